"""A transfer that goes well, step by step, and what the sender refuses before anything is asked of anybody."""

from __future__ import annotations

import pytest
from core_parts import CHUNK, RECEIVER_INCARNATION, SENDER_INCARNATION, keys
from sender_world import SenderWorld, finished, grants, sent, sent_all

from kvpd.core.events import DrainExpired, DrainRequested, ReportName
from kvpd.core.messages import (
    BATCH_CHUNKS_MAX,
    BATCH_KEYS_BYTES_MAX,
    CHUNKS_MAX,
    KEY_BYTES_MAX,
    AllocRequest,
    CancelNotif,
    ErrorInfo,
    ProxyNotif,
    WriteDone,
    decode,
    encode,
)
from kvpd.core.sender import events as ev
from kvpd.core.sender.events import StagedSlot
from kvpd.errors import ErrorCode


def test_a_transfer_from_open_to_done() -> None:
    """Every message and every action of the shortest life, in order."""
    world = SenderWorld(staging=4, proxy_address="proxy")
    p = world.connect()
    (opened,) = world.open(1, 2)
    request = AllocRequest(
        SENDER_INCARNATION,
        RECEIVER_INCARNATION,
        sent([opened], AllocRequest).message_id,
        transfer_no=1,
        req_id="req-1",
        open=True,
        keys=(),
        is_last_batch=False,
        total_chunks=2,
        first_chunk=0,
        last_chunk_bytes=0,
    )
    assert opened == ev.SendToPeer("decode-0", request)
    assert p.answer(request) == []
    batch = sent(world.stage(1, 0, keys(1, 2), last=True, last_bytes=5), AllocRequest)
    assert (batch.open, batch.keys, batch.is_last_batch, batch.last_chunk_bytes) == (False, keys(1, 2), True, 5)
    slots = (StagedSlot(1, 40, CHUNK), StagedSlot(0, 7, 5))
    assert p.answer(batch, [40, 7]) == [ev.GrantPiece(1, 0, 0, 0, slots, is_last_piece=True)]
    assert world.fill(1, 0) == [ev.PostPuts(1, 0, p.endpoint, slots)]
    assert world.free == 2
    done = sent(world.land(1, 0), WriteDone)
    assert (done.transfer_no, done.rank, done.first_chunk, done.count) == (1, 0, 0, 2)
    assert world.free == 4
    finish, notify = p.ack(done)
    assert finish == ev.FinishTransfer(1)
    assert isinstance(notify, ev.NotifyProxy)
    notif = ProxyNotif("req-1", notify.message.message_id, "name-of-decode-0", "prefill-0", SENDER_INCARNATION, 1)
    assert notify == ev.NotifyProxy("proxy", notif)
    assert world.feed(ev.ProxyAcknowledged("proxy", SENDER_INCARNATION, notif.message_id)) == []
    assert world.let_go(1) == []
    assert world.core.is_clean
    assert world.core.is_idle
    assert [r.fields["bytes"] for r in world.reported(ReportName.TRANSFER_DONE)] == [CHUNK + 5]


def test_a_transfer_to_an_unknown_receiver_connects_first() -> None:
    """Its engine may stage already; everything is asked for as soon as the endpoint exists, in order."""
    world = SenderWorld()
    p = world.receiver()
    connect, hello = world.open(1, 3)
    assert connect == ev.ConnectPeer("decode-0")
    assert isinstance(hello, ev.SendToPeer)
    assert world.open(2, 1) == []
    assert world.stage(1, 0, keys(1)) == []
    (endpoint,) = p.welcome()
    assert endpoint == ev.OpenEndpoint("decode-0", 1, p.welcome_message().regions, "", RECEIVER_INCARNATION)
    assert world.open(3, 1) == []
    actions = world.feed(ev.EndpointOpened("decode-0", 1))
    asked = [(m.transfer_no, m.open, m.keys) for m in sent_all(actions, AllocRequest)]
    assert asked == [(1, True, ()), (1, True, keys(1)), (2, True, ()), (3, True, ())]


def test_a_first_batch_that_is_known_at_the_opening_needs_no_message_of_its_own() -> None:
    """One message asks for room and for slots: its answer is admission and placing at once."""
    world = SenderWorld()
    p = world.connect()
    (ask,) = sent_all(world.open(1, 2, first=keys(1)), AllocRequest)
    assert (ask.open, ask.keys, ask.total_chunks, ask.is_last_batch) == (True, keys(1), 2, False)
    (grant,) = grants(p.answer(ask, [7]))
    assert grant.entries == (ev.StagedSlot(0, 7, CHUNK),)
    assert world.core.next_deadline() is not None
    (batch,) = sent_all(world.stage(1, 1, keys(2), last=True), AllocRequest)
    assert (batch.open, batch.first_chunk) == (False, 1)


