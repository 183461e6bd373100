"""What the samples say: medians with quartiles, and what is taken within a round before its median is."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Self

import attrs

from ttft_app.measuring import Sample
from ttft_app.systems import SINGLE, System


@attrs.frozen
class Spread:
    """A median and the quartiles around it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Self:
        """From one value at least."""
        known = sorted(values)
        if len(known) == 1:
            return cls(known[0], known[0], known[0])
        low, median, high = statistics.quantiles(known, n=4, method="inclusive")
        return cls(median, low, high)

    def text(self, digits: int = 0) -> str:
        """For a cell."""
        return f"{self.median:.{digits}f} ({self.low:.{digits}f} to {self.high:.{digits}f})"


class Figures:
    """All samples of a run, by system, length and round. Results are in milliseconds, ratios without a unit."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self._samples = {(one.system, one.length, one.round): one for one in samples}
        self.lengths = sorted({one.length for one in samples})
        self.rounds = sorted({one.round for one in samples})

    def first(self, system: System, length: int) -> Spread:
        """The time to first token."""
        return self._spread(lambda number: 1e3 * self._first(system, length, number))

    def alone(self, system: System, length: int) -> Spread:
        """The time to first token of its prefill server alone."""
        return self._spread(lambda number: 1e3 * self._samples[system.name, length, number].alone_s)

    def added(self, system: System, length: int) -> Spread:
        """How much longer than its prefill server alone, for the same prompt in the same turn."""
        return self._spread(lambda number: 1e3 * self._added(system, length, number))

    def over_single(self, system: System, length: int) -> Spread:
        """How much longer than the single server's in the same round."""
        return self._spread(
            lambda number: 1e3 * (self._first(system, length, number) - self._first(SINGLE, length, number))
        )

    def added_ratio(self, system: System, other: System, length: int) -> float:
        """What a system's median addition is to another's."""
        return self.added(system, length).median / self.added(other, length).median

    def wins(self, system: System, other: System, length: int) -> int:
        """In how many rounds the system added less than the other."""
        return sum(self._added(system, length, number) < self._added(other, length, number) for number in self.rounds)

    def stage(self, system: System, length: int, name: str) -> Spread:
        """One stage of its requests."""
        return self._spread(lambda number: 1e3 * self._samples[system.name, length, number].stages[name])

    def _spread(self, value: Callable[[int], float]) -> Spread:
        return Spread.of(map(value, self.rounds))

    def _first(self, system: System, length: int, number: int) -> float:
        return self._samples[system.name, length, number].first_s

    def _added(self, system: System, length: int, number: int) -> float:
        one = self._samples[system.name, length, number]
        return one.first_s - one.alone_s
