"""The queue of an endpoint's puts, over a wire that ends them in any order."""

from __future__ import annotations

import random

import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpd.transports._puts import Batch, PutQueue, Window
from kvpd.transports.base import Put

WINDOW_BYTES = 100
PIECE_BYTES = 60
BUFFER_BYTES = 1000


class AnyOrderWire(PutQueue):
    """A transport whose puts and flushes end when, and how, the test says."""

    def __init__(self, shared: Window | None = None) -> None:
        super().__init__(
            local_bytes=BUFFER_BYTES,
            remote_bytes=BUFFER_BYTES,
            window_bytes=WINDOW_BYTES,
            piece_bytes=PIECE_BYTES,
            shared=shared,
        )
        self.begun: list[tuple[Batch, int]] = []  # whose, and its local offset
        self.under_way: list[tuple[Batch, int | None]] = []  # a put's length, or None for a flush

    def force_close(self) -> None:
        self._break("force-closed")

    def _begin_put(self, batch: Batch, put: Put) -> None:
        self.begun.append((batch, put.local_offset))
        self.under_way.append((batch, put.length))

    def _begin_flush(self, batch: Batch) -> None:
        assert all(other is not batch or length is not None for other, length in self.under_way), "flushed twice"
        self.under_way.append((batch, None))

    def end(self, index: int, error: str | None) -> None:
        batch, length = self.under_way.pop(index)
        if length is None:
            self._flush_ended(batch, error)
        else:
            self._put_ended(batch, length, error)
        self.pump()

    def check(self) -> None:
        lengths = [length for _, length in self.under_way if length is not None]
        assert self.in_flight_bytes == sum(lengths)
        assert self.in_flight_bytes <= WINDOW_BYTES or len(lengths) == 1


@given(seed=st.integers(0, 1 << 32), failures=st.booleans(), closes=st.booleans())
@settings(max_examples=200, deadline=None)
def test_every_batch_ends_once_and_nothing_of_it_is_left(seed: int, failures: bool, closes: bool) -> None:
    """A batch that never ends keeps its staging slots for ever; one that ends early gives them away too soon."""
    trio.run(_play, random.Random(seed), failures, closes)


async def _play(rng: random.Random, failures: bool, closes: bool) -> None:
    wire = AnyOrderWire()
    batches: list[Batch] = []
    may_succeed: set[Batch] = set()
    for _ in range(60):
        choice = rng.random()
        if choice < 0.4 and not wire.broken:
            puts = [Put(200 * position, 0, rng.randint(0, 150)) for position in range(rng.randint(0, 4))]
            batches.append(wire.post(puts))
            may_succeed.add(batches[-1])
        elif choice < 0.8 and wire.under_way:
            index = rng.randrange(len(wire.under_way))
            bad = failures and rng.random() < 0.2
            if bad:
                may_succeed.discard(wire.under_way[index][0])
            wire.end(index, "bad luck" if bad else None)
        elif choice < 0.9 and batches:
            rng.choice(batches).abandon()
        elif choice > 0.98 and closes:
            may_succeed -= {batch for batch in batches if not batch.done}
            wire.force_close()
        wire.check()
        for batch in batches:
            assert not batch.done or all(other is not batch for other, _ in wire.under_way)
    while wire.under_way:
        wire.end(rng.randrange(len(wire.under_way)), None)
        wire.check()
    order = [(batches.index(batch), offset) for batch, offset in wire.begun]
    assert order == sorted(order)
    assert all(batch.done for batch in batches)
    assert {batch for batch in batches if not batch.failed} == may_succeed
    assert wire.in_flight_bytes == 0
    assert not wire._queue
    assert not wire._unfinished


@given(seed=st.integers(0, 1 << 32))
@settings(max_examples=100, deadline=None)
def test_a_shared_window_holds_for_all_together_and_all_of_them_end(seed: int) -> None:
    """An endpoint that finds it full is begun when another's put has ended: nobody else would remember it."""
    trio.run(_share, random.Random(seed))


async def _share(rng: random.Random) -> None:
    shared = Window(WINDOW_BYTES + PIECE_BYTES)
    wires = [AnyOrderWire(shared) for _ in range(4)]
    batches = [
        wire.post([Put(0, 0, rng.randint(1, 150)) for _ in range(rng.randint(0, 4))])
        for wire in rng.choices(wires, k=20)
    ]
    while busy := [wire for wire in wires if wire.under_way]:
        wire = rng.choice(busy)
        wire.end(rng.randrange(len(wire.under_way)), "bad luck" if rng.random() < 0.1 else None)
        if rng.random() < 0.02:
            wire.force_close()
        for other in wires:
            other.pump()
            other.check()
        assert shared.in_flight_bytes == sum(wire.in_flight_bytes for wire in wires) <= WINDOW_BYTES + PIECE_BYTES
    assert all(batch.done for batch in batches)
    assert shared.in_flight_bytes == 0
