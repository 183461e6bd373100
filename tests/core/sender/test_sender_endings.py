"""Cancels in every state, drains, revocations and timeouts: the engine is told at once, nothing is left behind."""

from __future__ import annotations

import pytest
from core_parts import RECEIVER_INCARNATION, SENDER_INCARNATION, keys
from sender_world import ReceiverPeer, SenderWorld, failures_in, finished, grants, readies_in, sent, sent_all

from kvpd.core.events import ReportName, RequestCancelled
from kvpd.core.messages import AllocRequest, CancelNotif, Hello, WriteDone
from kvpd.core.sender import events as ev
from kvpd.errors import ErrorCode, TransferCancelled

STEPS = ["connecting", "welcomed", "opening", "admitted", "asked", "filling", "writing", "acking"]


def until(world: SenderWorld, p: ReceiverPeer, step: str) -> None:
    """Transfer 1, two chunks, stands at this step of its life."""
    reached = STEPS.index(step)
    world.open(1, 2)
    if reached >= 1:
        p.welcome()
    request = None
    if reached >= 2:
        request = sent(world.feed(ev.EndpointOpened("decode-0", 1)), AllocRequest)
    if reached >= 3:
        assert request is not None
        p.answer(request)
    if reached >= 4:
        batch = sent(world.stage(1, 0, keys(1, 2), last=True), AllocRequest)
        if reached >= 5:
            p.answer(batch, [0, 1])
    if reached >= 6:
        world.fill(1, 0)
    if reached >= 7:
        world.land(1, 0)


WHO = ["engine", "req_id", "engine left", "revoked", "request timeout", "receiver lost"]
UNHEARD = ("connecting", "welcomed")  # a receiver cannot revoke what it has not heard of


@pytest.mark.parametrize(("step", "who"), [(s, w) for s in STEPS for w in WHO if w != "revoked" or s not in UNHEARD])
def test_a_cancel_works_in_every_state_and_leaves_nothing(step: str, who: str) -> None:
    """The wait for admission included (fault 8). The engine is told at once; slots come back when nobody uses them."""
    world = SenderWorld(request_timeout_s=4.0, proxy_address="proxy")
    p = world.receiver()
    until(world, p, step)
    match who:
        case "engine":
            actions, code = world.feed(ev.CancelRequested(1)), ErrorCode.CANCELLED
        case "req_id":
            actions, code = world.feed(RequestCancelled("req-1")), ErrorCode.CANCELLED
        case "engine left":
            actions, code = world.let_go(1), ErrorCode.CANCELLED
        case "revoked":
            actions, code = p.revoke(1), ErrorCode.NO_PROGRESS
        case "request timeout":
            actions, code = world.pass_time(4.0), ErrorCode.REQUEST_TIMEOUT
        case _:
            actions, code = world.feed(ev.PeerMessageRejected("decode-0", "rubbish")), ErrorCode.PROTOCOL_ERROR
    assert finished(actions) == {1: code}
    assert [a.transfer_no for a in actions if isinstance(a, ev.CancelTransfer)] == [1]
    assert readies_in(actions) == []
    (told,) = failures_in(actions)
    assert (told.req_id, told.transfer_no, told.receiver, told.error.code) == ("req-1", 1, "decode-0", code)
    world.acknowledge("proxy", told)
    notified = sent_all(world.drained(1), CancelNotif)
    knows = step not in UNHEARD and who != "receiver lost"
    assert [(n.transfer_no, n.reason, n.drained) for n in notified] == ([(1, code, True)] if knows else [])
    for notif in notified:
        assert p.ack(notif) == []
    world.let_go(1)
    assert world.core.is_clean


def test_cancelling_again_changes_nothing() -> None:
    """Cancels come from everywhere at once (fault 21)."""
    world = SenderWorld()
    p = world.connect()
    p.admit(1, 2)
    world.feed(ev.CancelRequested(1, ErrorCode.CANCELLED, "first"))
    for event in (ev.CancelRequested(1), RequestCancelled("req-1"), ev.CancelRequested(99), RequestCancelled("nobody")):
        assert world.feed(event) == []
    assert p.revoke(1) == []
    assert world.drained(1) != []
    assert world.drained(1) == []
    assert world.drained(99) == []


def test_a_cancel_is_told_to_the_engine_as_what_it_is() -> None:
    """Asked for is one thing, failed another: logs, metrics and exceptions differ."""
    world = SenderWorld()
    p = world.connect()
    p.admit(1, 2)
    (finish, _) = world.feed(ev.CancelRequested(1, ErrorCode.CANCELLED, "the client hung up"))
    assert finish == ev.FinishTransfer(1, TransferCancelled(ErrorCode.CANCELLED, "the client hung up"))
    assert len(world.reported(ReportName.TRANSFER_CANCELLED)) == 2  # one of them opened the session
    p.admit(2, 2)
    p.revoke(2)
    assert [r.fields["code"] for r in world.reported(ReportName.TRANSFER_FAILED)] == [ErrorCode.NO_PROGRESS]


