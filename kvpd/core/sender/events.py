"""What happens to a sender (past tense) and what it wants done (imperative).

A transfer is known to an engine by the number of its own open. Where several ranks open it, each has a number of its
own for its share, and `transfer_no` below is that one; towards the receiver and the proxy the first open's stands for
all of them.
"""

from __future__ import annotations

import attrs

from kvpd.core.events import DrainExpired, DrainRequested, Report, RequestCancelled, TimePassed
from kvpd.core.messages import Message, Notification, PeerMessage, Region, Verify
from kvpd.errors import ErrorCode, TransferError


@attrs.frozen
class StageRequested:
    """An engine has the keys of its next batch. `stage` numbers the transfer's batches, growing."""

    transfer_no: int
    stage: int
    keys: tuple[bytes, ...]
    is_last: bool
    last_chunk_bytes: int


@attrs.frozen
class OpenRequested:
    """A rank's engine opens a transfer, or joins the one that another rank has opened. Numbers grow; none comes twice.

    `group` names the engine that the rank is part of. `in_place`: it can write into a receiver's memory itself. `first`
    is its first batch, if it is known by now: then one message asks the receiver for room and for slots.
    """

    transfer_no: int
    engine: int
    req_id: str
    receiver: str
    total_chunks: int
    notify: str | None = None
    rank: int = 0
    group: str = ""
    in_place: bool = False
    first: StageRequested | None = None


@attrs.frozen
class PieceFilled:
    """The engine has filled a granted piece's slots and writes them no more."""

    transfer_no: int
    piece: int


@attrs.frozen
class TransferTouched:
    """The engine still computes."""

    transfer_no: int


@attrs.frozen
class CancelRequested:
    """Somebody who may wants this transfer to end. Harmless in every state, for unknown ones too."""

    transfer_no: int
    code: ErrorCode = ErrorCode.CANCELLED
    detail: str = ""


@attrs.frozen
class EngineLetGo:
    """The engine has left the transfer (or is dead): it writes into none of its slots any more."""

    transfer_no: int


@attrs.frozen
class PeerMessageReceived:
    """A message came from the receiver at this address."""

    receiver: str
    message: Message


@attrs.frozen
class PeerMessageRejected:
    """Bytes came from the receiver at this address that are no message."""

    receiver: str
    detail: str


@attrs.frozen
class EndpointOpened:
    """The endpoint of this session can be put to. `in_place`: our engines can have the receiver's memory too.

    `way` is what carries the bytes, for the log.
    """

    receiver: str
    endpoint: int
    way: str = ""
    in_place: bool = False


@attrs.frozen
class EndpointBroken:
    """The endpoint could not be made, or has failed."""

    receiver: str
    endpoint: int
    detail: str


@attrs.frozen
class PutsCompleted:
    """Every put of the piece has ended well."""

    transfer_no: int
    piece: int
    seconds: float = 0.0
    checksums: tuple[int, ...] = ()  # one per put, where they were asked for


@attrs.frozen
class PutsFailed:
    """A put of the piece did not."""

    transfer_no: int
    piece: int
    detail: str


@attrs.frozen
class PutsDrained:
    """The transfer's puts are over. `drained`: all ended well; `ended`: all ended, well or not: none is still writing.

    Both False: the transport did not end them even when it was cut off.
    """

    transfer_no: int
    drained: bool
    ended: bool = True


@attrs.frozen
class ProxyAcknowledged:
    """The proxy at this address has received a notification."""

    proxy: str
    sender_incarnation: int
    message_id: int


@attrs.frozen
class ClockJumped:
    """The loop did not run for so long that no lease can be trusted."""

    gap_s: float


SenderEvent = (
    OpenRequested
    | StageRequested
    | PieceFilled
    | TransferTouched
    | CancelRequested
    | RequestCancelled
    | EngineLetGo
    | PeerMessageReceived
    | PeerMessageRejected
    | EndpointOpened
    | EndpointBroken
    | PutsCompleted
    | PutsFailed
    | PutsDrained
    | ProxyAcknowledged
    | ClockJumped
    | TimePassed
    | DrainRequested
    | DrainExpired
)

# ------------------------------------------------------------------ actions


@attrs.frozen
class ConnectPeer:
    """Open a control channel to this receiver."""

    receiver: str


@attrs.frozen
class DisconnectPeer:
    """Close the control channel to this receiver."""

    receiver: str


@attrs.frozen
class SendToPeer:
    """Send to a receiver. If its queue is full the message may be dropped: what matters is repeated."""

    receiver: str
    message: PeerMessage


@attrs.frozen
class OpenEndpoint:
    """Make an endpoint to these regions; answer EndpointOpened or EndpointBroken.

    `share` is where the receiver, in this incarnation, gives its memory to engines; empty where it does not.
    """

    receiver: str
    endpoint: int
    regions: tuple[Region, ...]
    share: str
    incarnation: int


@attrs.frozen
class CloseEndpoint:
    """Force-close this endpoint, now, and have engines let go of the memory that they fill in place. Not answered."""

    receiver: str
    endpoint: int


@attrs.frozen
class StagedSlot:
    """One chunk on its way: from a staging slot to a remote slot, `length` bytes. In place both are the remote one."""

    local: int
    remote: int
    length: int


@attrs.frozen
class GrantPiece:
    """Let the engine fill these slots; None: the receiver has that chunk. `first` counts within the stage.

    The slots are in the staging buffer, or, where `place` is not 0, in the memory of the receiver that the endpoint of
    this number leads to.
    """

    transfer_no: int
    stage: int
    piece: int
    first: int
    entries: tuple[StagedSlot | None, ...]
    is_last_piece: bool
    place: int = 0


@attrs.frozen
class DeferStage:
    """Tell the engine that this early stage waits until its earlier slots are filled."""

    transfer_no: int
    stage: int


@attrs.frozen
class PostPuts:
    """Put a filled piece through this endpoint and no other; answer PutsCompleted or PutsFailed.

    `verify` names the checksum to compute of each put's bytes, for PutsCompleted. Slots are those of `rank`, here and
    there.
    """

    transfer_no: int
    piece: int
    endpoint: int
    puts: tuple[StagedSlot, ...]
    verify: Verify = "off"
    rank: int = 0


@attrs.frozen
class CancelTransfer:
    """End the transfer's puts: begin no more, let those in flight end within the put deadline; answer PutsDrained."""

    transfer_no: int
    put_deadline_s: float


@attrs.frozen
class FinishTransfer:
    """Tell the engine: all landed. Or, with an error, that the transfer has ended and why."""

    transfer_no: int
    error: TransferError | None = attrs.field(default=None, eq=str)


@attrs.frozen
class NotifyProxy:
    """Send a notification to this proxy."""

    proxy: str
    message: Notification


SenderAction = (
    ConnectPeer
    | DisconnectPeer
    | SendToPeer
    | OpenEndpoint
    | CloseEndpoint
    | GrantPiece
    | DeferStage
    | PostPuts
    | CancelTransfer
    | FinishTransfer
    | NotifyProxy
    | Report
)
