"""Heartbeats, and how a sender fences itself: its own view of its lease always ends before the receiver's."""

from __future__ import annotations

from collections.abc import Iterable

from core_parts import keys
from sender_world import ReceiverPeer, SenderWorld, finished, sent, sent_all

from kvpd.core.events import DrainRequested
from kvpd.core.messages import AllocRequest, CancelNotif, Heartbeat, Hello
from kvpd.core.sender import events as ev
from kvpd.errors import ErrorCode


def test_heartbeats_say_who_lives_and_what_is_being_put() -> None:
    """Every third of the lease; a put in flight is progress that no message shows."""
    world = SenderWorld()
    p = world.connect()
    p.admit(3, 2)
    p.admit(5, 2)
    p.stage(5, 0, keys(1, 2), last=True)
    (beat,) = sent_all(world.pass_time(3.0), Heartbeat)
    assert (beat.oldest_live, beat.in_flight) == (3, ())
    p.ack(beat)
    world.fill(5, 0)
    world.feed(ev.CancelRequested(3))
    p.ack(sent(world.drained(3), CancelNotif))
    (beat,) = sent_all(world.pass_time(3.0), Heartbeat)
    assert (beat.oldest_live, beat.in_flight) == (5, ((5, 2),))


def test_nothing_but_heartbeats_wakes_a_sender_whose_receiver_answers() -> None:
    """An idle daemon's time is its wake-ups: none may be there to find that all is well."""
    world = SenderWorld()
    p = world.connect()
    for _ in range(10):
        at = world.core.next_deadline()
        assert at is not None
        (beat,) = sent_all(world.pass_time(at - world.now), Heartbeat)
        p.ack(beat)


def test_with_no_transfer_alive_all_numbers_so_far_are_settled() -> None:
    """The receiver may forget how they ended."""
    world = SenderWorld()
    world.connect()
    world.open(41, 1, receiver="another")
    (beat,) = sent_all(world.pass_time(3.0), Heartbeat)
    assert beat.oldest_live == 42


def test_a_sender_fences_itself_before_its_lease_ends() -> None:
    """By then the receiver may give the slots away: no put may begin or be in flight."""
    world = SenderWorld()
    p = world.connect()
    p.admit(1, 1)
    p.stage(1, 0, keys(1), last=True)
    world.fill(1, 0)
    assert finished(world.pass_time(6.9)) == {}
    actions = world.pass_time(0.1)
    assert finished(actions) == {1: ErrorCode.PEER_LOST}
    assert ev.CloseEndpoint("decode-0", 1) in actions
    assert world.free == 7  # the put may still read its slot
    world.drained(1, drained=False)
    assert world.free == 8
    world.let_go(1)
    assert world.core.is_clean


def test_the_lease_runs_from_when_the_acknowledged_message_was_sent() -> None:
    """An answer that was long under way proves little: the receiver heard us when it was sent, not now."""
    world = SenderWorld()
    p = world.connect()
    (beat,) = sent_all(world.pass_time(3.0), Heartbeat)  # it was sent at (lease_s - put_deadline_s) / 3 = 7 / 3
    world.pass_time(2.0)
    p.ack(beat)
    assert world.core.peer_of("decode-0") is not None
    world.pass_time(4.3)
    assert world.core.peer_of("decode-0") is not None
    world.pass_time(0.1)
    assert world.core.peer_of("decode-0") is None


def test_an_answer_to_an_older_message_does_not_shorten_the_lease() -> None:
    """Answers are reordered by waiting: an admission comes long after newer heartbeats were answered."""
    world = SenderWorld()
    p = world.connect()
    request = sent(world.open(1, 1), AllocRequest)
    beats = sent_all(world.pass_time(6.0), Heartbeat)  # at 7 / 3 and 14 / 3
    p.ack(beats[1])
    p.ack(beats[0])
    p.answer(request)
    world.pass_time(5.6)
    assert world.core.peer_of("decode-0") is not None


def test_a_clock_that_jumped_cuts_every_endpoint_at_once() -> None:
    """While this process stood still its leases ran out: what it would put now lands in others' slots."""
    world = SenderWorld()
    p = world.connect("p")
    world.receiver("q")
    first, second = p.serial + 1, p.serial + 2
    p.admit(first, 1)
    world.open(second, 1, receiver="q")
    assert world.feed(ev.ClockJumped(p.put_deadline_s)) == []
    actions = world.feed(ev.ClockJumped(p.put_deadline_s + 0.1))
    assert ev.CloseEndpoint("p", 1) in actions
    assert finished(actions) == {first: ErrorCode.PEER_LOST}  # one that only connects has nothing to lose


def test_one_lost_heartbeat_does_not_end_a_quiet_session() -> None:
    """A network loses a message now and then; that must not cost every request its session."""
    world = SenderWorld()
    p = world.connect()
    lost, heard = sent_all(world.pass_time(5.0), Heartbeat)
    p.ack(heard)
    world.pass_time(5.0)
    assert lost.message_id < heard.message_id
    assert world.core.peer_of("decode-0") is not None


def lost_with_a_put_in_flight() -> tuple[SenderWorld, ReceiverPeer]:
    """A session that ended while transfer 1 was being put."""
    world = SenderWorld()
    p = world.connect()
    p.admit(1, 1)
    p.stage(1, 0, keys(1), last=True)
    world.fill(1, 0)
    assert ErrorCode.PEER_LOST in finished(world.pass_time(7.0)).values()
    return world, p