def test_the_cancel_is_repeated_until_the_receiver_answers() -> None:
    """Its room is freed by this message and by no clock."""
    world = SenderWorld()
    p = world.connect()
    p.admit(1, 2)
    world.feed(ev.CancelRequested(1))
    notif = sent(world.drained(1), CancelNotif)
    assert sent_all(world.pass_time(3.0), CancelNotif) == [notif]
    assert world.core.transfer_count == 1
    p.ack(notif)
    assert world.core.transfer_count == 0
    assert sent_all(world.pass_time(3.9), CancelNotif) == []


def test_what_was_asked_for_a_cancelled_transfer_is_asked_no_more() -> None:
    """And a late answer to it finds no question."""
    world = SenderWorld()
    p = world.connect()
    request = sent(world.open(1, 2), AllocRequest)
    world.feed(ev.CancelRequested(1))
    assert sent_all(world.pass_time(3.0), AllocRequest) == []
    assert p.answer(request) == []


def test_a_cancelled_batch_leaves_the_line_for_staging() -> None:
    """Those behind it move up."""
    world = SenderWorld(staging=2)
    p = world.connect()
    for number in (1, 2, 3):
        p.admit(number, 2)
    p.stage(1, 0, keys(1, 2), last=True)
    p.stage(2, 0, keys(3, 4), last=True)
    p.stage(3, 0, keys(5, 6), last=True)
    world.feed(ev.CancelRequested(2))
    world.fill(1, 0)
    assert [g.transfer_no for g in grants(world.land(1, 0))] == [3]


# ------------------------------------------------------------------ slots that somebody may still use


def test_slots_that_the_engine_may_still_fill_linger_until_it_lets_go() -> None:
    """A new owner's bytes would be overwritten by an engine that has not yet read that its transfer has ended."""
    world = SenderWorld(staging=2)
    p = world.connect()
    p.admit(1, 2)
    p.admit(2, 2)
    p.stage(1, 0, keys(1, 2), last=True)
    p.stage(2, 0, keys(3, 4), last=True)
    assert world.core.is_filling(1)
    world.feed(ev.CancelRequested(1))
    p.ack(sent(world.drained(1), CancelNotif))
    assert (world.core.transfer_count, world.free) == (1, 0)
    assert world.core.is_filling(1)
    assert not world.core.is_clean
    assert world.fill(1, 0) == []  # it is filled, yet the engine has not left
    assert [g.transfer_no for g in grants(world.let_go(1))] == [2]
    assert not world.core.is_filling(1)


def test_a_piece_that_needs_no_slots_leaves_none_to_linger() -> None:
    """The receiver has its chunk already: its transfer ends holding no staging, and its sender must not stumble."""
    world = SenderWorld(staging=2)
    p = world.connect()
    p.admit(1, 1)
    p.stage(1, 0, keys(1), [-1], last=True)
    world.feed(ev.CancelRequested(1))
    p.ack(sent(world.drained(1), CancelNotif))
    assert world.free == 2
    assert not world.core.is_filling(1)
    assert world.core.is_clean


def test_an_engine_that_fills_a_cancelled_piece_has_let_go_of_that_piece() -> None:
    """While the transfer still ends, its slots are free as soon as nobody writes them."""
    world = SenderWorld(staging=2)
    p = world.connect()
    p.admit(1, 2)
    p.stage(1, 0, keys(1, 2), last=True)
    world.feed(ev.CancelRequested(1))
    assert world.free == 0
    world.fill(1, 0)
    assert world.free == 2


def test_slots_that_are_being_put_are_free_when_the_puts_have_ended() -> None:
    """The transport reads them until then."""
    world = SenderWorld(staging=2)
    p = world.connect()
    p.admit(1, 2)
    p.stage(1, 0, keys(1, 2), last=True)
    world.fill(1, 0)
    world.let_go(1)
    assert world.free == 0
    assert world.land(1, 0) == []
    assert world.free == 2
    assert world.land(1, 0) == []


def test_an_engine_that_lets_go_while_the_transfer_ends_frees_what_it_was_filling() -> None:
    """In whichever order the two come."""
    world = SenderWorld(staging=3)
    p = world.connect()
    p.admit(1, 3)
    p.stage(1, 0, keys(1, 2))
    world.fill(1, 0)
    p.stage(1, 1, keys(3), [2], last=True)
    world.feed(ev.CancelRequested(1))
    world.let_go(1)
    assert world.free == 1
    world.drained(1)
    assert world.free == 3


def test_a_piece_that_is_not_being_filled_ends_its_transfer() -> None:
    """The engine counts wrongly: what would travel is not what it thinks."""
    world = SenderWorld()
    p = world.connect()
    p.admit(1, 2)
    p.stage(1, 0, keys(1), last=False)
    world.fill(1, 0)
    assert finished(world.fill(1, 0)) == {1: ErrorCode.PROTOCOL_ERROR}
    p.admit(2, 2)
    assert finished(world.fill(2, 5)) == {2: ErrorCode.PROTOCOL_ERROR}


# ------------------------------------------------------------------ puts that fail


