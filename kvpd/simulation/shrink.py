"""Shrinking: fewer requests and fewer faults, while the same rule is broken.

What is kept is named by its place in the seed's scenario, so that the smallest counterexample has a replay command too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import attrs

from kvpd.simulation.scenario import Scenario
from kvpd.simulation.world import Outcome

T = TypeVar("T")


@attrs.frozen
class Selection:
    """Which requests and faults of a scenario are kept; None: all."""

    requests: tuple[int, ...] | None = None
    faults: tuple[int, ...] | None = None

    def of(self, scenario: Scenario) -> Scenario:
        """The scenario with only these."""
        requests, faults = scenario.requests, scenario.faults
        if self.requests is not None:
            requests = tuple(requests[index] for index in self.requests)
        if self.faults is not None:
            faults = tuple(faults[index] for index in self.faults)
        return attrs.evolve(scenario, requests=requests, faults=faults)


class Shrinker:
    """Makes one failing scenario smaller, in `runs_max` runs at most."""

    def __init__(self, outcome: Outcome, run: Callable[[Scenario], Outcome], *, runs_max: int) -> None:
        assert outcome.failure is not None
        self._scenario = outcome.scenario
        self._rule = outcome.failure.rule
        self._run = run
        self._left = runs_max
        self.best = outcome
        self.selection = Selection(
            tuple(range(len(outcome.scenario.requests))), tuple(range(len(outcome.scenario.faults)))
        )

    def shrink(self) -> Outcome:
        """The smallest failing run found; `selection` says what is left of the scenario."""
        self._leave_out_the_future()
        before = None
        while before != self.selection and self._left > 0:
            before = self.selection
            self._reduce(lambda kept: attrs.evolve(self.selection, requests=kept), self.selection.requests or ())
            self._reduce(lambda kept: attrs.evolve(self.selection, faults=kept), self.selection.faults or ())
        return self.best

    def _leave_out_the_future(self) -> None:
        """What begins after the failure cannot have caused it."""
        assert self.best.failure is not None
        at, scenario = self.best.failure.at, self._scenario
        self._still_fails(
            Selection(
                tuple(index for index, request in enumerate(scenario.requests) if request.at <= at),
                tuple(index for index, fault in enumerate(scenario.faults) if fault.at <= at),
            )
        )

    def _reduce(self, select: Callable[[tuple[int, ...]], Selection], kept: tuple[int, ...]) -> None:
        """Leave out ever smaller parts."""
        if kept and self._still_fails(select(())):
            return
        size = len(kept) // 2
        while size > 0:
            start = 0
            while start < len(kept) and self._left > 0:
                fewer = kept[:start] + kept[start + size :]
                if fewer and self._still_fails(select(fewer)):
                    kept = fewer
                else:
                    start += size
            size //= 2

    def _still_fails(self, selection: Selection) -> bool:
        if self._left <= 0:
            return False
        self._left -= 1
        outcome = self._run(selection.of(self._scenario))
        if outcome.failure is None or outcome.failure.rule != self._rule:
            return False
        self.best, self.selection = outcome, selection
        return True
