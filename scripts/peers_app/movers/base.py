"""What a system that moves bytes looks like to the benchmark: a source that writes, a sink that is written to.

Both run in processes of their own and are driven by one thread. A source may have any number of writes under way; a
write that `is_done` has landed. Beside the bytes, either side can `tell` the other a few words, by whatever means the
system has. Nothing here waits without end: the conductor ends a process that is late.
"""

from __future__ import annotations

import abc
import select
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import attrs

from peers_app.memory import Buffer

Address = dict[str, Any]


@attrs.frozen
class Chunks:
    """Some slots here, the slots there that they go to, and their length."""

    local: Sequence[int]
    remote: Sequence[int]
    chunk_bytes: int


class End(abc.ABC):
    """Either side."""

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer

    @abc.abstractmethod
    def tell(self, words: bytes) -> None:
        """Say something to the other side; it must have been connected."""

    @abc.abstractmethod
    def heard(self) -> list[bytes]:
        """What the other side has said since the last call, in order."""

    def wait(self, commands: int) -> None:
        """Until something was said, here or by the conductor on the descriptor `commands`, or need be looked at."""
        select.select([commands], [], [])


class Source(End):
    """The side that writes."""

    has_notice = False  # whether what `begin` is given as notice reaches the sink behind the bytes
    # Between two questions to a library that says nothing by itself. Over TCP kernel and threads want the cores that
    # asking without a pause would take from them, over CMA asking is what makes progress: each was tried both ways.
    pause_s = 0.0
    introduction = ""  # what the sink must be told of this source, where it must be told

    @abc.abstractmethod
    def connect(self, address: Address) -> None:
        """Get ready to write into the sink that has this address."""

    @abc.abstractmethod
    def begin(self, chunks: Chunks, notice: bytes = b"") -> Any:
        """Begin to write; what `is_done` is asked about."""

    @abc.abstractmethod
    def is_done(self, write: Any) -> bool:
        """Whether it has landed. RuntimeError: it failed."""

    def prepare(self, chunk_bytes: int) -> None:
        """Whatever can be done before the clock runs, for chunks of this length."""

    def run(self, count: int, chunk_bytes: int, in_flight: int) -> None:
        """Write `count` chunks, slot by slot and round again, that many at a time, until all have landed."""
        slots = self.buffer.length // chunk_bytes
        under_way: deque[Any] = deque()
        for number in range(count):
            if len(under_way) == in_flight:
                self._finish(under_way.popleft())
            slot = number % slots
            under_way.append(self.begin(Chunks((slot,), (slot,), chunk_bytes)))
        while under_way:
            self._finish(under_way.popleft())

    def _finish(self, write: Any) -> None:
        while not self.is_done(write):
            self.rest()

    def rest(self) -> None:
        """Between two questions."""
        if self.pause_s:
            time.sleep(self.pause_s)


class Sink(End):
    """The side that is written to; `address` is what a source needs to know."""

    address: Address

    def meet(self, introduction: str) -> None:
        """Know the source that introduces itself."""
