"""What a wrong line for the search is, and the search that must find it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import attrs
import pytest

from kvpd.simulation.explore import Counterexample, search
from kvpd.simulation.explore_state import WorldConfig

Patch = Callable[[pytest.MonkeyPatch], None]


def with_faults(world: WorldConfig, **budget: int) -> WorldConfig:
    """A world in which these may happen."""
    return attrs.evolve(world, budget=budget)


def find(world: WorldConfig) -> Counterexample:
    """What the search finds wrong in a world; it is printed by a test that fails."""
    result = search(world, states_max=200_000, seconds_max=100.0)
    assert result.counterexample is not None, f"{result.states} states, and nothing was found"
    sys.stdout.write(f"{result.counterexample}\n")
    return result.counterexample


@attrs.frozen
class Planted:
    """A wrong line, the world that shows it, and what is found there."""

    name: str
    world: WorldConfig
    patch: Patch
    what: str


def wrap(patch: pytest.MonkeyPatch, owner: type, name: str, new: Callable[..., Any]) -> None:
    """`new` gets the method that was there before, then its arguments."""
    old = getattr(owner, name)
    patch.setattr(owner, name, lambda *args, **kwargs: new(old, *args, **kwargs))
