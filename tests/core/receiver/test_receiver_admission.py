"""Who gets room, in which order, and who is told at once that there will be none."""

from __future__ import annotations

import pytest
from core_parts import RECEIVER_INCARNATION, keys
from receiver_world import ReceiverWorld, refusal_of

from kvpd.core.events import DrainRequested, ReportName
from kvpd.core.messages import AllocResponse, ErrorInfo, decode, encode
from kvpd.core.pool import PoolCounts
from kvpd.core.receiver import events as ev
from kvpd.errors import ErrorCode


def test_a_request_that_does_not_fit_whole_holds_nothing() -> None:
    """Half an admission is a deadlock waiting for its other half."""
    world = ReceiverWorld(slots=4)
    a, b = world.connect("a"), world.connect("b")
    a.alloc(1, 3)
    assert b.alloc(1, 2) == [b.ack()]
    assert world.core.counts == PoolCounts(free=1, reserved=3, writing=0, ready=0, quarantined=0)
    assert world.core.queue_depth == 1


def test_two_requests_that_fit_together_are_admitted_together() -> None:
    """Admission serialises only what cannot run side by side."""
    world = ReceiverWorld(slots=4)
    a, b = world.connect("a"), world.connect("b")
    assert a.alloc(1, 2, keys(1, 2)) == [a.placed(1, [0, 1])]
    assert b.alloc(1, 2, keys(3, 4)) == [b.placed(1, [2, 3])]


def test_a_request_without_keys_only_reserves() -> None:
    """A sender opens before its keys are known, so that waiting for room overlaps with computing."""
    world = ReceiverWorld(slots=4)
    p = world.connect()
    assert p.alloc(1, 3) == [p.placed(1)]
    assert world.core.counts == PoolCounts(free=1, reserved=3, writing=0, ready=0, quarantined=0)


def test_an_admitted_transfers_later_batches_never_wait() -> None:
    """Its room was reserved whole: a full buffer and a long queue cannot stop it half-way."""
    world = ReceiverWorld(slots=4)
    a, b = world.connect("a"), world.connect("b")
    a.alloc(1, 4, keys(0))
    b.alloc(1, 4, keys(9))
    assert a.alloc(1, 4, keys(1, 2, 3), first=1, open_=False, last=True) == [a.placed(1, [1, 2, 3], first=1)]


def test_batches_of_a_queued_transfer_are_kept_and_answered_together_on_admission() -> None:
    """The sender need not ask again: its batches travelled while it waited."""
    world = ReceiverWorld(slots=4)
    a, b = world.connect("a"), world.connect("b")
    a.complete(1, keys(1, 2, 3, 4))
    assert b.alloc(1, 3) == [b.ack()]
    assert b.alloc(1, 3, keys(5, 6), open_=False) == [b.ack()]
    assert b.alloc(1, 3, keys(7), first=2, open_=False, last=True) == [b.ack()]
    world.claim("req-1", sender="a")
    assert world.release() == [
        ev.AnnounceTransfer(ev.Outcome.RELEASED, a.id(1), "req-1", 4),
        b.placed(1, message_id=b.last_id - 2),
        b.placed(1, [3, 2], message_id=b.last_id - 1),
        b.placed(1, [1], first=2),
    ]


def test_a_batch_that_is_asked_for_again_while_queued_is_kept_once() -> None:
    """What a peer may make us remember is bounded, however often it asks."""
    world = ReceiverWorld(slots=4)
    a, b = world.connect("a"), world.connect("b")
    a.alloc(1, 4)
    for _ in range(50):
        b.alloc(1, 3)
        b.alloc(1, 3, keys(5, 6))
    (answer, other) = a.cancel(1)[-2:]
    assert (answer, other) == (b.placed(1, message_id=b.last_id - 1), b.placed(1, [0, 1]))


def test_releasing_a_request_unblocks_the_next_in_line() -> None:
    """Room is charged until it is consumed, and handed on in the same step: nobody polls for it."""
    world = ReceiverWorld(slots=2)
    a, b = world.connect("a"), world.connect("b")
    a.complete(1, keys(1, 2))
    assert b.alloc(1, 2, req_id="b") == [b.ack()]
    world.claim("req-1")
    assert world.release() == [ev.AnnounceTransfer(ev.Outcome.RELEASED, a.id(1), "req-1", 2), b.placed(1)]


def test_finished_but_unread_chunks_stay_charged() -> None:
    """Releasing at the last write, as the reference does, admits more than the buffer holds."""
    world = ReceiverWorld(slots=2)
    a, b = world.connect("a"), world.connect("b")
    a.complete(1, keys(1, 2))
    assert b.alloc(1, 1, req_id="b") == [b.ack()]
    assert world.core.counts.ready == 2


