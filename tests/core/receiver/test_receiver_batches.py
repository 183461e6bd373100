"""Where chunks are placed, what counts as written, and which batches no correct sender sends."""

from __future__ import annotations

import pytest
from core_parts import CHUNK, code_of, keys
from receiver_world import ReceiverWorld, refusal_of, revoked_in

from kvpd.core.events import RequestCancelled
from kvpd.core.pool import PoolCounts
from kvpd.core.receiver import events as ev
from kvpd.errors import ErrorCode


def test_a_transfer_is_complete_when_every_chunk_is_written_and_not_before() -> None:
    """Ready only after commit: an engine that reads earlier computes on rubbish and answers 200."""
    world = ReceiverWorld()
    p = world.connect()
    p.alloc(1, 3, keys(1, 2, 3), last=True)
    assert p.done(1, 0, 2) == [p.ack()]
    assert p.done(1, 2, 1) == [p.ack(), p.ready(1, 3)]


def test_batches_may_be_written_in_any_order() -> None:
    """Puts of several batches are in flight at once; the network decides who is first."""
    world = ReceiverWorld()
    p = world.connect()
    p.alloc(1, 3, keys(1))
    p.alloc(1, 3, keys(2), first=1, open_=False)
    p.alloc(1, 3, keys(3), first=2, open_=False, last=True)
    assert p.done(1, 2, 1) == [p.ack()]
    assert p.done(1, 0, 1) == [p.ack()]
    assert p.done(1, 1, 1) == [p.ack(), p.ready(1, 3)]


def test_batches_may_arrive_in_any_order() -> None:
    """They are judged by position, never by order of arrival: the last batch first is no overflow."""
    world = ReceiverWorld()
    p = world.connect()
    assert p.alloc(1, 3, keys(3), first=2, last=True) == [p.placed(1, [0], first=2)]
    assert p.alloc(1, 3, keys(1, 2), open_=False) == [p.placed(1, [1, 2])]
    p.done(1, 0, 3)
    (granted,) = world.claim("req-1")
    assert isinstance(granted, ev.GrantClaim)
    assert [chunk.key for chunk in granted.chunks] == list(keys(1, 2, 3))


def test_the_last_chunk_may_be_shorter() -> None:
    """Only its bytes travel, and an engine is told how many there are."""
    world = ReceiverWorld()
    p = world.connect()
    p.alloc(1, 2, keys(1, 2), last=True, last_bytes=5)
    p.done(1, 0, 2)
    assert world.claim("req-1") == [
        ev.GrantClaim(1, 1, p.id(1), (ev.ClaimedSlot(keys(1)[0], 0, CHUNK), ev.ClaimedSlot(keys(2)[0], 1, 5)))
    ]


@pytest.mark.parametrize("last_bytes", [0, CHUNK + 1, 1 << 50])
def test_a_chunk_of_an_impossible_length_revokes_the_transfer(last_bytes: int) -> None:
    """Its bytes would be another slot's, or nobody's."""
    world = ReceiverWorld()
    p = world.connect()
    actions = p.alloc(1, 2, keys(1, 2), last=True, last_bytes=last_bytes)
    assert refusal_of(actions).code is ErrorCode.PROTOCOL_ERROR
    assert world.free == 4


def test_only_the_requests_last_chunk_may_be_short() -> None:
    """A short chunk in the middle would be read as a full one."""
    world = ReceiverWorld()
    p = world.connect()
    assert refusal_of(p.alloc(1, 3, keys(1, 2), last_bytes=5)).code is ErrorCode.PROTOCOL_ERROR


def test_a_repeated_batch_gets_the_same_answer_and_no_second_slot() -> None:
    """Control channels lose answers; a repeat must not cost room or move a chunk."""
    world = ReceiverWorld()
    p = world.connect()
    request = p.request(1, 3, keys(1, 2))
    assert p.say(request) == [p.placed(1, [0, 1])]
    before = world.core.counts
    assert p.say(request) == [p.placed(1, [0, 1])]
    assert p.alloc(1, 3, keys(1, 2), open_=False) == [p.placed(1, [0, 1])]
    assert world.core.counts == before


def test_a_repeat_after_the_chunks_are_ready_still_gets_the_same_answer() -> None:
    """By then the key would deduplicate against itself; the first answer stands."""
    world = ReceiverWorld()
    p = world.connect()
    request = p.request(1, 2, keys(1, 2), last=True)
    p.say(request)
    p.done(1, 0, 2)
    assert p.say(request) == [p.placed(1, [0, 1], message_id=request.message_id)]
    world.claim("req-1")
    assert p.say(request) == [p.placed(1, [0, 1], message_id=request.message_id)]


def test_a_repeat_after_a_good_end_says_that_everything_is_there() -> None:
    """All of it has landed and been read: the sender has nothing left to do."""
    world = ReceiverWorld()
    p = world.connect()
    p.complete(1, keys(1, 2))
    world.claim("req-1")
    world.release()
    assert p.alloc(1, 2, keys(1, 2), last=True) == [p.placed(1, [-1, -1])]
    assert p.done(1, 0, 2) == [p.ack()]
    assert world.core.is_clean


