"""How long a daemon's loop goes without looking for what has arrived.

A turn of trio's loop runs every task that is ready and then looks for I/O. The time from one look to the next is what
a message, an engine or a timer may have to wait for: the stall. A watched daemon counts its turns by their length in
memory that the benchmark maps too, so reading costs the daemon nothing. Production daemons are not watched, and pay
nothing.
"""

from __future__ import annotations

import math
import mmap
import time
from pathlib import Path
from typing import Final, Self

import trio

# Bucket n holds turns of up to SHORTEST_S * STEP ** n: 1 µs to more than an hour, in steps of 2 %.
_BUCKETS: Final = 1200
_SHORTEST_S: Final = 1e-6
_STEP: Final = 1.02
_LOG_STEP: Final = math.log(_STEP)
_COUNT_BYTES: Final = 8


class LoopWatch:
    """The counts, seen from the benchmark."""

    def __init__(self, file: Path) -> None:
        self.file = file
        with file.open("r+b") as opened:
            self._counts = memoryview(mmap.mmap(opened.fileno(), _BUCKETS * _COUNT_BYTES)).cast("Q")

    @classmethod
    def create(cls, file: Path) -> Self:
        """A new file of zeros."""
        file.write_bytes(bytes(_BUCKETS * _COUNT_BYTES))
        return cls(file)

    def turns(self) -> Turns:
        """All turns so far."""
        return Turns(tuple(self._counts))

    def count(self, seconds: float) -> None:
        """In the daemon: one more turn."""
        self._counts[_bucket(seconds)] += 1


class Turns:
    """How many turns there were of each length."""

    def __init__(self, counts: tuple[int, ...]) -> None:
        self._counts = counts

    def __sub__(self, earlier: Turns) -> Turns:
        """Those since then."""
        return Turns(tuple(now - then for now, then in zip(self._counts, earlier._counts, strict=True)))

    @property
    def total(self) -> int:
        """How many."""
        return sum(self._counts)

    def percentile_s(self, percent: float) -> float:
        """So many percent of the turns took no longer; seconds, 2 % too long at most. 100: the longest."""
        left = self.total * percent / 100
        for number, count in enumerate(self._counts):
            left -= count
            if count and left <= 1e-9:
                return _SHORTEST_S * _STEP**number
        return 0.0


def _bucket(seconds: float) -> int:
    if seconds <= _SHORTEST_S:
        return 0
    return min(_BUCKETS - 1, math.ceil(math.log(seconds / _SHORTEST_S) / _LOG_STEP))


class TurnInstrument(trio.abc.Instrument):
    """Counts the turns of the loop that it is added to."""

    def __init__(self, watch: LoopWatch) -> None:
        self._watch = watch
        self._began = time.perf_counter()

    def before_io_wait(self, timeout: float) -> None:
        """All that was ready has run."""
        self._watch.count(time.perf_counter() - self._began)

    def after_io_wait(self, timeout: float) -> None:
        """What has arrived is known."""
        self._began = time.perf_counter()
