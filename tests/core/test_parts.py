"""The small parts on their own: deadlines, repeats, the pool and the ledger."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpd.core.events import TransferId
from kvpd.core.ledger import Ledger
from kvpd.core.messages import Ack
from kvpd.core.outbox import Outbox
from kvpd.core.pool import PoolCounts, SlotPool
from kvpd.core.timers import Timers

A, B, C = (TransferId("s", 1, number) for number in (1, 2, 3))

# ------------------------------------------------------------------ timers


@given(st.lists(st.tuples(st.integers(0, 9), st.one_of(st.none(), st.integers(0, 50))), max_size=200))
def test_the_earliest_deadline_is_always_at_hand(moves: list[tuple[int, int | None]]) -> None:
    """Set, moved and cleared in any order, compared with the plainest model there is."""
    timers: Timers[int] = Timers()
    model: dict[int, int] = {}
    for key, at in moves:
        if at is None:
            timers.clear(key)
            model.pop(key, None)
        else:
            timers.set(key, at)
            model[key] = at
        assert timers.next_at() == min(model.values(), default=None)
    popped = []
    while (key_due := timers.pop_due(25)) is not None:
        popped.append(model.pop(key_due))
    assert popped == sorted(popped)
    assert all(at > 25 for at in model.values())


def test_deadlines_that_move_for_ever_do_not_collect() -> None:
    """A lease moves with every message, for months."""
    timers: Timers[int] = Timers()
    for at in range(10_000):
        timers.set(1, at)
        timers.set(2, at)
    assert len(timers._heap) <= 70
    assert timers.next_at() == 9_999


def test_deadlines_that_are_cleared_leave_nothing_to_be_done_later() -> None:
    """Whoever asks for the earliest, perhaps in a loop that has been idle for long, must not pay for thousands."""
    timers: Timers[int] = Timers()
    for key in range(10_000):
        timers.set(key, key)
    for key in range(9_999):
        timers.clear(key)
        timers.clear(key)
    assert len(timers._heap) <= 70
    assert timers.next_at() == 9_999


def test_a_deadline_that_may_be_met_too_early_is_not_put_off() -> None:
    """Putting it off at every message would leave thousands of dead entries for one that is looked at again anyway."""
    timers: Timers[int] = Timers()
    for at in (5, 9, 7):
        timers.set_by(1, at)
        assert timers.next_at() == 5
    timers.set_by(1, 3)
    assert timers.pop_due(3) == 1
    timers.set_by(1, 8)
    assert timers.next_at() == 8


# ------------------------------------------------------------------ outbox


def test_a_message_is_repeated_until_its_own_answer() -> None:
    """And an answer says when its message was first sent, however often it was repeated."""
    outbox: Outbox[Ack] = Outbox(repeat_s=3.0)
    first, second = Ack(1, 2, 10), Ack(1, 2, 11)
    outbox.add(first, now=0.0)
    outbox.add(second, now=1.0)
    assert outbox.due(2.9) == []
    assert outbox.due(3.0) == [first]
    assert outbox.due(4.0) == [second]
    assert outbox.oldest_at() == 0.0
    answered = outbox.answer(10)
    assert answered is not None
    assert (answered.message, answered.at) == (first, 0.0)
    assert outbox.answer(10) is None
    assert outbox.oldest_at() == 1.0
    assert outbox.next_at() == 7.0
    outbox.answer(11)
    assert (outbox.next_at(), outbox.oldest_at()) == (None, None)


# ------------------------------------------------------------------ pool and ledger


def test_a_slot_goes_from_free_to_ready_and_back() -> None:
    """Conservation at every step."""
    pool = SlotPool(2)
    pool.reserve(2)
    index = pool.draw(b"k", 5)
    assert pool.counts == PoolCounts(free=0, reserved=1, writing=1, ready=0, quarantined=0)
    assert pool.pin_ready(b"k", 5) is None
    assert pool.written(index, 0)
    assert pool.pin_ready(b"k", 6) is None
    assert pool.pin_ready(b"k", 5) == index
    assert not pool.let_go(index, fenced=True)
    assert pool.counts.ready == 1
    assert not pool.let_go(index, fenced=True)
    assert pool.pin_ready(b"k", 5) is None
    pool.unreserve(1)
    assert pool.counts == PoolCounts(free=2, reserved=0, writing=0, ready=0, quarantined=0)
    pool.audit()


def test_a_slot_that_may_still_be_written_is_freed_by_its_fence_alone() -> None:
    """Given away too early it is silent corruption."""
    pool = SlotPool(1)
    pool.reserve(1)
    index = pool.draw(b"k", 5)
    assert pool.let_go(index, fenced=False)
    assert pool.counts.quarantined == 1
    pool.audit()
    pool.fence(index)
    assert pool.counts.free == 1


def freed_twice(pool: SlotPool) -> None:
    """The same slot, given back by two."""
    pool.reserve(1)
    index = pool.draw(b"k", 1)
    pool.let_go(index, fenced=True)
    pool.let_go(index, fenced=True)


@pytest.mark.parametrize(
    "misuse",
    [
        pytest.param(lambda pool: pool.reserve(2), id="more than there is"),
        pytest.param(lambda pool: pool.unreserve(1), id="a promise that was never made"),
        pytest.param(lambda pool: pool.draw(b"k", 1), id="drawn without a promise"),
        pytest.param(lambda pool: pool.fence(0), id="a fence for a free slot"),
        pytest.param(freed_twice, id="freed twice"),
    ],
)
def test_misuse_of_the_pool_is_our_own_bug(misuse: Callable[[SlotPool], object]) -> None:
    """It ends the process: going on would hand out somebody's slot."""
    with pytest.raises(AssertionError):
        misuse(SlotPool(1))


def test_the_ledger_admits_in_order_whole_or_not_at_all() -> None:
    """And gives back once what was not drawn."""
    pool = SlotPool(4)
    ledger = Ledger(pool)
    for transfer, chunks in ((A, 3), (B, 2), (C, 1)):
        ledger.join(transfer, chunks)
    assert ledger.admit_next() == A
    assert ledger.admit_next() is None  # C would fit, and must not overtake B
    ledger.audit()
    ledger.draw(A, [(b"k", 1)])
    ledger.settle(A)
    assert ledger.admit_next() == B
    with pytest.raises(KeyError):
        ledger.settle(A)
    ledger.leave(C)
    assert ledger.depth == 0
    ledger.settle(B)
    assert ledger.is_empty
    assert pool.counts.free == 3


def test_more_than_the_buffer_holds_can_never_wait() -> None:
    """It would block the queue for ever: it is refused before."""
    with pytest.raises(AssertionError, match="can never fit"):
        Ledger(SlotPool(2)).join(A, 3)


def test_more_chunks_than_reserved_cannot_be_drawn() -> None:
    """The surplus would be somebody else's room."""
    pool = SlotPool(2)
    ledger = Ledger(pool)
    ledger.join(A, 1)
    ledger.admit_next()
    ledger.draw(A, [(b"k", 1)])
    with pytest.raises(AssertionError, match="more chunks than"):
        ledger.draw(A, [(b"l", 1)])


def test_a_transfers_name_is_readable_in_logs() -> None:
    """Sender, incarnation in hexadecimal, number."""
    assert str(TransferId("prefill-0", 255, 7)) == "prefill-0/ff/7"
