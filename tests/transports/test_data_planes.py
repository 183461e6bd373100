"""The contract of kvpd.transports.base.DataPlane, kept by every implementation."""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
import trio.testing
from data_plane_rig import (
    MODES,
    NETWORK_MODES,
    check_mode,
    never_broken,
    open_pair,
    open_plane,
    open_remote,
    region_of,
)

from kvpd.errors import ConfigError, TransportError
from kvpd.transports import _ucp
from kvpd.transports.base import Put
from kvpd.transports.memory_data import MemoryFabric
from kvpd.transports.ucx import open_ucx_data_plane, ucx_version

KIB = 1 << 10
MIB = 1 << 20

every_mode = pytest.mark.parametrize("mode", MODES)
over_network = pytest.mark.parametrize("mode", NETWORK_MODES)


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


# ------------------------------------------------------------------ ends


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
        pair.fabric.put_s = lambda length: length / (1 << 40)
        batch = pair.endpoint.post([Put(at, at, MIB) for at in range(0, 64 * MIB, MIB)])
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


# ------------------------------------------------------------------ UCX alone


async def _enter(opening: Callable[[], Coroutine[Any, Any, None]]) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        await opening()
    return caught.value


async def test_a_library_that_is_not_there_is_named() -> None:
    """The operator must read what to change, and to what."""

    async def opening() -> None:
        async with open_ucx_data_plane(bytearray(4096), library="/nowhere/libucp.so.0"):
            raise AssertionError("unreachable")

    (problem,) = (await _enter(opening)).problems
    assert "ucx_library = '/nowhere/libucp.so.0'" in problem
    assert "1.20" in problem
    with pytest.raises(ConfigError, match="/nowhere"):
        ucx_version("/nowhere/libucp.so.0")


async def test_an_old_library_is_refused_with_both_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before 1.20 the same settings quietly mean a tenth of the speed."""
    monkeypatch.setattr(_ucp, "MIN_VERSION", (99, 0))

    async def opening() -> None:
        async with open_ucx_data_plane(bytearray(4096)):
            raise AssertionError("unreachable")

    (problem,) = (await _enter(opening)).problems
    assert ucx_version() in problem
    assert "99.0" in problem


async def test_transports_that_do_not_exist_are_refused() -> None:
    """A misspelt transport must not come up as silence or as another transport."""

    async def opening() -> None:
        async with open_ucx_data_plane(bytearray(4096), tls="nosuch"):
            raise AssertionError("unreachable")

    (problem,) = (await _enter(opening)).problems
    assert "ucx_tls = 'nosuch'" in problem


async def test_the_environment_stays_as_it_was() -> None:
    """Engines started by the same process must not inherit our UCX settings."""
    before = dict(os.environ)
    async with open_pair("ucx-tcp", 4096):
        assert dict(os.environ) == before
