"""Deadlines: many can be set, moved and cleared; the earliest is always at hand.

A key has one deadline at most. Moving or clearing one leaves its old entry in the heap, to be skipped when it comes up;
the heap is rebuilt when such dead entries outnumber the living, so it stays within twice their number. Whoever clears
thousands thus pays for it then, and not whoever asks for the earliest long after.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Timers(Generic[K]):
    """A set of keys, each due at a time in seconds."""

    def __init__(self) -> None:
        self._due: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._count = 0  # breaks ties, so that keys are never compared

    def set(self, key: K, at: float) -> None:
        """`key` is due at `at`, whatever was set before."""
        if self._due.get(key) == at:
            return
        self._due[key] = at
        self._count += 1
        heapq.heappush(self._heap, (at, self._count, key))
        self._bound_heap()

    def set_by(self, key: K, at: float) -> None:
        """`key` is due at `at`, or sooner where that was set before: cheaper, for who then looks again anyway."""
        due = self._due.get(key)
        if due is None or due > at:
            self.set(key, at)

    def clear(self, key: K) -> None:
        """`key` is due no more. Harmless when it never was."""
        if self._due.pop(key, None) is not None:
            self._bound_heap()

    def next_at(self) -> float | None:
        """When the earliest is due, or None."""
        while self._heap and self._due.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop_due(self, now: float) -> K | None:
        """The earliest key that is due; it is set no more. One at a time, because acting on it may clear others."""
        at = self.next_at()
        if at is None or at > now:
            return None
        key = heapq.heappop(self._heap)[2]
        del self._due[key]
        return key

    def _bound_heap(self) -> None:
        if len(self._heap) > 64 and len(self._heap) > 2 * len(self._due):
            self._heap = [entry for entry in self._heap if self._due.get(entry[2]) == entry[0]]
            heapq.heapify(self._heap)
