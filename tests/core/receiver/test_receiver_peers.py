"""Peers: who is let in, whom the receiver believes and for how long, and what a session leaves behind."""

from __future__ import annotations

import attrs
import pytest
from core_parts import CHUNK, RECEIVER_INCARNATION, keys, regions
from receiver_world import ReceiverWorld, refusal_of

from kvpd.core.events import DrainRequested, ReportName
from kvpd.core.messages import (
    PROTOCOL_VERSION,
    Ack,
    AllocResponse,
    ErrorInfo,
    Message,
    ProxyNotif,
    RevokeNotif,
    Welcome,
    WriteDone,
    decode,
    encode,
)
from kvpd.core.receiver import events as ev
from kvpd.errors import ErrorCode

# ------------------------------------------------------------------ Hello


def test_a_hello_opens_a_worker_of_its_own_and_is_welcomed_with_its_regions() -> None:
    """One worker per sender incarnation: destroying it is what stops that sender's writes, and nobody else's."""
    world = ReceiverWorld(slots=4, lease_s=9.0, put_deadline_s=2.0)
    p = world.connect("p")
    q = world.connect("q")
    assert (p.session_no, q.session_no) == (1, 2)
    welcome = Welcome(
        q.incarnation,
        RECEIVER_INCARNATION,
        q.last_id,
        protocol_version=PROTOCOL_VERSION,
        receiver_id="decode-0",
        total_chunks=4,
        chunk_bytes=CHUNK,
        layout="",
        lease_s=9.0,
        put_deadline_s=2.0,
        regions=regions(4),
    )
    assert q.last_hello is not None
    assert q.say(q.last_hello) == [q.told(welcome)]


def test_a_repeated_hello_before_the_worker_exists_opens_no_second_one() -> None:
    """Workers cost memory and time; a sender repeats its Hello every second."""
    world = ReceiverWorld()
    p = world.stranger()
    assert p.hello() == [ev.OpenSession(1, None, p.sender_id, p.incarnation)]
    assert p.last_hello is not None
    assert p.say(p.last_hello) == []
    assert world.core.session_count == 1


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"protocol_version": 1}, ErrorCode.PROTOCOL_VERSION),
        ({"chunk_bytes": CHUNK + 1}, ErrorCode.LAYOUT_MISMATCH),
        ({"layout": "fp8"}, ErrorCode.LAYOUT_MISMATCH),
        ({"sender_id": ""}, ErrorCode.PROTOCOL_ERROR),
    ],
)
def test_a_sender_that_does_not_match_is_refused_before_anything_is_held(
    changes: dict[str, object], code: ErrorCode
) -> None:
    """Bytes in another layout are wrong tokens with HTTP 200; equal byte counts prove nothing."""
    world = ReceiverWorld()
    p = world.stranger()
    error = refusal_of(p.hello(**changes))
    assert error.code is code
    assert world.core.session_count == 0


def test_a_refusal_of_the_layout_names_both_sides_values_within_bounds() -> None:
    """The operator compares them; a detail longer than the protocol allows would be dropped as rubbish instead."""
    world = ReceiverWorld(layout="\U000e0001" * 4096)
    (refusal,) = world.stranger().hello(layout="\U000e0002" * 4096)
    assert isinstance(refusal, ev.SendMessage)
    assert decode(encode(refusal.message)) == refusal.message
    error = refusal_of([refusal])
    assert "e0001" in error.detail
    assert "e0002" in error.detail


def test_a_refused_hello_leaves_the_session_that_runs_alone() -> None:
    """A stranger on the same name must not end it by asking for nonsense."""
    world = ReceiverWorld()
    p = world.connect()
    p.alloc(1, 2, keys(1))
    assert refusal_of(p.hello(layout="other")).code is ErrorCode.LAYOUT_MISMATCH
    assert p.alloc(1, 2, keys(2), first=1, open_=False, last=True) == [p.placed(1, [1], first=1)]


def test_a_draining_receiver_welcomes_nobody() -> None:
    """A new session is new work."""
    world = ReceiverWorld()
    p = world.connect()
    world.feed(DrainRequested())
    assert refusal_of(attrs.evolve(p, sender_id="q").hello()).code is ErrorCode.DRAINING


def test_sessions_are_bounded_closing_ones_included() -> None:
    """Each keeps a worker; a sender that comes back every second must not collect them."""
    world = ReceiverWorld(sessions_max=1)
    p = world.connect()
    error = refusal_of(attrs.evolve(p, sender_id="q").hello())
    assert (error.code, error.retry_after_s) == (ErrorCode.QUEUE_FULL, world.settings.lease_s)
    assert world.core.session_count == 1


def test_no_worker_no_session() -> None:
    """The sender is told, and may come again."""
    world = ReceiverWorld()
    p = world.stranger()
    p.hello()
    actions = world.feed(ev.SessionFailed(1, "no device"))
    assert actions == [p.ack(ErrorInfo(ErrorCode.TRANSPORT_FAILED, "no device")), ev.CloseSession(1)]
    assert world.feed(ev.SessionFailed(1, "again")) == []
    assert world.feed(ev.SessionClosed(1)) == [ev.ForgetSession(1)]
    assert world.feed(ev.SessionFailed(1, "again")) == []
    assert world.core.session_count == 0


