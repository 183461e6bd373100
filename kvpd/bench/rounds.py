"""Rounds: whatever is compared takes turns, so that a machine that slows down slows all of it.

The median stands for the rounds, and the least and the greatest beside it say how far to trust it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Self, TypeVar

import attrs

T = TypeVar("T")


@attrs.frozen
class Measured:
    """One number, measured several times."""

    median: float
    low: float
    high: float
    values: tuple[float, ...]  # by round

    @classmethod
    def of(cls, values: Iterable[float]) -> Self:
        """From the rounds' values, of which there must be one at least."""
        rounds = tuple(values)
        return cls(statistics.median(rounds), min(rounds), max(rounds), rounds)

    def times(self, factor: float) -> Measured:
        """In another unit."""
        return Measured.of(value * factor for value in self.values)

    def ratio_to(self, other: Measured) -> Measured:
        """This divided by the other, round by round: what was measured together is compared."""
        return Measured.of(mine / theirs for mine, theirs in zip(self.values, other.values, strict=True))


def alternate(rounds: int, things: Mapping[str, Callable[[], T]]) -> dict[str, list[T]]:
    """Call everything once per round, in turns, every second round backwards; what each gave, by round."""
    results: dict[str, list[T]] = {name: [] for name in things}
    for number in range(rounds):
        for name in in_turn(number, things):
            results[name].append(things[name]())
    return results


def in_turn(number: int, things: Iterable[T]) -> list[T]:
    """The order of things in a round: every second one is backwards."""
    order = list(things)
    return order if number % 2 == 0 else order[::-1]


def percentile(values: Sequence[float], percent: float) -> float:
    """The least value that so many percent of all do not exceed. `values` must not be empty."""
    assert values
    rank = math.ceil(len(values) * percent / 100)
    return sorted(values)[max(rank, 1) - 1]
