"""A worker: a decode engine that claims requests, looks at every chunk and gives it back.

A few threads claim, because each waits for the daemon's answer; an engine that runs several requests does the same.
"""

from __future__ import annotations

import itertools
import mmap
import os
import threading
import time
from collections.abc import Iterator
from typing import Final

import attrs

from kvpd.bench.payload import Load, Payload, has_stamps
from kvpd.bench.workers import serve
from kvpd.client import Chunk, ReceiverLink, connect_receiver

_THREADS_MAX: Final = 4
_CLAIM_S: Final = 120.0
_ARENA_BYTES: Final = 64 << 20  # of each thread; more than caches hold


@attrs.frozen(kw_only=True)
class AttachDecode:
    """Whom to attach to, and the FIFO that AttachPrefill names."""

    socket: str
    released: str


@attrs.frozen(kw_only=True)
class Taken:
    """When it happened, in seconds of CLOCK_MONOTONIC, and what was seen."""

    claimed_at: tuple[float, ...]  # by request: its chunks are there to be used
    ended_at: float
    chunks: int
    wrong: int  # chunks whose bytes were not those that were sent


class DecodeEngine:
    """One link, one load at a time."""

    _link: ReceiverLink
    _payload: Payload
    _arenas: list[memoryview]

    def attach(self, where: AttachDecode) -> None:
        """Connect."""
        self._link = connect_receiver(where.socket)
        self._payload = Payload(self._link.chunk_bytes)
        self._released = os.open(where.released, os.O_WRONLY)
        # Touched, as memory that an engine has used before.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
        length = max(_ARENA_BYTES, self._link.chunk_bytes)
        self._arenas = [memoryview(mmap.mmap(-1, length, flags=flags)) for _ in range(_THREADS_MAX)]

    def close(self) -> None:
        """Leave the daemon."""
        self._link.close()
        os.close(self._released)

    def run(self, load: Load) -> Taken:
        """Claim it all."""
        numbers = itertools.count()
        takers = [
            _Taker(self._link, self._released, self._payload, load, numbers, own) for own in self._arenas[: load.depth]
        ]
        for taker in takers:
            taker.start()
        for taker in takers:
            taker.join()
        claimed_at = dict(itertools.chain.from_iterable(taker.claimed_at.items() for taker in takers))
        return Taken(
            claimed_at=tuple(claimed_at[number] for number in sorted(claimed_at)),
            ended_at=time.monotonic(),
            chunks=sum(taker.chunks for taker in takers),
            wrong=sum(taker.wrong for taker in takers),
        )


class _Taker(threading.Thread):
    """A thread that claims every request whose number it draws."""

    def __init__(
        self,
        link: ReceiverLink,
        released: int,
        payload: Payload,
        load: Load,
        numbers: Iterator[int],
        own: memoryview,
    ) -> None:
        super().__init__(name="taker", daemon=True)
        self.claimed_at: dict[int, float] = {}
        self.chunks = 0
        self.wrong = 0
        self._link = link
        self._released = released
        self._payload = payload
        self._load = load
        self._numbers = numbers
        self._own = own

    def run(self) -> None:
        while (number := next(self._numbers)) < self._load.requests:
            with self._link.claim(self._load.req_id(number), _CLAIM_S) as chunks:
                self.claimed_at[number] = time.monotonic()
                for position, chunk in enumerate(chunks):
                    self._look(number, position, chunk)
            os.write(self._released, b"\0")

    def _look(self, number: int, position: int, chunk: Chunk) -> None:
        stamp = self._load.stamp(number, position)
        match self._load.mode:
            case "check":
                right = self._payload.is_whole(chunk.view, number, position, stamp)
            case "copy":
                right = has_stamps(self._copy(chunk.view), stamp)
            case "in_place":
                right = has_stamps(chunk.view, stamp)
        self.chunks += 1
        self.wrong += not right

    def _copy(self, view: memoryview) -> memoryview:
        places = len(self._own) // len(view)
        offset = self.chunks % places * len(view)
        own = self._own[offset : offset + len(view)]
        own[:] = view
        return own


if __name__ == "__main__":
    engine = DecodeEngine()
    serve({"attach": engine.attach, "run": engine.run})
