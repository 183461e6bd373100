"""A transfer as a trio program sees it: stages, and slots to fill.

The core's grants reach the waiting task through a memory channel of one: that is the backpressure. Stepping past a
piece of a stage posts it; leaving the stage posts the last one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import trio

from kvpd.core.sender import events as ev
from kvpd.errors import LocalProtocolError, TransferError
from kvpd.service.buffer import Buffer

Slot = memoryview | None  # None: the receiver has the chunk already


class Transfer:
    """One transfer of an embedding program; made by `Sender.open`."""

    def __init__(self, buffer: Buffer, feed: Callable[[ev.SenderEvent], None]) -> None:
        self.number = -1
        self._buffer = buffer
        self._feed = feed
        self._next_stage = 0
        self._stages: dict[int, trio.MemorySendChannel[ev.GrantPiece]] = {}
        self._ended = trio.Event()
        self._error: TransferError | None = None
        self._deferred: set[int] = set()

    @asynccontextmanager
    async def stage(
        self, keys: Sequence[bytes], *, last: bool = False, last_chunk_bytes: int | None = None
    ) -> AsyncIterator[AsyncIterator[Slot]]:
        """The next batch: an iterator of one entry per key, in order, a slot to fill or None.

        Its last chunk is `last_chunk_bytes` long, which only the request's last may set. Waits for admission and for
        staging slots; a batch larger than the staging buffer comes in pieces, the next one when this one is passed.

        Raises:
            TransferError: the transfer has ended, and how.
        """
        self._raise_if_ended()
        stage, self._next_stage = self._next_stage, self._next_stage + 1
        length = self._buffer.chunk_bytes if last_chunk_bytes is None else last_chunk_bytes
        # No more pieces than there are staging slots can be granted at once.
        self._stages[stage], grants = trio.open_memory_channel[ev.GrantPiece](self._buffer.slots)
        self._feed(ev.StageRequested(self.number, stage, tuple(keys), last, length))
        filler = _Filler(self, stage, grants)
        try:
            yield filler.slots()
            filler.post()
            if not filler.is_complete:
                raise LocalProtocolError("the stage was left before all of its slots were filled")
        finally:
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

    def _raise_if_ended(self) -> None:
        if self._error is not None:
            raise self._error

    # -------------------------------------------------------------- called by the sender

    def granted(self, grant: ev.GrantPiece) -> None:
        """A piece of a stage may be filled."""
        if grant.stage in self._stages:
            self._stages[grant.stage].send_nowait(grant)

    def deferred(self, deferral: ev.DeferStage) -> None:
        """A stage was begun before the earlier one was filled, and no staging is free: it could wait for ever."""
        self._deferred.add(deferral.stage)
        if deferral.stage in self._stages:
            self._stages[deferral.stage].close()

    def ended(self, error: TransferError | None) -> None:
        """It is over."""
        self._error = error
        self._ended.set()
        for channel in self._stages.values():
            channel.close()


class _Filler:
    """The slots of one stage, piece by piece."""

    def __init__(self, transfer: Transfer, stage: int, grants: trio.MemoryReceiveChannel[ev.GrantPiece]) -> None:
        self._transfer = transfer
        self._stage = stage
        self._grants = grants
        self._piece: ev.GrantPiece | None = None
        self._views: list[memoryview] = []
        self.is_complete = False

    async def slots(self) -> AsyncIterator[Slot]:
        """One entry per key. Asking for the one after a piece's last posts that piece."""
        while not self.is_complete:
            try:
                piece = self._piece = await self._grants.receive()
            except trio.EndOfChannel:
                self._transfer._raise_if_ended()
                why = (
                    "fill the earlier stage first: no staging is free"
                    if self._stage in self._transfer._deferred
                    else ""
                )
                raise LocalProtocolError(why or "the stage has been left") from None
            for entry in piece.entries:
                if entry is None:
                    yield None
                    continue
                view = self._transfer._buffer.slot(entry.local, entry.length)
                self._views.append(view)
                yield view
            self.post()

    def post(self) -> None:
        """The engine writes into the piece's slots no more: put them."""
        if self._piece is None:
            return
        for view in self._views:
            view.release()
        self._views.clear()
        self.is_complete = self._piece.is_last_piece
        piece, self._piece = self._piece, None
        self._transfer._feed(ev.PieceFilled(self._transfer.number, piece.piece))
