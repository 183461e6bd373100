"""Slots that the engine fills at the receiver: no staging, no put, and no word of an end before the engine's own."""

from __future__ import annotations

import pytest
from core_parts import CHUNK, RECEIVER_INCARNATION, keys
from sender_world import ReceiverPeer, SenderWorld, finished, grants, sent, sent_all

from kvpd.core.events import DrainExpired, DrainRequested, ReportName
from kvpd.core.messages import AllocRequest, CancelNotif, Heartbeat, Hello, WriteDone
from kvpd.core.sender import events as ev
from kvpd.core.sender.events import StagedSlot
from kvpd.errors import ErrorCode

PUT_DEADLINE_S = 2.0  # of ReceiverPeer
SHARE = "/run/kvpd/receiver.sock"


def come_up(world: SenderWorld, **welcome: object) -> ReceiverPeer:
    """A receiver whose memory engines can have."""
    p = world.receiver()
    world.feed(ev.OpenRequested(0, 1, "first", p.address, 1, in_place=True))
    world.feed(ev.CancelRequested(0))
    world.drained(0)
    world.let_go(0)
    reopen(world, p, **welcome)
    return p


def reopen(world: SenderWorld, p: ReceiverPeer, **welcome: object) -> list[ev.SenderAction]:
    """Its session is up, the first one or the next."""
    p.welcome(share=SHARE, **welcome)
    return world.feed(ev.EndpointOpened(p.address, p.endpoint, "local", in_place=True))


def admit(
    world: SenderWorld, p: ReceiverPeer, number: int, total: int, *, rank: int = 0, in_place: bool = True
) -> None:
    """A transfer whose engine can fill in place is opened; with several ranks, by the first of them."""
    event = ev.OpenRequested(number, 1, f"req-{number}", p.address, total, rank=rank, in_place=in_place)
    p.answer(sent(world.feed(event), AllocRequest))


def filling(**settings: object) -> tuple[SenderWorld, ReceiverPeer]:
    """Transfer 1 is to fill slots 5 and 6 in place."""
    world = SenderWorld(**settings)  # type: ignore[arg-type]
    p = come_up(world)
    admit(world, p, 1, 2)
    p.stage(1, 0, keys(1, 2), [5, 6], last=True)
    return world, p


def test_a_batch_is_granted_whole_and_at_once_in_the_receivers_slots() -> None:
    """More chunks than the staging buffer holds, none of whose slots are taken; what is there already is left out."""
    world = SenderWorld(staging=2)
    p = come_up(world)
    admit(world, p, 1, 5)
    (grant,) = grants(p.stage(1, 0, keys(1, 2, 3, 4, 5), [7, -1, 3, 9, 1], last=True, last_bytes=10))
    entries = (StagedSlot(7, 7, CHUNK), None, StagedSlot(3, 3, CHUNK), StagedSlot(9, 9, CHUNK), StagedSlot(1, 1, 10))
    assert grant == ev.GrantPiece(1, 0, 0, 0, entries, is_last_piece=True, place=p.endpoint)
    assert world.free == 2
    assert world.core.is_filling(1)


def test_a_filled_piece_is_written_without_a_put() -> None:
    """WriteDone at once; and when it is acknowledged, the transfer is done."""
    world, p = filling()
    actions = world.fill(1, 0)
    done = sent(actions, WriteDone)
    assert (done.first_chunk, done.count, done.checksums) == (0, 2, ())
    assert not [action for action in actions if isinstance(action, ev.PostPuts)]
    assert not world.core.is_filling(1)
    assert finished(p.ack(done)) == {1: None}
    (report,) = world.reported(ReportName.PIECE_FILLED)
    assert (report.fields["chunks"], report.fields["bytes"]) == (2, 2 * CHUNK)
    assert world.reported(ReportName.TRANSFER_DONE)[0].fields["bytes"] == 2 * CHUNK
    world.let_go(1)
    assert world.core.is_clean


def test_several_batches_are_filled_at_the_same_time() -> None:
    """Nobody waits for the engine to fill an earlier one: there is no staging that could run out."""
    world = SenderWorld(staging=1)
    p = come_up(world)
    admit(world, p, 1, 6)
    assert len(grants(p.stage(1, 0, keys(1, 2, 3), [0, 1, 2]))) == 1
    assert len(grants(p.stage(1, 1, keys(4, 5, 6), [3, 4, 5], last=True))) == 1
    p.ack(sent(world.fill(1, 1), WriteDone))
    assert finished(p.ack(sent(world.fill(1, 0), WriteDone))) == {1: None}


