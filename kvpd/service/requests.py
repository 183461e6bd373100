"""One task and one cancel scope per request: its puts, in order, and their shielded end.

The core says when a piece is to be put and when a request is over. The task waits for the puts; when its scope is
cancelled it begins no more, lets those in flight end within the put deadline, then cuts the endpoint, and says whether
anything may still land.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import attrs
import trio

from kvpd.core.messages import Verify
from kvpd.core.sender import events as ev
from kvpd.errors import TransportError
from kvpd.service.checksums import checksums_of
from kvpd.transports.base import Endpoint, PutBatch

# A forced close ends every operation within milliseconds; a transport that does not is broken, and waited for no more.
_CUT_OFF_S: Final = 1.0


@attrs.frozen
class Posted:
    """A piece whose puts are on their way."""

    piece: int
    batch: PutBatch
    endpoint: Endpoint
    posted_at: float
    chunks: Sequence[memoryview]  # what is put, to be summed; empty where nobody asks for checksums
    verify: Verify


class Request:
    """The task of one transfer. Made when it opens; ends by `finish` or `cancel`."""

    def __init__(self, number: int, feed: Callable[[ev.SenderEvent], None], pieces_max: int) -> None:
        self.number = number
        self._feed = feed
        self._scope = trio.CancelScope()
        # As many pieces as there are staging slots can be in flight, so the channel never fills.
        self._posted, self._next = trio.open_memory_channel[Posted](pieces_max)
        self._in_flight: list[Posted] = []
        self._put_deadline_s: float | None = None

    def post(
        self, piece: int, endpoint: Endpoint, batch: PutBatch, chunks: Sequence[memoryview], verify: Verify
    ) -> None:
        """The piece's puts have been posted."""
        posted = Posted(piece, batch, endpoint, trio.current_time(), chunks, verify)
        self._in_flight.append(posted)
        self._posted.send_nowait(posted)

    def finish(self) -> None:
        """Everything was acknowledged: the task has nothing left to do."""
        self._posted.close()

    def cancel(self, put_deadline_s: float) -> None:
        """Begin no more puts, let those in flight end within the deadline, then report PutsDrained."""
        self._put_deadline_s = put_deadline_s
        self._scope.cancel()

    async def run(self) -> None:
        """The task."""
        try:
            with self._scope:
                await self._wait_for_puts()
        finally:
            if self._put_deadline_s is not None:
                await self._drain(self._put_deadline_s)
                ended = all(posted.batch.done for posted in self._in_flight)
                drained = ended and not any(posted.batch.failed for posted in self._in_flight)
                self._feed(ev.PutsDrained(self.number, drained, ended))

    async def _wait_for_puts(self) -> None:
        async for posted in self._next:
            # Summed while the puts are on their way: the staging slots are ours until PutsCompleted.
            checksums = () if posted.verify == "off" else await checksums_of(posted.chunks, posted.verify)
            try:
                await posted.batch.wait()
            except TransportError as exc:
                self._feed(ev.PutsFailed(self.number, posted.piece, str(exc)))
                await trio.sleep_forever()  # the core ends the transfer, and this scope with it
            self._in_flight.remove(posted)
            seconds = trio.current_time() - posted.posted_at
            self._feed(ev.PutsCompleted(self.number, posted.piece, seconds, checksums))

    async def _drain(self, put_deadline_s: float) -> None:
        """Wait until every put that was begun has ended; past the deadline, cut the endpoint."""
        with trio.CancelScope(shield=True):
            for posted in self._in_flight:
                posted.batch.abandon()
            with trio.move_on_after(put_deadline_s):
                await self._ended()
            if not all(posted.batch.done for posted in self._in_flight):
                for posted in self._in_flight:
                    posted.endpoint.force_close()
                with trio.move_on_after(_CUT_OFF_S):
                    await self._ended()

    async def _ended(self) -> None:
        for posted in self._in_flight:
            await posted.batch.drain()
