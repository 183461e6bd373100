"""Sessions with receivers: how they begin, and when the sender stops believing in one."""

from __future__ import annotations

import msgspec
import pytest
from core_parts import CHUNK, RECEIVER_INCARNATION, SENDER_INCARNATION, keys, regions
from sender_world import SenderWorld, failures_in, finished, readies_in, sent, sent_all

from kvpd.core.events import ReportName
from kvpd.core.messages import (
    PROTOCOL_VERSION,
    Ack,
    AllocRequest,
    AllocResponse,
    CancelNotif,
    ErrorInfo,
    Hello,
    HostIdentity,
    Message,
    ProxyAck,
    RevokeNotif,
    WriteDone,
)
from kvpd.core.sender import events as ev
from kvpd.errors import ErrorCode

# ------------------------------------------------------------------ Hello and Welcome


def test_hello_says_all_that_the_receiver_judges() -> None:
    """And from which transfer on this session speaks."""
    world = SenderWorld()
    hello = sent(world.open(5, 1), Hello)
    expected = Hello(
        SENDER_INCARNATION,
        0,
        hello.message_id,
        protocol_version=PROTOCOL_VERSION,
        sender_id="prefill-0",
        chunk_bytes=CHUNK,
        layout="",
        oldest_live=5,
        host=HostIdentity(),
        puts_ended=True,
    )
    assert hello == expected


def test_hello_is_repeated_until_welcomed_and_given_up_after_the_connect_timeout() -> None:
    """A receiver that is not there must not hold a request for longer than that."""
    world = SenderWorld(connect_timeout_s=5.0, hello_repeat_s=1.0)
    hello = sent(world.open(1, 1), Hello)
    assert sent_all(world.pass_time(4.5), Hello) == [hello] * 4
    actions = world.pass_time(0.5)
    assert finished(actions) == {1: ErrorCode.PEER_LOST}
    assert ev.DisconnectPeer("decode-0") in actions
    assert world.core.next_deadline() is None
    world.drained(1)
    world.let_go(1)
    assert world.core.is_clean


def test_a_receiver_that_is_lost_is_connected_to_anew_by_the_next_transfer() -> None:
    """No manual action after an outage; nothing of the old session is used."""
    world = SenderWorld()
    p = world.connect()
    world.feed(ev.EndpointBroken("decode-0", p.endpoint, "unreachable"))
    assert world.core.peer_of("decode-0") is None
    assert world.open(1, 1)[0] == ev.ConnectPeer("decode-0")
    p.come_up()
    assert p.endpoint == 2


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"protocol_version": PROTOCOL_VERSION + 1}, ErrorCode.PROTOCOL_VERSION),
        ({"chunk_bytes": CHUNK * 2}, ErrorCode.LAYOUT_MISMATCH),
        ({"layout": "another"}, ErrorCode.LAYOUT_MISMATCH),
        ({"regions": regions(63)}, ErrorCode.PROTOCOL_ERROR),
        ({"regions": regions(64, ranks=2)}, ErrorCode.LAYOUT_MISMATCH),
        ({"lease_s": 4.0, "put_deadline_s": 2.0}, ErrorCode.PROTOCOL_ERROR),
    ],
)
def test_a_welcome_that_does_not_match_is_refused(changes: dict[str, object], code: ErrorCode) -> None:
    """A put into a region that is too small is a write into somebody else's memory."""
    world = SenderWorld()
    p = world.receiver()
    world.open(1, 1)
    actions = p.welcome(**changes)
    assert finished(actions) == {1: code}
    assert not [a for a in actions if isinstance(a, ev.OpenEndpoint | ev.CloseEndpoint)]
    assert world.core.peer_count == 0


def test_a_refused_hello_ends_all_that_wait_for_it() -> None:
    """With the receiver's reason and its advice."""
    world = SenderWorld()
    p = world.receiver()
    hello = sent(world.open(1, 1), Hello)
    world.open(2, 1)
    refusal = ErrorInfo(ErrorCode.LAYOUT_MISMATCH, "yours is other than mine", 3.0)
    actions = p.ack(hello, refusal)
    assert finished(actions) == {1: ErrorCode.LAYOUT_MISMATCH, 2: ErrorCode.LAYOUT_MISMATCH}
    assert world.reported(ReportName.SESSION_ENDED) == []  # it never began


