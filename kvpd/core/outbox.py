"""Messages that are repeated until they are answered.

Control channels may lose a message when a connection breaks; nothing here believes that one has arrived until its
answer names it. A repeat is byte for byte the message that was first sent, so that acting on it twice is acting once.
A message that is known to have arrived, and whose answer has to wait, is held back: it is repeated only if its answer
turns out to be lost. So thousands of them cost nothing.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import attrs

from kvpd.core.messages import PeerMessage
from kvpd.core.timers import Timers

M = TypeVar("M", bound=PeerMessage)


@attrs.define
class Sent(Generic[M]):
    """One unanswered message. `at` is when it was first sent: what an answer proves is no younger than that."""

    message: M
    at: float


class Outbox(Generic[M]):
    """One peer's unanswered messages, by message id."""

    def __init__(self, repeat_s: float) -> None:
        self._repeat_s = repeat_s
        self._sent: dict[int, Sent[M]] = {}
        self._timers: Timers[int] = Timers()
        self._held_back: dict[int, None] = {}  # message ids, in the order in which they began to wait

    def add(self, message: M, *, now: float) -> None:
        """`message` has just been sent."""
        self._sent[message.message_id] = Sent(message, now)
        self._timers.set(message.message_id, now + self._repeat_s)

    def answer(self, message_id: int) -> Sent[M] | None:
        """`message_id` has been answered: repeat it no more. None if it was answered before."""
        self._timers.clear(message_id)
        self._held_back.pop(message_id, None)
        return self._sent.pop(message_id, None)

    def unanswered(self, message_id: int) -> Sent[M] | None:
        """The message, if it has not been answered."""
        return self._sent.get(message_id)

    def hold_back(self, message_id: int) -> None:
        """`message_id`, unanswered, has arrived, and its answer will come: repeat it no more until told otherwise."""
        self._timers.clear(message_id)
        self._held_back[message_id] = None

    def resume(self, message_id: int, *, now: float) -> None:
        """Repeat `message_id` again, if it was held back: its answer is overdue from now on."""
        if message_id in self._held_back:
            del self._held_back[message_id]
            self._timers.set(message_id, now + self._repeat_s)

    def repeat_held_back(self, *, now: float) -> None:
        """Answers were lost, nobody knows which: repeat now whatever was held back."""
        for message_id in self._held_back:
            self._timers.set(message_id, now)
        self._held_back.clear()

    def next_at(self) -> float | None:
        """When the next repeat is due."""
        return self._timers.next_at()

    def due(self, now: float) -> list[M]:
        """The messages to send again now."""
        again = []
        while (message_id := self._timers.pop_due(now)) is not None:
            self._timers.set(message_id, now + self._repeat_s)
            again.append(self._sent[message_id].message)
        return again

    def oldest_at(self) -> float | None:
        """When the oldest unanswered message was first sent."""
        return next(iter(self._sent.values())).at if self._sent else None
