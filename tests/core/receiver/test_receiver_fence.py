"""How long the receiver believes a sender, and what frees a slot that a sender may still write."""

from __future__ import annotations

import pytest
from core_parts import OWN_HOST, SENDER_INCARNATION, keys
from receiver_world import ReceiverWorld, SenderPeer, refusal_of, revoked_in

from kvpd.core.events import ReportName, RequestCancelled, TimePassed
from kvpd.core.messages import HostIdentity
from kvpd.core.receiver import events as ev
from kvpd.errors import ErrorCode

LOCAL = HostIdentity(OWN_HOST.boot_id, OWN_HOST.pid_namespace, 4242, 99)

# ------------------------------------------------------------------ lease


def test_a_silent_sender_loses_its_session_after_its_lease() -> None:
    """A dead sender must not hold room for ever (fault 6); what it may still write waits for the fence."""
    world = ReceiverWorld(lease_s=9.0)
    p = world.connect()
    p.alloc(1, 3, keys(1))
    world.pass_time(8.9)
    assert world.core.counts.reserved == 2
    actions = world.pass_time(0.1)
    assert ev.CloseSession(p.session_no) in actions
    assert (world.core.counts.free, world.core.counts.quarantined) == (3, 1)
    assert world.pass_time(10_000.0) == []
    assert world.core.counts.quarantined == 1
    world.feed(ev.SessionClosed(p.session_no))
    assert world.core.is_clean


@pytest.mark.parametrize("what", ["heartbeat", "alloc", "done", "cancel"])
def test_any_message_renews_the_lease(what: str) -> None:
    """A sender that works need not say that it lives."""
    world = ReceiverWorld(lease_s=9.0)
    p = world.connect()
    p.alloc(1, 3, keys(1))
    world.pass_time(8.0)
    match what:
        case "heartbeat":
            p.heartbeat()
        case "alloc":
            p.alloc(2, 1)
        case "done":
            p.done(1, 0, 1)
        case "cancel":
            p.cancel(7)
    world.pass_time(8.0)
    assert world.core.session_count == 1
    assert refusal_of(world.pass_time(1.0)[:1]).code is ErrorCode.PEER_LOST


def test_a_repeated_hello_renews_the_lease_too() -> None:
    """A session whose Welcome was lost is not silent."""
    world = ReceiverWorld(lease_s=9.0)
    p = world.connect()
    world.pass_time(8.0)
    assert p.last_hello is not None
    p.say(p.last_hello)
    assert world.pass_time(8.0) == []


def test_a_lag_of_its_own_loop_extends_every_lease() -> None:
    """While the receiver stood still it could not hear anybody: judging then would kill the healthy."""
    world = ReceiverWorld(lease_s=9.0)
    world.connect()
    world.now += 20.0
    assert world.feed(TimePassed(lag_s=12.0)) == []
    world.now += 0.9
    assert world.feed(TimePassed()) == []
    world.now += 0.1
    assert world.feed(TimePassed()) != []


def test_a_huge_lag_extends_no_lease_into_the_future() -> None:
    """A lease runs from now at the latest."""
    world = ReceiverWorld(lease_s=9.0)
    world.connect()
    world.now += 9.0
    world.feed(TimePassed(lag_s=1e9))
    assert world.core.next_deadline() == world.now + 9.0


# ------------------------------------------------------------------ fence


@pytest.mark.parametrize("order", ["closed first", "died first"])
def test_a_sender_on_this_host_is_fenced_by_its_death_and_its_worker(order: str) -> None:
    """Its own kernel does the writing: destroying our worker stops nothing there."""
    world = ReceiverWorld(lease_s=9.0)
    p = world.connect(host=LOCAL)
    p.alloc(1, 2, keys(1))
    world.pass_time(9.0)
    events: list[ev.ReceiverEvent] = [ev.SessionClosed(p.session_no), ev.ProcessDied(p.session_no)]
    if order == "died first":
        events.reverse()
    assert world.feed(events[0]) == []
    assert world.core.counts.quarantined == 1
    assert world.feed(events[1]) == [ev.ForgetSession(p.session_no)]
    assert world.core.is_clean


def test_a_stopped_sender_on_this_host_keeps_its_slots_quarantined() -> None:
    """Time alone never frees a slot: it may wake up and write."""
    world = ReceiverWorld(lease_s=9.0)
    p = world.connect(host=LOCAL)
    p.alloc(1, 2, keys(1))
    world.pass_time(9.0)
    world.feed(ev.SessionClosed(p.session_no))
    world.pass_time(1e6)
    assert world.core.counts.quarantined == 1
    assert not world.core.is_clean


def test_its_process_is_watched_only_on_this_host() -> None:
    """Across pid namespaces and hosts a pid says nothing; UCX uses the network there."""
    world = ReceiverWorld()
    elsewhere = HostIdentity(OWN_HOST.boot_id, "another namespace", 4242, 99)
    assert world.stranger("p", host=LOCAL).hello() == [ev.OpenSession(1, LOCAL, "p", SENDER_INCARNATION)]
    assert world.stranger("q", host=elsewhere).hello() == [ev.OpenSession(2, None, "q", SENDER_INCARNATION)]


