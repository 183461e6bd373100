"""The receiver's book of transfers: which chunks of each are placed where, and what room each holds.

Freeing is by transfer and happens once: every way out of the book goes through `roll_back`, `release` or `fence`.
The book moves slots and states; it sends nothing and sets no deadline.
"""

from __future__ import annotations

from collections import OrderedDict

import attrs

from kvpd.core.events import TransferId
from kvpd.core.ledger import Ledger
from kvpd.core.messages import AllocRequest, ErrorInfo
from kvpd.core.pool import SlotPool
from kvpd.core.receiver.events import ClaimedSlot
from kvpd.core.states import RECEIVER_TRANSITIONS, ReceiverCause, ReceiverState, advance
from kvpd.errors import ErrorCode


@attrs.define(eq=False)
class Batch:
    """Some consecutive chunks, and the answer they got: a repeat gets the same one."""

    first_chunk: int
    keys: tuple[bytes, ...]
    lengths: tuple[int, ...]  # bytes
    remote_indexes: tuple[int, ...] | None = None  # None until placed
    already_sent_indexes: tuple[int, ...] = ()


@attrs.define(eq=False)
class Transfer:
    """One transfer at the receiver."""

    id: TransferId
    req_id: str
    session_no: int
    total_chunks: int
    opened_at: float
    state: ReceiverState = ReceiverState.QUEUED
    batches: dict[int, Batch] = attrs.field(factory=dict)  # by first_chunk
    covered: set[int] = attrs.field(factory=set)  # positions that some batch speaks of
    # Until admission, by first chunk, -1 for a mere reservation: bounded, however often a batch is asked for again.
    unanswered: OrderedDict[int, AllocRequest] = attrs.field(factory=OrderedDict)
    slots: dict[int, int] = attrs.field(factory=dict)  # position → slot
    ready: int = 0  # chunks
    deduplicated: int = 0  # chunks
    bytes_placed: int = 0
    verifying: set[int] = attrs.field(factory=set)  # message ids of WriteDones whose checksums are being compared
    quarantined: list[int] = attrs.field(factory=list)
    last_progress: float = 0.0
    ready_until: float = 0.0
    ranks_returned: set[int] = attrs.field(factory=set)  # whose claim came back, once each
    ranks_unclaimed: set[int] = attrs.field(factory=set)
    ranks_reading: set[int] = attrs.field(factory=set)
    error: ErrorInfo | None = None

    def move(self, cause: ReceiverCause) -> None:
        """To the state that the table allows."""
        self.state = advance(RECEIVER_TRANSITIONS, self.state, cause)


class BatchRefused(Exception):
    """A batch that no correct sender sends; `info` is the answer to it."""

    def __init__(self, code: ErrorCode, detail: str) -> None:
        super().__init__(detail)
        self.info = ErrorInfo(code, detail)


