"""What a sender remembers: its peers (the receivers it speaks to), its transfers, and each rank's share of them.

A transfer is one for all ranks: one admission, one allocation of each batch, one end. What an engine's rank stages and
puts is its share, with staging slots and pieces of its own; no rank waits for another one's staging.
"""

from __future__ import annotations

import enum

import attrs

from kvpd.core.messages import AllocRequest, CancelNotif, Hello, Verify, WriteDone
from kvpd.core.outbox import Outbox
from kvpd.core.sender.events import StagedSlot
from kvpd.core.sender.joining import Roll
from kvpd.core.states import SENDER_TRANSITIONS, SenderCause, SenderState, advance
from kvpd.errors import TransferError


class PeerState(enum.Enum):
    """How far a sender is with one receiver."""

    CONNECTING = "connecting"  # Hello is out
    WELCOMED = "welcomed"  # its endpoint is being made
    UP = "up"
    LOST = "lost"  # nothing of it is acted on; a new open starts afresh


Repeated = Hello | AllocRequest | WriteDone | CancelNotif


@attrs.define(eq=False)
class Peer:
    """One session with one receiver, from Hello on."""

    receiver: str  # its address
    hello_id: int
    outbox: Outbox[Repeated]
    state: PeerState = PeerState.CONNECTING
    receiver_id: str = ""
    incarnation: int = 0
    total_chunks: int = 0
    lease_s: float = 0.0
    put_deadline_s: float = 0.0
    endpoint: int = 0
    in_place: bool = False  # engines may fill this receiver's slots themselves
    said_puts_ended: bool = True  # in its Hello
    verify: Verify = "off"
    # When the newest message that was acknowledged had been sent: the receiver's patience runs from there or later.
    lease_from: float = 0.0
    heartbeats: dict[int, float] = attrs.field(factory=dict)  # message_id → sent at, unanswered
    transfers: dict[int, Transfer] = attrs.field(factory=dict)  # by number, which grows: the first is the oldest
    waiting: set[int] = attrs.field(factory=set)  # transfers that the receiver has said to wait for room there
    writing: dict[int, Transfer] = attrs.field(factory=dict)  # those with puts in flight

    @property
    def heartbeat_s(self) -> float:
        """How often to say that we live: two may be lost before this sender fences itself."""
        return (self.lease_s - self.put_deadline_s) / 3


class PieceState(enum.Enum):
    """How far a piece is."""

    FILLING = "filling"  # the engine writes into its staging slots
    WRITING = "writing"  # its puts are in flight
    ACKING = "acking"  # landed; WriteDone is out


@attrs.define(eq=False)
class Piece:
    """Some consecutive chunks of a batch that one rank stages, puts and has acknowledged together."""

    number: int
    first_chunk: int
    entries: tuple[StagedSlot | None, ...]  # None: the receiver has that chunk already
    state: PieceState = PieceState.FILLING
    in_place: bool = False  # its slots are the receiver's: there is nothing to stage or put

    @property
    def puts(self) -> tuple[StagedSlot, ...]:
        """What travels."""
        return tuple(entry for entry in self.entries if entry is not None)

    @property
    def staging_slots(self) -> list[int]:
        """The slots that it holds until its puts have ended."""
        return [] if self.in_place or self.state is PieceState.ACKING else [entry.local for entry in self.puts]


@attrs.define(eq=False)
class Batch:
    """Some consecutive chunks of a transfer, the same for all ranks: asked for by the first, kept until the last."""

    first_chunk: int
    keys: tuple[bytes, ...]
    last_chunk_bytes: int
    ranks_left: int  # that have not staged all of it
    remote_indexes: tuple[int, ...] | None = None  # None until allocated


@attrs.define(eq=False)
class Stage:
    """One rank's way through a batch: from its asking until the last chunk is staged for it."""

    number: int
    batch: Batch
    asked_at: float = 0.0  # when it was asked for and allocated: it waits for staging since then
    cursor: int = 0  # chunks staged
    is_waiting: bool = False  # in line for staging
    was_deferred: bool = False

    @property
    def slots_wanted(self) -> int:
        """Staging slots that the rest of it needs; only once allocated."""
        assert self.batch.remote_indexes is not None
        return sum(index >= 0 for index in self.batch.remote_indexes[self.cursor :])


@attrs.define(eq=False)
class Share:
    """One rank's part in a transfer: what its engine stages, and what of that has landed."""

    number: int  # of its open
    engine: int
    rank: int
    transfer: Transfer
    in_place: bool = False  # its engine can write into a receiver's memory itself
    stages: dict[int, Stage] = attrs.field(factory=dict)  # not fully staged
    last_stage: int = -1
    next_chunk: int = 0
    acknowledged: int = 0  # chunks
    pieces: dict[int, Piece] = attrs.field(factory=dict)
    next_piece: int = 0
    puts_ended: bool = False  # of a transfer that is ending

    @property
    def is_filling(self) -> bool:
        """The engine holds slots that it has not filled."""
        return any(piece.state is PieceState.FILLING for piece in self.pieces.values())

    @property
    def writes_ended(self) -> bool:
        """Of a transfer that is ending: nothing of this share is on its way to the receiver's slots any more."""
        return self.puts_ended and not any(piece.in_place for piece in self.pieces.values())


@attrs.define(eq=False)
class Transfer:
    """One transfer at the sender. It bears the number of the open that began it."""

    number: int
    req_id: str
    peer: Peer
    total_chunks: int
    notify: str | None
    roll: Roll
    opened_at: float
    state: SenderState = SenderState.OPENING
    open_sent: bool = False
    admitted_at: float = 0.0
    shares: dict[int, Share] = attrs.field(factory=dict)  # by rank
    batches: dict[int, Batch] = attrs.field(factory=dict)  # by first chunk; some rank has not staged all of it
    bytes_sent: int = 0
    unanswered: set[int] = attrs.field(factory=set)  # message ids in the peer's outbox
    touch_id: int | None = None
    all_drained: bool = True  # no share whose puts have ended said otherwise
    puts_drained: bool = False  # every share's puts have ended, and no engine fills a slot in place
    is_overdue: bool = False  # an engine has not let go of slots in place within the put deadline
    cancel_id: int | None = None  # the CancelNotif that is unanswered
    error: TransferError | None = None

    def move(self, cause: SenderCause) -> None:
        """To the state that the table allows."""
        self.state = advance(SENDER_TRANSITIONS, self.state, cause)

    @property
    def is_live(self) -> bool:
        """Neither over nor ending."""
        return self.state in (SenderState.OPENING, SenderState.TRANSFERRING)
