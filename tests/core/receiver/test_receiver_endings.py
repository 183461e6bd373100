"""Cancels, revocations, timeouts and the drain: whatever ends a transfer, everything it held is given back once."""

from __future__ import annotations

import pytest
from core_parts import keys
from receiver_world import ReceiverWorld, refusal_of, revoked_in

from kvpd.core.events import DrainExpired, DrainRequested, RequestCancelled, TimePassed
from kvpd.core.pool import PoolCounts
from kvpd.core.receiver import events as ev
from kvpd.errors import ErrorCode


def test_a_cancel_releases_keys_and_room_at_once_when_the_puts_are_drained() -> None:
    """`drained` is a fence: the sender's own puts have ended, nothing can land any more."""
    world = ReceiverWorld()
    p = world.connect()
    p.alloc(1, 3, keys(1, 2))
    p.done(1, 0, 1)
    assert p.cancel(1) == [p.ack(), p.failed(1, 3, ErrorCode.CANCELLED, "cancelled by the sender")]
    assert world.core.is_clean
    q = world.connect("q")
    assert q.alloc(1, 1, keys(1), last=True)[0] == q.placed(1, [1])  # not deduplicated: the key is gone


def test_a_cancel_whose_puts_are_not_drained_ends_the_session() -> None:
    """The endpoint was cut off: bytes may still be under way, and only the worker's end stops them (fault 12)."""
    world = ReceiverWorld()
    p = world.connect()
    p.alloc(1, 3, keys(1, 2))
    p.alloc(2, 1, keys(3))
    actions = p.cancel(1, drained=False)
    assert ev.CloseSession(p.session_no) in actions
    assert world.core.counts == PoolCounts(free=1, reserved=0, writing=0, ready=0, quarantined=3)
    assert refusal_of(p.cancel(1, drained=True)).code is ErrorCode.NO_SESSION  # no late word is a fence
    assert world.core.counts.quarantined == 3
    world.feed(ev.SessionClosed(p.session_no))
    assert world.core.is_clean


def test_an_undrained_answer_to_a_revoke_is_no_fence() -> None:
    """It ends the session instead."""
    world = ReceiverWorld()
    p = world.connect()
    p.alloc(1, 3, keys(1, 2))
    world.feed(RequestCancelled("req-1"))
    p.cancel(1, drained=False)
    assert world.core.counts.quarantined == 2
    world.feed(ev.SessionClosed(p.session_no))
    assert world.core.is_clean


def test_a_cancel_works_while_the_transfer_is_queued() -> None:
    """Its other messages get the answer; it is never admitted afterwards (fault 8)."""
    world = ReceiverWorld(slots=2)
    p = world.connect()
    p.alloc(1, 2)
    p.alloc(2, 2, keys(1, 2), last=True)
    actions = p.cancel(2)
    assert actions[0] == p.ack()
    assert refusal_of(actions[1:]).code is ErrorCode.CANCELLED
    assert len(p.cancel(1)) == 2
    assert world.core.is_clean


def test_a_cancel_frees_a_complete_transfer_that_nobody_has_claimed() -> None:
    """Its client is gone; nobody will come for it."""
    world = ReceiverWorld()
    p = world.connect()
    p.complete(1, keys(1, 2))
    p.cancel(1)
    assert world.core.is_clean


def test_nothing_but_its_engines_release_or_death_ends_a_claim() -> None:
    """Memory that is being read is never taken away: cancels, leases, drains and restarts pass it by."""
    world = ReceiverWorld(lease_s=9.0)
    p = world.connect()
    p.complete(1, keys(1, 2))
    world.claim("req-1")
    assert p.cancel(1) == [p.ack()]
    assert world.feed(RequestCancelled("req-1")) == []
    world.feed(DrainRequested())
    world.feed(DrainExpired())
    world.pass_time(1e6)
    world.feed(ev.SessionClosed(p.session_no))
    assert world.core.counts.ready == 2
    assert world.release() == [ev.AnnounceTransfer(ev.Outcome.RELEASED, p.id(1), "req-1", 2)]
    assert world.core.is_clean


def test_a_repeated_cancel_gets_the_same_answer_and_frees_nothing_twice() -> None:
    """The room may be somebody else's by then (fault 14)."""
    world = ReceiverWorld(slots=2)
    p = world.connect()
    p.alloc(1, 2, keys(1, 2))
    p.cancel(1)
    p.alloc(2, 2, keys(3, 4))
    assert p.cancel(1) == [p.ack()]
    assert world.core.counts.writing == 2


