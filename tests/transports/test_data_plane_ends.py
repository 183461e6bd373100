"""The contract of kvpd.transports.base.DataPlane, continued: how its ends end, and what they cost meanwhile."""

from __future__ import annotations

import hashlib
import itertools
import math
import mmap
import os
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
import trio.testing

from kvpd.errors import TransportError
from kvpd.transports.base import Put
from kvpd.transports.memory_data import MemoryFabric

from .data_plane_rig import MODES, NETWORK_MODES, never_broken, open_pair, open_plane, open_remote, region_of

every_mode = pytest.mark.parametrize("mode", MODES)
over_network = pytest.mark.parametrize("mode", NETWORK_MODES)
KIB = 1 << 10
MIB = 1 << 20


@every_mode
async def test_force_close_ends_what_is_in_flight(mode: str) -> None:
    """The last resort of a cancel: it must work when nothing else does, and soon."""
    async with open_pair(mode, 64 * MIB) as pair:
        batches = [pair.endpoint.post([Put(at, at, 4 * MIB)]) for at in range(0, 64 * MIB, 4 * MIB)]
        assert pair.endpoint.in_flight_bytes > 0
        pair.endpoint.force_close()
        pair.endpoint.force_close()
        assert pair.endpoint.broken
        for batch in batches:
            await batch.drain()
            assert batch.done
            assert batch.failed
            with pytest.raises(TransportError):
                await batch.wait()
        assert pair.endpoint.in_flight_bytes == 0
        with pytest.raises(TransportError):
            pair.endpoint.post([])
        # The planes are unharmed: the next endpoint works.
        again = await pair.sender.connect(region_of(await pair.receiver.open_target()), never_broken)
        await again.post([Put(0, 0, MIB)]).wait()


@every_mode
async def test_endpoints_fail_each_for_itself(mode: str) -> None:
    """One sender's lost receiver is nobody else's business."""
    async with open_pair(mode, 8 * MIB) as pair:
        other = await pair.sender.connect(region_of(await pair.receiver.open_target()), never_broken)
        lost = pair.endpoint.post([Put(0, 0, 4 * MIB)])
        kept = other.post([Put(4 * MIB, 4 * MIB, 4 * MIB)])
        pair.endpoint.force_close()
        await kept.wait()
        await lost.drain()
        assert lost.failed
        assert not other.broken
        assert pair.sink[4 * MIB :] == pair.source[4 * MIB :]


@over_network
async def test_nothing_lands_after_its_target_was_closed(mode: str) -> None:
    """The fence: the slots go to somebody else now."""
    broken = trio.Event()
    async with open_pair(mode, 64 * MIB, window_bytes=64 * MIB, on_broken=lambda _detail: broken.set()) as pair:
        await pair.endpoint.post([Put(0, 0, MIB)]).wait()
        # In memory one lands at once and the others are still under way, however slow the machine is.
        seconds = itertools.chain([0.0], itertools.repeat(math.inf))
        pair.fabric.put_s = lambda _length: next(seconds)
        batch = pair.endpoint.post([Put(at, at, MIB) for at in range(MIB, 64 * MIB, MIB)])
        while not any(pair.sink[at] for at in range(MIB, 64 * MIB, 4 * KIB)):
            await trio.lowlevel.checkpoint()
        pair.target.close()
        pair.target.close()
        landed = hashlib.sha256(pair.sink).digest()
        with pytest.raises(TransportError):
            await batch.wait()
        await broken.wait()
        await batch.drain()
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert hashlib.sha256(pair.sink).digest() == landed
        assert pair.sink[:] != pair.source[:]


@every_mode
async def test_a_closed_target_does_not_trap_its_sender(mode: str) -> None:
    """Whether the transport notices or not: a force-close ends it."""
    async with open_pair(mode, MIB, on_broken=lambda _detail: None) as pair:
        await pair.endpoint.post([Put(0, 0, KIB)]).wait()
        pair.target.close()
        batches = [] if pair.endpoint.broken else [pair.endpoint.post([Put(0, 0, MIB)])]
        pair.endpoint.force_close()
        for batch in batches:
            await batch.drain()
            assert batch.failed


