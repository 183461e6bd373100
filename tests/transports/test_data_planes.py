"""The contract of kvpd.transports.base.DataPlane, kept by every implementation: bytes, window, queue."""

from __future__ import annotations

import hashlib
import mmap
import os

import pytest
import trio
import trio.testing

from kvpd.errors import TransportError
from kvpd.transports.base import Put
from kvpd.transports.memory_data import MemoryFabric

from .data_plane_rig import (
    MODES,
    NETWORK_MODES,
    check_mode,
    never_broken,
    open_pair,
    open_plane,
    open_remote,
    region_of,
)

every_mode = pytest.mark.parametrize("mode", MODES)
over_network = pytest.mark.parametrize("mode", NETWORK_MODES)
KIB = 1 << 10
MIB = 1 << 20


# ------------------------------------------------------------------ bytes


@every_mode
async def test_bytes_arrive_where_they_belong_and_nowhere_else(mode: str) -> None:
    """A chunk that is off by one byte is a wrong answer with status 200."""
    async with open_pair(mode, 4 * MIB) as pair:
        puts = [Put(0, 3 * MIB, 1), Put(4097, 17, 70_001), Put(MIB, 2 * MIB - 5, 5), Put(2 * MIB, MIB, 300 * KIB)]
        await pair.endpoint.post(puts).wait()
        expected = bytearray(len(pair.sink))
        for put in puts:
            end = put.remote_offset + put.length
            expected[put.remote_offset : end] = pair.source[put.local_offset : put.local_offset + put.length]
        assert pair.sink[:] == bytes(expected)


@every_mode
async def test_the_whole_buffer_arrives_in_another_process(mode: str) -> None:
    """One process proves little about a wire."""
    fabric, source = MemoryFabric(), mmap.mmap(-1, 16 * MIB)
    source[:] = os.urandom(len(source))
    async with open_remote(mode, fabric, len(source)) as remote, open_plane(mode, fabric, source) as plane:
        endpoint = await plane.connect(remote.region, never_broken)
        check_mode(mode, endpoint)
        await endpoint.post([Put(start, start, 4 * MIB) for start in range(0, len(source), 4 * MIB)]).wait()
        assert await remote.digest() == hashlib.sha256(source).hexdigest()


@every_mode
async def test_a_batch_is_done_only_when_its_bytes_are_visible(mode: str) -> None:
    """Whoever waits tells the receiver next, and the receiver tells its engine to read."""
    async with open_pair(mode, 256 * KIB) as pair:
        for value in range(50):
            pair.source[:] = bytes([value]) * len(pair.source)
            await pair.endpoint.post([Put(0, 0, 200 * KIB), Put(200 * KIB, 200 * KIB, 56 * KIB)]).wait()
            assert pair.sink[:] == pair.source[:]


@every_mode
async def test_a_thousand_small_puts_arrive(mode: str) -> None:
    """More puts than are begun in one go: the rest must not be forgotten."""
    async with open_pair(mode, 1000 * 64) as pair:
        await pair.endpoint.post([Put(start, start, 64) for start in range(0, len(pair.sink), 64)]).wait()
        assert pair.sink[:] == pair.source[:]


@every_mode
async def test_an_empty_batch_succeeds(mode: str) -> None:
    """Everything deduplicated: there is nothing to write, and that is a success."""
    async with open_pair(mode, 4 * KIB) as pair:
        for puts in ([], [Put(0, 0, 0)]):
            batch = pair.endpoint.post(puts)
            assert batch.done
            assert not batch.failed
            await batch.wait()
            await batch.drain()


@every_mode
async def test_both_directions_work_at_once(mode: str) -> None:
    """One daemon's plane may be source and target alike."""
    async with open_pair(mode, MIB) as pair:
        back = await pair.receiver.connect(region_of(await pair.sender.open_target()), never_broken)
        half = MIB // 2
        there, here = pair.endpoint.post([Put(0, 0, half)]), back.post([Put(half, half, half)])
        await there.wait()
        await here.wait()
        back.force_close()
        assert pair.sink[:half] == pair.source[:half]
        assert pair.source[half:] == bytes(half)


# ------------------------------------------------------------------ window and queue