def test_while_connecting_only_the_answer_to_this_hello_counts() -> None:
    """Whatever else arrives belongs to a session that is over."""
    world = SenderWorld()
    p = world.receiver()
    world.open(1, 1)
    for message in (
        msgspec.structs.replace(p.welcome_message(), message_id=99),
        Ack(SENDER_INCARNATION, RECEIVER_INCARNATION, 99, ErrorInfo(ErrorCode.NO_SESSION)),
        RevokeNotif(SENDER_INCARNATION, RECEIVER_INCARNATION, p.hello_id, 1, ErrorCode.REVOKED),
    ):
        assert p.say(message) == []
    assert world.core.transfer_count == 1


def test_a_repeated_welcome_changes_nothing() -> None:
    """Each repeat of our Hello gets one."""
    world = SenderWorld()
    p = world.receiver()
    world.open(1, 1)
    welcome = p.welcome_message()
    assert len(p.say(welcome)) == 1
    assert p.say(welcome) == []
    world.feed(ev.EndpointOpened("decode-0", 1))
    assert p.say(welcome) == []


def test_a_welcome_after_a_bare_acknowledgement_of_hello_is_not_believed() -> None:
    """No receiver acknowledges a Hello without an error; the connect timeout ends this."""
    world = SenderWorld()
    p = world.receiver()
    hello = sent(world.open(1, 1), Hello)
    p.ack(hello)
    assert p.welcome() == []
    assert finished(world.pass_time(5.0)) == {1: ErrorCode.PEER_LOST}


def test_an_endpoint_of_a_session_that_is_over_is_not_used() -> None:
    """It leads to a worker that is no more (fault 18)."""
    world = SenderWorld()
    p = world.receiver()
    world.open(1, 1)
    p.welcome()
    world.feed(ev.EndpointBroken("decode-0", 1, "no route"))
    assert world.feed(ev.EndpointOpened("decode-0", 1)) == []
    world.open(2, 1)
    assert world.feed(ev.EndpointOpened("decode-0", 1)) == []
    p.come_up()
    assert world.feed(ev.EndpointOpened("decode-0", 2)) == []
    assert world.feed(ev.EndpointBroken("decode-0", 1, "late")) == []
    assert world.core.transfer_count == 2  # the first drains


# ------------------------------------------------------------------ restarts


def test_a_restarted_receiver_is_recognised_by_its_answer() -> None:
    """It knows no session and says so in its new incarnation; everything that went to the old one is over."""
    world = SenderWorld()
    p = world.connect()
    request = sent(world.open(1, 1), AllocRequest)
    p.incarnation += 1
    actions = p.ack(request, ErrorInfo(ErrorCode.NO_SESSION, "no session"))
    assert finished(actions) == {1: ErrorCode.PEER_LOST}
    assert ev.CloseEndpoint("decode-0", 1) in actions
    assert world.reported(ReportName.SESSION_ENDED)[0].fields["detail"] == "the receiver has restarted"


def test_a_receiver_that_lost_the_session_says_so() -> None:
    """In the same incarnation: our lease ran out there."""
    world = SenderWorld()
    p = world.connect()
    request = sent(world.open(1, 1), AllocRequest)
    actions = p.ack(request, ErrorInfo(ErrorCode.NO_SESSION, "no session"))
    assert finished(actions) == {1: ErrorCode.PEER_LOST}
    assert world.open(2, 1)[0] == ev.ConnectPeer("decode-0")


def test_a_receiver_that_ends_the_session_answers_our_hello_again() -> None:
    """This time with the reason."""
    world = SenderWorld()
    p = world.connect()
    world.open(1, 1)
    gone = Ack(SENDER_INCARNATION, p.incarnation, p.hello_id, ErrorInfo(ErrorCode.PEER_LOST, "silent"))
    assert finished(p.say(gone)) == {1: ErrorCode.PEER_LOST}


def test_messages_of_other_incarnations_are_not_acted_on() -> None:
    """Neither to a sender that is no more nor from a receiver that is no more."""
    world = SenderWorld()
    p = world.connect()
    request = sent(world.open(1, 1), AllocRequest)
    for ours, theirs in ((SENDER_INCARNATION - 1, p.incarnation), (SENDER_INCARNATION, p.incarnation - 1)):
        stale = AllocResponse(ours, theirs, request.message_id, 1, 0, (), ())
        assert p.say(stale) == []
    old = Ack(SENDER_INCARNATION, p.incarnation - 1, p.hello_id, ErrorInfo(ErrorCode.DRAINING))
    assert p.say(old) == []
    assert world.core.transfer_count == 1


# ------------------------------------------------------------------ rubbish