def test_a_batch_that_the_receiver_has_already_is_acknowledged_at_once() -> None:
    """Nothing to fill, nowhere."""
    world = SenderWorld()
    p = come_up(world)
    admit(world, p, 1, 1)
    (grant,) = grants(p.stage(1, 0, keys(1), [-1], last=True))
    assert (grant.entries, grant.place) == ((None,), 0)
    assert finished(world.fill(1, 0)) == {1: None}


def test_an_engine_that_cannot_fill_in_place_is_staged_for() -> None:
    """A program that embeds the sender has no link to a receiver."""
    world = SenderWorld()
    p = come_up(world)
    admit(world, p, 1, 1, in_place=False)
    (grant,) = grants(p.stage(1, 0, keys(1), [9], last=True))
    assert (grant.place, world.free) == (0, 7)
    assert grant.entries[0] is not None
    assert grant.entries[0].remote == 9


def test_where_chunks_are_verified_they_are_put() -> None:
    """Nobody has a checksum of what an engine wrote by itself."""
    world = SenderWorld()
    p = come_up(world, verify="crc32c")
    admit(world, p, 1, 1)
    (grant,) = grants(p.stage(1, 0, keys(1), [9], last=True))
    assert grant.place == 0


def test_the_endpoint_is_told_where_the_memory_is() -> None:
    """And of which start of the receiver: another one has other memory."""
    world = SenderWorld()
    p = world.receiver()
    world.open(1, 1)
    (action,) = p.welcome(share=SHARE)
    assert isinstance(action, ev.OpenEndpoint)
    assert (action.share, action.incarnation) == (SHARE, RECEIVER_INCARNATION)
    world.feed(ev.EndpointOpened(p.address, p.endpoint, "local", in_place=True))
    assert world.reported(ReportName.SESSION_OPENED)[0].fields["way"] == "local"


# ---------------------------------------------------------------------- ends

LETS_GO = {
    "it left": lambda world: world.let_go(1),
    "it filled the piece all the same": lambda world: world.fill(1, 0),
}


@pytest.mark.parametrize("how", LETS_GO)
def test_a_cancel_is_told_when_the_engine_has_let_go(how: str) -> None:
    """Not before: drained says that nothing can land any more."""
    world, p = filling()
    assert finished(world.feed(ev.CancelRequested(1))) == {1: ErrorCode.CANCELLED}
    assert world.drained(1) == []
    assert world.core.is_filling(1)
    notif = sent(LETS_GO[how](world), CancelNotif)
    assert (notif.drained, notif.goes_on) == (True, False)
    p.ack(notif)
    world.let_go(1)
    assert world.core.is_clean
    assert sent_all(world.pass_time(PUT_DEADLINE_S), CancelNotif) == []


def test_an_engine_that_lets_go_before_the_puts_task_has_ended_is_waited_for_no_more() -> None:
    """Both must be over, in either order."""
    world, _ = filling()
    world.feed(ev.CancelRequested(1))
    assert sent_all(world.let_go(1), CancelNotif) == []
    assert sent(world.drained(1), CancelNotif).drained


def test_past_the_put_deadline_the_receiver_hears_that_it_is_over_and_not_that_it_has_drained() -> None:
    """So that it rolls the transfer back. The session goes on, and the other requests in it."""
    world, p = filling()
    admit(world, p, 2, 1)
    world.feed(ev.CancelRequested(1))
    world.drained(1)
    assert sent_all(world.pass_time(PUT_DEADLINE_S - 0.1), CancelNotif) == []
    notif = sent(world.pass_time(0.2), CancelNotif)
    assert (notif.transfer_no, notif.drained, notif.goes_on) == (1, False, True)
    p.ack(notif)
    p.stage(2, 0, keys(9), [8], last=True)
    assert finished(p.ack(sent(world.fill(2, 0), WriteDone))) == {2: None}
    assert not world.core.is_idle
    drained = sent(world.let_go(1), CancelNotif)
    assert (drained.drained, drained.goes_on) == (True, False)
    p.ack(drained)
    world.let_go(2)
    assert world.core.is_clean


def test_a_word_that_was_lost_is_repeated_until_the_later_one_takes_its_place() -> None:
    """The receiver could otherwise hear last what was said first."""
    world, p = filling()
    world.feed(ev.CancelRequested(1))
    world.drained(1)
    first = sent(world.pass_time(PUT_DEADLINE_S), CancelNotif)
    later = world.let_go(1)
    second = sent(later, CancelNotif)
    assert second.message_id > first.message_id
    repeats = sent_all(world.pass_time(3.5), CancelNotif)
    assert {notif.message_id for notif in repeats} == {second.message_id}
    assert p.ack(first) == []
    assert not world.core.is_idle
    p.ack(second)
    assert world.core.is_clean