@every_mode
async def test_a_killed_peer_is_an_error_and_reported_once(mode: str) -> None:
    """UCX's default is to abort the sender's process along with its peer."""
    fabric, source = MemoryFabric(), mmap.mmap(-1, 32 * MIB)
    reports: list[str] = []
    reported = trio.Event()

    def on_broken(detail: str) -> None:
        reports.append(detail)
        reported.set()

    async with open_plane(mode, fabric, source) as plane:
        async with open_remote(mode, fabric, len(source)) as remote:
            endpoint = await plane.connect(remote.region, on_broken)
            whole = [Put(at, at, 4 * MIB) for at in range(0, 32 * MIB, 4 * MIB)]
            await endpoint.post(whole).wait()
            batches = [endpoint.post(whole) for _ in range(4)]
            await remote.kill()
            with pytest.raises(TransportError):  # noqa: PT012 - which of them meets the death is the machine's choice
                while True:
                    batches.append(endpoint.post(whole))
                    await batches[-1].wait()
            await reported.wait()
            for batch in batches:
                await batch.drain()
            assert endpoint.broken
            assert endpoint.in_flight_bytes == 0
        async with open_remote(mode, fabric, len(source)) as successor:
            endpoint = await plane.connect(successor.region, never_broken)
            await endpoint.post(whole).wait()
            endpoint.force_close()
    assert len(reports) == 1


@over_network
async def test_leaving_ends_puts_to_a_peer_that_hangs(mode: str) -> None:
    """Fault 22: a shutdown that waits for a frozen peer never ends."""
    fabric, source = MemoryFabric(), mmap.mmap(-1, 64 * MIB)
    async with open_remote(mode, fabric, len(source)) as remote:
        async with open_plane(mode, fabric, source) as plane:
            endpoint = await plane.connect(remote.region, never_broken)
            await endpoint.post([Put(0, 0, MIB)]).wait()
            remote.stop()
            batch = endpoint.post([Put(at, at, MIB) for at in range(0, 64 * MIB, MIB)])
            await trio.testing.wait_all_tasks_blocked(0.01)
            assert endpoint.in_flight_bytes > 0
        assert batch.done
        assert batch.failed
        with pytest.raises(TransportError):
            endpoint.post([])
        with pytest.raises(TransportError):
            await plane.connect(remote.region, never_broken)
        with pytest.raises(TransportError):
            await plane.open_target()
    source.close()  # BufferError if the plane still had it exported


@every_mode
async def test_a_stranger_s_bytes_make_no_endpoint(mode: str) -> None:
    """UCX reads an address without checking it: garbage would crash the daemon."""
    async with open_pair(mode, 64 * KIB) as pair:
        region = region_of(pair.target)
        flipped = bytes([region.worker_address[-1] ^ 1])
        for bad in (
            attrs.evolve(region, worker_address=b""),
            attrs.evolve(region, worker_address=os.urandom(200)),
            attrs.evolve(region, worker_address=region.worker_address[:-1]),
            attrs.evolve(region, worker_address=region.worker_address[:-1] + flipped),
            attrs.evolve(region, worker_address=region.worker_address + b"x" * 100_000),
            attrs.evolve(region, worker_address=region.rkey),
            attrs.evolve(region, rkey=b""),
            attrs.evolve(region, rkey=os.urandom(20)),
            attrs.evolve(region, rkey=region.worker_address),
            attrs.evolve(region, length=region.length + 1),
            attrs.evolve(region, base_address=region.base_address + 4096),
        ):
            with pytest.raises(TransportError):
                await pair.sender.connect(bad, never_broken)
        await pair.endpoint.post([Put(0, 0, KIB)]).wait()


# ------------------------------------------------------------------ what it costs


def _open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@every_mode
async def test_sessions_come_and_go_without_leaving_descriptors(mode: str) -> None:
    """A worker holds about ten descriptors; a leak ends the daemon after some days of restarting senders."""

    async def one_session(plane_pair: Any) -> None:
        target = await plane_pair.receiver.open_target()
        endpoint = await plane_pair.sender.connect(region_of(target), lambda _detail: None)
        await endpoint.post([Put(0, 0, KIB)]).wait()
        endpoint.force_close()
        target.close()

    async with open_pair(mode, 64 * KIB) as pair:
        await one_session(pair)
        await trio.testing.wait_all_tasks_blocked(0.05)
        before = _open_descriptors()
        for _ in range(20):
            await one_session(pair)
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert _open_descriptors() <= before + 10


@every_mode
async def test_idle_costs_nothing(mode: str) -> None:
    """Nothing polls: a daemon that waits must not be seen in top."""
    async with open_pair(mode, 64 * KIB) as pair:
        await pair.endpoint.post([Put(0, 0, KIB)]).wait()
        await trio.testing.wait_all_tasks_blocked(0.05)
        before = pair.progress_rounds
        await trio.sleep(0.5)  # not for a condition: this is the time in which nothing may happen
        assert pair.progress_rounds <= before + 3
