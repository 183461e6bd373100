"""The proxy's notifications: bounded, repeated, in order, and never in a transfer's way."""

from __future__ import annotations

from core_parts import SENDER_INCARNATION, keys
from sender_world import ReceiverPeer, SenderWorld, finished

from kvpd.core.events import ReportName
from kvpd.core.sender import events as ev


def finish(world: SenderWorld, p: ReceiverPeer, number: int, **kwargs: object) -> list[ev.NotifyProxy]:
    """A transfer of a chunk that is there already ends well."""
    p.admit(number, 1, **kwargs)
    p.stage(number, 0, keys(number), [-1], last=True)
    actions = world.fill(number, 0)
    assert finished(actions) == {number: None}
    return notified(actions)


def notified(actions: list[ev.SenderAction]) -> list[ev.NotifyProxy]:
    """The notifications among these actions."""
    return [action for action in actions if isinstance(action, ev.NotifyProxy)]


def test_a_notification_is_repeated_with_growing_pauses_until_acknowledged() -> None:
    """At least once; a proxy that is down is not hammered."""
    world = SenderWorld(proxy_address="proxy", notify_repeat_s=1.0, notify_backoff_max_s=4.0)
    p = world.connect()
    (first,) = finish(world, p, 1)
    times = []
    start = world.now
    while world.now < start + 15.0:
        at = world.core.next_deadline()
        assert at is not None
        if notified(world.pass_time(at - world.now)):
            times.append(world.now - start)
    assert times == [1.0, 3.0, 7.0, 11.0, 15.0]
    world.feed(ev.ProxyAcknowledged("proxy", SENDER_INCARNATION, first.message.message_id))
    assert world.core.notifications_pending == 0
    assert notified(world.pass_time(100.0)) == []


def test_notifications_are_repeated_in_order() -> None:
    """The oldest request has waited longest."""
    world = SenderWorld(proxy_address="proxy")
    p = world.connect()
    sent = [finish(world, p, number)[0] for number in (1, 2, 3)]
    world.feed(ev.ProxyAcknowledged("proxy", SENDER_INCARNATION, sent[1].message.message_id))
    assert notified(world.pass_time(1.0)) == [sent[0], sent[2]]


def test_an_answer_ends_the_backoff() -> None:
    """The proxy is back: what it missed comes soon."""
    world = SenderWorld(proxy_address="proxy", notify_repeat_s=1.0, notify_backoff_max_s=100.0)
    p = world.connect()
    first, second = finish(world, p, 1)[0], finish(world, p, 2)[0]
    world.pass_time(15.5)  # the next repeat is due after 31 s
    world.feed(ev.ProxyAcknowledged("proxy", SENDER_INCARNATION, first.message.message_id))
    assert notified(world.pass_time(1.0)) == [second]


def test_a_stream_of_answers_does_not_put_off_the_repeat_of_the_one_that_was_lost() -> None:
    """Under steady load a lost notification would never be repeated, and its request never answered."""
    world = SenderWorld(proxy_address="proxy", notify_repeat_s=1.0)
    p = world.connect()
    (lost,) = finish(world, p, 1)
    repeated: list[ev.NotifyProxy] = []
    for number in range(2, 30):
        (other,) = finish(world, p, number)
        repeated += notified(world.pass_time(0.1))
        world.feed(ev.ProxyAcknowledged("proxy", SENDER_INCARNATION, other.message.message_id))
    assert repeated[0] == lost
    assert {a.message.transfer_no for a in repeated} == {1}  # the young ones are not repeated for its sake


def test_what_was_sent_a_moment_ago_is_not_repeated_yet() -> None:
    """The timer was set for an older one, which has been answered since."""
    world = SenderWorld(proxy_address="proxy", notify_repeat_s=1.0)
    p = world.connect()
    (first,) = finish(world, p, 1)
    world.pass_time(0.9)
    (second,) = finish(world, p, 2)
    world.feed(ev.ProxyAcknowledged("proxy", SENDER_INCARNATION, first.message.message_id))
    assert notified(world.pass_time(0.9)) == []
    assert notified(world.pass_time(0.2)) == [second]


def test_a_proxy_that_stays_away_is_given_up_and_counted() -> None:
    """Its queue is bounded in time too."""
    world = SenderWorld(proxy_address="proxy", notify_give_up_s=10.0, notify_backoff_max_s=2.0)
    p = world.connect()
    finish(world, p, 1)
    world.pass_time(5.0)
    finish(world, p, 2)
    world.pass_time(6.0)
    assert world.core.notifications_pending == 1
    assert [r.req_id for r in world.reported(ReportName.PROXY_NOTIFICATION_DROPPED)] == ["req-1"]
    world.pass_time(20.0)
    assert world.core.notifications_pending == 0
    assert world.core.is_idle


def test_a_full_queue_sends_once_and_counts() -> None:
    """A proxy that is down never stops a transfer (fault 16)."""
    world = SenderWorld(proxy_address="proxy", notifications_max=1, proxies_max=2)
    p = world.connect()
    finish(world, p, 1)
    assert len(finish(world, p, 2)) == 1
    finish(world, p, 3, notify="another")
    assert len(finish(world, p, 4, notify="one too many")) == 1
    assert world.core.notifications_pending == 2
    dropped = world.reported(ReportName.PROXY_NOTIFICATION_DROPPED)
    assert [(r.req_id, r.peer) for r in dropped] == [("req-2", "proxy"), ("req-4", "one too many")]


def test_repeats_come_in_bursts_of_bounded_size() -> None:
    """A proxy that comes back after an hour is not flooded in one step."""
    world = SenderWorld(proxy_address="proxy")
    p = world.connect()
    for number in range(1, 301):
        finish(world, p, number)
    assert len(notified(world.pass_time(1.0))) == 256


def test_the_plain_push_is_sent_once_and_never_waited_for() -> None:
    """The reference's proxies bind PULL and answer nothing."""
    world = SenderWorld(proxy_address="proxy", notify_is_acknowledged=False)
    p = world.connect()
    assert len(finish(world, p, 1)) == 1
    assert world.core.notifications_pending == 0
    assert notified(world.pass_time(5.0)) == []


def test_acknowledgements_that_mean_nothing_are_ignored() -> None:
    """Of an earlier start of this sender, of an unknown proxy, of an unknown notification, twice."""
    world = SenderWorld(proxy_address="proxy")
    p = world.connect()
    number = finish(world, p, 1)[0].message.message_id
    for event in (
        ev.ProxyAcknowledged("proxy", SENDER_INCARNATION - 1, number),
        ev.ProxyAcknowledged("stranger", SENDER_INCARNATION, number),
        ev.ProxyAcknowledged("proxy", SENDER_INCARNATION, number + 99),
    ):
        assert world.feed(event) == []
    assert world.core.notifications_pending == 1
    world.feed(ev.ProxyAcknowledged("proxy", SENDER_INCARNATION, number))
    world.feed(ev.ProxyAcknowledged("proxy", SENDER_INCARNATION, number))
    assert world.core.notifications_pending == 0
