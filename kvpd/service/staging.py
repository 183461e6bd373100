"""A transfer as a trio program sees it: stages, and slots to fill.

The core's grants reach the waiting task through a memory channel of one: that is the backpressure. Stepping past a
piece of a stage posts it; leaving the stage posts the last one.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Self

import trio

from kvpd.core.sender import events as ev
from kvpd.errors import LocalProtocolError, TransferError
from kvpd.service.buffer import Buffer

Slot = memoryview | None  # None: the receiver has the chunk already
Grant = ev.GrantPiece | ev.DeferStage


class Transfer:
    """One transfer of an embedding program, or one rank's part in it; made by `Sender.open`."""

    def __init__(self, buffer: Buffer, rank: int, feed: Callable[[ev.SenderEvent], None], total_chunks: int) -> None:
        self.number = -1
        self._buffer = buffer
        self._rank = rank
        self._feed = feed
        self._total_chunks = total_chunks
        self._staged_chunks = 0
        self._next_stage = 0
        self._stages: dict[int, trio.MemorySendChannel[Grant]] = {}
        self._unfilled: set[int] = set()  # stages
        self._ended = trio.Event()
        self._error: TransferError | None = None

    @asynccontextmanager
    async def stage(
        self, keys: Sequence[bytes], *, last: bool = False, last_chunk_bytes: int | None = None
    ) -> AsyncIterator[AsyncIterator[Slot]]:
        """The next batch: an iterator of one entry per key, in order, a slot to fill or None.

        Its last chunk is `last_chunk_bytes` long, which only the request's last may set. Waits for admission and for
        staging slots; a batch larger than the staging buffer comes in pieces, the next one when this one is passed.

        Raises:
            TransferError: the transfer has ended, and how.
            LocalProtocolError: it is complete; or, on leaving, a slot of the stage was not filled.
        """
        self._raise_if_ended()
        if self._ended.is_set():
            raise LocalProtocolError("this transfer is complete")
        stage, self._next_stage = self._next_stage, self._next_stage + 1
        length = self._buffer.chunk_bytes if last_chunk_bytes is None else last_chunk_bytes
        # No more pieces than there are staging slots can be granted at once; and it is deferred once.
        self._stages[stage], grants = trio.open_memory_channel[Grant](self._buffer.slots + 1)
        self._unfilled.add(stage)
        self._staged_chunks += len(keys)
        self._feed(ev.StageRequested(self.number, stage, tuple(keys), last, length))
        filler = _Filler(self, stage, grants)
        try:
            yield filler
            filler.finish()
        finally:
            filler.release()
            self._stages.pop(stage).close()

    def touch(self) -> None:
        """Say that the engine still computes, so that the receiver does not take back the room that others want."""
        self._feed(ev.TransferTouched(self.number))

    def cancel(self) -> None:
        """End it, wherever it stands."""
        self._feed(ev.CancelRequested(self.number))

    async def wait_ended(self) -> None:
        """Until everything has landed.

        Raises:
            TransferError: it ended otherwise.
        """
        await self._ended.wait()
        self._raise_if_ended()

    def check_staged(self) -> None:
        """It is being left: what was never staged will never land.

        Raises:
            TransferError: it has ended without success.
            LocalProtocolError: not all of its chunks were staged.
        """
        self._raise_if_ended()
        if self._staged_chunks < self._total_chunks:
            detail = f"left with {self._staged_chunks} of {self._total_chunks} chunks staged; it is cancelled"
            raise LocalProtocolError(detail)

    def _raise_if_ended(self) -> None:
        if self._error is not None:
            raise self._error

    # -------------------------------------------------------------- called by the sender

    def granted(self, grant: ev.GrantPiece) -> None:
        """A piece of a stage may be filled."""
        if grant.stage in self._stages:
            self._stages[grant.stage].send_nowait(grant)

    def deferred(self, deferral: ev.DeferStage) -> None:
        """A stage was begun before the earlier one was filled, and no staging is free."""
        if deferral.stage in self._stages:
            self._stages[deferral.stage].send_nowait(deferral)

    def ended(self, error: TransferError | None) -> None:
        """It is over."""
        self._error = error
        self._ended.set()
        for channel in self._stages.values():
            channel.close()


class _Filler:
    """The slots of one stage, piece by piece: one entry per key, in order.

    Asking for the one after a piece's last posts that piece. A piece of which a slot was not even looked at is never
    posted: what an earlier request left there would be announced as this one's.
    """

    def __init__(self, transfer: Transfer, stage: int, grants: trio.MemoryReceiveChannel[Grant]) -> None:
        self._transfer = transfer
        self._stage = stage
        self._grants = grants
        self._piece: ev.GrantPiece | None = None
        self._position = 0  # in the piece, of the next entry
        self._views: list[memoryview] = []
        self._is_complete = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Slot:
        if self._piece is not None and self._position == len(self._piece.entries):
            self._post(self._piece)
        if self._is_complete:
            raise StopAsyncIteration
        piece = self._piece
        if piece is None:
            piece = self._piece = await self._next_piece()
        entry = piece.entries[self._position]
        self._position += 1
        if entry is None:
            return None
        view = self._transfer._buffer.slot(entry.local, entry.length, self._transfer._rank)
        self._views.append(view)
        return view

    async def _next_piece(self) -> ev.GrantPiece:
        async for grant in self._grants:
            if isinstance(grant, ev.GrantPiece):
                self._position = 0
                return grant
            if min(self._transfer._unfilled) < self._stage:
                # Nobody waits while holding slots: it could be for ever.
                raise LocalProtocolError("fill the earlier stage first: no staging is free")
        self._transfer._raise_if_ended()
        raise LocalProtocolError("the stage has been left")

    def finish(self) -> None:
        """The stage is left: post its last piece.

        Raises:
            LocalProtocolError: some of its slots were not filled.
        """
        if self._piece is not None and self._position == len(self._piece.entries):
            self._post(self._piece)
        if not self._is_complete:
            self._transfer._raise_if_ended()
            raise LocalProtocolError("the stage was left before all of its slots were filled")

    def _post(self, piece: ev.GrantPiece) -> None:
        """The engine writes into the piece's slots no more: put them."""
        self.release()
        self._piece = None
        if piece.is_last_piece:
            self._is_complete = True
            self._transfer._unfilled.discard(self._stage)
        self._transfer._feed(ev.PieceFilled(self._transfer.number, piece.piece))

    def release(self) -> None:
        """Take the slots that were handed out back."""
        for view in self._views:
            with contextlib.suppress(BufferError):  # an array of the engine's still refers to it
                view.release()
        self._views.clear()