def test_a_worker_that_comes_too_late_is_not_welcomed() -> None:
    """The session ended while its worker was being made; nobody may put to it."""
    world = ReceiverWorld(lease_s=9.0)
    p = world.stranger()
    p.hello()
    world.feed(ev.MessageRejected(p.channel, "rubbish"))
    assert world.feed(ev.SessionOpened(1, regions(4))) == []
    world.feed(ev.SessionClosed(1))
    assert world.feed(ev.SessionOpened(1, regions(4))) == []


# ------------------------------------------------------------------ incarnations


def test_a_stranger_is_told_to_say_hello() -> None:
    """After a restart the receiver knows nobody: a plain silence would cost its senders a whole lease."""
    world = ReceiverWorld()
    p = world.stranger()
    assert refusal_of(p.alloc(1, 1)).code is ErrorCode.NO_SESSION
    assert refusal_of(p.heartbeat()).code is ErrorCode.NO_SESSION
    assert world.core.is_clean


@pytest.mark.parametrize("whose", ["sender", "receiver"])
def test_a_message_of_another_incarnation_is_refused_and_not_acted_on(whose: str) -> None:
    """A message to or from a process that is no more speaks of transfers that are no more."""
    world = ReceiverWorld()
    p = world.connect()
    p.alloc(1, 2, keys(1, 2), last=True)
    stale = WriteDone(
        p.incarnation - (whose == "sender"),
        RECEIVER_INCARNATION - (whose == "receiver"),
        99,
        transfer_no=1,
        rank=0,
        first_chunk=0,
        count=2,
    )
    assert refusal_of(p.say(stale)).code is ErrorCode.NO_SESSION
    assert world.core.counts.writing == 2


def test_a_restarted_sender_ends_its_old_session_and_what_it_had_on_the_way() -> None:
    """Nobody will ever finish those transfers; what has landed whole is still good."""
    world = ReceiverWorld(slots=6)
    old = world.connect("p", 1)
    old.complete(1, keys(1, 2))
    old.alloc(2, 2, keys(3))
    new = world.connect("p", 2)
    assert world.core.counts.quarantined == 1
    assert refusal_of(old.heartbeat()).code is ErrorCode.NO_SESSION
    assert isinstance(world.claim("req-1")[0], ev.GrantClaim)
    assert world.feed(ev.SessionClosed(old.session_no)) == [ev.ForgetSession(old.session_no)]
    assert world.core.counts.quarantined == 0
    assert new.alloc(1, 4) == [new.placed(1)]


def test_a_new_hello_on_the_same_channel_ends_the_session_once() -> None:
    """The sender lost its session and begins anew: both sides must agree that nothing of it is left."""
    world = ReceiverWorld()
    p = world.connect()
    p.alloc(1, 2, keys(1))
    first_hello = p.last_hello
    assert first_hello is not None
    actions = p.hello()
    gone = ErrorInfo(ErrorCode.PEER_LOST, "the sender opened a new session")
    assert actions == [
        p.ack(gone, message_id=first_hello.message_id),
        p.failed(1, 2, ErrorCode.PEER_LOST, "the sender opened a new session"),
        ev.CloseSession(1),
        ev.OpenSession(2, None, p.sender_id, p.incarnation),
    ]


def test_a_straggling_hello_does_not_end_the_session_that_its_sender_opened_since() -> None:
    """Channels outlive what they carried: the older of two Hellos of one start is news of nothing."""
    world = ReceiverWorld()
    p = world.connect()
    straggler = p.last_hello
    assert straggler is not None
    p.hello()
    world.feed(ev.SessionOpened(2, regions(4)))
    assert p.say(straggler) == []
    assert world.feed(ev.MessageReceived(b"another channel", straggler)) == []
    assert p.alloc(1, 1) == [p.placed(1)]


def test_an_older_hello_of_another_start_opens_a_session_all_the_same() -> None:
    """Message ids grow within one start only."""
    world = ReceiverWorld()
    old = world.connect("p", 1)
    old.heartbeat()
    old.hello()
    new = world.connect("p", 2)
    assert new.alloc(1, 1) == [new.placed(1)]


# ------------------------------------------------------------------ rubbish


@pytest.mark.parametrize(
    "message",
    [
        ProxyNotif("r", 1, "", "", 0, 0),
        Ack(1, 2, 3),
        AllocResponse(1, 2, 3, 4, 0, (), ()),
        RevokeNotif(1, 2, 3, 4, ErrorCode.REVOKED),
    ],
)
def test_a_message_that_no_sender_sends_ends_its_session_alone(message: Message) -> None:
    """That peer at most is dropped; everybody else goes on undisturbed."""
    world = ReceiverWorld()
    p, q = world.connect("p"), world.connect("q")
    p.alloc(1, 2, keys(1))
    q.alloc(1, 2, keys(2))
    actions = world.feed(ev.MessageReceived(p.channel, message))
    assert ev.CloseSession(p.session_no) in actions
    assert refusal_of(p.heartbeat()).code is ErrorCode.NO_SESSION
    assert q.done(1, 0, 1) == [q.ack()]


def test_bytes_that_are_no_message_end_their_peers_session() -> None:
    """And bytes from somebody unknown end nothing: they are counted."""
    world = ReceiverWorld()
    p = world.connect()
    assert world.feed(ev.MessageRejected(b"\xff\x00stranger", "12 bytes that are no message")) == []
    assert world.reported(ReportName.PEER_REJECTED)[0].peer == "\\xff\x00stranger"
    assert ev.CloseSession(p.session_no) in world.feed(ev.MessageRejected(p.channel, "rubbish"))