# ------------------------------------------------------------------ dedupe


def test_a_key_that_is_ready_is_pinned_and_its_share_of_the_reservation_returned() -> None:
    """What is here already need not travel, nor be charged twice."""
    world = ReceiverWorld()
    a, b = world.connect("a"), world.connect("b")
    a.complete(1, keys(1, 2))
    assert b.alloc(1, 2, keys(1, 3), req_id="b", last=True) == [b.placed(1, [-1, 2])]
    assert world.core.counts == PoolCounts(free=1, reserved=0, writing=1, ready=2, quarantined=0)


def test_a_transfer_of_nothing_but_known_keys_is_complete_at_once() -> None:
    """There is no WriteDone to wait for."""
    world = ReceiverWorld()
    a, b = world.connect("a"), world.connect("b")
    a.complete(1, keys(1, 2))
    answer, announced = b.alloc(2, 2, keys(1, 2), last=True)
    assert answer == b.placed(2, [-1, -1])
    assert announced == b.ready(2, 2)


def test_deduplication_pins_once_and_the_last_pin_frees() -> None:
    """Whoever wrote it, and in whichever order they are read."""
    world = ReceiverWorld()
    a, b = world.connect("a"), world.connect("b")
    a.complete(1, keys(1))
    request = b.request(2, 1, keys(1), last=True)
    b.say(request)
    b.say(request)
    world.claim("req-1")
    world.release()
    assert world.core.counts.ready == 1
    world.claim("req-2", claim=2)
    world.release(claim=2)
    assert world.core.is_clean


def test_a_key_that_another_transfer_still_writes_gets_a_slot_of_its_own() -> None:
    """Placed is not written: announcing it would announce bytes that may never come (fault 13)."""
    world = ReceiverWorld()
    a, b = world.connect("a"), world.connect("b")
    a.alloc(1, 1, keys(1), last=True)
    assert b.alloc(2, 1, keys(1), last=True) == [b.placed(2, [1])]


def test_a_ready_key_of_another_length_is_not_the_same_chunk() -> None:
    """A short last chunk may bear the key of a full one only by mistake; its bytes would be too few."""
    world = ReceiverWorld()
    a, b = world.connect("a"), world.connect("b")
    a.alloc(1, 1, keys(1), last=True, last_bytes=5)
    a.done(1, 0, 1)
    assert b.alloc(2, 1, keys(1), last=True) == [b.placed(2, [1])]


def test_equal_keys_in_one_transfer_have_slots_of_their_own_until_written() -> None:
    """And each is freed once."""
    world = ReceiverWorld()
    p = world.connect()
    assert p.alloc(1, 3, keys(1, 1)) == [p.placed(1, [0, 1])]
    p.done(1, 0, 2)
    assert p.alloc(1, 3, keys(1), first=2, open_=False, last=True)[0] == p.placed(1, [-1], first=2)
    world.claim("req-1")
    world.release()
    assert world.core.is_clean


# ------------------------------------------------------------------ what no correct sender sends


def test_more_chunks_than_declared_overflow_and_roll_everything_back() -> None:
    """The reservation is what was declared; the surplus would take somebody else's room."""
    world = ReceiverWorld(slots=6)
    p = world.connect()
    p.alloc(1, 3, keys(1, 2))
    p.done(1, 0, 1)
    actions = p.alloc(1, 3, keys(3, 4), first=2, open_=False)
    assert refusal_of(actions).code is ErrorCode.OVERFLOW
    (revoke,) = revoked_in(actions)
    assert (revoke.transfer_no, revoke.reason) == (1, ErrorCode.OVERFLOW)
    # The written chunk is free, the one that may still be written is not.
    assert world.core.counts == PoolCounts(free=5, reserved=0, writing=0, ready=0, quarantined=1)
    p.cancel(1)
    assert world.core.is_clean


def test_an_overflow_of_a_queued_transfer_leaves_nothing_and_needs_no_revoke() -> None:
    """Nothing was placed; its other messages are answered with the same error."""
    world = ReceiverWorld(slots=2)
    p = world.connect()
    p.alloc(1, 2)
    p.alloc(2, 2)
    actions = p.alloc(2, 2, keys(1, 2, 3), open_=False)
    assert revoked_in(actions) == []
    answered = [a.message for a in actions if isinstance(a, ev.SendMessage)]
    assert [code_of(getattr(m, "error", None)) for m in answered] == [ErrorCode.OVERFLOW] * 2
    p.cancel(1)
    assert world.core.is_clean


def test_a_last_batch_that_ends_short_underflows() -> None:
    """The missing chunks would be waited for until a timeout."""
    world = ReceiverWorld()
    p = world.connect()
    assert refusal_of(p.alloc(1, 3, keys(1, 2), last=True)).code is ErrorCode.UNDERFLOW
    assert world.free == 4


def test_a_changed_total_revokes_the_transfer() -> None:
    """The room was reserved for the first one."""
    world = ReceiverWorld()
    p = world.connect()
    p.alloc(1, 3, keys(1))
    assert refusal_of(p.alloc(1, 2, keys(2), first=1, open_=False)).code is ErrorCode.TOTAL_MISMATCH
    assert world.core.counts.quarantined == 1