def test_a_revoked_transfer_that_is_being_filled_is_answered_in_time() -> None:
    """A receiver that hears nothing for a lease ends the session."""
    world, p = filling()
    p.revoke(1)
    world.drained(1)
    notif = sent(world.pass_time(PUT_DEADLINE_S), CancelNotif)
    assert notif.goes_on
    assert sent_all(p.revoke(1), CancelNotif) == []


def test_every_rank_must_have_let_go() -> None:
    """One rank has filled its part and another one is still at it."""
    world = SenderWorld(ranks=2)
    p = world.receiver()
    for number, rank in ((1, 0), (2, 1)):
        world.feed(ev.OpenRequested(number, 1, "r", p.address, 1, rank=rank, in_place=True))
    p.answer(sent_all(reopen(world, p), AllocRequest)[0])
    p.stage(1, 0, keys(1), [4], last=True)
    world.stage(2, 0, keys(1), last=True)
    world.fill(1, 0)
    world.feed(ev.CancelRequested(2))
    world.drained(1)
    assert sent_all(world.let_go(1), CancelNotif) == []
    assert sent_all(world.drained(2), CancelNotif) == []
    p.ack(sent(world.let_go(2), CancelNotif))
    assert world.core.is_clean


# ---------------------------------------------------------------------- a session is lost


def lose(world: SenderWorld, p: ReceiverPeer) -> list[ev.SenderAction]:
    """The session is over, and the puts' task of transfer 1 with it."""
    actions = world.feed(ev.EndpointBroken(p.address, p.endpoint, "broken"))
    return actions + world.drained(1)


def test_no_hello_while_an_engine_may_still_be_filling_and_the_deadline_is_not_over() -> None:
    """It could not say that all has ended, and a moment later it can."""
    world, p = filling()
    lose(world, p)
    world.feed(ev.OpenRequested(2, 1, "next", p.address, 1, in_place=True))
    assert sent_all(world.pass_time(PUT_DEADLINE_S - 0.5), Hello) == []
    hello = sent(world.let_go(1), Hello)
    assert hello.puts_ended


def test_past_the_deadline_the_hello_does_not_say_that_all_has_ended() -> None:
    """Whoever else wants the receiver is served. Once the engine has let go, heartbeats say what Hello could not."""
    world, p = filling()
    lose(world, p)
    world.feed(ev.OpenRequested(2, 1, "next", p.address, 1, in_place=True))
    hello = sent_all(world.pass_time(PUT_DEADLINE_S), Hello)[0]
    assert not hello.puts_ended
    actions = reopen(world, p)
    p.answer(sent(actions, AllocRequest))
    assert not beat(world, p).puts_ended
    world.let_go(1)
    assert beat(world, p).puts_ended


def beat(world: SenderWorld, p: ReceiverPeer) -> Heartbeat:
    """The next heartbeat, acknowledged."""
    heartbeat = sent_all(world.pass_time((9.0 - PUT_DEADLINE_S) / 3), Heartbeat)[0]
    p.ack(heartbeat)
    return heartbeat


def test_a_heartbeat_says_nothing_of_the_kind_where_hello_has_said_it() -> None:
    """The receiver looks through its sessions for it."""
    world = SenderWorld()
    p = come_up(world)
    assert not beat(world, p).puts_ended


def test_an_overdue_engine_of_a_session_that_is_lost_later_counts_too() -> None:
    """It was cancelled while the session lived, and is still at it when the next Hello is due."""
    world, p = filling()
    world.feed(ev.CancelRequested(1))
    world.drained(1)
    p.ack(sent(world.pass_time(PUT_DEADLINE_S), CancelNotif))
    world.feed(ev.EndpointBroken(p.address, p.endpoint, "broken"))
    hello = sent(world.pass_time(1.0), Hello)
    assert not hello.puts_ended
    reopen(world, p)
    assert not beat(world, p).puts_ended
    world.let_go(1)
    assert beat(world, p).puts_ended
    assert world.core.is_clean


def test_two_engines_of_a_lost_session_must_both_let_go() -> None:
    """The first one to do so says nothing of the other."""
    world, p = filling()
    admit(world, p, 2, 1)
    p.stage(2, 0, keys(7), [7], last=True)
    lose(world, p)
    world.drained(2)
    assert not sent_all(world.pass_time(PUT_DEADLINE_S), Hello)[0].puts_ended
    reopen(world, p)
    world.let_go(1)
    assert not beat(world, p).puts_ended
    world.let_go(2)
    assert beat(world, p).puts_ended
    assert world.core.is_clean


def test_a_drain_does_not_wait_for_an_engine_that_hangs() -> None:
    """What still runs is told its end; the process may go, and the receiver then watches the engine itself."""
    world, _ = filling()
    world.feed(DrainRequested())
    assert finished(world.feed(DrainExpired())) == {1: ErrorCode.DRAINING}