def test_a_first_batch_that_no_correct_engine_asks_for_ends_the_transfer_before_anybody_hears_of_it() -> None:
    """It was opened all the same: its end is an end like any other, and the receiver need not know."""
    world = SenderWorld()
    world.connect()
    actions = world.open(1, 1, first=keys(1, 2))
    assert sent_all(actions, AllocRequest) == []
    assert finished(actions) == {1: ErrorCode.OVERFLOW}
    assert sent_all(world.drained(1), CancelNotif) == []
    world.let_go(1)
    assert world.core.is_clean


def test_a_first_batch_of_a_refused_opening_asks_for_nothing() -> None:
    """There is no transfer that it could be a batch of."""
    world = SenderWorld()
    world.connect()
    actions = world.open(1, 0, first=keys(1))
    assert sent_all(actions, AllocRequest) == []
    assert finished(actions) == {1: ErrorCode.LEGACY_SENDER}
    assert world.core.is_clean


def test_a_transfer_that_was_cancelled_while_connecting_asks_for_nothing() -> None:
    """The receiver need never hear of it."""
    world = SenderWorld()
    p = world.receiver()
    world.open(1, 3)
    world.open(2, 3)
    world.feed(ev.CancelRequested(1))
    p.welcome()
    assert [m.transfer_no for m in sent_all(world.feed(ev.EndpointOpened("decode-0", 1)), AllocRequest)] == [2]
    assert sent_all(world.drained(1), CancelNotif) == []
    assert world.core.transfer_count == 1


def test_nothing_is_staged_before_admission() -> None:
    """Remote room first, local staging second: else those that wait for room hold the slots of those that have it."""
    world = SenderWorld()
    p = world.connect()
    request = sent(world.open(1, 2), AllocRequest)
    assert grants(world.stage(1, 0, keys(1, 2), last=True)) == []
    p.answer(request)
    assert world.free == 8
    assert world.reported(ReportName.ADMISSION_GRANTED)[0].fields == {"waited_s": 0.0}


def test_batches_may_finish_in_any_order_and_the_proxy_is_told_once_after_the_last() -> None:
    """The decode engine starts on whatever the proxy says is ready (fault 20)."""
    world = SenderWorld(proxy_address="proxy")
    p = world.connect()
    p.admit(1, 3)
    p.stage(1, 0, keys(1))
    world.fill(1, 0)
    p.stage(1, 1, keys(2), [1])
    world.fill(1, 1)
    p.stage(1, 2, keys(3), [2], last=True)
    world.fill(1, 2)
    dones = {piece: sent(world.land(1, piece), WriteDone) for piece in (2, 0, 1)}
    assert p.ack(dones[2]) == []
    assert p.ack(dones[1]) == []
    actions = p.ack(dones[0])
    assert [type(action) for action in actions] == [ev.FinishTransfer, ev.NotifyProxy]
    assert p.ack(dones[0]) == []


def test_chunks_that_the_receiver_has_do_not_travel() -> None:
    """The engine sees None for them and stages nothing."""
    world = SenderWorld()
    p = world.connect()
    p.admit(1, 3)
    (grant,) = grants(p.stage(1, 0, keys(1, 2, 3), [-1, 5, -1], last=True))
    assert grant.entries == (None, StagedSlot(0, 5, CHUNK), None)
    assert world.fill(1, 0) == [ev.PostPuts(1, 0, p.endpoint, (StagedSlot(0, 5, CHUNK),))]
    done = sent(world.land(1, 0), WriteDone)
    assert (done.first_chunk, done.count) == (0, 3)


def test_a_transfer_of_nothing_but_known_chunks_needs_no_staging_and_no_write() -> None:
    """Even with all staging taken."""
    world = SenderWorld(staging=1, proxy_address="proxy")
    p = world.connect()
    p.admit(1, 1)
    p.stage(1, 0, keys(1), last=True)
    p.admit(2, 2)
    (grant,) = grants(p.stage(2, 0, keys(2, 3), [-1, -1], last=True))
    assert grant.entries == (None, None)
    actions = world.fill(2, 0)
    assert finished(actions) == {2: None}
    assert sent_all(actions, WriteDone) == []