class TransferBook:
    """All transfers of one receiver, its slots and its admission queue."""

    def __init__(self, total_slots: int, *, chunk_bytes: int, ranks: int, bypass_max: int) -> None:
        self.pool = SlotPool(total_slots, ranks=ranks)
        self.ledger = Ledger(self.pool, bypass_max=bypass_max)
        self.ranks = ranks
        self._chunk_bytes = chunk_bytes
        self._transfers: dict[TransferId, Transfer] = {}
        # Only those that were not revoked: what a claim or a cancel by req_id can mean.
        self._by_req_id: dict[str, dict[TransferId, Transfer]] = {}
        # By last progress, the oldest first.
        self._admitted: OrderedDict[TransferId, Transfer] = OrderedDict()

    def __len__(self) -> int:
        return len(self._transfers)

    def get(self, transfer_id: TransferId) -> Transfer | None:
        """The transfer, unless it is gone."""
        return self._transfers.get(transfer_id)

    def bearing(self, req_id: str) -> list[Transfer]:
        """The transfers of this label that were not revoked."""
        return list(self._by_req_id.get(req_id, {}).values())

    def in_state(self, *states: ReceiverState) -> list[Transfer]:
        """Every transfer in one of these states, oldest first. O(n): not for the hot path."""
        return [transfer for transfer in self._transfers.values() if transfer.state in states]

    # -------------------------------------------------------------- in

    def open(self, transfer: Transfer) -> None:
        """A new transfer waits for room."""
        assert transfer.id not in self._transfers
        self._transfers[transfer.id] = transfer
        self._by_req_id.setdefault(transfer.req_id, {})[transfer.id] = transfer
        self.ledger.join(transfer.id, transfer.total_chunks)

    def admit_next(self, *, now: float) -> Transfer | None:
        """The head of the queue, if it fits whole: it now holds all the room it will need."""
        transfer_id = self.ledger.admit_next()
        if transfer_id is None:
            return None
        transfer = self._transfers[transfer_id]
        transfer.move(ReceiverCause.ADMIT)
        self.progressed(transfer, now=now)
        return transfer

    def progressed(self, transfer: Transfer, *, now: float) -> None:
        """An admitted transfer has not stood still."""
        transfer.last_progress = now
        self._admitted[transfer.id] = transfer
        self._admitted.move_to_end(transfer.id)

    def longest_idle(self) -> Transfer | None:
        """The admitted transfer whose last progress is longest ago."""
        return next(iter(self._admitted.values()), None)

    # -------------------------------------------------------------- batches

    def batch(self, transfer: Transfer, message: AllocRequest) -> Batch | None:
        """The batch that a message speaks of, checked and booked. None for one without keys: it only reserves.

        Raises:
            BatchRefused: it does not fit what was declared, or overlaps another; judged by position, so that the
                order of arrival does not matter.
        """
        if message.total_chunks != transfer.total_chunks:
            raise BatchRefused(
                ErrorCode.TOTAL_MISMATCH,
                f"total_chunks was {transfer.total_chunks} when the transfer opened and is now {message.total_chunks}",
            )
        end = message.first_chunk + len(message.keys)
        if end > transfer.total_chunks:
            raise BatchRefused(
                ErrorCode.OVERFLOW,
                f"chunks {message.first_chunk} to {end - 1}, but {transfer.total_chunks} were declared",
            )
        if message.is_last_batch and end < transfer.total_chunks:
            raise BatchRefused(
                ErrorCode.UNDERFLOW, f"the last batch ends at chunk {end} of {transfer.total_chunks} declared"
            )
        if not message.keys:
            return None
        lengths = self._lengths(transfer, message, end)
        known = transfer.batches.get(message.first_chunk)
        if known is not None:
            if (known.keys, known.lengths) != (message.keys, lengths):
                raise BatchRefused(ErrorCode.BATCH_OVERLAP, f"another batch at chunk {message.first_chunk} came before")
            return known
        positions = range(message.first_chunk, end)
        if not transfer.covered.isdisjoint(positions):
            raise BatchRefused(
                ErrorCode.BATCH_OVERLAP, f"chunks {message.first_chunk} to {end - 1} overlap an earlier batch"
            )
        batch = Batch(message.first_chunk, message.keys, lengths)
        transfer.batches[message.first_chunk] = batch
        transfer.covered.update(positions)
        return batch

    def _lengths(self, transfer: Transfer, message: AllocRequest, end: int) -> tuple[int, ...]:
        """Bytes of each chunk: full ones, but for the request's last."""
        last = message.last_chunk_bytes
        if not 0 < last <= self._chunk_bytes or (last < self._chunk_bytes and end < transfer.total_chunks):
            raise BatchRefused(
                ErrorCode.PROTOCOL_ERROR,
                f"last_chunk_bytes of {last}: only the request's last chunk may be shorter than {self._chunk_bytes}",
            )
        return (self._chunk_bytes,) * (len(message.keys) - 1) + (last,)

    def place(self, transfer: Transfer, batch: Batch) -> None:
        """Give every chunk of an admitted transfer's batch its slot. Never waits: the room is reserved."""
        chunks = list(zip(batch.keys, batch.lengths, strict=True))
        drawn = self.ledger.draw(transfer.id, chunks)
        transfer.slots.update(enumerate([index for index, _ in drawn], batch.first_chunk))
        transfer.bytes_placed += sum(batch.lengths)
        already_sent = tuple(offset for offset, (_, is_ready) in enumerate(drawn) if is_ready)
        transfer.ready += len(already_sent)
        transfer.deduplicated += len(already_sent)
        batch.remote_indexes = tuple([-1 if is_ready else index for index, is_ready in drawn])
        batch.already_sent_indexes = already_sent

    def unwritten(self, transfer: Transfer, rank: int, first_chunk: int, count: int) -> list[int]:
        """The slots in the range that still wait for `rank`: not those that were deduplicated, nor those of a repeat.

        Raises:
            BatchRefused: there is no such rank, or a chunk in the range was never placed.
        """
        positions = range(first_chunk, first_chunk + count)
        if rank >= self.ranks or count == 0 or any(position not in transfer.slots for position in positions):
            raise BatchRefused(
                ErrorCode.PROTOCOL_ERROR,
                f"chunks {first_chunk} to {first_chunk + count - 1} of rank {rank} were never allocated",
            )
        slots = (transfer.slots[position] for position in positions)
        return [index for index in slots if rank in self.pool.slot(index).ranks_missing]

    def mark_written(self, transfer: Transfer, rank: int, slots: list[int]) -> None:
        """These slots have been written for `rank`."""
        transfer.ready += sum(self.pool.written(index, rank) for index in slots)

    def complete_if_ready(self, transfer: Transfer) -> bool:
        """Whether that was the last chunk; then the transfer is COMPLETE."""
        if transfer.state is not ReceiverState.ADMITTED or transfer.ready < transfer.total_chunks:
            return False
        transfer.move(ReceiverCause.ALL_WRITTEN)
        transfer.ranks_unclaimed = set(range(self.ranks))
        self._leave_admitted(transfer)
        return True

    def _leave_admitted(self, transfer: Transfer) -> None:
        del self._admitted[transfer.id]
        self.ledger.settle(transfer.id)

    # -------------------------------------------------------------- out

    def chunks(self, transfer: Transfer) -> tuple[ClaimedSlot, ...]:
        """What a claim gets, in request order."""
        slots = (transfer.slots[position] for position in range(transfer.total_chunks))
        return tuple(ClaimedSlot(self.pool.slot(i).key, i, self.pool.slot(i).length) for i in slots)

    def roll_back(self, transfer: Transfer, error: ErrorInfo, *, fenced: bool) -> None:
        """End a transfer that nobody has claimed: everything it holds is given back.

        Slots that may still be written are quarantined, unless `fenced` says that no write can land any more.
        """
        before = transfer.state
        transfer.error = error
        transfer.move(ReceiverCause.ROLL_BACK)
        self._forget_req_id(transfer)
        match before:
            case ReceiverState.QUEUED:
                self.ledger.leave(transfer.id)
            case ReceiverState.ADMITTED:
                self._leave_admitted(transfer)
        self._free(transfer, fenced=fenced)
        if transfer.state is ReceiverState.REVOKED and not transfer.quarantined:
            self.fence(transfer)
        elif transfer.state is ReceiverState.GONE:
            del self._transfers[transfer.id]

    def fence(self, transfer: Transfer) -> None:
        """No write can land for this revoked transfer any more."""
        for index in transfer.quarantined:
            self.pool.fence(index)
        transfer.quarantined.clear()
        transfer.move(ReceiverCause.FENCE)
        del self._transfers[transfer.id]

    def expire(self, transfer: Transfer) -> None:
        """Nobody claimed a complete transfer in time."""
        transfer.move(ReceiverCause.EXPIRE)
        self._remove_read(transfer)

    def release(self, transfer: Transfer) -> None:
        """Every rank has released a claimed transfer."""
        transfer.move(ReceiverCause.RELEASE)
        self._remove_read(transfer)

    def _remove_read(self, transfer: Transfer) -> None:
        self._free(transfer, fenced=True)
        self._forget_req_id(transfer)
        del self._transfers[transfer.id]

    def _free(self, transfer: Transfer, *, fenced: bool) -> None:
        for index in transfer.slots.values():
            if self.pool.let_go(index, fenced=fenced):
                transfer.quarantined.append(index)
        transfer.slots.clear()

    def _forget_req_id(self, transfer: Transfer) -> None:
        same = self._by_req_id[transfer.req_id]
        del same[transfer.id]
        if not same:
            del self._by_req_id[transfer.req_id]

    def audit(self) -> None:
        """Every invariant of the book by a full scan, for tests and simulation."""
        self.pool.audit()
        self.ledger.audit()
        pins: dict[int, int] = {}
        for transfer in self._transfers.values():
            assert (transfer.state is ReceiverState.ADMITTED) == (transfer.id in self._admitted)
            for index in transfer.slots.values():
                pins[index] = pins.get(index, 0) + 1
        assert all(self.pool.slot(index).pins == count for index, count in pins.items())
