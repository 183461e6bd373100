"""What a proxy is told of transfers that fail: each once, in the step in which it ends, and never that it is ready."""

from __future__ import annotations

import pytest
from core_parts import SENDER_INCARNATION, keys
from sender_world import SenderWorld, failures_in, finished, readies_in, sent

from kvpd.core.events import DrainExpired, DrainRequested, ReportName
from kvpd.core.messages import AllocRequest, ErrorInfo, FailNotif
from kvpd.core.sender import events as ev
from kvpd.errors import ErrorCode


def test_a_refusal_reaches_the_proxy_with_its_reason() -> None:
    """It answers its client with them: the code, both numbers, and when to come again."""
    world = SenderWorld(proxy_address="proxy")
    p = world.connect()
    request = sent(world.open(1, 3), AllocRequest)
    actions = p.answer(request, error=ErrorInfo(ErrorCode.QUEUE_FULL, "1024 requests wait", 2.5))
    (action,) = [action for action in actions if isinstance(action, ev.NotifyProxy)]
    assert action.proxy == "proxy"
    assert action.message == FailNotif(
        req_id="req-1",
        message_id=action.message.message_id,
        receiver="decode-0",
        sender_id="prefill-0",
        sender_incarnation=SENDER_INCARNATION,
        transfer_no=1,
        error=ErrorInfo(ErrorCode.QUEUE_FULL, "1024 requests wait", 2.5),
    )
    report = world.reported(ReportName.PROXY_TOLD_OF_FAILURE)[-1]
    assert (report.req_id, report.peer, dict(report.fields)) == ("req-1", "proxy", {"code": ErrorCode.QUEUE_FULL})


@pytest.mark.parametrize(
    "code", [ErrorCode.DRAINING, ErrorCode.LEGACY_SENDER, ErrorCode.TOO_LARGE, ErrorCode.QUEUE_FULL]
)
def test_what_this_sender_refuses_by_itself_is_told_too(code: ErrorCode) -> None:
    """No receiver has heard of it, and the proxy waits all the same."""
    world = SenderWorld(transfers_max=1 if code is ErrorCode.QUEUE_FULL else 8)
    if code is ErrorCode.DRAINING:
        world.feed(DrainRequested())
    if code is ErrorCode.QUEUE_FULL:
        world.open(1, 1)
    total = {ErrorCode.LEGACY_SENDER: 0, ErrorCode.TOO_LARGE: 1 << 30}.get(code, 1)
    actions = world.open(2, total, notify="its own")
    assert finished(actions) == {2: code}
    (told,) = failures_in(actions)
    assert (told.req_id, told.transfer_no, told.error.code) == ("req-2", 2, code)
    assert [action.proxy for action in actions if isinstance(action, ev.NotifyProxy)] == ["its own"]


def test_every_transfer_of_a_lost_receiver_is_told_once() -> None:
    """Each to the proxy that it named; how it drains, and what else comes of it, is nothing that a proxy needs."""
    world = SenderWorld(proxy_address="proxy")
    p = world.connect()
    p.admit(1, 2)
    p.stage(1, 0, keys(1, 2), last=True)
    world.fill(1, 0)
    p.admit(2, 2, notify="another")
    world.open(3, 1)
    actions = world.feed(ev.PutsFailed(1, 0, "the wire broke"))
    told = [(a.proxy, a.message.transfer_no) for a in actions if isinstance(a, ev.NotifyProxy)]
    assert told == [("proxy", 1), ("another", 2), ("proxy", 3)]
    assert {notif.error.code for notif in failures_in(actions)} == {ErrorCode.TRANSPORT_FAILED}
    later = [world.drained(1, drained=False), world.drained(2), world.drained(3), world.feed(DrainExpired())]
    later += [world.let_go(number) for number in (1, 2, 3)]
    assert [failures_in(actions) + readies_in(actions) for actions in later] == [[]] * 7


def test_a_transfer_is_told_as_ready_or_as_failed_and_never_as_both() -> None:
    """A proxy that heard both would have to guess which of them it may act on."""
    world = SenderWorld(proxy_address="proxy")
    p = world.connect()
    p.admit(1, 1)
    p.stage(1, 0, keys(1), [-1], last=True)
    done = world.fill(1, 0)
    assert [notif.transfer_no for notif in readies_in(done)] == [1]
    for event in (ev.CancelRequested(1), ev.EngineLetGo(1), ev.PeerMessageRejected("decode-0", "rubbish")):
        actions = world.feed(event)
        assert failures_in(actions) + readies_in(actions) == []


def test_a_failure_is_repeated_until_it_is_acknowledged() -> None:
    """A client waits for it as for the word that all is well."""
    world = SenderWorld(proxy_address="proxy", notify_repeat_s=1.0, notify_give_up_s=10.0)
    world.open(1, 1)
    (told,) = failures_in(world.feed(ev.CancelRequested(1)))
    assert failures_in(world.pass_time(1.0)) == [told]
    world.acknowledge("proxy", told)
    assert failures_in(world.pass_time(5.0)) == []
    world.open(2, 1)
    world.feed(ev.CancelRequested(2))
    world.pass_time(30.0)
    assert [report.req_id for report in world.reported(ReportName.PROXY_NOTIFICATION_DROPPED)] == ["req-2"]
    assert world.core.notifications_pending == 0


def test_a_full_queue_sends_a_failure_once_and_counts() -> None:
    """A proxy that is down must not cost memory for every request that fails."""
    world = SenderWorld(proxy_address="proxy", notifications_max=1)
    for number in (1, 2):
        world.open(number, 1)
        assert len(failures_in(world.feed(ev.CancelRequested(number)))) == 1
    assert world.core.notifications_pending == 1
    assert [report.req_id for report in world.reported(ReportName.PROXY_NOTIFICATION_DROPPED)] == ["req-2"]


def test_proxies_that_are_pushed_to_hear_of_success_alone() -> None:
    """Those that LMCache wrote take whatever comes for the word that all is ready."""
    world = SenderWorld(proxy_address="proxy", notify_is_acknowledged=False, transfers_max=1)
    world.open(1, 1)
    refused = world.open(2, 1)
    assert finished(refused) == {2: ErrorCode.QUEUE_FULL}
    for actions in (refused, world.feed(ev.CancelRequested(1))):
        assert not [action for action in actions if isinstance(action, ev.NotifyProxy)]


def test_without_a_proxy_nobody_is_told() -> None:
    """An engine may be its own judge."""
    world = SenderWorld()
    world.open(1, 1)
    assert failures_in(world.feed(ev.CancelRequested(1))) == []
    assert world.core.notifications_pending == 0


def test_a_reason_of_any_length_fits_the_message() -> None:
    """A receiver's own text may fill what a message takes, and our words come before it."""
    world = SenderWorld(proxy_address="proxy")
    p = world.connect()
    p.answer(sent(world.open(1, 3), AllocRequest), error=ErrorInfo(ErrorCode.REVOKED, "x" * 4096))
    world.open(2, 1)
    (told,) = failures_in(world.feed(ev.CancelRequested(2, ErrorCode.REVOKED, "y" * 5000)))
    assert len(told.error.detail) == 1024