@every_mode
async def test_no_more_than_the_window_is_in_flight(mode: str) -> None:
    """A cancel waits for what is in flight, so that must stay small."""
    window = 256 * KIB
    async with open_pair(mode, 8 * MIB, window_bytes=window) as pair:
        batches = [pair.endpoint.post([Put(at, at, 64 * KIB)]) for at in range(0, 8 * MIB, 64 * KIB)]
        assert pair.endpoint.in_flight_bytes == window
        while not all(batch.done for batch in batches):
            assert pair.endpoint.in_flight_bytes <= window
            await trio.lowlevel.checkpoint()
        assert pair.endpoint.in_flight_bytes == 0
        assert pair.sink[:] == pair.source[:]


@every_mode
async def test_a_put_larger_than_the_window_goes_alone(mode: str) -> None:
    """It must go some time; a window may not turn into a size limit."""
    async with open_pair(mode, 2 * MIB, window_bytes=256 * KIB) as pair:
        first, large, last = (
            pair.endpoint.post([put]) for put in (Put(0, 0, KIB), Put(KIB, KIB, MIB), Put(MIB + KIB, MIB + KIB, KIB))
        )
        assert pair.endpoint.in_flight_bytes == KIB
        await first.wait()
        while not large.done:
            assert pair.endpoint.in_flight_bytes <= MIB
            await trio.lowlevel.checkpoint()
        await last.wait()
        assert pair.sink[: MIB + 2 * KIB] == pair.source[: MIB + 2 * KIB]


@every_mode
@pytest.mark.parametrize(
    "bad",
    [
        Put(-1, 0, 1),
        Put(0, -1, 1),
        Put(0, 0, -1),
        Put(8 * KIB, 0, 1),
        Put(0, 8 * KIB, 1),
        Put(1, 0, 8 * KIB),
        Put(0, 1, 8 * KIB),
        Put(8 * KIB + 1, 0, 0),
        Put(0, 1 << 70, 1),
    ],
)
async def test_what_is_outside_either_buffer_is_refused_whole(mode: str, bad: Put) -> None:
    """A wrong remote address crashes the receiver, or worse, does not."""
    async with open_pair(mode, 8 * KIB) as pair:
        with pytest.raises(ValueError, match="outside"):
            pair.endpoint.post([Put(0, 0, KIB), bad])
        assert pair.endpoint.in_flight_bytes == 0
        await pair.endpoint.post([Put(KIB, KIB, KIB)]).wait()
        assert pair.sink[:KIB] == bytes(KIB)


@every_mode
async def test_abandoning_drops_only_what_has_not_begun(mode: str) -> None:
    """A cancelled request must neither wait for its whole batch nor hide what is still on its way."""
    async with open_pair(mode, 4 * MIB, window_bytes=64 * KIB) as pair:
        begun = pair.endpoint.post([Put(0, 0, 64 * KIB), Put(MIB, MIB, 64 * KIB)])
        waiting = pair.endpoint.post([Put(2 * MIB, 2 * MIB, KIB)])
        kept = pair.endpoint.post([Put(3 * MIB, 3 * MIB, KIB)])
        waiting.abandon()
        assert waiting.done
        begun.abandon()
        assert not begun.done
        await begun.drain()
        await kept.wait()
        kept.abandon()
        await kept.wait()
        for batch in (begun, waiting):
            assert batch.done
            assert not batch.failed
            with pytest.raises(TransportError, match="abandoned"):
                await batch.wait()
        written = {start for start in range(0, 4 * MIB, MIB) if any(pair.sink[start : start + MIB])}
        assert written == {0, 3 * MIB}


@every_mode
async def test_cancelling_a_wait_leaves_the_puts_going(mode: str) -> None:
    """Cancellation is about the waiter: the wire cannot be called back."""
    async with open_pair(mode, 4 * MIB) as pair:
        batch = pair.endpoint.post([Put(0, 0, 4 * MIB)])
        with trio.CancelScope() as scope:
            scope.cancel()
            await batch.wait()
        assert scope.cancelled_caught
        await batch.wait()
        assert pair.sink[:] == pair.source[:]


@every_mode
async def test_a_shielded_drain_ends_although_everything_around_is_cancelled(mode: str) -> None:
    """Clean-up runs exactly then, and waits for the puts in flight."""
    batch = None
    with trio.CancelScope() as scope:
        async with open_pair(mode, 4 * MIB) as pair:
            batch = pair.endpoint.post([Put(0, 0, 4 * MIB)])
            scope.cancel()
            with trio.CancelScope(shield=True):
                await batch.drain()
            assert pair.sink[:] == pair.source[:]
    assert batch is not None
    assert not batch.failed