def test_small_requests_do_not_overtake_a_large_one() -> None:
    """First in, first out: a large request is not starved by a stream of small ones."""
    world = ReceiverWorld(slots=4)
    p = world.connect()
    p.alloc(1, 2)
    assert p.alloc(2, 4) == [p.ack()]
    assert p.alloc(3, 1) == [p.ack()]
    assert p.cancel(1) == [
        p.ack(),
        p.failed(1, 2, ErrorCode.CANCELLED, "cancelled by the sender"),
        p.placed(2, message_id=2 + 1),
    ]
    assert world.core.queue_depth == 1


def test_when_the_head_of_the_queue_leaves_those_behind_it_move_up() -> None:
    """The head blocks its followers only as long as it waits itself."""
    world = ReceiverWorld(slots=4)
    p = world.connect()
    p.alloc(1, 2)
    p.alloc(2, 4)
    p.alloc(3, 2, keys(1, 2))
    actions = p.cancel(2)
    assert actions[-1] == p.placed(3, [0, 1], message_id=p.last_id - 1)


@pytest.mark.parametrize("total", [0, -1, -(1 << 40)])
def test_a_sender_that_declares_no_total_is_refused_as_legacy(total: int) -> None:
    """Without a total there is nothing to reserve: such a request would bypass admission (fault 4)."""
    world = ReceiverWorld()
    p = world.connect()
    error = refusal_of(p.alloc(1, total, keys(1)))
    assert error.code is ErrorCode.LEGACY_SENDER
    assert str(total) in error.detail
    assert world.core.is_clean


def test_a_refusal_stays_within_the_protocols_bounds() -> None:
    """Even if it quotes the longest and strangest of names: a detail that is too long would end the session."""
    world = ReceiverWorld()
    p = world.connect()
    (refusal,) = p.alloc(1, 0, req_id="\U000e0001" * 512)
    assert isinstance(refusal, ev.SendMessage)
    assert decode(encode(refusal.message)) == refusal.message


def test_a_request_without_a_name_is_refused_as_legacy() -> None:
    """Nobody could claim or cancel it."""
    world = ReceiverWorld()
    p = world.connect()
    assert refusal_of(p.alloc(1, 2, req_id="")).code is ErrorCode.LEGACY_SENDER


@pytest.mark.parametrize("total", [5, 1 << 40])
def test_a_request_larger_than_the_buffer_is_refused_at_once_with_nothing_left(total: int) -> None:
    """It could wait for ever; both numbers tell the operator what to change."""
    world = ReceiverWorld(slots=4)
    p = world.connect()
    error = refusal_of(p.alloc(1, total, keys(1)))
    assert error.code is ErrorCode.TOO_LARGE
    assert str(total) in error.detail
    assert "4" in error.detail
    assert world.core.is_clean
    assert [r.req_id for r in world.reported(ReportName.TRANSFER_REFUSED)] == ["req-1"]


def test_a_request_as_large_as_the_buffer_is_admitted() -> None:
    """The limit itself is allowed."""
    world = ReceiverWorld(slots=4)
    p = world.connect()
    assert p.alloc(1, 4) == [p.placed(1)]


def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    """An unbounded queue only hides overload."""
    world = ReceiverWorld(slots=2, queue_depth_max=1)
    p = world.connect()
    p.alloc(1, 2)
    p.alloc(2, 2)
    error = refusal_of(p.alloc(3, 1))
    assert (error.code, error.retry_after_s) == (ErrorCode.QUEUE_FULL, 1.0)


def test_legacy_and_too_large_are_judged_before_a_full_queue() -> None:
    """A request that can never succeed must not be told to try again."""
    world = ReceiverWorld(slots=2, queue_depth_max=0)
    p = world.connect()
    assert refusal_of(p.alloc(1, 0)).code is ErrorCode.LEGACY_SENDER
    assert refusal_of(p.alloc(2, 3)).code is ErrorCode.TOO_LARGE
    assert refusal_of(p.alloc(3, 2)).code is ErrorCode.QUEUE_FULL


def test_a_sender_whose_oldest_live_stands_still_is_refused_and_remembered_no_more() -> None:
    """The memory of how transfers ended is bounded, refusals included."""
    world = ReceiverWorld(slots=2, outcomes_max=3)
    p = world.connect()
    for number in range(1, 4):
        p.alloc(number, 1)
        p.cancel(number)
    for number in range(4, 9):
        error = refusal_of(p.alloc(number, 1))
        assert (error.code, error.retry_after_s) == (ErrorCode.QUEUE_FULL, world.settings.lease_s)
    p.heartbeat(oldest_live=9)
    assert p.alloc(9, 1) == [p.placed(9)]
    # What was refused for want of memory was not remembered either.
    world = ReceiverWorld(slots=2, outcomes_max=0)
    p = world.connect()
    assert refusal_of(p.alloc(1, 1)).code is ErrorCode.QUEUE_FULL
    assert p.cancel(1) == [p.ack()]


