"""The exhaustive search: every state that the real cores of a small world can reach, breadth first.

In every state all invariants hold, and from every state a clean ending can be reached without any fault, or the search
says so with the fewest steps that lead to the contrary. What a world is made of: explore_state and explore_world; what
may happen in it: explore_moves; why its states are finite: explore_cores.
"""

from __future__ import annotations

import gc
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import attrs

from kvpd.simulation.explore_acts import Acts
from kvpd.simulation.explore_mirror import Mirror
from kvpd.simulation.explore_moves import Move
from kvpd.simulation.explore_state import State, Violation, WorldConfig
from kvpd.simulation.explore_trace import describe


@attrs.frozen
class Counterexample:
    """What must be impossible, and the fewest steps that lead there."""

    what: str
    steps: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"{number:4} {step}" for number, step in enumerate(self.steps, 1)]
        return "\n".join([*lines, f"     => {self.what}"])


@attrs.frozen
class Result:
    """What a search has found. `is_exhausted`: there are no other states."""

    world: str
    states: int
    transitions: int
    depth: int
    seconds: float
    clean: int  # states in which nothing is left to do
    sender_states: int
    receiver_states: int
    is_exhausted: bool
    counterexample: Counterexample | None

    @property
    def states_per_s(self) -> float:
        """How fast it was."""
        return self.states / self.seconds if self.seconds else 0.0


@attrs.frozen
class Progress:
    """How far a search is."""

    states: int
    waiting: int  # states whose moves were not tried yet
    depth: int
    seconds: float


class Search:
    """One search of one world."""

    def __init__(self, config: WorldConfig) -> None:
        self.world = Acts(config)
        self._mirror = Mirror(self.world) if config.is_symmetric else None
        self._numbers: dict[State, int] = {}
        self._parents = array("q")
        # Steps that happen by themselves, as pairs: what a clean ending may use.
        self._from, self._to = array("q"), array("q")
        self._next: list[State] = []
        self._transitions = 0

    def run(
        self,
        *,
        states_max: int = 1_000_000,
        seconds_max: float = 60.0,
        on_progress: Callable[[Progress], None] = lambda _: None,
    ) -> Result:
        """Search until there is nothing new, something is wrong, or a limit is reached."""
        begin, depth, found = time.perf_counter(), 0, None
        self._reach(self.world.initial(), -1)
        frontier: list[State] = []
        with _quiet_collector() as collected:
            while self._next and found is None:
                frontier, self._next = self._next, []
                for at, state in enumerate(frontier):
                    found = self._expand(state)
                    if found is not None:
                        break
                    if at % 1024 == 0:
                        seconds = time.perf_counter() - begin
                        waiting = len(frontier) - at + len(self._next)
                        on_progress(Progress(len(self._numbers), waiting, depth, seconds))
                        if seconds > seconds_max or len(self._numbers) > states_max:
                            return self._result(begin, depth, None, is_exhausted=False)
                depth += 1
                collected()
            if found is None:
                found = self._wedge()
        return self._result(begin, depth, found, is_exhausted=not self._next)

    def _result(self, begin: float, depth: int, found: Counterexample | None, *, is_exhausted: bool) -> Result:
        return Result(
            self.world.config.name,
            len(self._numbers),
            self._transitions,
            depth,
            time.perf_counter() - begin,
            sum(map(self.world.is_clean, self._numbers)),
            len(self.world.sender_cores.entries),
            len(self.world.receiver_cores.entries),
            is_exhausted,
            found,
        )

    def _expand(self, state: State) -> Counterexample | None:
        """Try every move of a state."""
        here = self._numbers[state]
        natural, faults = self.world.moves(state)
        try:
            is_quiet = True
            for move in natural:
                is_quiet &= not self._try(state, here, move, is_natural=True)
            for move in self.world.ticks(state) if is_quiet else ():
                self._try(state, here, move, is_natural=True)
            for move in faults:
                self._try(state, here, move, is_natural=False)
        except Violation:
            return self._violation(here)
        return None

    def _violation(self, number: int) -> Counterexample:
        """The way to a state, and the move there that must be impossible."""
        steps, state = self._steps_to(number)
        for move in self._all_moves(state):
            try:
                self.world.after(state, move)
            except Violation as exc:
                return Counterexample(str(exc), (*steps, describe(self.world, state, move)))
        raise AssertionError("the violation did not come again")

    def _try(self, state: State, here: int, move: Move, *, is_natural: bool) -> bool:
        """Whether the move leads anywhere else."""
        self._transitions += 1
        there = self._reach(self.world.after(state, move), here)
        if is_natural and there != here:
            self._from.append(here)
            self._to.append(there)
        return there != here

    def _reach(self, state: State, parent: int) -> int:
        if self._mirror is not None:
            state = self._mirror.least(state)
        number = self._numbers.setdefault(state, len(self._parents))
        if number == len(self._parents):
            self._parents.append(parent)
            self._next.append(state)
        return number

    # -------------------------------------------------------------- a clean ending

    def _wedge(self) -> Counterexample | None:
        """A state from which no clean ending can be reached without a fault; the one with the fewest steps to it."""
        count = len(self._parents)
        first, following = array("q", [-1]) * count, array("q", [-1]) * len(self._from)
        for edge, there in enumerate(self._to):
            following[edge], first[there] = first[there], edge
        ends_well = bytearray(count)
        waiting = [number for number, state in enumerate(self._numbers) if self.world.is_clean(state)]
        for number in waiting:
            ends_well[number] = 1
        while waiting:
            edge = first[waiting.pop()]
            while edge >= 0:
                before = self._from[edge]
                if not ends_well[before]:
                    ends_well[before] = 1
                    waiting.append(before)
                edge = following[edge]
        number = ends_well.find(0)
        if number < 0:
            return None
        steps, state = self._steps_to(number)
        return Counterexample(f"no clean ending can be reached any more: {self.world.leftovers(state)}", tuple(steps))

    def _steps_to(self, number: int) -> tuple[list[str], State]:
        """How a state was reached, in words, and the state as it is on that way (its mirror image may be numbered)."""
        path = [number]
        while self._parents[path[-1]] >= 0:
            path.append(self._parents[path[-1]])
        path.reverse()
        state, steps = self.world.initial(), []
        for number in path[1:]:
            move = next(m for m in self._all_moves(state) if self._leads_to(state, m, number))
            steps.append(describe(self.world, state, move))
            state = self.world.after(state, move)
        return steps, state

    def _all_moves(self, state: State) -> Iterator[Move]:
        natural, faults = self.world.moves(state)
        yield from natural
        yield from self.world.ticks(state)
        yield from faults

    def _leads_to(self, state: State, move: Move, number: int) -> bool:
        try:
            after = self.world.after(state, move)
        except Violation:
            return False
        return self._numbers.get(after if self._mirror is None else self._mirror.least(after)) == number


@contextmanager
def _quiet_collector() -> Iterator[Callable[[], None]]:
    """States live as long as the search: the collector need not look at them again and again."""
    gc.collect()
    try:
        yield gc.freeze
    finally:
        gc.unfreeze()


def search(
    config: WorldConfig,
    *,
    states_max: int = 1_000_000,
    seconds_max: float = 60.0,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> Result:
    """Every state of a world, or as many as the limits allow."""
    return Search(config).run(states_max=states_max, seconds_max=seconds_max, on_progress=on_progress)