def test_a_cancel_of_a_transfer_that_never_came_keeps_it_from_coming() -> None:
    """Messages are reordered by reconnects: a cancelled transfer stays cancelled (fault 10)."""
    world = ReceiverWorld()
    p = world.connect()
    assert p.cancel(1, reason=ErrorCode.REQUEST_TIMEOUT) == [p.ack()]
    assert refusal_of(p.alloc(1, 2, keys(1))).code is ErrorCode.REQUEST_TIMEOUT
    assert world.core.is_clean


def test_how_transfers_ended_is_remembered_until_oldest_live_has_passed() -> None:
    """Bounded memory: the sender says when it speaks of them no more. An older word changes nothing."""
    world = ReceiverWorld()
    p = world.connect()
    p.cancel(1, reason=ErrorCode.CANCELLED)
    p.cancel(2, reason=ErrorCode.REQUEST_TIMEOUT)
    p.heartbeat(oldest_live=2)
    p.heartbeat(oldest_live=1)
    assert refusal_of(p.alloc(1, 1)).code is ErrorCode.PEER_LOST
    assert refusal_of(p.alloc(2, 1)).code is ErrorCode.REQUEST_TIMEOUT
    # The end of a transfer below it is not remembered at all.
    assert p.cancel(1) == [p.ack()]
    assert refusal_of(p.alloc(1, 1)).code is ErrorCode.PEER_LOST


def test_hello_names_the_oldest_live_transfer_too() -> None:
    """A session that opens late must not take repeats of finished transfers for new ones."""
    world = ReceiverWorld()
    p = world.stranger()
    (opened,) = p.hello(oldest_live=5)
    assert isinstance(opened, ev.OpenSession)
    world.feed(ev.SessionOpened(opened.session_no, ()))
    assert refusal_of(p.alloc(4, 1)).code is ErrorCode.PEER_LOST


@pytest.mark.parametrize("state", ["queued", "admitted", "complete"])
def test_the_decode_engine_may_cancel_too(state: str) -> None:
    """Its client hung up; the sender is told where it may still write."""
    world = ReceiverWorld(slots=3)
    p = world.connect()
    if state == "queued":
        p.alloc(9, 3)
    p.alloc(1, 2, keys(1))
    if state == "complete":
        p.alloc(1, 2, keys(2), first=1, open_=False, last=True)
        p.done(1, 0, 2)
    actions = world.feed(RequestCancelled("req-1"))
    assert p.failed(1, 2, ErrorCode.CANCELLED, "cancelled by the decode engine") in actions
    assert len(revoked_in(actions)) == (state == "admitted")
    assert world.core.counts.quarantined == (state == "admitted")
    p.cancel(1)
    p.cancel(9)
    assert world.core.is_clean


def test_a_cancel_by_req_id_ends_all_of_its_attempts_and_the_claims_for_it() -> None:
    """Unknown ones are no error: the request may have ended long ago."""
    world = ReceiverWorld()
    a, b = world.connect("a"), world.connect("b")
    a.complete(1, keys(1), req_id="same")
    b.alloc(1, 1, req_id="same")
    world.claim("later", timeout_s=1e6)
    assert len(world.feed(RequestCancelled("same"))) == 3
    (refused,) = world.feed(RequestCancelled("later"))
    assert isinstance(refused, ev.RefuseClaim)
    assert refused.error.code is ErrorCode.CANCELLED
    assert world.feed(RequestCancelled("nobody")) == []
    b.cancel(1)
    assert world.core.is_clean


# ------------------------------------------------------------------ progress


def test_nobody_holds_room_by_doing_nothing_while_others_wait() -> None:
    """An engine that blocks on one transfer while another of its own holds the room would stop itself for ever."""
    world = ReceiverWorld(slots=2, progress_timeout_s=20.0, allocation_timeout_s=1e6, lease_s=1e6)
    p = world.connect()
    p.alloc(1, 2)
    p.alloc(2, 2)
    assert world.pass_time(19.9) == []
    actions = world.pass_time(0.1)
    assert [(r.transfer_no, r.reason) for r in revoked_in(actions)] == [(1, ErrorCode.NO_PROGRESS)]
    assert actions[-1] == p.placed(2)


def test_an_idle_transfer_keeps_its_room_while_nobody_waits() -> None:
    """And is not blamed for the time when nobody waited."""
    world = ReceiverWorld(slots=2, progress_timeout_s=20.0, allocation_timeout_s=1e6, lease_s=1e6)
    p = world.connect()
    p.alloc(1, 2)
    assert world.pass_time(1000.0) == []
    p.alloc(2, 2)
    assert world.pass_time(19.9) == []
    assert len(revoked_in(world.pass_time(0.1))) == 1


