"""The driver: events are decided one at a time, actions carried out in the same step, deadlines kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import trio

from kvpd.core.events import TimePassed
from kvpd.service.driver import Driver

from .worlds import in_virtual_time


class Script:
    """A core of one line: it answers every event with what `decide` says, and is due at `at`, once."""

    def __init__(self, decide: Callable[[Any], list[Any]]) -> None:
        self.seen: list[tuple[Any, float]] = []
        self.at: float | None = None
        self._decide = decide

    def handle(self, event: Any, *, now: float) -> list[Any]:
        self.seen.append((event, now))
        if isinstance(event, TimePassed):
            self.at = None
        return self._decide(event)

    def next_deadline(self) -> float | None:
        return self.at


def decide_nothing(_: object) -> list[Any]:
    return []


def perform_nothing(_: object) -> None:
    return None


@in_virtual_time
async def test_what_an_action_causes_is_decided_after_the_rest_of_its_step() -> None:
    """No event ever sees half a step: this is why kvpd has no locks."""
    core = Script(lambda event: ["a", "b"] if event == "outer" else [f"of {event}"])
    done: list[str] = []

    def perform(action: str) -> None:
        done.append(action)
        if action == "a":
            driver.feed("inner")
            done.append("after inner was fed")

    driver: Driver[Any, Any] = Driver(core, perform)
    driver.feed("outer")
    assert done == ["a", "after inner was fed", "b", "of inner"]


@in_virtual_time
async def test_the_callback_comes_once_when_all_has_been_carried_out() -> None:
    """What is shown to the outside is never half a step either."""
    core = Script(lambda event: ["a"] if event == 0 else [])
    steps: list[int] = []
    driver: Driver[Any, Any] = Driver(core, lambda _: driver.feed(1))
    driver.on_step(lambda: steps.append(len(core.seen)))
    driver.feed(0)
    assert steps == [2]


@in_virtual_time
async def test_a_stopped_driver_decides_nothing() -> None:
    """What its actions need is being taken down."""
    core = Script(decide_nothing)
    driver: Driver[Any, Any] = Driver(core, perform_nothing)
    driver.stop()
    driver.feed("late")
    assert driver.is_stopped
    assert core.seen == []


@in_virtual_time
async def test_an_error_in_a_step_comes_out_and_the_next_step_runs() -> None:
    """An assertion is our bug and ends the process; it must not look like a driver that is busy for ever."""

    def fail(_: object) -> list[Any]:
        raise AssertionError("a bug")

    core = Script(fail)
    driver: Driver[Any, Any] = Driver(core, perform_nothing)
    for _ in range(2):
        with pytest.raises(AssertionError, match="a bug"):
            driver.feed("event")
    assert len(core.seen) == 2


@in_virtual_time
async def test_the_core_is_woken_when_its_deadline_is_due() -> None:
    """Set before the timer runs, moved while it sleeps, cleared, and set again: each is kept to the moment."""
    core = Script(decide_nothing)
    driver: Driver[Any, Any] = Driver(core, perform_nothing)

    def due(at: float | None) -> None:
        core.at = at
        driver.feed("moved")
        core.seen.clear()

    def woken() -> list[float]:
        times = [now for event, now in core.seen if isinstance(event, TimePassed)]
        core.at = None
        core.seen.clear()
        return times

    async with trio.open_nursery() as nursery:
        due(5.0)
        nursery.start_soon(driver.run_timer)
        await trio.sleep(6.0)
        assert woken() == [5.0]
        due(100.0)
        await trio.sleep(1.0)
        due(9.0)
        await trio.sleep(10.0)
        assert woken() == [9.0]
        due(20.0)
        due(None)
        await trio.sleep(100.0)
        assert woken() == []
        due(trio.current_time())
        await trio.sleep(1.0)
        assert len(woken()) == 1, "what is due already does not wait for anything else"
        nursery.cancel_scope.cancel()


@in_virtual_time
async def test_what_has_arrived_is_heard_before_time_is_judged() -> None:
    """A message that waits in the socket counts before its sender's silence does."""
    core = Script(decide_nothing)
    driver: Driver[Any, Any] = Driver(core, perform_nothing)
    core.at = 3.0
    arrived, messages = trio.open_memory_channel[str](1)

    async def hear() -> None:
        core_message = await messages.receive()
        core.at = 7.0  # the message that was waiting renewed the lease
        driver.feed(core_message)

    async def pump() -> None:
        await trio.sleep(3.0)  # it wakes in the same turn of the loop as the timer
        arrived.send_nowait("heard")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(hear)
        nursery.start_soon(pump)
        nursery.start_soon(driver.run_timer)
        await trio.sleep(5.0)
        assert [event for event, _ in core.seen] == ["heard"]
        nursery.cancel_scope.cancel()


@in_virtual_time
async def test_lag_is_told() -> None:
    """While our own loop stood still we could not hear anybody: the core extends every lease by that."""
    core = Script(decide_nothing)
    clock = [0.0]
    driver: Driver[Any, Any] = Driver(core, perform_nothing, now=lambda: clock[0])
    core.at = 4.0
    async with trio.open_nursery() as nursery:
        nursery.start_soon(driver.run_timer)
        await trio.sleep(1.0)
        clock[0] = 10.0  # by the clock that does not stop in suspend, six seconds too late
        await trio.sleep(3.5)
        assert core.seen == [(TimePassed(lag_s=6.0), 10.0)]
        nursery.cancel_scope.cancel()


@in_virtual_time
async def test_a_standstill_is_told_before_anything_else() -> None:
    """Stopped, suspended or starved: leases ran on meanwhile, and the core must know before it does anything more."""
    core = Script(decide_nothing)
    clock = [0.0]
    driver: Driver[Any, Any] = Driver(
        core, perform_nothing, now=lambda: clock[0], stood_still=lambda gap_s: f"stood still for {gap_s:g} s"
    )
    core.at = 4.0
    driver.feed("early")
    clock[0] = 4.0 + 30.0
    driver.feed("late")
    assert [event for event, _ in core.seen] == ["early", "stood still for 30 s", "late"]


@in_virtual_time
async def test_a_deadline_that_is_a_little_late_is_no_standstill() -> None:
    """A busy moment must not cost every session."""
    core = Script(decide_nothing)
    clock = [0.0]
    driver: Driver[Any, Any] = Driver(core, perform_nothing, now=lambda: clock[0], stood_still=lambda _: "stood still")
    core.at = 4.0
    clock[0] = 4.01
    driver.feed("late")
    assert [event for event, _ in core.seen] == ["late"]
