"""The cores alone: a cost is that of a number of live transfers only if that number stays."""

from __future__ import annotations

import pytest

from kvpd.bench.cores import WORLDS, QueueWorld, ReceiverWorld, SenderWorld, measure

POPULATION = 10
SLOTS = 64


def test_a_receivers_population_outlives_the_transfers_in_the_foreground() -> None:
    """Half of it is written and not read, the other half holds a slot that is not written."""
    world = ReceiverWorld(POPULATION, SLOTS)
    before = world.core.counts
    assert (before.ready, before.writing, before.free) == (POPULATION / 2, POPULATION / 2, SLOTS - POPULATION)
    for _ in range(3):
        world.live()
        world.core.audit()
    assert world.core.counts == before


def test_a_queue_stays_as_long_as_it_was() -> None:
    """One leaves it at its head, and one joins it at its end."""
    world = QueueWorld(POPULATION, SLOTS)
    for _ in range(3):
        assert world.core.queue_depth == POPULATION
        world.live()
        world.core.audit()


def test_a_senders_population_outlives_the_transfers_in_the_foreground() -> None:
    """None of them is timed out, and no staging slot is kept."""
    world = SenderWorld(POPULATION, SLOTS)
    for _ in range(20):
        # The first was opened to open the session, and waits for its engine.
        assert world.core.transfer_count == POPULATION + 1
        assert all(staging.free_count == staging.total_slots for staging in world.core.staging)
        world.live()
        world.core.audit()


@pytest.mark.parametrize("make", WORLDS)
def test_only_the_foreground_is_measured(make: type[ReceiverWorld | QueueWorld | SenderWorld]) -> None:
    """The making of a population is not what an event costs while it is there."""
    world = make(POPULATION, SLOTS)
    assert not world.costs
    world.live()
    assert world.costs


def test_every_event_is_measured_for_every_population() -> None:
    """Else a ratio would compare different things."""
    steps: list[str] = []
    costs = measure((1, 4), rounds=2, lives=1, progress=steps.append)
    assert {cost.core for cost in costs} == {"receiver", "queue", "sender"}
    assert all(cost.seconds.keys() == {1, 4} for cost in costs)
    assert all(seconds > 0 for cost in costs for seconds in cost.seconds.values())
    assert len(steps) == 2 * len(WORLDS)
