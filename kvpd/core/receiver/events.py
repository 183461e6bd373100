"""What happens to a receiver (past tense) and what it wants done (imperative)."""

from __future__ import annotations

import enum

import attrs

from kvpd.core.events import DrainExpired, DrainRequested, Report, RequestCancelled, TimePassed, TransferId
from kvpd.core.messages import HostIdentity, Message, PeerMessage, Region, WriteDone
from kvpd.errors import TransferError


@attrs.frozen
class MessageReceived:
    """A message came from a peer: the identity of a sender's channel."""

    peer: bytes
    message: Message


@attrs.frozen
class MessageRejected:
    """Bytes came from a peer that are no message."""

    peer: bytes
    detail: str


@attrs.frozen
class SessionOpened:
    """The session's worker exists; these are its regions."""

    session_no: int
    regions: tuple[Region, ...]


@attrs.frozen
class SessionFailed:
    """No worker could be made for the session."""

    session_no: int
    detail: str


@attrs.frozen
class SessionClosed:
    """The session's worker is destroyed: nothing lands through a network any more."""

    session_no: int


@attrs.frozen
class ProcessDied:
    """The process of the session's sender, on this host, is dead (or was already), and so is every engine that was
    given this receiver's memory on its behalf, unless that engine has let go of it.
    """

    session_no: int


@attrs.frozen
class ChunksVerified:
    """The checksums of a WriteDone have been compared; `mismatched` chunks hold other bytes than were sent."""

    transfer: TransferId
    message: WriteDone
    mismatched: int


@attrs.frozen
class ClaimRequested:
    """An engine wants the chunks of `req_id`, within `timeout_s`."""

    engine: int
    claim: int
    req_id: str
    rank: int
    timeout_s: float
    sender_id: str | None = None


@attrs.frozen
class ClaimReleased:
    """An engine is done with a claim, or waits for it no longer."""

    engine: int
    claim: int


@attrs.frozen
class EngineClosed:
    """An engine's connection ended: it waits for nothing any more, but may still read or write what it holds."""

    engine: int


@attrs.frozen
class EngineDied:
    """An engine's process is dead: it reads and writes nothing any more."""

    engine: int


ReceiverEvent = (
    MessageReceived
    | MessageRejected
    | SessionOpened
    | SessionFailed
    | SessionClosed
    | ProcessDied
    | ChunksVerified
    | ClaimRequested
    | ClaimReleased
    | EngineClosed
    | EngineDied
    | RequestCancelled
    | TimePassed
    | DrainRequested
    | DrainExpired
)

# ------------------------------------------------------------------ actions


@attrs.frozen
class SendMessage:
    """Send to a peer. If its queue is full the message may be dropped: what matters is repeated."""

    peer: bytes
    message: PeerMessage


@attrs.frozen
class OpenSession:
    """Make a worker for this session; answer SessionOpened or SessionFailed. Watch `process` if it is on this host.

    `sender_id` and `incarnation` name the start of the sender, for the engines that fill slots on its behalf.
    """

    session_no: int
    process: HostIdentity | None
    sender_id: str
    incarnation: int


@attrs.frozen
class CloseSession:
    """Destroy the session's worker; answer SessionClosed. Keep watching its process until ProcessDied, if watched."""

    session_no: int


@attrs.frozen
class ForgetSession:
    """Nothing of this session matters any more: stop watching its process."""

    session_no: int


@attrs.frozen
class WrittenSlot:
    """One chunk to verify: its slot, its length in bytes, and the checksum that its sender computed."""

    index: int
    length: int
    checksum: int


@attrs.frozen
class VerifyChunks:
    """Compare these checksums with what the slots hold; answer ChunksVerified."""

    transfer: TransferId
    message: WriteDone
    chunks: tuple[WrittenSlot, ...]


@attrs.frozen
class CutEngine:
    """End this engine's connection: it holds a claim for too long. Its memory is its own until it is dead."""

    engine: int
    detail: str


@attrs.frozen
class ClaimedSlot:
    """One chunk of a granted claim: its key, its slot, its length in bytes."""

    key: bytes
    index: int
    length: int


@attrs.frozen
class GrantClaim:
    """The chunks, in request order; they are the engine's until ClaimReleased or EngineDied."""

    engine: int
    claim: int
    transfer: TransferId
    chunks: tuple[ClaimedSlot, ...]


@attrs.frozen
class RefuseClaim:
    """There is nothing to claim, and why."""

    engine: int
    claim: int
    error: TransferError = attrs.field(eq=str)


class Outcome(enum.StrEnum):
    """What engines are told about a transfer."""

    READY = "ready"
    FAILED = "failed"
    RELEASED = "released"


@attrs.frozen
class AnnounceTransfer:
    """Tell every engine attached."""

    outcome: Outcome
    transfer: TransferId
    req_id: str
    total_chunks: int
    error: TransferError | None = attrs.field(default=None, eq=str)


ReceiverAction = (
    SendMessage
    | VerifyChunks
    | CutEngine
    | OpenSession
    | CloseSession
    | ForgetSession
    | GrantClaim
    | RefuseClaim
    | AnnounceTransfer
    | Report
)
