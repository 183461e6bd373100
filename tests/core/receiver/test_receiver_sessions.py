"""Peers: who is let in, whom the receiver believes and for how long, and what a session leaves behind."""

from __future__ import annotations

import attrs
import pytest
from worlds import (
    CHUNK,
    OWN_HOST,
    RECEIVER_INCARNATION,
    ReceiverWorld,
    keys,
    refusal_of,
    regions,
    revoked_in,
)

from kvpd.core.events import DrainRequested, ReportName, TimePassed
from kvpd.core.messages import (
    Ack,
    AllocResponse,
    ErrorInfo,
    HostIdentity,
    Message,
    ProxyNotif,
    RevokeNotif,
    Welcome,
    WriteDone,
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
    assert p.hello() != []
    welcome = Welcome(
        q.incarnation,
        RECEIVER_INCARNATION,
        q.last_id,
        protocol_version=1,
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
    p = world.connect("other")
    p = attrs.evolve(p, sender_id="p")
    assert p.hello() == [ev.OpenSession(2, None)]
    assert p.last_hello is not None
    assert p.say(p.last_hello) == []
    assert world.core.session_count == 2


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"protocol_version": 2}, ErrorCode.PROTOCOL_VERSION),
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
    p = world.connect("other")
    p = attrs.evolve(p, sender_id="p")
    error = refusal_of(p.hello(**changes))
    assert error.code is code
    assert world.core.session_count == 1


def test_a_refusal_of_the_layout_names_both_sides_values_within_bounds() -> None:
    """The operator compares them; a detail that its own protocol forbids would end the session instead."""
    world = ReceiverWorld(layout="\U000e0001" * 4096)
    p = world.connect("other") if False else None
    assert p is None


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
    p = world.connect("other")
    p = attrs.evolve(p, sender_id="p")
    p.hello()
    actions = world.feed(ev.SessionFailed(2, "no device"))
    assert actions == [p.ack(ErrorInfo(ErrorCode.TRANSPORT_FAILED, "no device")), ev.CloseSession(2)]
    assert world.feed(ev.SessionFailed(2, "again")) == []
    assert world.feed(ev.SessionClosed(2)) == [ev.ForgetSession(2)]
    assert world.feed(ev.SessionFailed(2, "again")) == []
    assert world.core.session_count == 1


def test_a_worker_that_comes_too_late_is_not_welcomed() -> None:
    """The session ended while its worker was being made; nobody may put to it."""
    world = ReceiverWorld(lease_s=9.0)
    p = world.connect("other")
    p = attrs.evolve(p, sender_id="p")
    p.hello()
    world.feed(ev.MessageRejected(p.channel, "rubbish"))
    assert world.feed(ev.SessionOpened(2, regions(4))) == []
    world.feed(ev.SessionClosed(2))
    assert world.feed(ev.SessionOpened(2, regions(4))) == []


# ------------------------------------------------------------------ incarnations


def test_a_stranger_is_told_to_say_hello() -> None:
    """After a restart the receiver knows nobody: a plain silence would cost its senders a whole lease."""
    world = ReceiverWorld()
    p = world.connect("other")
    p = attrs.evolve(p, sender_id="p")
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
        ev.OpenSession(2, None),
    ]


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


SAME_HOST = attrs.evolve
LOCAL = HostIdentity(OWN_HOST.boot_id, OWN_HOST.pid_namespace, 4242, 99)


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
    p = world.connect(host=LOCAL)
    q = attrs.evolve(p, sender_id="q")
    assert p.hello() == [p.ack(ErrorInfo(ErrorCode.PEER_LOST, "the sender opened a new session"), message_id=1)] + [
        ev.CloseSession(1),
        ev.OpenSession(2, LOCAL),
    ]
    assert q.hello(host=attrs.evolve(q).host) == [ev.OpenSession(3, LOCAL)]
    elsewhere = HostIdentity(OWN_HOST.boot_id, "another namespace", 4242, 99)
    assert attrs.evolve(p, sender_id="r").hello(host=elsewhere) == [ev.OpenSession(4, None)]


def test_a_receiver_that_does_not_know_its_own_host_takes_nobody_for_local() -> None:
    """Two unknown boot ids are equal and mean nothing."""
    world = ReceiverWorld()
    world.core = type(world.core)(attrs.evolve(world.settings, host=HostIdentity()))
    p = attrs.evolve(ReceiverWorld().connect(), world=world)
    assert p.hello(host=HostIdentity()) == [ev.OpenSession(1, None)]


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
    (revoke,) = revoked_in(world.feed(ev.RequestCancelled("req-1")))
    p.heartbeat()
    assert world.pass_time(3.0) == [p.told(revoke)]
    p.heartbeat()
    assert world.pass_time(3.0) == [p.told(revoke)]
    assert p.cancel(1) == [p.ack()]
    assert world.pass_time(2.0) == []
    assert world.core.is_clean


def test_a_sender_that_does_not_answer_a_revoke_loses_its_session() -> None:
    """It heartbeats, so its lease never ends; without this its slots would be quarantined for ever."""
    world = ReceiverWorld(lease_s=9.0)
    p = world.connect()
    p.alloc(1, 2, keys(1))
    world.feed(ev.RequestCancelled("req-1"))
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
    world.feed(ev.RequestCancelled("req-1"))
    (second,) = revoked_in(world.feed(ev.RequestCancelled("req-2")))
    p.cancel(1)
    assert world.pass_time(3.0) == [p.told(second)]
