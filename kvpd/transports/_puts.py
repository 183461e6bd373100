"""One endpoint's puts: batches in order, a window of bytes in flight, and what has become of each.

Puts begin in the order in which they were posted and only while the window has room; one that is larger than the
window goes alone. A batch has succeeded only when every one of its puts and the flush behind the last of them have
ended well on an endpoint that still stands. A batch that is done has nothing in flight: nothing of it lands later.
How a put is begun is the transport's business: it derives from PutQueue.
"""

from __future__ import annotations

import abc
from collections import deque
from collections.abc import Sequence
from typing import Final

import trio

from kvpd.errors import TransportError
from kvpd.transports.base import Put

BEGIN_MAX: Final = 64  # puts begun in one go, so that a batch of many small ones does not hold up the loop


class Window:
    """Bytes in flight, and the limit that they keep to; what is larger than the limit goes alone."""

    def __init__(self, limit_bytes: int) -> None:
        self.in_flight_bytes = 0
        self._limit_bytes = limit_bytes

    def has_room(self, length: int) -> bool:
        """Whether a put of `length` bytes may begin."""
        return self.in_flight_bytes == 0 or self.in_flight_bytes + length <= self._limit_bytes


class Batch:
    """See `kvpd.transports.base.PutBatch`."""

    def __init__(self, queue: PutQueue, pieces: deque[Put]) -> None:
        self._queue = queue
        self._unbegun = pieces
        self._in_flight = 0  # puts, and the flush
        self._begun = False
        self._queued = True
        self._flushed = False
        self._error: str | None = None  # the first thing that went wrong
        self._abandoned = 0
        self._ended = trio.Event()

    @property
    def done(self) -> bool:
        return self._ended.is_set()

    @property
    def failed(self) -> bool:
        return self._error is not None

    async def wait(self) -> None:
        await self._ended.wait()
        if self._error is not None:
            raise TransportError(self._error)
        if self._abandoned:
            raise TransportError(f"{self._abandoned} puts of the batch were abandoned before they began")

    async def drain(self) -> None:
        await self._ended.wait()

    def abandon(self) -> None:
        self._abandoned += len(self._unbegun)
        self._unbegun.clear()
        self._queue._settle(self)


class PutQueue(abc.ABC):
    """An endpoint without its wire; see `kvpd.transports.base.Endpoint`.

    A transport implements `_begin_put`, `_begin_flush` and `force_close`. It answers each begun put by `_put_ended` and
    each begun flush by `_flush_ended`, exactly once, and then calls `pump`, from its loop; where endpoints share a
    window, it calls that of each of them.
    """

    def __init__(
        self,
        *,
        local_bytes: int,
        remote_bytes: int,
        window_bytes: int,
        piece_bytes: int | None,
        shared: Window | None = None,
    ) -> None:
        """`piece_bytes`: puts are cut into pieces of at most that length; None: never cut.

        `shared`: a window that several endpoints keep to, besides each its own.
        """
        self._local_bytes = local_bytes
        self._remote_bytes = remote_bytes
        self._window = Window(window_bytes)
        self._windows = (self._window,) if shared is None else (self._window, shared)
        self._piece_bytes = piece_bytes
        self._queue: deque[Batch] = deque()  # with puts to begin, or a flush
        self._unfinished: dict[Batch, None] = {}
        self._broken: str | None = None

    @property
    def broken(self) -> bool:
        return self._broken is not None

    @property
    def in_flight_bytes(self) -> int:
        return self._window.in_flight_bytes

    def post(self, puts: Sequence[Put]) -> Batch:
        for put in puts:
            self._check(put)
        if self._broken is not None:
            raise TransportError(self._broken)
        batch = Batch(self, deque(piece for put in puts for piece in self._cut(put)))
        self._unfinished[batch] = None
        self._queue.append(batch)
        self.pump()
        return batch

    @abc.abstractmethod
    def force_close(self) -> None: ...

    @abc.abstractmethod
    def _begin_put(self, batch: Batch, put: Put) -> None: ...

    @abc.abstractmethod
    def _begin_flush(self, batch: Batch) -> None: ...

    def pump(self) -> None:
        """Begin what the window has room for, BEGIN_MAX puts at most: the end of one of them calls for the rest."""
        budget = BEGIN_MAX
        while self._queue:
            batch = self._queue[0]
            while batch._unbegun:
                length = batch._unbegun[0].length
                if budget == 0 or not all(window.has_room(length) for window in self._windows):
                    return
                budget -= 1
                put = batch._unbegun.popleft()
                batch._begun = True
                batch._in_flight += 1
                for window in self._windows:
                    window.in_flight_bytes += length
                self._begin_put(batch, put)
            self._settle(batch)

    def _check(self, put: Put) -> None:
        local_room, remote_room = self._local_bytes - put.local_offset, self._remote_bytes - put.remote_offset
        fits = 0 <= put.length <= min(local_room, remote_room)
        if not (fits and put.local_offset >= 0 and put.remote_offset >= 0):
            raise ValueError(f"{put} is outside {self._local_bytes} bytes here or {self._remote_bytes} bytes there")

    def _cut(self, put: Put) -> Sequence[Put]:
        if put.length == 0:
            return ()
        step = self._piece_bytes or put.length
        if put.length <= step:
            return (put,)
        return [
            Put(put.local_offset + start, put.remote_offset + start, min(step, put.length - start))
            for start in range(0, put.length, step)
        ]

    def _put_ended(self, batch: Batch, length: int, error: str | None) -> None:
        for window in self._windows:
            window.in_flight_bytes -= length
        self._step_ended(batch, error)

    def _flush_ended(self, batch: Batch, error: str | None) -> None:
        self._step_ended(batch, error)

    def _step_ended(self, batch: Batch, error: str | None) -> None:
        batch._in_flight -= 1
        if error is not None:
            batch._error = batch._error or error
            batch._unbegun.clear()
        self._settle(batch)

    def _settle(self, batch: Batch) -> None:
        """Flush behind the batch's last put; when nothing of it is left or under way, it is done."""
        if batch._unbegun or batch.done:
            return
        if batch._begun and not batch._flushed:
            batch._flushed = True
            if self._broken is None:
                batch._in_flight += 1
                self._begin_flush(batch)  # may end at once, and then settles the batch
        if batch._queued:
            batch._queued = False
            self._queue.remove(batch)  # nearly always the head
        if batch._in_flight == 0 and not batch.done:
            del self._unfinished[batch]
            batch._ended.set()

    def _break(self, detail: str) -> None:
        """The endpoint is over: no put begins any more, and no batch that is still here can succeed."""
        if self._broken is None:
            self._broken = detail
            for batch in list(self._unfinished):
                batch._error = batch._error or detail
                batch._unbegun.clear()
                self._settle(batch)
