"""Waiting for admission costs nothing: who waits is told so once, and a lost answer is found by the heartbeat's."""

from __future__ import annotations

from core_parts import RECEIVER_INCARNATION, SENDER_INCARNATION, keys
from receiver_world import ReceiverWorld
from receiver_world import SenderPeer as SenderOf
from sender_world import ReceiverPeer, SenderWorld, finished, sent, sent_all

from kvpd.core.events import RequestCancelled
from kvpd.core.messages import Ack, AllocRequest, CancelNotif, Heartbeat
from kvpd.core.outbox import Outbox
from kvpd.core.receiver import events as rev
from kvpd.core.sender import events as ev

# ------------------------------------------------------------------ the receiver


def told_waiting(peer: SenderOf) -> int:
    """What the answer to a heartbeat says."""
    (told,) = peer.heartbeat()
    assert isinstance(told, rev.SendMessage)
    assert isinstance(told.message, Ack)
    return told.message.waiting


def test_who_must_wait_is_told_so_and_who_need_not_is_not() -> None:
    """Else thousands that wait would ask again and again, and whoever got room at once would get two answers."""
    world = ReceiverWorld(slots=2)
    p = world.connect()
    assert p.alloc(1, 2) == [p.placed(1)]
    assert p.alloc(2, 1) == [p.ack()]


def test_a_repeat_of_a_request_that_waits_is_told_again() -> None:
    """The first word that it waits may have been lost."""
    world = ReceiverWorld(slots=2)
    p = world.connect()
    p.alloc(1, 2)
    request = p.request(2, 1)
    assert p.say(request) == p.say(request) == [p.ack()]


def test_a_heartbeats_answer_says_how_many_of_its_sender_wait() -> None:
    """From this the sender knows whether it has missed an answer. Others' transfers and admitted ones do not count."""
    world = ReceiverWorld(slots=2)
    p, q = world.connect("p"), world.connect("q")
    p.alloc(1, 2)
    p.alloc(2, 1)
    p.alloc(3, 1)
    q.alloc(1, 1)
    assert (told_waiting(p), told_waiting(q)) == (2, 1)
    p.cancel(3)
    p.cancel(1)
    assert (told_waiting(p), told_waiting(q)) == (0, 0)


# ------------------------------------------------------------------ the sender


def beat(world: SenderWorld, peer: ReceiverPeer, waiting: int) -> list[ev.SenderAction]:
    """The next heartbeat is due, and answered: so many wait."""
    at = world.core.peer_of(peer.address).heartbeat_s  # type: ignore[union-attr]
    actions = world.pass_time(at)
    (heartbeat,) = sent_all(actions, Heartbeat)
    answer = Ack(SENDER_INCARNATION, RECEIVER_INCARNATION, heartbeat.message_id, waiting=waiting)
    return actions + peer.say(answer) + world.pass_time(0.0)


def test_a_request_that_is_known_to_wait_is_not_repeated() -> None:
    """Ten thousand that wait would otherwise keep both daemons busy with nothing."""
    world = SenderWorld()
    p = world.connect()
    p.ack(sent(world.open(1, 1), AllocRequest))
    p.ack(sent(world.stage(1, 0, keys(1), last=True), AllocRequest))
    for _ in range(8):
        assert sent_all(beat(world, p, waiting=1), AllocRequest) == []


def test_a_request_that_may_not_have_arrived_is_repeated() -> None:
    """Only the receiver's own word stops that."""
    world = SenderWorld()
    p = world.connect()
    waits, lost = sent(world.open(1, 1), AllocRequest), sent(world.open(2, 1), AllocRequest)
    p.ack(waits)
    actions = beat(world, p, waiting=1) + beat(world, p, waiting=1)
    assert sent_all(actions, AllocRequest) == [lost]


def test_a_lost_answer_is_asked_for_again_at_the_next_heartbeat() -> None:
    """The receiver says that fewer wait than were told to: so an answer went by."""
    world = SenderWorld()
    p = world.connect()
    first, second = sent(world.open(1, 1), AllocRequest), sent(world.open(2, 1), AllocRequest)
    p.ack(first)
    p.ack(second)
    assert sent_all(beat(world, p, waiting=1), AllocRequest) == [first, second]
    p.answer(first)
    p.ack(second)
    assert sent_all(beat(world, p, waiting=1), AllocRequest) == []