def test_one_failed_put_ends_everything_through_its_endpoint() -> None:
    """Nothing proves what has landed; only the end of the session at the receiver is a fence."""
    world = SenderWorld()
    p = world.connect()
    p.admit(1, 1)
    p.admit(2, 1)
    p.stage(1, 0, keys(1), last=True)
    world.fill(1, 0)
    actions = world.feed(ev.PutsFailed(1, 0, "endpoint timeout"))
    assert finished(actions) == {1: ErrorCode.TRANSPORT_FAILED, 2: ErrorCode.TRANSPORT_FAILED}
    assert ev.CloseEndpoint("decode-0", 1) in actions
    assert world.feed(ev.PutsFailed(1, 0, "again")) == []
    assert world.drained(1, drained=False) == []
    assert world.drained(2) == []
    assert world.feed(ev.PutsFailed(1, 0, "late")) == []
    world.let_go(1)
    world.let_go(2)
    assert world.core.is_clean


def test_puts_that_do_not_drain_are_no_fence_and_end_the_session() -> None:
    """The endpoint was force-closed: bytes may still land, so the cancel says so and nothing is trusted after it."""
    world = SenderWorld()
    p = world.connect()
    p.admit(1, 1)
    p.admit(2, 1)
    p.stage(1, 0, keys(1), last=True)
    world.fill(1, 0)
    world.feed(ev.CancelRequested(1))
    actions = world.drained(1, drained=False)
    assert sent(actions, CancelNotif) == CancelNotif(
        SENDER_INCARNATION,
        RECEIVER_INCARNATION,
        sent(actions, CancelNotif).message_id,
        1,
        (),
        ErrorCode.CANCELLED,
        False,
    )
    assert finished(actions) == {2: ErrorCode.TRANSPORT_FAILED}
    assert ev.DisconnectPeer("decode-0") in actions
    assert sent_all(world.pass_time(60.0), CancelNotif) == []


def test_a_lost_receiver_need_not_answer_the_cancels_that_wait_for_it() -> None:
    """Nobody is there; the transfers are settled."""
    world = SenderWorld()
    p = world.connect()
    p.admit(1, 1)
    world.feed(ev.CancelRequested(1))
    world.drained(1)
    assert world.core.transfer_count == 1
    world.feed(ev.EndpointBroken("decode-0", p.endpoint, "gone"))
    assert world.core.transfer_count == 0


# ------------------------------------------------------------------ revocations


def test_a_revocation_of_a_transfer_that_has_ended_is_answered_all_the_same() -> None:
    """Its cancel was lost or forgotten; without an answer the receiver would end the whole session."""
    world = SenderWorld()
    p = world.connect()
    notif = sent(p.revoke(77, ErrorCode.CANCELLED), CancelNotif)
    assert (notif.transfer_no, notif.reason, notif.drained) == (77, ErrorCode.CANCELLED, True)


def test_a_revocation_while_the_puts_drain_is_answered_when_they_have() -> None:
    """Not earlier: the answer is the fence."""
    world = SenderWorld()
    p = world.connect()
    p.admit(1, 1)
    p.stage(1, 0, keys(1), last=True)
    world.fill(1, 0)
    assert sent_all(p.revoke(1), CancelNotif) == []
    assert sent_all(p.revoke(1), CancelNotif) == []
    assert sent(world.drained(1), CancelNotif).drained


# ------------------------------------------------------------------ deadlines


def test_a_request_that_takes_too_long_ends() -> None:
    """However far it is, and however alive its receiver."""
    world = SenderWorld(request_timeout_s=2.0)
    p = world.connect()
    p.admit(1, 1)
    assert finished(world.pass_time(1.9)) == {}
    assert finished(world.pass_time(0.1)) == {1: ErrorCode.REQUEST_TIMEOUT}


def test_a_request_that_is_done_has_no_deadline_left() -> None:
    """No timer outlives what it was for."""
    world = SenderWorld(request_timeout_s=2.0)
    p = world.connect()
    p.admit(1, 1)
    p.stage(1, 0, keys(1), last=True)
    world.fill(1, 0)
    p.ack(sent(world.land(1, 0), WriteDone))
    assert finished(world.pass_time(2.0)) == {}


def test_a_hung_receiver_costs_a_request_no_more_than_the_lease() -> None:
    """It accepts everything and answers nothing (fault 15)."""
    world = SenderWorld()
    p = world.connect()
    world.open(1, 1)
    assert finished(world.pass_time(p.lease_s)) == {1: ErrorCode.PEER_LOST}
    assert sent_all(world.drained(1), Hello) != []


def test_a_revoked_reason_is_a_failure_with_the_receivers_words() -> None:
    """An operator reads them."""
    world = SenderWorld()
    p = world.connect()
    p.admit(1, 1)
    p.revoke(1, ErrorCode.OVERFLOW)
    assert world.reported(ReportName.TRANSFER_FAILED)[0].fields == {
        "code": ErrorCode.OVERFLOW,
        "detail": "the receiver revoked it: why",
    }
