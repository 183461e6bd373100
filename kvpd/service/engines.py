"""What the daemons do for their engines: frames of the link become events of the core, and its answers frames.

A prefill engine opens, stages and fills; a decode engine claims and releases. Numbers on the link are the engine's own
and mean nothing beyond its connection. A writer is a prefill engine at a receiver on its host, whose memory it has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from kvpd.core.events import RequestCancelled
from kvpd.core.receiver import events as rev
from kvpd.core.sender import events as sev
from kvpd.errors import ErrorCode, LocalProtocolError, RemoteProtocolError, TransferError
from kvpd.link import (
    CLAIMED_CHUNKS_MAX,
    Attach,
    AttachWriter,
    Cancel,
    CancelRequest,
    Claim,
    Claimed,
    ClaimedChunk,
    ClaimFailed,
    Close,
    Ended,
    EngineFrame,
    Filled,
    Frame,
    LetGo,
    LinkError,
    Open,
    Place,
    PlaceGone,
    Release,
    Stage,
    Staged,
    StageDeferred,
    Stats,
    StatsRequest,
    Touch,
    TransferEvent,
)
from kvpd.service.receiver import Receiver
from kvpd.service.sender import Sender
from kvpd.service.sharing import SenderStart

_OPEN_MAX: Final = 65536  # transfers of one connection that were not closed


class Outgoing(Protocol):
    """Where frames to the engine go."""

    def send(self, frame: Frame) -> None: ...

    def cut_off(self, detail: str) -> None: ...


class PrefillEngine:
    """The connection of a prefill engine, or of one of its ranks, to a sender."""

    def __init__(self, sender: Sender, out: Outgoing, attach: Attach) -> None:
        self._sender = sender
        self._out = out
        self._rank, self._group = attach.rank, attach.group
        self._name = "the engine" if sender.config.ranks == 1 else f"the engine of rank {attach.rank}"
        self._number = sender.new_engine(self.place_gone)
        self._transfers: dict[int, _Sink] = {}  # by the engine's number, until it closes them
        self._places: set[int] = set()  # that it knows
        self._opening: Open | None = None  # what came last: its first batch may come with it

    def handle(self, frame: EngineFrame) -> None:
        """See `engine_link.Engine`."""
        opening = self._opening
        if opening is not None and isinstance(frame, Stage) and frame.transfer == opening.transfer:
            self._begin(frame)
            return
        self._begin()
        feed = self._sender.feed
        match frame:
            case Open():
                self._open(frame)
            case Stage(transfer):
                feed(_stage_requested(self._of(transfer), frame))
            case Filled(transfer, _, piece):
                feed(sev.PieceFilled(self._of(transfer), piece))
            case Touch(transfer):
                feed(sev.TransferTouched(self._of(transfer)))
            case Cancel(transfer):
                feed(sev.CancelRequested(self._of(transfer), ErrorCode.CANCELLED, f"cancelled by {self._name}"))
            case Close(transfer):
                feed(sev.EngineLetGo(self._of(transfer)))
                del self._transfers[transfer]
            case CancelRequest(req_id):
                feed(RequestCancelled(req_id))
            case StatsRequest(call):
                self._out.send(Stats(call, self._sender.metrics.snapshot()))
            case _:
                raise RemoteProtocolError(f"{type(frame).__name__} is no frame for a sender")

    def _open(self, frame: Open) -> None:
        if frame.transfer in self._transfers:
            raise RemoteProtocolError(f"transfer {frame.transfer} is open already")
        if len(self._transfers) >= _OPEN_MAX:
            raise RemoteProtocolError(f"{_OPEN_MAX} transfers were opened and not closed")
        self._transfers[frame.transfer] = _Sink(frame.transfer, self._out, self._introduce)
        self._opening = frame
        self._sender.at_turn_end(self._begin)

    def _begin(self, first: Stage | None = None) -> None:
        """Tell the sender of what was opened last, if it has not been told, with its first batch if that has come."""
        frame, self._opening = self._opening, None
        if frame is None:
            return
        sink = self._transfers[frame.transfer]
        try:
            sink.number = self._sender.open_for(
                sink,
                self._number,
                frame.req_id,
                frame.receiver,
                frame.total_chunks,
                frame.notify,
                rank=self._rank,
                group=self._group,
                in_place=True,
                first=None if first is None else lambda number: _stage_requested(number, first),
            )
        except LocalProtocolError as exc:
            self._out.send(Ended(frame.transfer, LinkError(ErrorCode.PROTOCOL_ERROR, str(exc)[:4096])))

    def _of(self, transfer: int) -> int:
        """The sender's own number of the engine's transfer."""
        if transfer not in self._transfers:
            raise RemoteProtocolError(f"transfer {transfer} is not open")
        return self._transfers[transfer].number

    def _introduce(self, number: int) -> None:
        """Say where the receiver's memory is that slots are in, the first time."""
        if number not in self._places:
            offer, settings = self._sender.offer(number), self._sender.core.settings
            self._places.add(number)
            self._out.send(
                Place(number, offer.path, settings.sender_id, settings.incarnation, offer.receiver_incarnation)
            )

    def place_gone(self, number: int) -> None:
        """The session with that receiver is over."""
        if number in self._places:
            self._places.discard(number)
            self._out.send(PlaceGone(number))

    def closed(self) -> None:
        """See `engine_link.Engine`. What it was sending is rolled back."""
        self._opening = None
        self._sender.engine_left(self._number)
        for sink in self._transfers.values():
            detail = f"{self._name}'s connection ended"
            self._sender.feed(sev.CancelRequested(sink.number, ErrorCode.CANCELLED, detail))
        if not self.holds_memory:
            self.died()

    @property
    def holds_memory(self) -> bool:
        """See `engine_link.Engine`."""
        return any(self._sender.core.is_filling(sink.number) for sink in self._transfers.values())

    def died(self) -> None:
        """See `engine_link.Engine`."""
        for sink in self._transfers.values():
            self._sender.feed(sev.EngineLetGo(sink.number))
        self._transfers.clear()