def test_what_was_asked_for_together_with_an_admitted_request_is_repeated_again() -> None:
    """All of it is answered at once on admission; where a part of that was lost, the rest must not wait for ever."""
    world = SenderWorld()
    p = world.connect()
    opened, batch = sent(world.open(1, 1), AllocRequest), sent(world.stage(1, 0, keys(1), last=True), AllocRequest)
    p.ack(opened)
    p.ack(batch)
    p.answer(opened)
    actions = beat(world, p, waiting=0) + beat(world, p, waiting=0)
    assert sent_all(actions, AllocRequest) == [batch]


def test_a_late_word_that_an_admitted_request_waits_is_ignored() -> None:
    """A broken connection may deliver something twice; the request's batch would never be asked for again."""
    world = SenderWorld()
    p = world.connect()
    opened, batch = sent(world.open(1, 1), AllocRequest), sent(world.stage(1, 0, keys(1), last=True), AllocRequest)
    p.answer(opened)
    assert p.ack(batch) == []
    assert sent_all(beat(world, p, waiting=0) + beat(world, p, waiting=0), AllocRequest) == [batch]


def test_a_request_that_is_cancelled_while_it_waits_is_not_missed() -> None:
    """It waits no more on this side, whatever the receiver still counts."""
    world = SenderWorld()
    p = world.connect()
    p.ack(sent(world.open(1, 1), AllocRequest))
    other = sent(world.open(2, 1), AllocRequest)
    p.ack(other)
    world.feed(ev.CancelRequested(1))
    p.ack(sent(world.drained(1), CancelNotif))
    assert sent_all(beat(world, p, waiting=1), AllocRequest) == []
    assert finished(p.answer(other)) == {}


def test_a_heartbeat_names_the_transfers_with_puts_in_flight_and_no_others() -> None:
    """They make progress at the receiver; and to search all transfers for them would stop the loop."""
    world = SenderWorld()
    p = world.connect()
    for number in (1, 2, 3):
        p.admit(number, 2)
        p.stage(number, 0, keys(number), [number])
        p.stage(number, 1, keys(number + 10), [number + 10], last=True)
    for number, piece in ((1, 0), (1, 1), (2, 0), (2, 1)):
        world.fill(number, piece)
    world.land(1, 0)
    world.land(2, 0)
    world.land(2, 1)
    (heartbeat,) = sent_all(world.pass_time(world.core.peer_of(p.address).heartbeat_s), Heartbeat)  # type: ignore[union-attr]
    assert heartbeat.in_flight == ((1, 1),)


def test_transfers_of_one_name_are_all_cancelled_by_it_and_no_others() -> None:
    """Two attempts may bear the same name."""
    world = SenderWorld()
    p = world.connect()
    for number, name in ((1, "a"), (2, "b"), (3, "a")):
        p.admit(number, 1, req_id=name)
    assert finished(world.feed(RequestCancelled("a"))).keys() == {1, 3}
    assert finished(world.feed(RequestCancelled("nobody"))) == {}


# ------------------------------------------------------------------ the outbox


def test_what_is_held_back_is_due_only_when_it_is_resumed() -> None:
    """The order stays that in which the messages were sent."""
    outbox: Outbox[Ack] = Outbox(repeat_s=3.0)
    first, second, third = (Ack(1, 2, number) for number in (10, 11, 12))
    for message in (first, second, third):
        outbox.add(message, now=0.0)
        outbox.hold_back(message.message_id)
    assert outbox.next_at() is None
    assert outbox.answer(12) is not None
    outbox.resume(10, now=5.0)
    outbox.resume(12, now=5.0)
    assert outbox.due(7.9) == []
    assert outbox.due(8.0) == [first]
    outbox.repeat_held_back(now=9.0)
    assert outbox.due(9.0) == [second]
    assert outbox.due(12.0) == [first, second]
