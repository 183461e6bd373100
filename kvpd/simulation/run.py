"""Campaigns: many seeds, one after the other or on several processes, until one fails or the budget is spent."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait

import attrs

from kvpd.simulation.coverage import Coverage
from kvpd.simulation.scenario import Scenario
from kvpd.simulation.service import run_service
from kvpd.simulation.shrink import Selection, Shrinker
from kvpd.simulation.workload import draw
from kvpd.simulation.world import Outcome, World

_SEEDS_AT_ONCE = 10  # that a process runs before it reports
_SERVICE_SEEDS_AT_ONCE = 2
_SHRINK_RUNS_MAX = 300


@attrs.define
class Tally:
    """What many runs have come to."""

    seeds: int = 0
    steps: int = 0
    virtual_s: float = 0.0
    requests: int = 0
    finished: int = 0
    bytes_verified: int = 0
    coverage: Coverage = attrs.field(factory=Coverage)
    failed: list[int] = attrs.field(factory=list)  # seeds

    def count(self, outcome: Outcome) -> None:
        """One run more."""
        self.seeds += 1
        self.steps += outcome.steps
        self.virtual_s += outcome.seconds
        self.requests += len(outcome.scenario.requests)
        self.finished += outcome.finished
        self.bytes_verified += outcome.bytes_verified
        self.coverage.add(outcome.coverage)
        if outcome.failure is not None:
            self.failed.append(outcome.scenario.seed)

    def add(self, other: Tally) -> None:
        """Another process's runs too."""
        self.seeds += other.seeds
        self.steps += other.steps
        self.virtual_s += other.virtual_s
        self.requests += other.requests
        self.finished += other.finished
        self.bytes_verified += other.bytes_verified
        self.coverage.add(other.coverage)
        self.failed += other.failed


@attrs.frozen
class Kind:
    """Which worlds to run: of which workload (None: all in turn), and whether over the real service."""

    workload: str | None = None
    service: bool = False

    def scenario(self, seed: int) -> Scenario:
        """The world of this seed."""
        return draw(seed, self.workload)

    def run(self, scenario: Scenario) -> Outcome:
        """One run."""
        return run_service(scenario) if self.service else World(scenario).run()

    def shrink(self, outcome: Outcome, *, runs_max: int = _SHRINK_RUNS_MAX) -> tuple[Outcome, Selection]:
        """The smallest run that fails in the same way, and what it keeps of the seed's scenario."""
        shrinker = Shrinker(outcome, self.run, runs_max=runs_max)
        return shrinker.shrink(), shrinker.selection


def _run_some(kind: Kind, seeds: range) -> Tally:
    tally = Tally()
    for seed in seeds:
        tally.count(kind.run(kind.scenario(seed)))
        if tally.failed:
            break
    return tally


def campaign(
    kind: Kind, seeds: range, *, seconds: float | None, jobs: int, on_progress: Callable[[Tally], None]
) -> Tally:
    """Run these seeds, on `jobs` processes, until one fails or `seconds` have passed."""
    tally = Tally()
    stop_at = None if seconds is None else time.monotonic() + seconds
    for part in _parts(kind, seeds, jobs, stop_at):
        tally.add(part)
        on_progress(tally)
        if tally.failed or (stop_at is not None and time.monotonic() >= stop_at):
            break
    return tally


def _parts(kind: Kind, seeds: range, jobs: int, stop_at: float | None) -> Iterator[Tally]:
    step = _SERVICE_SEEDS_AT_ONCE if kind.service else _SEEDS_AT_ONCE
    slices = (seeds[start : start + step] for start in range(0, len(seeds), step))
    if jobs == 1:
        for some in slices:
            yield _run_some(kind, some)
        return
    # Spawned, so that a worker inherits nothing: a run depends on its seed and on nothing else.
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        running: set[Future[Tally]] = set()
        try:
            for some in slices:
                running.add(pool.submit(_run_some, kind, some))
                if len(running) < 2 * jobs:
                    continue
                done, running = wait(running, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in done)
                if stop_at is not None and time.monotonic() >= stop_at:
                    break
            while running:
                done, running = wait(running, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in done)
        finally:
            for future in running:
                future.cancel()