@pytest.mark.parametrize(
    "message",
    [
        Hello(1, 0, 1, 1, "x", CHUNK, "", 0, HostIdentity()),
        WriteDone(SENDER_INCARNATION, RECEIVER_INCARNATION, 1, 1, 0, 0, 1),
        ProxyAck(SENDER_INCARNATION, 1),
    ],
)
def test_a_message_that_no_receiver_sends_ends_its_session_alone(message: Message) -> None:
    """That peer at most is dropped; transfers to others go on."""
    world = SenderWorld()
    p, q = world.connect("p"), world.connect("q")
    first, second = q.serial + 1, q.serial + 2
    p.admit(first, 1)
    q.admit(second, 1)
    actions = p.say(message)
    assert finished(actions) == {first: ErrorCode.PROTOCOL_ERROR}
    assert world.core.peer_of("p") is None
    assert world.core.peer_of("q") is not None
    assert p.say(message) == []


def test_bytes_that_are_no_message_end_their_peers_session() -> None:
    """And those of an unknown one end nothing."""
    world = SenderWorld()
    p = world.connect()
    p.admit(1, 1)
    assert world.feed(ev.PeerMessageRejected("unknown", "rubbish")) == []
    assert finished(world.feed(ev.PeerMessageRejected("decode-0", "rubbish"))) == {1: ErrorCode.PROTOCOL_ERROR}


@pytest.mark.parametrize(
    ("indexes", "changes"),
    [
        ([0], {}),
        ([0, 64], {}),
        ([0, 1], {"already_sent_indexes": (1,)}),
        ([0, -1], {"already_sent_indexes": ()}),
        ([0, 1], {"transfer_no": 77}),
    ],
)
def test_an_answer_that_does_not_fit_its_request_ends_the_session(
    indexes: list[int], changes: dict[str, object]
) -> None:
    """A wrong index would be a write into somebody else's slot."""
    world = SenderWorld()
    p = world.connect()
    p.admit(1, 2)
    request = sent(world.stage(1, 0, keys(1, 2), last=True), AllocRequest)
    actions = p.answer(request, indexes, **changes)  # type: ignore[arg-type]
    assert finished(actions) == {1: ErrorCode.PROTOCOL_ERROR}
    assert world.free == 8


def test_an_answer_of_the_wrong_kind_ends_the_session() -> None:
    """It would leave its transfer waiting for an answer that never comes."""
    world = SenderWorld()
    p = world.connect()
    p.admit(1, 1)
    world.feed(ev.CancelRequested(1))
    notif = sent(world.drained(1), CancelNotif)
    wrong = AllocResponse(SENDER_INCARNATION, p.incarnation, notif.message_id, 1, 0, (), ())
    assert ev.DisconnectPeer("decode-0") in p.say(wrong)
    world.let_go(1)
    assert world.core.is_clean


def test_answers_to_questions_nobody_asked_are_ignored() -> None:
    """Repeats, and answers to what has ended."""
    world = SenderWorld()
    p = world.connect()
    request = sent(world.open(1, 1), AllocRequest)
    p.answer(request)
    assert p.answer(request) == []
    assert p.say(Ack(SENDER_INCARNATION, p.incarnation, 12345)) == []
    assert p.say(Ack(SENDER_INCARNATION, p.incarnation, 12345, ErrorInfo(ErrorCode.REVOKED))) == []
    world.feed(ev.CancelRequested(1))
    assert p.answer(request, error=ErrorInfo(ErrorCode.TOO_LARGE)) == []


def test_a_write_that_is_refused_ends_its_transfer() -> None:
    """A WriteDone of a revoked transfer is never plainly acknowledged; the proxy must not be told (fault 20)."""
    world = SenderWorld(proxy_address="proxy")
    p = world.connect()
    p.admit(1, 1)
    p.stage(1, 0, keys(1), last=True)
    world.fill(1, 0)
    done = sent(world.land(1, 0), WriteDone)
    actions = p.ack(done, ErrorInfo(ErrorCode.NO_PROGRESS, "revoked"))
    assert finished(actions) == {1: ErrorCode.NO_PROGRESS}
    assert readies_in(actions) == []
    assert [notif.error.code for notif in failures_in(actions)] == [ErrorCode.NO_PROGRESS]


def test_a_receiver_of_several_ranks_is_refused() -> None:
    """This sender writes one rank; the others would be missing for ever, and the request with them."""
    world = SenderWorld()
    p = world.receiver()
    world.open(1, 1)
    (region,) = p.welcome_message().regions
    assert finished(p.welcome(regions=(region, region))) == {1: ErrorCode.LAYOUT_MISMATCH}