@pytest.mark.parametrize("what", ["batch", "touch", "write", "heartbeat"])
def test_progress_of_any_kind_is_progress(what: str) -> None:
    """A batch, a WriteDone, a put in flight, an engine that says it computes."""
    world = ReceiverWorld(slots=2, progress_timeout_s=20.0, allocation_timeout_s=1e6, lease_s=1e6)
    p = world.connect()
    p.alloc(1, 2, keys(1))
    p.alloc(2, 2)
    world.pass_time(15.0)
    match what:
        case "batch":
            p.alloc(1, 2, keys(2), first=1, open_=False, last=True)
        case "touch":
            p.alloc(1, 2, open_=False)
        case "write":
            p.done(1, 0, 1)
        case "heartbeat":
            p.heartbeat(1, [(1, 3), (2, 1), (77, 1)])
    assert world.pass_time(19.9) == []
    assert len(revoked_in(world.pass_time(0.1))) == 1


def test_the_one_that_is_idle_longest_goes_first() -> None:
    """Its room may be all that is needed."""
    world = ReceiverWorld(slots=4, progress_timeout_s=20.0, allocation_timeout_s=1e6, lease_s=1e6)
    p = world.connect()
    p.alloc(1, 2)
    p.alloc(2, 2)
    p.alloc(3, 2)
    world.pass_time(10.0)
    p.alloc(1, 2, open_=False)
    actions = world.pass_time(10.0)
    assert [r.transfer_no for r in revoked_in(actions)] == [2]
    assert world.core.queue_depth == 0
    assert world.pass_time(1000.0) == []  # nobody waits any more
    assert world.core.counts.reserved == 4


def test_when_the_last_that_waited_has_just_timed_out_nobody_is_revoked() -> None:
    """Both deadlines come up in one step of a late loop; the room is not needed any more."""
    world = ReceiverWorld(slots=2, progress_timeout_s=20.0, allocation_timeout_s=19.5, lease_s=1e6)
    p = world.connect()
    p.alloc(1, 2)
    p.alloc(2, 2)
    world.now += 25.0
    actions = world.feed(TimePassed(lag_s=5.5))
    assert refusal_of(actions).code is ErrorCode.ADMISSION_TIMEOUT
    assert revoked_in(actions) == []
    assert world.core.counts.reserved == 2


def test_a_transfer_that_takes_turns_with_the_idle_one_is_not_blamed_for_it() -> None:
    """One deadline stands for all admitted transfers: it moves to the next when the idle one goes."""
    world = ReceiverWorld(slots=4, progress_timeout_s=20.0, allocation_timeout_s=1e6, lease_s=1e6)
    p = world.connect()
    p.alloc(1, 2)
    p.alloc(2, 2)
    p.alloc(3, 4)
    world.pass_time(10.0)
    p.alloc(2, 2, open_=False)
    assert [r.transfer_no for r in revoked_in(world.pass_time(10.0))] == [1]
    assert revoked_in(world.pass_time(9.9)) == []
    assert [r.transfer_no for r in revoked_in(world.pass_time(0.1))] == [2]
    assert world.core.counts.reserved == 4


def test_a_complete_transfer_outlives_its_session_and_can_still_be_cancelled() -> None:
    """Its sender has restarted and knows nothing of it; the decode engine does."""
    world = ReceiverWorld()
    p = world.connect()
    p.complete(1, keys(1))
    world.feed(ev.MessageRejected(p.channel, "rubbish"))
    world.feed(ev.SessionClosed(p.session_no))
    assert world.core.session_count == 0
    assert len(world.feed(RequestCancelled("req-1"))) == 1
    assert world.core.is_clean


# ------------------------------------------------------------------ drain


def test_a_drain_ends_the_queue_and_lets_what_runs_finish() -> None:
    """Those that wait have lost nothing yet; those that run are nearly done."""
    world = ReceiverWorld(slots=3)
    p = world.connect()
    p.alloc(1, 2, keys(1, 2), last=True)
    p.alloc(2, 3)
    assert refusal_of(world.feed(DrainRequested())).code is ErrorCode.DRAINING
    assert [world.core.is_idle] == [False]
    p.done(1, 0, 2)
    assert isinstance(world.claim("req-1")[0], ev.GrantClaim)
    world.release()
    assert world.core.is_idle
    assert world.core.is_clean


def test_when_the_drain_expires_everything_that_nobody_reads_is_rolled_back() -> None:
    """A shutdown has a deadline; the senders are told to stop writing."""
    world = ReceiverWorld(slots=4)
    p = world.connect()
    p.complete(1, keys(1))
    p.alloc(2, 2, keys(2))
    actions = world.feed(DrainExpired())
    assert [(r.transfer_no, r.reason) for r in revoked_in(actions)] == [(2, ErrorCode.DRAINING)]
    assert world.core.is_idle
    assert world.core.counts == PoolCounts(free=3, reserved=0, writing=0, ready=0, quarantined=1)
    p.cancel(2)
    assert world.core.is_clean