def test_a_new_session_waits_until_the_puts_of_the_lost_one_have_ended() -> None:
    """Its Hello is a fence on one host: the receiver gives away slots that this process may have been writing."""
    world, _ = lost_with_a_put_in_flight()
    assert sent_all(world.pass_time(1.0), Hello) == []
    assert sent_all(world.open(2, 1), Hello) == []
    hello = sent(world.drained(1, drained=False), Hello)
    assert hello.puts_ended


def test_a_put_that_never_ends_is_never_said_to_have_ended() -> None:
    """The transport did not end it even when it was cut off: nothing proves that it cannot still write."""
    world, _ = lost_with_a_put_in_flight()
    world.feed(ev.PutsDrained(1, drained=False, ended=False))
    assert not sent(world.pass_time(1.0), Hello).puts_ended


def test_the_next_session_waits_for_every_transfer_of_the_lost_one() -> None:
    """One put that still writes is enough to corrupt."""
    world = SenderWorld()
    p = world.connect()
    p.admit(1, 1)
    p.admit(2, 1)
    world.pass_time(7.0)
    assert sent_all(world.pass_time(1.0) + world.drained(1), Hello) == []
    assert sent_all(world.drained(2), Hello) != []


def test_puts_that_end_before_anybody_wants_a_session_hold_up_nothing() -> None:
    """The Hello goes out when it is due."""
    world, _ = lost_with_a_put_in_flight()
    assert sent_all(world.drained(1), Hello) == []
    assert sent_all(world.pass_time(1.0), Hello) != []


def hellos_in(actions: Iterable[ev.SenderAction]) -> int:
    """How often a session was asked for; repeats are not counted."""
    return len({hello.message_id for hello in sent_all(actions, Hello)})


def test_a_lost_session_is_opened_anew_though_nobody_asks() -> None:
    """Slots that only this sender's word can free must not wait for its next request."""
    world = SenderWorld()
    p = world.connect()
    world.pass_time(7.0)
    assert hellos_in(world.pass_time(1.0)) == 1
    p.come_up()
    world.pass_time(7.0)
    assert hellos_in(world.pass_time(1.0)) == 1, "the first pause is short again"


def test_a_receiver_is_tried_for_ever_and_less_and_less_often() -> None:
    """One that was stopped for an hour holds our slots when it goes on; one that is dead must cost next to nothing."""
    world = SenderWorld(connect_timeout_s=5.0, reconnect_max_s=600.0)
    p = world.connect()
    assert hellos_in(world.pass_time(7.0 + 60.0)) == 6  # 1, 7.5, 15.6, 25.8, 38.5 and 54.4 s after the loss
    assert hellos_in(world.pass_time(3600.0)) < 20
    day = hellos_in(world.pass_time(86_400.0))
    assert day in (86_400 // 605, 86_400 // 605 + 1)
    assert world.core.is_clean
    while world.core.peer_count == 0:
        world.pass_time(1.0)
    p.come_up()
    assert world.core.next_deadline() == world.now + (p.lease_s - p.put_deadline_s) / 3, "a session like any other"


def test_only_so_many_lost_receivers_are_remembered() -> None:
    """Invariant 9, for a sender that has outlived thousands of receivers: the first one lost is forgotten."""
    world = SenderWorld(peers_max=2)
    for name in "pqr":
        world.connect(name)
        world.pass_time(7.0)
    tried = {action.receiver for action in world.pass_time(3600.0) if isinstance(action, ev.ConnectPeer)}
    assert tried == {"q", "r"}


def test_a_session_that_was_wanted_sooner_is_not_opened_twice() -> None:
    """The next request may come before the reconnect does."""
    world = SenderWorld()
    p = world.connect()
    world.pass_time(7.0)
    first = sent(world.open(1, 1), Hello)
    assert {hello.message_id for hello in sent_all(world.pass_time(1.5), Hello)} <= {first.message_id}
    p.come_up()
    assert world.core.peer_of("decode-0") is not None


def test_a_sender_that_shuts_down_opens_nothing_anew() -> None:
    """Nobody would use it."""
    world = SenderWorld()
    world.connect()
    world.pass_time(7.0)
    world.feed(DrainRequested())
    assert sent_all(world.pass_time(100.0), Hello) == []
    other = SenderWorld()
    other.connect()
    other.feed(DrainRequested())
    assert sent_all(other.pass_time(100.0), Hello) == []


def test_a_reconnect_waits_for_room_among_the_peers() -> None:
    """The table of peers is bounded, and those whom somebody asks for come first."""
    world = SenderWorld(peers_max=1, connect_timeout_s=5.0)
    world.connect("p")
    world.pass_time(7.0)
    world.open(1, 1, receiver="q")
    world.pass_time(4.9)
    assert world.core.peer_of("p") is None
    world.pass_time(1.2)  # nobody answers at q, so it is given up
    assert world.core.peer_of("p") is not None


def test_a_reconnect_that_finds_no_room_for_long_waits_on() -> None:
    """As if nobody had answered: it must not be looked at every second."""
    world = SenderWorld(peers_max=1, connect_timeout_s=50.0)
    world.connect("p")
    world.pass_time(7.0)
    world.open(1, 1, receiver="q")
    assert hellos_in(world.pass_time(50.0)) == 1  # q's
    assert hellos_in(world.pass_time(15.0)) == 1  # p's, a quarter later
    assert world.core.peer_of("p") is not None
