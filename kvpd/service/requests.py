"""A request's puts: a task and a cancel scope for each piece that is on its way, and their shielded end.

The core says when a piece is to be put and when a request is over. A piece's task waits for its puts; when its scope is
cancelled none of them begins any more, those in flight have until the put deadline to end, and then the endpoint is
cut. When nothing of the request is left, the core is told whether anything may still land.
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


@attrs.frozen(eq=False)
class Posted:
    """A piece whose puts are on their way."""

    piece: int
    batch: PutBatch
    endpoint: Endpoint
    posted_at: float
    chunks: Sequence[memoryview]  # what is put, to be summed; empty where nobody asks for checksums
    verify: Verify
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)


class Request:
    """One transfer's pieces. It is over when it ends well, or else when everything that was begun for it has ended;
    then `on_drained` is called, and PutsDrained fed.
    """

    def __init__(
        self,
        number: int,
        nursery: trio.Nursery,
        feed: Callable[[ev.SenderEvent], None],
        on_drained: Callable[[int], None],
    ) -> None:
        self.number = number
        self._nursery = nursery
        self._feed = feed
        self._on_drained = on_drained
        self._in_flight: dict[Posted, None] = {}
        self._put_deadline_s: float | None = None  # once it is cancelled
        self._all_drained = self._all_ended = True

    def post(
        self, piece: int, endpoint: Endpoint, batch: PutBatch, chunks: Sequence[memoryview], verify: Verify
    ) -> None:
        """The piece's puts have been posted."""
        posted = Posted(piece, batch, endpoint, trio.current_time(), chunks, verify)
        self._in_flight[posted] = None
        self._nursery.start_soon(self._run, posted)

    def cancel(self, put_deadline_s: float) -> None:
        """Begin no more puts, let those in flight end within the deadline, then report PutsDrained."""
        self._put_deadline_s = put_deadline_s
        for posted in self._in_flight:
            posted.batch.abandon()
            posted.scope.cancel()
        self._finish_if_drained()

    async def _run(self, posted: Posted) -> None:
        """A piece's task."""
        try:
            with posted.scope:
                await self._wait_for_puts(posted)
        finally:
            if self._put_deadline_s is not None and posted in self._in_flight:
                await self._drain(posted, self._put_deadline_s)

    async def _wait_for_puts(self, posted: Posted) -> None:
        # Summed while the puts are on their way: the staging slots are ours until PutsCompleted.
        checksums = () if posted.verify == "off" else await checksums_of(posted.chunks, posted.verify)
        failure = None
        try:
            await posted.batch.wait()
        except TransportError as exc:
            failure = str(exc)
        if self._put_deadline_s is not None:
            return  # cancelled in the turn in which its puts have ended: it is drained
        if failure is not None:
            self._feed(ev.PutsFailed(self.number, posted.piece, failure))
            await trio.sleep_forever()  # the core ends the transfer, and this scope with it
        del self._in_flight[posted]
        seconds = trio.current_time() - posted.posted_at
        self._feed(ev.PutsCompleted(self.number, posted.piece, seconds, checksums))

    async def _drain(self, posted: Posted, put_deadline_s: float) -> None:
        """Wait until every put that was begun has ended; past the deadline, cut the endpoint."""
        with trio.CancelScope(shield=True):
            with trio.move_on_after(put_deadline_s):
                await posted.batch.drain()
            if not posted.batch.done:
                posted.endpoint.force_close()
                with trio.move_on_after(_CUT_OFF_S):
                    await posted.batch.drain()
        self._all_ended &= posted.batch.done
        self._all_drained &= posted.batch.done and not posted.batch.failed
        del self._in_flight[posted]
        self._finish_if_drained()

    def _finish_if_drained(self) -> None:
        if not self._in_flight:
            self._on_drained(self.number)
            self._feed(ev.PutsDrained(self.number, self._all_drained, self._all_ended))