def _stage_requested(number: int, frame: Stage) -> sev.StageRequested:
    return sev.StageRequested(number, frame.stage, frame.keys, frame.is_last, frame.last_chunk_bytes)


class _Sink:
    """One transfer's events, as frames."""

    def __init__(self, transfer: int, out: Outgoing, introduce: Callable[[int], None]) -> None:
        self.number = -1  # the sender's; a transfer that was refused has none
        self._transfer = transfer
        self._out = out
        self._introduce = introduce

    def granted(self, grant: sev.GrantPiece) -> None:
        if grant.place:
            self._introduce(grant.place)
        slots = tuple(-1 if entry is None else entry.local for entry in grant.entries)
        self._out.send(
            Staged(self._transfer, grant.stage, grant.piece, grant.first, slots, grant.is_last_piece, grant.place)
        )

    def deferred(self, deferral: sev.DeferStage) -> None:
        self._out.send(StageDeferred(self._transfer, deferral.stage))

    def ended(self, error: TransferError | None) -> None:
        self._out.send(Ended(self._transfer, None if error is None else LinkError.of(error)))


class WriterEngine:
    """The connection of a prefill engine, or of one of its ranks, to a receiver whose slots it fills in place.

    Raises:
        RemoteProtocolError: it may not have the memory.
    """

    def __init__(self, receiver: Receiver, attach: AttachWriter) -> None:
        if attach.receiver_incarnation != receiver.core.settings.incarnation:
            raise RemoteProtocolError("that start of this receiver is over, and its memory with it")
        self._start = SenderStart(attach.sender_id, attach.sender_incarnation)
        self._writers = receiver.writers
        self._writers.admit(self._start)
        self.holds_memory = True  # see `engine_link.Engine`

    def handle(self, frame: EngineFrame) -> None:
        """See `engine_link.Engine`."""
        if not isinstance(frame, LetGo) or not self.holds_memory:
            raise RemoteProtocolError(f"{type(frame).__name__} is no frame for a receiver, from who writes in place")
        self.died()

    def closed(self) -> None:
        """See `engine_link.Engine`."""

    def died(self) -> None:
        """See `engine_link.Engine`. Or it has let go, which comes to the same."""
        self.holds_memory = False
        self._writers.let_go(self._start)


class DecodeEngine:
    """The connection of a decode engine, or of one of its ranks, to a receiver."""

    def __init__(self, receiver: Receiver, out: Outgoing, attach: Attach) -> None:
        self._receiver = receiver
        self._out = out
        self._rank = attach.rank
        self._number = receiver.attach(self)

    def handle(self, frame: EngineFrame) -> None:
        """See `engine_link.Engine`."""
        feed = self._receiver.feed
        match frame:
            case Claim(claim, req_id, rank, timeout_s, sender_id):
                if rank != self._rank:
                    raise RemoteProtocolError(f"a claim of rank {rank} from the engine of rank {self._rank}")
                feed(rev.ClaimRequested(self._number, claim, req_id, rank, timeout_s, sender_id))
            case Release(claim):
                feed(rev.ClaimReleased(self._number, claim))
            case CancelRequest(req_id):
                feed(RequestCancelled(req_id))
            case StatsRequest(call):
                self._out.send(Stats(call, self._receiver.metrics.snapshot()))
            case _:
                raise RemoteProtocolError(f"{type(frame).__name__} is no frame for a receiver")

    def closed(self) -> None:
        """See `engine_link.Engine`. What it waits for is forgotten; what it reads is kept until its process dies."""
        self._receiver.detach(self._number)

    @property
    def holds_memory(self) -> bool:
        """See `engine_link.Engine`."""
        return self._receiver.core.holds(self._number)

    def died(self) -> None:
        """See `engine_link.Engine`."""
        self._receiver.feed(rev.EngineDied(self._number))

    # -------------------------------------------------------------- the receiver's answers

    def granted(self, grant: rev.GrantClaim) -> None:
        """The chunks, in as many frames as they need."""
        for first in range(0, len(grant.chunks), CLAIMED_CHUNKS_MAX):
            some = grant.chunks[first : first + CLAIMED_CHUNKS_MAX]
            chunks = tuple(ClaimedChunk(chunk.key, chunk.index, chunk.length) for chunk in some)
            is_last_piece = first + len(some) == len(grant.chunks)
            transfer = grant.transfer
            self._out.send(Claimed(grant.claim, transfer.sender_id, transfer.transfer_no, first, chunks, is_last_piece))

    def refused(self, refusal: rev.RefuseClaim) -> None:
        """Why there is nothing to claim."""
        self._out.send(ClaimFailed(refusal.claim, LinkError.of(refusal.error)))

    def cut_off(self, detail: str) -> None:
        """It holds a claim for too long."""
        self._out.cut_off(detail)

    def announced(self, announcement: rev.AnnounceTransfer) -> None:
        """What became of a transfer, pushed."""
        transfer, error = announcement.transfer, announcement.error
        self._out.send(
            TransferEvent(
                announcement.outcome.value,
                announcement.req_id,
                transfer.sender_id,
                transfer.transfer_no,
                announcement.total_chunks,
                None if error is None else LinkError.of(error),
            )
        )