def test_who_is_told_is_the_requests_own_proxy_where_it_names_one() -> None:
    """And nobody where there is none."""
    world = SenderWorld(proxy_address=None)
    p = world.connect()
    p.admit(1, 1, notify="its own")
    p.stage(1, 0, keys(1), [-1], last=True)
    p.admit(2, 1)
    p.stage(2, 0, keys(1), [-1], last=True)
    assert [a.proxy for a in world.fill(1, 0) if isinstance(a, ev.NotifyProxy)] == ["its own"]
    assert world.fill(2, 0) == [ev.FinishTransfer(2)]


def test_an_engine_that_still_computes_says_so_one_touch_at_a_time() -> None:
    """A request without keys is progress at the receiver; a busy engine must not fill the channel with them."""
    world = SenderWorld()
    p = world.connect()
    request = sent(world.open(1, 2), AllocRequest)
    assert world.feed(ev.TransferTouched(1)) == []  # it waits for admission: that is the receiver's business
    p.answer(request)
    touch = sent(world.feed(ev.TransferTouched(1)), AllocRequest)
    assert (touch.open, touch.keys) == (False, ())
    assert world.feed(ev.TransferTouched(1)) == []
    p.answer(touch)
    assert len(world.feed(ev.TransferTouched(1))) == 1
    assert world.feed(ev.TransferTouched(99)) == []


def test_an_unanswered_message_is_repeated_byte_for_byte_and_no_longer_than_needed() -> None:
    """Channels lose messages when they break; acting twice on the same bytes is acting once."""
    world = SenderWorld()
    p = world.connect()
    actions = world.open(1, 1)
    request = sent(actions, AllocRequest)
    assert sent_all(world.pass_time(3.0), AllocRequest) == [request]
    p.answer(request)
    p.stage(1, 0, keys(1), last=True)
    world.fill(1, 0)
    done = sent(world.land(1, 0), WriteDone)
    assert sent_all(world.pass_time(3.0), WriteDone) == [done]
    p.ack(done)
    assert sent_all(world.pass_time(0.5), WriteDone) == []


# ------------------------------------------------------------------ refusals of its own


@pytest.mark.parametrize(
    ("total", "req_id", "code"),
    [
        (0, "r", ErrorCode.LEGACY_SENDER),
        (-3, "r", ErrorCode.LEGACY_SENDER),
        (1, "", ErrorCode.LEGACY_SENDER),
        (CHUNKS_MAX + 1, "r", ErrorCode.TOO_LARGE),
        (1 << 70, "r", ErrorCode.TOO_LARGE),
    ],
)
def test_a_request_that_makes_no_sense_is_refused_to_its_engine(total: int, req_id: str, code: ErrorCode) -> None:
    """And never sent: a number that the wire does not carry would end the session of all the others."""
    world = SenderWorld()
    assert finished(world.open(1, total, req_id=req_id)) == {1: code}
    assert world.core.peer_count == 0
    assert world.let_go(1) == []
    assert world.core.is_clean


def test_a_draining_sender_opens_nothing_and_lets_what_runs_finish() -> None:
    """No new work; at its deadline the rest is cancelled."""
    world = SenderWorld()
    p = world.connect()
    p.admit(1, 1)
    p.admit(2, 1)
    assert world.feed(DrainRequested()) == []
    assert finished(world.open(3, 1)) == {3: ErrorCode.DRAINING}
    p.stage(1, 0, keys(1), last=True)
    world.fill(1, 0)
    assert finished(p.ack(sent(world.land(1, 0), WriteDone))) == {1: None}
    world.feed(ev.CancelRequested(2))
    assert world.feed(DrainExpired()) == []


def test_when_the_drain_expires_every_transfer_is_cancelled() -> None:
    """A shutdown has a deadline."""
    world = SenderWorld()
    p = world.connect()
    p.admit(1, 1)
    world.open(2, 1)
    assert finished(world.feed(DrainExpired())) == {1: ErrorCode.DRAINING, 2: ErrorCode.DRAINING}


def test_transfers_and_receivers_are_bounded() -> None:
    """Each costs memory; an engine learns that it should come back."""
    world = SenderWorld(transfers_max=2, peers_max=1)
    world.open(1, 1)
    assert finished(world.open(2, 1, receiver="another")) == {2: ErrorCode.QUEUE_FULL}
    world.open(3, 1)
    assert finished(world.open(4, 1)) == {4: ErrorCode.QUEUE_FULL}


