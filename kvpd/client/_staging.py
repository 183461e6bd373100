"""One batch of a transfer, as the prefill engine fills it.

It comes in pieces, which are filled and sent strictly one after the other. A piece with a slot that nobody wrote is
never sent: its transfer is cancelled instead.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Self

from kvpd.client._slot import Slot
from kvpd.errors import LocalProtocolError, RemoteProtocolError, TransferFailed
from kvpd.link import Filled, Staged

if TYPE_CHECKING:
    from kvpd.client._sender import Transfer


class Staging:
    """One batch of a transfer: `with transfer.stage(keys) as slots`.

    It is a forward iterator with one entry per key, in order: a Slot to fill, or None where the receiver has the chunk
    already. Stepping past a piece of it sends that piece and may wait for the next one; leaving sends the last.
    """

    def __init__(self, transfer: Transfer, number: int, keys: int, last_chunk_bytes: int) -> None:
        self._transfer = transfer
        self._connection = transfer.connection
        self._number = number
        self._keys = keys
        self._last_chunk_bytes = last_chunk_bytes
        # The reader thread's, under the lock.
        self._pieces: deque[Staged] = deque()
        self._announced = 0  # how many entries the pieces so far have
        self._newest_piece = -1  # the daemon numbers a transfer's pieces through all of its stages
        self._deferred = False
        # The engine's.
        self._piece: Staged | None = None
        self._slots: list[Slot | None] = []
        self._position = 0  # in the stage, of the next entry
        self._entered = False
        self._finished = False

    @property
    def is_finished(self) -> bool:
        """Whether its last piece was sent."""
        return self._finished

    def __len__(self) -> int:
        return self._keys

    def __enter__(self) -> Self:
        """Wait until the transfer is admitted and slots are here.

        Raises:
            TransferError: the transfer has ended.
            LocalProtocolError: an earlier stage must be filled first, and nothing else can make room for this one.
        """
        if self._entered:
            raise LocalProtocolError("a stage is entered once")
        self._entered = True
        self._take_piece()
        return self

    def __iter__(self) -> Iterator[Slot | None]:
        return self

    def __next__(self) -> Slot | None:
        if self._piece is None:
            raise LocalProtocolError("the slots of a stage are there while it is entered and did not fail")
        if self._position == self._keys:
            raise StopIteration
        if self._position == self._piece.first + len(self._slots):
            self._post_piece(self._piece)
            self._take_piece()
        slot = self._slots[self._position - self._piece.first]
        self._position += 1
        return slot

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Send the last piece; on an exception, cancel the transfer.

        Raises:
            TransferError: the transfer has ended.
            LocalProtocolError: a slot was not written; the transfer is cancelled, rather than sent with a hole in it.
        """
        if not self._connection.is_ours:
            return
        if kind is not None:
            self.revoke_slots()
            self._transfer.cancel()
            return
        piece = self._piece
        if piece is None or not piece.is_last_piece:
            self.revoke_slots()
            self._transfer.check()
            self._transfer.cancel()
            raise LocalProtocolError(
                f"a stage of {self._keys} chunks was left after {self._position} of them; it is cancelled"
            )
        self._post_piece(piece)
        self._finished = True

    def _post_piece(self, piece: Staged) -> None:
        holes = [piece.first + n for n, slot in enumerate(self._slots) if slot is not None and not slot.is_written]
        self.revoke_slots()
        self._piece = None  # whatever comes of it, it is not sent again
        self._transfer.check()
        if holes:
            self._transfer.cancel()
            raise LocalProtocolError(
                f"chunk {holes[0]} of a stage of {self._keys} was never written ({len(holes)} such); it is cancelled"
            )
        self._connection.send(Filled(self._transfer.number, self._number, piece.piece))

    def _take_piece(self) -> None:
        self._connection.check_process()
        with self._connection.lock:
            self._transfer.wait(lambda: bool(self._pieces) or self._is_stuck())
            if not self._pieces:
                raise LocalProtocolError("an earlier stage of this transfer is not filled yet: fill and leave it first")
            piece = self._piece = self._pieces.popleft()
        chunk_bytes = self._connection.info.chunk_bytes
        region = self._region(piece)
        for position, index in enumerate(piece.slots, piece.first):
            length = self._last_chunk_bytes if position == self._keys - 1 else chunk_bytes
            self._slots.append(None if index < 0 else Slot(region, index * chunk_bytes, length))

    def _region(self, piece: Staged) -> mmap.mmap:
        """The memory that the piece's slots are in.

        Raises:
            TransferFailed: it is the receiver's, and cannot be had; the transfer is cancelled.
            RemoteProtocolError: a slot is outside of it.
        """
        if not piece.place:
            return self._connection.region  # the slots were checked when they came
        try:
            region = self._connection.places.region(piece.place, self._transfer.number)
        except TransferFailed:
            self._transfer.check()  # how it ended says more, if it has
            self._transfer.cancel()
            raise
        slots_total = len(region) // self._connection.info.chunk_bytes
        if any(index >= slots_total for index in piece.slots):
            raise RemoteProtocolError(f"piece {piece.piece} has slots beyond the {slots_total} of its receiver")
        return region

    def _is_stuck(self) -> bool:
        return self._deferred and self._transfer.has_unfilled_before(self)

    def revoke_slots(self) -> None:
        for slot in self._slots:
            if slot is not None:
                slot.revoke()
        self._slots = []

    # ------------------------------------------------------------------ the reader thread's side, under the lock

    def accept(self, piece: Staged) -> None:
        """A piece from the daemon.

        Raises:
            RemoteProtocolError: it does not continue the stage.
        """
        announced = self._announced + len(piece.slots)
        if (
            piece.first != self._announced
            or piece.piece <= self._newest_piece
            or announced > self._keys
            or piece.is_last_piece != (announced == self._keys)
            or not piece.slots
            or min(piece.slots) < -1
            # How many slots a receiver has is known once its memory is mapped.
            or not (piece.place or max(piece.slots) < self._connection.slots_total)
        ):
            raise RemoteProtocolError(f"piece {piece.piece} does not continue a stage of {self._keys} chunks")
        self._announced = announced
        self._newest_piece = piece.piece
        self._pieces.append(piece)

    def defer(self) -> None:
        """The daemon makes this early stage wait."""
        self._deferred = True
