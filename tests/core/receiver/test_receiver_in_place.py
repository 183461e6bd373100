"""What a receiver decides where engines may fill its slots: whom it tells, and which words free a slot."""

from __future__ import annotations

import pytest
from core_parts import OWN_HOST, keys, regions
from receiver_world import ReceiverWorld, SenderPeer

from kvpd.core.messages import CancelNotif, HostIdentity, Welcome
from kvpd.core.receiver import events as ev
from kvpd.errors import ErrorCode

SHARE = "/run/kvpd/receiver.sock"
LOCAL = HostIdentity(OWN_HOST.boot_id, OWN_HOST.pid_namespace, 4242, 99)


def welcome_of(p: SenderPeer) -> Welcome:
    """What the sender was told when its session was opened."""
    session = p.world.core._sessions.numbered(p.session_no)
    assert session is not None
    assert session.welcome is not None
    return session.welcome


def test_only_senders_on_this_host_are_told_where_the_memory_is() -> None:
    """Elsewhere nobody could see their engines' deaths."""
    world = ReceiverWorld(share=SHARE)
    assert welcome_of(world.connect("here", host=LOCAL)).share == SHARE
    assert welcome_of(world.connect("there")).share == ""
    assert welcome_of(ReceiverWorld().connect("here", host=LOCAL)).share == ""


def test_an_undrained_cancel_that_goes_on_keeps_its_slots_and_its_session() -> None:
    """An engine fills them, perhaps for ever. The drained word that follows frees them."""
    world = ReceiverWorld(share=SHARE)
    p = world.connect("here", host=LOCAL)
    p.alloc(1, 2, keys(1, 2))
    free = world.free
    actions = p.say(CancelNotif(*p._header(), 1, (), ErrorCode.CANCELLED, drained=False, goes_on=True))
    assert not [action for action in actions if isinstance(action, ev.CloseSession)]
    assert (world.core.counts.quarantined, world.free) == (2, free)
    p.alloc(2, 1, keys(9))  # it goes on
    p.cancel(1, drained=True)
    assert world.core.counts.quarantined == 0
    assert world.free == free + 1


@pytest.mark.parametrize("word", [True, False])
def test_a_heartbeat_may_say_that_the_writes_of_earlier_sessions_have_ended(word: bool) -> None:
    """A Hello that was said while an engine still filled could not; the heartbeats of its session can."""
    world = ReceiverWorld(share=SHARE)
    p = world.connect("here", host=LOCAL)
    p.alloc(1, 2, keys(1, 2))
    opened = p.hello(puts_ended=False)[-1]
    assert isinstance(opened, ev.OpenSession)
    world.feed(ev.SessionClosed(1))
    world.feed(ev.SessionOpened(opened.session_no, regions(world.settings.total_slots)))
    assert world.core.counts.quarantined == 2
    p.heartbeat(puts_ended=word)
    assert world.core.counts.quarantined == (0 if word else 2)


def test_a_strangers_heartbeat_frees_nothing_of_another_start() -> None:
    """Another start of the sender knows nothing of what the engines of the first one do."""
    world = ReceiverWorld(share=SHARE)
    p = world.connect("here", 1, host=LOCAL)
    p.alloc(1, 2, keys(1, 2))
    again = world.connect("here", 2, host=LOCAL)
    world.feed(ev.SessionClosed(1))
    again.heartbeat(puts_ended=True)
    assert world.core.counts.quarantined == 2
    world.feed(ev.ProcessDied(1))
    assert world.core.counts.quarantined == 0
