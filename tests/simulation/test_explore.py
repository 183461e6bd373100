"""The exhaustive search itself: small worlds are exhausted, equal states meet, and it sees what it must see."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from click.testing import CliRunner

from kvpd.core.events import TimePassed
from kvpd.core.pool import SlotPool
from kvpd.core.receiver.peers import Peers as ReceiverPeers
from kvpd.simulation.explore import Progress, Search, search
from kvpd.simulation.explore_acts import Acts
from kvpd.simulation.explore_command import main
from kvpd.simulation.explore_cores import FAR, Copier, freeze
from kvpd.simulation.explore_mirror import Mirror
from kvpd.simulation.explore_state import FAULTS, State, WorldConfig
from kvpd.simulation.explore_worlds import WORLDS, request

SMALL = [
    *("grow-1", "grow-2", "staging", "same-chunk", "shared-label", "cut-off", "loss", "checksums", "stalled"),
    *("ranks-two", "ranks-cut-off"),
    *(name for name, world in WORLDS.items() if not world.is_large and "+" in name and name.split("+")[0] == "cancel"),
]


@pytest.mark.parametrize("name", SMALL)
def test_a_small_world_is_exhausted_and_holds(name: str) -> None:
    """Every state of it was seen, every invariant held there, and a clean ending was in reach."""
    result = search(WORLDS[name], seconds_max=100.0)
    assert result.counterexample is None, str(result.counterexample)
    assert result.is_exhausted
    assert 0 < result.clean < result.states <= result.transitions + 1


def test_every_two_faults_meet_in_some_world() -> None:
    """What goes wrong alone is easy; it is the second fault on top of the first that nobody thought of."""
    met = {frozenset(world.budget) for world in WORLDS.values() if not world.is_large}
    assert {frozenset({first, second}) for first in FAULTS for second in FAULTS} <= met


def walk(world: Acts, states_max: int) -> list[State]:
    """The first states of a world, breadth first."""
    states = {world.initial(): None}
    for state in (waiting := list(states)):
        natural, faults = world.moves(state)
        for move in [*natural, *world.ticks(state), *faults]:
            after = world.after(state, move)
            if after not in states and len(states) < states_max:
                states[after] = None
                waiting.append(after)
    return waiting


def test_a_copy_of_a_core_is_the_same_state_and_shares_nothing_that_changes() -> None:
    """What is computed on a copy must not change the state that it came from."""
    world = Acts(WORLDS["grow-2"])
    walk(world, 2000)
    for cores in (world.sender_cores, world.receiver_cores):
        before = [freeze(entry.core) for entry in cores.entries]
        assert [cores.add(Copier().copy(entry.core)) for entry in cores.entries] == list(range(len(before)))
        for number in range(len(cores.entries)):
            for key in cores.entries[number].timers:
                cores.step(number, TimePassed(), timer=key, now=FAR)
        assert [freeze(entry.core) for entry in cores.entries[: len(before)]] == before


def test_equal_senders_behave_equally_when_they_are_exchanged() -> None:
    """Of two mirror images one is searched: sound only if whatever follows one has its image after the other."""
    world = Acts(WORLDS["shared-key"])
    mirror = Mirror(world)
    for state in walk(world, 1500):
        image = mirror.image(state)
        assert mirror.image(image) == state
        assert successors(world, image) == {mirror.image(after) for after in successors(world, state)}


def successors(world: Acts, state: State) -> set[State]:
    """What may follow."""
    natural, faults = world.moves(state)
    return {world.after(state, move) for move in [*natural, *world.ticks(state), *faults]}


def test_mirror_images_are_searched_once() -> None:
    """Merging halves a world of two equal senders, but for the states that are their own image."""
    merged = search(WORLDS["loss"])
    apart = search(attrs.evolve(WORLDS["loss"], is_symmetric=False))
    assert merged.counterexample is None
    assert apart.counterexample is None
    assert apart.states / 2 <= merged.states < apart.states * 0.51


def test_senders_that_differ_are_not_merged() -> None:
    """A merge of states that differ would leave some of them out."""
    world = WorldConfig("uneven", (request(0, 0, 2), request(1, 0, 1)), is_symmetric=True)
    with pytest.raises(AssertionError, match="differ"):
        Search(world)


def test_a_search_ends_at_its_limits_and_says_so() -> None:
    """A search that stopped half way must not look like one that found nothing."""
    seen: list[Progress] = []
    result = search(WORLDS["grow-2"], states_max=100, on_progress=seen.append)
    assert not result.is_exhausted
    assert result.counterexample is None
    assert seen
    assert seen[-1].waiting > 0


def test_a_counterexample_is_the_shortest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody reads sixty steps: a handshake, a slot, a put on its way, its slot taken back, and the put lands."""
    old: Any = SlotPool.let_go
    monkeypatch.setattr(SlotPool, "let_go", lambda self, index, *, fenced: old(self, index, fenced=True))
    found = search(WorldConfig("one", (request(0, 0, 1),), slots=1, budget={"cancel_claim": 1})).counterexample
    assert found is not None
    assert found.what == "a late write of transfer (0, 1, 1) lands in slot 0, free"
    assert len(found.steps) == 12
    assert found.steps[-3:] == (
        "engine of s0: fills a piece of s0.0",
        "decode engine: cancels s0.0",
        "s0: transfer 1: s0.0.0 lands in slot 0",
    )


def test_a_timeout_does_not_hide_a_wedge(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deadlines that end a request are faults here: what only they can end is stuck."""
    monkeypatch.setattr(ReceiverPeers, "_repeat_due", lambda self, session_no, now: None)
    found = search(WORLDS["stalled"]).counterexample
    assert found is not None
    assert found.what.startswith("no clean ending")


def test_the_command_lists_and_searches() -> None:
    """Its exit status is what CI looks at."""
    listing = CliRunner().invoke(main, ["--list"])
    assert listing.exit_code == 0
    assert "cut-off-here" in listing.output
    searched = CliRunner().invoke(main, ["--world", "grow-1"])
    assert searched.exit_code == 0, searched.output
    assert "holds" in searched.output


def test_the_command_prints_a_counterexample_and_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Readable steps, and exit status 1."""
    monkeypatch.setattr(ReceiverPeers, "_repeat_due", lambda self, session_no, now: None)
    result = CliRunner().invoke(main, ["--world", "stalled"])
    assert result.exit_code == 1
    assert "   1 engine of s" in result.output
    assert "=> no clean ending can be reached any more" in result.output
