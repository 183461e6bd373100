"""The two state machines as data: what may follow what, and why.

docs/PROTOCOL.md draws its diagrams from these tables (scripts/draw-states), so they cannot drift apart.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import TypeVar


class ReceiverState(enum.Enum):
    """Where a transfer stands at the receiver."""

    QUEUED = "queued"  # holds nothing, waits for room for all of it
    ADMITTED = "admitted"  # has room for all its chunks; some are placed, some written
    COMPLETE = "complete"  # every chunk is ready; nobody reads it
    CLAIMED = "claimed"  # an engine reads it: nothing but that engine's release or death ends this
    REVOKED = "revoked"  # rolled back; slots that may still be written wait for their fence
    GONE = "gone"


class ReceiverCause(enum.Enum):
    """What moves a transfer at the receiver."""

    ADMIT = "its turn, and it fits whole"
    ALL_WRITTEN = "all chunks ready"
    CLAIM = "claimed"
    RETURN = "claiming process died"
    RELEASE = "released by every rank"
    EXPIRE = "unclaimed for ready_ttl_s"
    ROLL_BACK = "refused, cancelled, revoked or peer lost"
    FENCE = "no write can land any more"


RECEIVER_TRANSITIONS: Mapping[tuple[ReceiverState, ReceiverCause], ReceiverState] = {
    (ReceiverState.QUEUED, ReceiverCause.ADMIT): ReceiverState.ADMITTED,
    (ReceiverState.QUEUED, ReceiverCause.ROLL_BACK): ReceiverState.GONE,
    (ReceiverState.ADMITTED, ReceiverCause.ALL_WRITTEN): ReceiverState.COMPLETE,
    (ReceiverState.ADMITTED, ReceiverCause.ROLL_BACK): ReceiverState.REVOKED,
    (ReceiverState.COMPLETE, ReceiverCause.CLAIM): ReceiverState.CLAIMED,
    (ReceiverState.COMPLETE, ReceiverCause.EXPIRE): ReceiverState.GONE,
    (ReceiverState.COMPLETE, ReceiverCause.ROLL_BACK): ReceiverState.GONE,
    (ReceiverState.CLAIMED, ReceiverCause.RETURN): ReceiverState.COMPLETE,
    (ReceiverState.CLAIMED, ReceiverCause.RELEASE): ReceiverState.GONE,
    (ReceiverState.REVOKED, ReceiverCause.FENCE): ReceiverState.GONE,
}


class SenderState(enum.Enum):
    """Where a transfer stands at the sender."""

    OPENING = "opening"  # waits for its receiver, or for admission there
    TRANSFERRING = "transferring"  # admitted; batches are staged, put and acknowledged
    CANCELLING = "cancelling"  # over; its puts drain, then the receiver is told until it answers
    DONE = "done"  # everything landed and was acknowledged
    GONE = "gone"


class SenderCause(enum.Enum):
    """What moves a transfer at the sender."""

    ADMITTED = "first AllocResponse"
    ALL_ACKNOWLEDGED = "last batch seen, all chunks acknowledged"
    CANCEL = "cancelled, refused, revoked, timed out or peer lost"
    SETTLED = "puts drained, CancelNotif answered"


SENDER_TRANSITIONS: Mapping[tuple[SenderState, SenderCause], SenderState] = {
    (SenderState.OPENING, SenderCause.ADMITTED): SenderState.TRANSFERRING,
    (SenderState.OPENING, SenderCause.CANCEL): SenderState.CANCELLING,
    (SenderState.TRANSFERRING, SenderCause.ALL_ACKNOWLEDGED): SenderState.DONE,
    (SenderState.TRANSFERRING, SenderCause.CANCEL): SenderState.CANCELLING,
    (SenderState.CANCELLING, SenderCause.SETTLED): SenderState.GONE,
}

S = TypeVar("S", ReceiverState, SenderState)
C = TypeVar("C", ReceiverCause, SenderCause)


def advance(table: Mapping[tuple[S, C], S], state: S, cause: C) -> S:
    """The state that follows. A pair that is not in the table is a bug of ours."""
    assert (state, cause) in table, f"{state} has no way out by {cause}"
    return table[state, cause]
