"""What both cores speak of: transfers' identities, reports, and the events that either side meets.

Events are past tense and go in; actions are imperative and come out, to be carried out in order and in the same step.
A Report among the actions changes nothing: it is what the logs and the metrics are told.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import NamedTuple

import attrs


class TransferId(NamedTuple):
    """One attempt at a request: what everything is booked under. A req_id is only a label.

    A tuple, because it is the key of many a table: an attrs class takes more than twice as long to hash.
    """

    sender_id: str
    incarnation: int
    transfer_no: int

    def __str__(self) -> str:
        return f"{self.sender_id}/{self.incarnation:x}/{self.transfer_no}"


class ReportName(enum.StrEnum):
    """Everything that the cores tell the logs: constant, past tense."""

    # the receiver, per transfer
    TRANSFER_QUEUED = "transfer_queued"
    TRANSFER_REFUSED = "transfer_refused"
    TRANSFER_ADMITTED = "transfer_admitted"
    BATCH_ALLOCATED = "batch_allocated"
    CHUNKS_WRITTEN = "chunks_written"
    TRANSFER_COMPLETED = "transfer_completed"
    TRANSFER_CLAIMED = "transfer_claimed"
    TRANSFER_RELEASED = "transfer_released"
    TRANSFER_EXPIRED = "transfer_expired"
    TRANSFER_REVOKED = "transfer_revoked"
    TRANSFER_FENCED = "transfer_fenced"
    CLAIM_REFUSED = "claim_refused"
    CLAIM_RETURNED = "claim_returned"
    CLAIM_OVERDUE = "claim_overdue"
    # the sender, per transfer
    TRANSFER_OPENED = "transfer_opened"
    TRANSFER_JOINED = "transfer_joined"
    ADMISSION_GRANTED = "admission_granted"
    BATCH_STAGED = "batch_staged"
    PIECE_WRITTEN = "piece_written"
    PIECE_FILLED = "piece_filled"
    TRANSFER_DONE = "transfer_done"
    TRANSFER_FAILED = "transfer_failed"
    TRANSFER_CANCELLED = "transfer_cancelled"
    PROXY_NOTIFIED = "proxy_notified"
    PROXY_TOLD_OF_FAILURE = "proxy_told_of_failure"
    PROXY_NOTIFICATION_DROPPED = "proxy_notification_dropped"
    # peers
    SESSION_OPENED = "session_opened"
    SESSION_ENDED = "session_ended"
    PEER_REJECTED = "peer_rejected"
    MESSAGE_REFUSED = "message_refused"


@attrs.frozen
class Report:
    """One thing that happened, for logs and metrics."""

    name: ReportName
    transfer: TransferId | None = None
    req_id: str | None = None
    peer: str | None = None
    fields: Mapping[str, int | float | str] = attrs.field(factory=dict)


@attrs.frozen
class TimePassed:
    """A deadline is due. `lag_s`: how much later than it should have, because the loop was busy, the clock was read."""

    lag_s: float = 0.0


@attrs.frozen
class DrainRequested:
    """No new work from now on; what runs may finish."""


@attrs.frozen
class DrainExpired:
    """What still runs is to be cancelled."""


@attrs.frozen
class RequestCancelled:
    """An engine wants every transfer of this req_id to end."""

    req_id: str
