"""The nearest thing to kvpd's job that a library of transfers can do, the same for all of them.

For each request the source asks for slots, the sink answers in order of asking when it has enough of them, the source
writes into them, the sink is told, reads the chunks in place, frees them and says so. One thread on each side, so many
requests under way. What is not here: an admission that outlives a process, cancellation, fences, timeouts.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import attrs

from peers_app.memory import check_stamp, is_equal_between_stamps, pattern, stamp
from peers_app.movers.base import Chunks, Sink, Source


@attrs.frozen
class Job:
    """`requests` requests of `chunks` chunks each, `depth` of them under way at once."""

    requests: int
    chunks: int
    chunk_bytes: int
    depth: int

    def local_slots(self, request: int) -> range:
        """Where the source has a request's chunks."""
        first = request % self.depth * self.chunks
        return range(first, first + self.chunks)


def run_source(source: Source, job: Job, commands: int) -> float:
    """Move all of them; when it began, by the monotonic clock that all processes of a host share."""
    source.prepare(job.chunk_bytes)
    source.buffer.fill()  # an earlier job's stamps are in the middle of this one's chunks
    began = time.monotonic()
    asked = 0
    freed: set[int] = set()
    writes: deque[tuple[int, Any]] = deque()

    def may_ask() -> bool:
        # A request's slots here are those of the one `depth` before it.
        return asked < job.requests and (asked < job.depth or asked - job.depth in freed)

    while len(freed) < job.requests:
        while may_ask():
            source.tell(b"ask %d" % asked)
            asked += 1
        for words in source.heard():
            kind, number, *slots = words.split()
            if kind == b"slots":
                writes.append((int(number), _begin(source, job, int(number), [int(slot) for slot in slots])))
            elif kind == b"freed":
                freed.add(int(number))
        while writes and source.is_done(writes[0][1]):
            request, _ = writes.popleft()
            if not source.has_notice:
                source.tell(b"landed %d" % request)
        if writes:
            source.rest()
        elif len(freed) < job.requests and not may_ask():
            source.wait(commands)
    return began


def _begin(source: Source, job: Job, request: int, slots: list[int]) -> Any:
    local = job.local_slots(request)
    for slot in local:
        stamp(source.buffer.chunk(slot, job.chunk_bytes), request)
    return source.begin(Chunks(local, slots, job.chunk_bytes), b"landed %d" % request)


class SinkRun:
    """The sink's side of one job."""

    def __init__(self, sink: Sink, job: Job) -> None:
        self._sink = sink
        self._job = job
        self._free: deque[int] = deque(range(sink.buffer.length // job.chunk_bytes))
        self._waiting: deque[int] = deque()
        self._granted: dict[int, list[int]] = {}
        self._last: dict[int, int] = {}  # which request a slot held last
        self._landed = 0

    def run(self, commands: int) -> float:
        """Serve until all have landed; when the last one had."""
        while self._landed < self._job.requests:
            for words in self._sink.heard():
                kind, number = words.split()
                if kind == b"ask":
                    self._waiting.append(int(number))
                elif kind == b"landed":
                    self._take(int(number))
            self._grant()
            if self._landed < self._job.requests:
                self._sink.wait(commands)
        return time.monotonic()

    def _grant(self) -> None:
        while self._waiting and len(self._free) >= self._job.chunks:
            request = self._waiting.popleft()
            slots = self._granted[request] = [self._free.popleft() for _ in range(self._job.chunks)]
            self._sink.tell(b"slots %d " % request + b" ".join(b"%d" % slot for slot in slots))

    def _take(self, request: int) -> None:
        slots = self._granted.pop(request)
        for position, slot in enumerate(slots):
            check_stamp(self._sink.buffer.chunk(slot, self._job.chunk_bytes), request)
            self._last[slot] = self._job.local_slots(request)[position]
        self._free.extend(slots)
        self._landed += 1
        self._sink.tell(b"freed %d" % request)

    def is_equal(self) -> bool:
        """Whether every slot that was ever written holds what it must."""
        size = self._job.chunk_bytes
        source = pattern(self._sink.buffer.length)
        return bool(self._last) and all(
            is_equal_between_stamps(self._sink.buffer.chunk(slot, size), source[local * size : (local + 1) * size])
            for slot, local in self._last.items()
        )