@pytest.mark.parametrize(
    ("names", "last", "last_bytes", "code"),
    [
        (keys(1, 2, 3, 4), False, CHUNK, ErrorCode.OVERFLOW),
        (keys(1, 2), True, CHUNK, ErrorCode.UNDERFLOW),
        (keys(1, 2), False, CHUNK - 1, ErrorCode.PROTOCOL_ERROR),
        (keys(1, 2, 3), True, 0, ErrorCode.PROTOCOL_ERROR),
        (keys(1, 2, 3), True, CHUNK + 1, ErrorCode.PROTOCOL_ERROR),
        ((), False, CHUNK, ErrorCode.PROTOCOL_ERROR),
        ((b"k" * (KEY_BYTES_MAX + 1),), False, CHUNK, ErrorCode.PROTOCOL_ERROR),
    ],
)
def test_a_batch_that_makes_no_sense_ends_its_transfer_with_an_error_of_its_own(
    names: tuple[bytes, ...], last: bool, last_bytes: int, code: ErrorCode
) -> None:
    """Judged here, so that the error names the engine's own call; the receiver hears only of the end."""
    world = SenderWorld()
    p = world.connect()
    p.admit(1, 3)
    actions = world.stage(1, 0, names, last=last, last_bytes=last_bytes)
    assert finished(actions) == {1: code}
    assert sent_all(actions, AllocRequest) == []
    assert sent(world.drained(1), CancelNotif).reason is code


def test_a_batch_that_no_message_can_carry_is_refused() -> None:
    """In number or in bytes: a longer frame would be our own bug."""
    world = SenderWorld()
    p = world.connect()
    p.admit(1, CHUNKS_MAX)
    p.admit(2, CHUNKS_MAX)
    assert finished(world.stage(1, 0, [b""] * (BATCH_CHUNKS_MAX + 1))) == {1: ErrorCode.PROTOCOL_ERROR}
    long_keys = [b"k" * KEY_BYTES_MAX] * BATCH_CHUNKS_MAX
    assert len(long_keys) * (KEY_BYTES_MAX + 2) < BATCH_KEYS_BYTES_MAX
    request = sent(world.stage(2, 0, long_keys), AllocRequest)
    assert decode(encode(request)) == request


def test_stages_come_in_order_and_not_too_many_at_once() -> None:
    """Each unfinished one is remembered."""
    world = SenderWorld(stages_max=2)
    p = world.connect()
    p.admit(1, 9)
    world.stage(1, 5, keys(1))
    assert finished(world.stage(1, 5, keys(2))) == {1: ErrorCode.PROTOCOL_ERROR}
    p.admit(2, 9)
    world.stage(2, 0, keys(1))
    world.stage(2, 1, keys(2))
    assert finished(world.stage(2, 2, keys(3))) == {2: ErrorCode.PROTOCOL_ERROR}


def test_what_an_engine_says_of_a_transfer_that_has_ended_is_ignored() -> None:
    """It may not have read the end yet."""
    world = SenderWorld()
    p = world.connect()
    p.admit(1, 1)
    world.feed(ev.CancelRequested(1))
    for event in (ev.StageRequested(1, 0, keys(1), True, CHUNK), ev.TransferTouched(1), ev.CancelRequested(1)):
        assert world.feed(event) == []
    world.drained(1)
    assert world.fill(1, 0) == []
    assert world.fill(99, 0) == []


def test_a_refused_admission_is_the_engines_error_as_it_was_given() -> None:
    """With the receiver's words and its advice when to come back."""
    world = SenderWorld()
    p = world.connect()
    request = sent(world.open(1, 99), AllocRequest)
    actions = p.answer(request, error=ErrorInfo(ErrorCode.QUEUE_FULL, "the words", 2.5))
    (finish, cancel) = actions
    assert isinstance(finish, ev.FinishTransfer)
    assert finish.error is not None
    assert (finish.error.code, finish.error.detail, finish.error.retry_after_s) == (
        ErrorCode.QUEUE_FULL,
        "the words",
        2.5,
    )
    assert cancel == ev.CancelTransfer(1, p.put_deadline_s)


def test_what_the_welcome_wants_summed_is_summed_and_sent_along() -> None:
    """The receiver compares before anybody reads."""
    world = SenderWorld()
    p = world.connect(verify="crc32c")
    p.admit(1, 1)
    p.stage(1, 0, keys(0), last=True)
    (post,) = [action for action in world.fill(1, 0) if isinstance(action, ev.PostPuts)]
    assert post.verify == "crc32c"
    (message,) = sent_all(world.feed(ev.PutsCompleted(1, 0, checksums=(7,))), WriteDone)
    assert message.checksums == (7,)