@pytest.mark.parametrize(("first", "names"), [(0, (9, 2)), (1, (2, 3)), (0, (1,))])
def test_overlapping_batches_revoke_the_transfer(first: int, names: tuple[int, ...]) -> None:
    """Two chunks at one position: one of them would be lost."""
    world = ReceiverWorld()
    p = world.connect()
    p.alloc(1, 4, keys(1, 2))
    assert refusal_of(p.alloc(1, 4, keys(*names), first=first, open_=False)).code is ErrorCode.BATCH_OVERLAP
    p.cancel(1)
    assert world.core.is_clean


def test_a_failed_batch_rolls_back_the_earlier_ones() -> None:
    """Whole or nothing: chunks of a request that will never be complete help nobody."""
    world = ReceiverWorld(slots=5)
    a, b = world.connect("a"), world.connect("b")
    a.alloc(1, 4, keys(1, 2))
    a.done(1, 0, 2)
    b.alloc(2, 1, keys(1), last=True)  # pins a's first chunk
    a.alloc(1, 4, keys(3, 4, 5), first=2, open_=False)
    assert world.core.counts == PoolCounts(free=4, reserved=0, writing=0, ready=1, quarantined=0)
    assert world.claim("req-2")[0] == ev.GrantClaim(1, 1, b.id(2), (ev.ClaimedSlot(keys(1)[0], 0, CHUNK),))


def test_a_bad_batch_after_completion_is_refused_and_harms_nobody() -> None:
    """Everything has landed; a late mistake of the sender must not take it from the reader."""
    world = ReceiverWorld()
    p = world.connect()
    p.complete(1, keys(1, 2))
    assert refusal_of(p.alloc(1, 2, keys(3), first=2, open_=False)).code is ErrorCode.OVERFLOW
    assert isinstance(world.claim("req-1")[0], ev.GrantClaim)


def test_a_batch_of_a_revoked_transfer_gets_the_reason() -> None:
    """Its slots wait for their fence; nothing is placed for it again."""
    world = ReceiverWorld()
    p = world.connect()
    p.alloc(1, 3, keys(1))
    p.alloc(1, 4, keys(2), first=1, open_=False)
    assert refusal_of(p.alloc(1, 3, keys(2), first=1, open_=False)).code is ErrorCode.TOTAL_MISMATCH
    assert world.core.counts.writing == 0


# ------------------------------------------------------------------ writes


@pytest.mark.parametrize(
    ("first", "count", "rank"), [(0, 3, 0), (2, 1, 0), (0, 0, 0), (0, 1, 1), (1 << 24, 1 << 24, 0)]
)
def test_a_write_of_what_was_never_allocated_revokes_the_transfer(first: int, count: int, rank: int) -> None:
    """The sender wrote where it was not sent, or counts wrongly: nothing it says about this transfer can be trusted."""
    world = ReceiverWorld()
    p = world.connect()
    p.alloc(1, 4, keys(1, 2))
    actions = p.done(1, first, count, rank=rank)
    assert refusal_of(actions).code is ErrorCode.PROTOCOL_ERROR
    assert len(revoked_in(actions)) == 1
    assert world.core.counts.quarantined == 2


def test_a_write_before_admission_revokes_the_transfer() -> None:
    """It has no slots: whatever was written is somebody else's."""
    world = ReceiverWorld(slots=2)
    p = world.connect()
    p.alloc(1, 2)
    p.alloc(2, 2, keys(1))
    assert refusal_of(p.done(2, 0, 1)[:1]).code is ErrorCode.PROTOCOL_ERROR
    assert world.core.queue_depth == 0


def test_a_repeated_write_is_acknowledged_again_and_counts_once() -> None:
    """Its Ack was lost; counting it twice would complete a transfer that lacks a chunk."""
    world = ReceiverWorld()
    p = world.connect()
    p.alloc(1, 2, keys(1, 2), last=True)
    assert p.done(1, 0, 1) == [p.ack()]
    assert p.done(1, 0, 1) == [p.ack()]
    assert p.done(1, 1, 1) == [p.ack(), p.ready(1, 2)]
    assert p.done(1, 1, 1) == [p.ack()]
    world.claim("req-1")
    assert p.done(1, 0, 2) == [p.ack()]


def test_a_write_of_a_revoked_transfer_is_never_plainly_acknowledged() -> None:
    """The sender would tell the proxy that a rolled-back request is ready (fault 20)."""
    world = ReceiverWorld()
    p = world.connect()
    p.alloc(1, 2, keys(1, 2), last=True)
    world.feed(RequestCancelled("req-1"))
    assert refusal_of(p.done(1, 0, 2)).code is ErrorCode.CANCELLED
    p.cancel(1)
    assert refusal_of(p.done(1, 0, 2)).code is ErrorCode.CANCELLED
    assert refusal_of(p.done(77, 0, 2)).code is ErrorCode.PEER_LOST
