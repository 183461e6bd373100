"""Every check can fail: each wrong line that is planted into the cores is found by the simulation, within few seeds.

One plant for each of the ten invariants, each entry of DESIGN section 12 that the cores can meet, and each check that
none of those trips. Not here, because the cores cannot meet it:

- entry 22, a close() that hangs: closing is the service's business; tests/service/test_lifetime.py.
"""

from __future__ import annotations

import pytest

from kvpd.simulation.report import counterexample
from kvpd.simulation.scenario import Scenario
from kvpd.simulation.shrink import Shrinker
from kvpd.simulation.workload import draw
from kvpd.simulation.world import Outcome, World

from .planted_entries import ENTRIES
from .planted_in_place import IN_PLACE
from .planted_invariants import INVARIANTS, OTHERS
from .planting import Plant

_SEEDS_MAX = 40
_SHRINK_RUNS = 40
_PLANTS = [*INVARIANTS, *ENTRIES, *OTHERS, *IN_PLACE]


def _run(scenario: Scenario) -> Outcome:
    return World(scenario, audit_every=1).run()


@pytest.mark.parametrize("plant", [pytest.param(plant, id=plant.name) for plant in _PLANTS])
def test_a_planted_fault_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that no wrong line can trip is worth nothing."""
    plant.patch(monkeypatch)
    outcomes = (_run(draw(seed, plant.workload)) for seed in range(_SEEDS_MAX))
    found = next((outcome for outcome in outcomes if outcome.failure is not None), None)
    assert found is not None, f"{_SEEDS_MAX} seeds of {plant.workload} did not find: {plant.what}"
    shrinker = Shrinker(found, _run, runs_max=_SHRINK_RUNS)
    smallest = shrinker.shrink()
    print(plant.what)  # noqa: T201  pytest shows it when it fails, or with -rP
    print(*counterexample(found, smallest, shrinker.selection), sep="\n")  # noqa: T201
    failure = smallest.failure
    assert failure is not None
    assert any(failure.rule.startswith(rule) for rule in plant.rules), f"found by another rule: {failure}"
    assert len(smallest.scenario.requests) <= len(found.scenario.requests)


def test_every_invariant_and_every_entry_that_the_cores_can_meet_is_planted() -> None:
    """The list cannot lose one unnoticed."""
    invariants = {plant.name[: len("invariant-00")] for plant in INVARIANTS}
    assert invariants == {f"invariant-{number:02}" for number in range(1, 11)}
    entries = {plant.name[: len("fault-00")] for plant in ENTRIES}
    assert entries == {f"fault-{number:02}" for number in range(1, 23)} - {"fault-22"}
