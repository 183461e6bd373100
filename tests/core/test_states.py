"""The tables are what the cores do: every transition is seen once, by name, and no other can be taken."""

from __future__ import annotations

import itertools

import pytest
from core_parts import keys
from receiver_world import ReceiverWorld, SenderPeer
from sender_world import ReceiverPeer, SenderWorld, finished, sent

from kvpd.core.events import RequestCancelled
from kvpd.core.messages import AllocRequest, CancelNotif, WriteDone
from kvpd.core.receiver import events as rev
from kvpd.core.sender import events as sev
from kvpd.core.states import (
    RECEIVER_TRANSITIONS,
    SENDER_TRANSITIONS,
    ReceiverCause,
    ReceiverState,
    SenderCause,
    SenderState,
    advance,
)

RS, RC, SS, SC = ReceiverState, ReceiverCause, SenderState, SenderCause


def test_what_is_not_in_the_tables_cannot_happen() -> None:
    """A transition that nobody drew is a bug of ours: the process dies rather than go on in a state of its own."""
    for state, cause in itertools.product(RS, RC):
        if (state, cause) not in RECEIVER_TRANSITIONS:
            with pytest.raises(AssertionError, match="has no way out by"):
                advance(RECEIVER_TRANSITIONS, state, cause)
    for ours, why in itertools.product(SS, SC):
        if (ours, why) not in SENDER_TRANSITIONS:
            with pytest.raises(AssertionError, match="has no way out by"):
                advance(SENDER_TRANSITIONS, ours, why)


def test_every_state_is_reached_and_only_the_ends_have_no_way_out() -> None:
    """A state without an exit is a leak."""
    assert {state for state, _ in RECEIVER_TRANSITIONS} == set(RS) - {RS.GONE}
    assert set(RECEIVER_TRANSITIONS.values()) == set(RS) - {RS.QUEUED}
    assert {state for state, _ in SENDER_TRANSITIONS} == set(SS) - {SS.DONE, SS.GONE}
    assert set(SENDER_TRANSITIONS.values()) == set(SS) - {SS.OPENING}


# ------------------------------------------------------------------ the receiver, transition by transition


def at(state: ReceiverState) -> tuple[ReceiverWorld, SenderPeer]:
    """Transfer 1, two chunks, in this state."""
    world = ReceiverWorld(slots=2, ready_ttl_s=60.0, lease_s=1e6, allocation_timeout_s=1e5)
    p = world.connect()
    if state is RS.QUEUED:
        p.alloc(9, 2)
    p.alloc(1, 2, keys(1, 2), last=True)
    if state in (RS.COMPLETE, RS.CLAIMED):
        p.done(1, 0, 2)
    if state is RS.CLAIMED:
        world.claim("req-1")
    if state is RS.REVOKED:
        world.feed(RequestCancelled("req-1"))
    assert state_of(world) is state
    return world, p


def state_of(world: ReceiverWorld) -> ReceiverState:
    """Where transfer 1 stands."""
    found = [t.state for t in world.core._book.in_state(*RS) if t.id.transfer_no == 1]
    return found[0] if found else RS.GONE


def take(cause: ReceiverCause, world: ReceiverWorld, p: SenderPeer) -> None:
    """Make this happen to transfer 1."""
    match cause:
        case RC.ADMIT:
            p.cancel(9)
        case RC.ALL_WRITTEN:
            p.done(1, 0, 2)
        case RC.CLAIM:
            world.claim("req-1")
        case RC.RETURN:
            world.feed(rev.EngineDied(1))
        case RC.RELEASE:
            world.release()
        case RC.EXPIRE:
            world.pass_time(60.0)
        case RC.ROLL_BACK:
            world.feed(RequestCancelled("req-1"))
        case RC.FENCE:
            p.cancel(1)


@pytest.mark.parametrize(
    ("state", "cause", "then"),
    [pytest.param(*pair, then, id=f"{pair[0].value} {pair[1].name}") for pair, then in RECEIVER_TRANSITIONS.items()],
)
def test_the_receiver_takes_every_transition_of_its_table(
    state: ReceiverState, cause: ReceiverCause, then: ReceiverState
) -> None:
    """The diagram in the documents is drawn from the table; this is why one may believe it."""
    world, p = at(state)
    take(cause, world, p)
    assert state_of(world) is then


# ------------------------------------------------------------------ the sender, transition by transition


def sender_at(state: SenderState) -> tuple[SenderWorld, ReceiverPeer, AllocRequest]:
    """Transfer 1, one chunk, in this state."""
    world = SenderWorld()
    p = world.connect()
    request = sent(world.open(1, 1), AllocRequest)
    if state is SS.TRANSFERRING:
        p.answer(request)
    if state is SS.CANCELLING:
        world.feed(sev.CancelRequested(1))
    return world, p, request


@pytest.mark.parametrize(
    ("state", "cause", "then"),
    [pytest.param(*pair, then, id=f"{pair[0].value} {pair[1].name}") for pair, then in SENDER_TRANSITIONS.items()],
)
def test_the_sender_takes_every_transition_of_its_table(
    state: SenderState, cause: SenderCause, then: SenderState
) -> None:
    """The same for the other side."""
    world, p, request = sender_at(state)
    transfer = world.core._transfers[1]
    assert transfer.state is state
    match cause:
        case SC.ADMITTED:
            p.answer(request)
        case SC.ALL_ACKNOWLEDGED:
            p.stage(1, 0, keys(1), last=True)
            world.fill(1, 0)
            assert finished(p.ack(sent(world.land(1, 0), WriteDone))) == {1: None}
        case SC.CANCEL:
            world.feed(sev.CancelRequested(1))
        case SC.SETTLED:
            p.ack(sent(world.drained(1), CancelNotif))
    assert transfer.state is then
    assert (1 in world.core._transfers) == (then in (SS.TRANSFERRING, SS.CANCELLING))
