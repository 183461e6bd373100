"""What is done once for everything that happened in a turn of the loop, however much that was.

Messages are what this is for: those of one turn to one peer travel together, because each that leaves alone wakes
ZMQ's thread, the kernel and the peer's loop. Not all of a long turn's, though: the peer can work on the first of them
while the rest is being decided.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import trio

MESSAGES_TOGETHER_MAX: Final = 16
BYTES_TOGETHER_MAX: Final = 1 << 14  # one message alone may be longer


class TurnEnd:
    """One task that calls back in the loop's next turn, when what had woken together has run.

    What a callback asks for is called before the task sleeps again: no callback may ask for itself without end.
    """

    def __init__(self) -> None:
        self._callbacks: dict[Callable[[], None], None] = {}
        self._idle = trio.lowlevel.ParkingLot()

    def call(self, callback: Callable[[], None]) -> None:
        """Call back once, however often that is asked for until then."""
        self._callbacks[callback] = None
        self._idle.unpark()

    async def run(self) -> None:
        """The task."""
        while True:
            while not self._callbacks:
                await self._idle.park()
            callbacks, self._callbacks = self._callbacks, {}
            for callback in callbacks:
                callback()


def together(messages: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    """These messages in groups that travel together, so that a queue of so many groups is one of so many bytes."""
    first = size = 0
    for position, message in enumerate(messages):
        is_full = position - first == MESSAGES_TOGETHER_MAX or size + len(message) > BYTES_TOGETHER_MAX
        if position > first and is_full:
            yield messages[first:position]
            first, size = position, 0
        size += len(message)
    if first < len(messages):
        yield messages[first:]
