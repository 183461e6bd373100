"""The peer of `control` and `admission`: what it does to a real receiver, and what it leaves there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from kvpd.bench.control import CHUNK_BYTES, PEER, connect
from kvpd.bench.failure import BenchmarkFailed
from kvpd.bench.fleet import Daemon, Fleet
from kvpd.bench.peer import RoundTrips, Times
from kvpd.bench.workers import Worker
from kvpd.client import connect_receiver

WAITING = 20


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with Fleet(tmp_path) as fleet:
        yield fleet


def joined(fleet: Fleet, slots: int) -> tuple[Daemon, Worker]:
    receiver, peer = fleet.receiver(chunk_bytes=CHUNK_BYTES, slots=slots), fleet.worker(PEER)
    connect(peer, receiver, slots)
    return receiver, peer


def stats(receiver: Daemon) -> Mapping[str, float]:
    with connect_receiver(receiver.socket) as link:
        return link.stats()


@pytest.mark.parametrize("outstanding", [1, 3, 8])
def test_every_round_trip_is_one_admission_and_leaves_no_slot_taken(fleet: Fleet, outstanding: int) -> None:
    """A rate counts something only if that something has happened, as often as it says."""
    receiver, peer = joined(fleet, slots=8)
    times = peer.call("round_trips", RoundTrips(30, outstanding), Times)
    assert len(times.each) == 30
    assert all(0 < each <= times.seconds for each in times.each)
    after = stats(receiver)
    assert after["kvpd_admission_wait_seconds_count"] == 30
    assert after['kvpd_slots{state="free"}'] == 8


def test_whoever_is_woken_is_replaced_at_the_end_of_the_line(fleet: Fleet) -> None:
    """Each wake-up is measured with as many waiting as the last."""
    receiver, peer = joined(fleet, slots=1)
    assert peer.call("queue_up", WAITING, int) == WAITING
    times = peer.call("wake_ups", 2 * WAITING, list[float])
    assert len(times) == 2 * WAITING
    assert min(times) > 0
    after = stats(receiver)
    assert after["kvpd_queued_transfers"] == WAITING
    assert after["kvpd_admission_wait_seconds_count"] == 1 + 2 * WAITING


def test_a_receiver_that_refuses_ends_the_benchmark_with_its_reason(fleet: Fleet) -> None:
    """Refusals are quick, and would pass for a good rate."""
    receiver, peer = fleet.receiver(chunk_bytes=CHUNK_BYTES, slots=1, queue_depth_max=2), fleet.worker(PEER)
    connect(peer, receiver, 1)
    with pytest.raises(BenchmarkFailed, match="queue_depth_max is 2"):
        peer.call("queue_up", 3, int)


def test_a_receiver_of_another_size_is_not_measured(fleet: Fleet) -> None:
    """The user's own --set is stronger than what the benchmark needs."""
    receiver, peer = fleet.receiver(chunk_bytes=CHUNK_BYTES, slots=2), fleet.worker(PEER)
    with pytest.raises(BenchmarkFailed, match="2 slots where it should have 8"):
        connect(peer, receiver, 8)
