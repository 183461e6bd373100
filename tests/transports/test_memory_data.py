"""What only the memory data plane can do: virtual time, and faults on demand."""

from __future__ import annotations

import mmap
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import attrs
import pytest
import trio
from trio.testing import MockClock

from kvpd.errors import TransportError
from kvpd.transports.base import Put, RemoteRegion
from kvpd.transports.memory_data import (
    MemoryDataPlane,
    MemoryEndpoint,
    MemoryFabric,
    MemoryTarget,
    open_memory_data_plane,
)

BUFFER_BYTES = 1 << 16
PUT = Put(0, 0, 1 << 10)


@attrs.frozen
class Ends:
    """A sender's end, a receiver's end, and the wire."""

    fabric: MemoryFabric
    sink: mmap.mmap
    sender: MemoryDataPlane
    target: MemoryTarget
    endpoint: MemoryEndpoint


@asynccontextmanager
async def open_ends(
    put_s: Callable[[int], float] = lambda _length: 1.0, on_broken: Callable[[str], None] = lambda _detail: None
) -> AsyncIterator[Ends]:
    fabric = MemoryFabric(put_s)
    source, sink = mmap.mmap(-1, BUFFER_BYTES), mmap.mmap(-1, BUFFER_BYTES)
    source[:] = b"s" * BUFFER_BYTES
    async with open_memory_data_plane(sink, fabric=fabric) as receiver:
        target = await receiver.open_target()
        region = RemoteRegion(target.worker_address, target.base_address, target.length, target.rkey)
        async with open_memory_data_plane(source, fabric=fabric) as sender:
            yield Ends(fabric, sink, sender, target, await sender.connect(region, on_broken))


async def test_a_put_takes_its_time(autojump_clock: MockClock) -> None:
    """Deadlines are tested against slow wires, at no cost in real time."""
    async with open_ends(put_s=lambda length: length / 1024 * 100.0) as ends:
        start = trio.current_time()
        batch = ends.endpoint.post([PUT, Put(0, 2048, 2048)])
        await trio.sleep(150)
        assert ends.sink[:1024] == b"s" * 1024
        assert ends.sink[2048:4096] == bytes(2048)
        assert not batch.done
        await batch.wait()
        assert trio.current_time() == start + 200


async def test_a_stalled_wire_moves_nothing_until_it_is_resumed(autojump_clock: MockClock) -> None:
    """A stopped peer is never reported by any transport: kvpd needs deadlines of its own."""
    async with open_ends() as ends:
        ends.fabric.stall()
        batch = ends.endpoint.post([PUT])
        with trio.move_on_after(1000) as scope:
            await batch.wait()
        assert scope.cancelled_caught
        assert ends.endpoint.in_flight_bytes == PUT.length
        assert ends.sink[:1024] == bytes(1024)
        ends.fabric.resume()
        await batch.wait()
        assert ends.sink[:1024] == b"s" * 1024


async def test_one_put_fails_and_the_endpoint_stands(autojump_clock: MockClock) -> None:
    """A batch never lies, and one failed batch is one failed request."""
    async with open_ends() as ends:
        ends.fabric.fail_next_puts(1, "cosmic ray")
        batch = ends.endpoint.post([PUT, Put(2048, 2048, 1024)])
        with pytest.raises(TransportError, match="cosmic ray"):
            await batch.wait()
        await batch.drain()
        assert batch.failed
        await ends.endpoint.post([PUT]).wait()


@pytest.mark.parametrize("target_closed", [False, True])
async def test_bytes_land_after_a_force_close_unless_the_target_was_closed(
    autojump_clock: MockClock, target_closed: bool
) -> None:
    """What the fence is for: a force-close is none."""
    async with open_ends() as ends:
        ends.fabric.late_landing = True
        batch = ends.endpoint.post([PUT])
        ends.endpoint.force_close()
        await batch.drain()
        assert batch.failed
        assert ends.sink[:1024] == bytes(1024)
        if target_closed:
            ends.target.close()
        assert ends.fabric.land_late() == (0 if target_closed else PUT.length)
        assert ends.sink[:1024] == (bytes(1024) if target_closed else b"s" * 1024)
        assert ends.fabric.land_late() == 0


async def test_without_late_landing_a_force_close_loses_the_bytes(autojump_clock: MockClock) -> None:
    """The plain case stays plain."""
    async with open_ends() as ends:
        batch = ends.endpoint.post([PUT])
        ends.endpoint.force_close()
        await batch.drain()
        assert ends.fabric.land_late() == 0


async def test_a_broken_target_breaks_its_endpoints_once(autojump_clock: MockClock) -> None:
    """A peer's death as the sender meets it."""
    reports: list[str] = []
    async with open_ends(on_broken=reports.append) as ends:
        batch = ends.endpoint.post([PUT])
        ends.fabric.break_target(ends.target.worker_address, "power cut")
        assert reports == []  # from the loop, never from within somebody's call
        with pytest.raises(TransportError, match="power cut"):
            await batch.wait()
        ends.target.close()
        await trio.testing.wait_all_tasks_blocked()
        assert reports == ["power cut"]
        assert ends.endpoint.broken
        assert ends.sink[:1024] == bytes(1024)


async def test_two_fabrics_know_nothing_of_each_other(autojump_clock: MockClock) -> None:
    """Tests in one process must not meet."""
    async with open_ends() as ends, open_memory_data_plane(bytearray(16), fabric=MemoryFabric()) as stranger:
        target = ends.target
        region = RemoteRegion(target.worker_address, target.base_address, target.length, target.rkey)
        with pytest.raises(TransportError, match="worker address"):
            await stranger.connect(region, lambda _detail: None)