def test_a_receiver_that_does_not_know_its_own_host_takes_nobody_for_local() -> None:
    """Two unknown boot ids are equal and mean nothing."""
    world = ReceiverWorld(host=HostIdentity())
    assert world.stranger(host=HostIdentity()).hello() == [ev.OpenSession(1, None, "prefill-0", SENDER_INCARNATION)]


def test_the_death_of_a_local_sender_ends_its_session_at_once() -> None:
    """A dead process sends no more: nobody need wait for its lease."""
    world = ReceiverWorld()
    p = world.connect(host=LOCAL)
    p.alloc(1, 2, keys(1))
    actions = world.feed(ev.ProcessDied(p.session_no))
    assert ev.CloseSession(p.session_no) in actions
    assert world.core.counts.quarantined == 1
    assert world.feed(ev.SessionClosed(p.session_no)) == [ev.ForgetSession(p.session_no)]
    assert world.feed(ev.ProcessDied(p.session_no)) == []
    assert world.core.is_clean


def test_a_worker_that_is_gone_by_itself_is_remembered() -> None:
    """Whatever the order in which the service reports."""
    world = ReceiverWorld()
    p = world.connect()
    p.alloc(1, 2, keys(1))
    assert world.feed(ev.SessionClosed(p.session_no)) == []
    assert world.core.counts.reserved == 1


def test_a_fence_frees_all_of_a_sessions_transfers() -> None:
    """One worker carried them all."""
    world = ReceiverWorld(slots=6)
    p = world.connect()
    for number in (1, 2, 3):
        p.alloc(number, 2, keys(number))
    world.feed(ev.MessageRejected(p.channel, "rubbish"))
    assert world.core.counts.quarantined == 3
    world.feed(ev.SessionClosed(p.session_no))
    assert world.core.is_clean
    assert len(world.reported(ReportName.TRANSFER_FENCED)) == 3


# ------------------------------------------------------------------ RevokeNotif


def test_a_revoke_is_repeated_until_its_transfer_is_cancelled() -> None:
    """The sender writes on until it hears of it; what a connection loses must be said again."""
    world = ReceiverWorld(lease_s=9.0)
    p = world.connect()
    p.alloc(1, 2, keys(1))
    (revoke,) = revoked_in(world.feed(RequestCancelled("req-1")))
    p.heartbeat()
    assert world.pass_time(3.0) == [p.told(revoke)]
    p.heartbeat()
    assert world.pass_time(3.0) == [p.told(revoke)]
    assert p.cancel(1) == [p.ack()]
    assert world.pass_time(8.0) == []
    assert world.core.is_clean


def test_a_sender_that_does_not_answer_a_revoke_loses_its_session() -> None:
    """It heartbeats, so its lease never ends; without this its slots would be quarantined for ever."""
    world = ReceiverWorld(lease_s=9.0)
    p = world.connect()
    p.alloc(1, 2, keys(1))
    world.feed(RequestCancelled("req-1"))
    for _ in range(2):
        world.pass_time(3.0)
        p.heartbeat()
    actions = world.pass_time(3.0)
    assert ev.CloseSession(p.session_no) in actions
    world.feed(ev.SessionClosed(p.session_no))
    assert world.core.is_clean


def test_each_of_several_revokes_is_repeated_until_its_own_answer() -> None:
    """One answer proves nothing about another transfer."""
    world = ReceiverWorld(lease_s=9.0)
    p = world.connect()
    p.alloc(1, 2, keys(1))
    p.alloc(2, 2, keys(2))
    world.feed(RequestCancelled("req-1"))
    (second,) = revoked_in(world.feed(RequestCancelled("req-2")))
    p.cancel(1)
    assert world.pass_time(3.0) == [p.told(second)]


def cut_off_on_this_host() -> tuple[ReceiverWorld, SenderPeer]:
    """A sender on this host whose session has ended with a slot that it may still be writing."""
    world = ReceiverWorld(slots=2)
    p = world.connect(host=OWN_HOST)
    p.alloc(1, 1, keys(0), last=True)
    p.cancel(1, drained=False)
    world.feed(ev.SessionClosed(p.session_no))
    assert world.core.counts.quarantined == 1
    return world, p


def test_a_sender_on_this_host_that_opens_a_new_session_has_ended_its_puts() -> None:
    """Its own kernel did the writing; a sender that was stopped, or cut off, must not keep slots until it is dead."""
    world, p = cut_off_on_this_host()
    p.hello(puts_ended=True)
    assert world.core.counts.quarantined == 0


def test_a_sender_that_cannot_say_that_its_puts_have_ended_keeps_its_slots() -> None:
    """No word is no fence."""
    world, p = cut_off_on_this_host()
    p.hello(puts_ended=False)
    assert world.core.counts.quarantined == 1


def test_a_hello_from_before_the_session_says_nothing_of_its_puts() -> None:
    """It was under way for long; the puts began after it was said."""
    world, p = cut_off_on_this_host()
    p.last_id = -1
    p.hello(puts_ended=True)
    assert world.core.counts.quarantined == 1


def test_one_senders_word_frees_no_slots_of_another() -> None:
    """Nor those of another start of the same sender: only its process's death speaks for that."""
    world, p = cut_off_on_this_host()
    world.stranger("prefill-1", host=OWN_HOST).hello(puts_ended=True)
    world.stranger("prefill-0", incarnation=p.incarnation + 1, host=OWN_HOST).hello(puts_ended=True)
    assert world.core.counts.quarantined == 1