def test_a_draining_receiver_refuses_new_transfers() -> None:
    """No new work; the sender learns when somebody may be back."""
    world = ReceiverWorld()
    p = world.connect()
    world.feed(DrainRequested())
    error = refusal_of(p.alloc(1, 1))
    assert (error.code, error.retry_after_s) == (ErrorCode.DRAINING, world.settings.lease_s)


def test_admission_times_out_and_takes_its_batches_with_it() -> None:
    """Nobody waits for ever; every message of the transfer gets the same answer, late ones too."""
    world = ReceiverWorld(slots=2, allocation_timeout_s=3.0)
    p = world.connect()
    p.alloc(1, 2)
    p.alloc(2, 2)
    p.alloc(2, 2, keys(1), open_=False)
    world.pass_time(2.9)
    assert world.core.queue_depth == 1
    answers = [a.message for a in world.pass_time(0.1) if isinstance(a, ev.SendMessage)]
    detail = "no room for 2 chunks within 3 s; 0 of 2 are free"
    error = ErrorInfo(ErrorCode.ADMISSION_TIMEOUT, detail, retry_after_s=3.0)
    assert answers == [
        AllocResponse(p.incarnation, RECEIVER_INCARNATION, number, 2, 0, (), (), error)
        for number in (p.last_id - 1, p.last_id)
    ]
    assert refusal_of(p.alloc(2, 2)) == error
    assert world.core.queue_depth == 0


def test_an_admitted_transfer_has_no_admission_timeout() -> None:
    """The deadline is for waiting, not for computing."""
    world = ReceiverWorld(slots=2, allocation_timeout_s=3.0, lease_s=1000.0)
    p = world.connect()
    p.alloc(1, 2)
    assert world.pass_time(500.0) == []
    assert world.core.counts.reserved == 2


def test_a_batch_of_an_unknown_transfer_is_never_an_open() -> None:
    """Only `open` creates a transfer; anything else is late."""
    world = ReceiverWorld()
    p = world.connect()
    assert refusal_of(p.alloc(1, 2, keys(1), open_=False)).code is ErrorCode.PEER_LOST
    assert world.core.is_clean


def test_a_transfer_below_oldest_live_is_never_opened() -> None:
    """Its end is forgotten; opening it again would bring a cancelled request back to life."""
    world = ReceiverWorld()
    p = world.connect()
    p.heartbeat(oldest_live=5)
    assert refusal_of(p.alloc(4, 2)).code is ErrorCode.PEER_LOST
    assert p.alloc(5, 2) == [p.placed(5)]


def test_a_number_of_an_earlier_session_that_still_holds_slots_is_not_opened_again() -> None:
    """Two transfers under one identity would free each other's slots."""
    world = ReceiverWorld()
    p = world.connect()
    p.complete(1, keys(1))
    p.hello()
    world.feed(ev.SessionOpened(2, ()))
    assert refusal_of(p.alloc(1, 1)).code is ErrorCode.PEER_LOST
    assert world.claim("req-1")[0] == ev.GrantClaim(1, 1, p.id(1), (ev.ClaimedSlot(keys(1)[0], 0, 64),))


def test_a_bounded_number_of_smaller_ones_may_pass_a_head_that_does_not_fit() -> None:
    """Room that the head cannot use yet need not lie idle; but nobody is overtaken for ever."""
    world = ReceiverWorld(slots=8, bypass_max=2)
    p = world.connect()
    p.alloc(1, 5)
    p.alloc(2, 6)  # the head: five of eight are taken
    for number in (3, 4, 5):
        p.alloc(number, 1)
    assert [r.transfer for r in world.reported(ReportName.TRANSFER_ADMITTED)] == [p.id(1), p.id(3), p.id(4)]
    waits = [(r.fields["depth"], r.fields["waits"]) for r in world.reported(ReportName.TRANSFER_QUEUED)]
    assert waits == [(1, False), (1, True), (2, False), (2, False), (2, True)]
    p.cancel(3)  # there is room for the fifth, and yet it waits
    assert world.core.queue_depth == 2
    p.cancel(4)
    p.cancel(1)
    admitted = [r.transfer for r in world.reported(ReportName.TRANSFER_ADMITTED)]
    assert admitted == [p.id(1), p.id(3), p.id(4), p.id(2), p.id(5)]


def test_the_bypass_begins_anew_with_each_head() -> None:
    """A head that left, whatever the reason, has been passed by nobody who comes now."""
    world = ReceiverWorld(slots=4, bypass_max=1)
    p = world.connect()
    p.alloc(1, 2)
    p.alloc(2, 4)
    p.alloc(3, 1)
    p.alloc(4, 4)
    p.alloc(5, 1)
    assert world.core.queue_depth == 3
    p.cancel(4)  # not the head: nothing changes for the fifth
    assert world.core.queue_depth == 2
    p.cancel(2)
    assert world.core.queue_depth == 0
