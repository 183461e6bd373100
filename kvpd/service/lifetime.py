"""What a receiver and a sender have in common: entering, leaving, draining, and the way to the core."""

from __future__ import annotations

import abc
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import trio

from kvpd.core.events import DrainExpired, DrainRequested, TimePassed
from kvpd.metrics import Health
from kvpd.service.driver import Driver
from kvpd.service.turns import TurnEnd

E = TypeVar("E")


class Lifetime(abc.ABC, Generic[E]):
    """A core and the tasks around it, alive while the context is entered."""

    def __init__(self, driver: Driver[E | DrainRequested | DrainExpired, Any], health: Health) -> None:
        self._driver = driver
        self._driver.on_step(self._after_step)
        self.health = health
        self._idle = trio.Event()
        self._is_draining = False
        self._turn_end = TurnEnd()
        self._running: AbstractAsyncContextManager[None] | None = None

    @abc.abstractmethod
    def _run(self) -> AbstractAsyncContextManager[None]:
        """Everything that lives while the context is entered."""

    @property
    @abc.abstractmethod
    def is_idle(self) -> bool:
        """Whether nothing is left to wait for, before it is closed."""

    async def __aenter__(self) -> Self:
        self._running = self._run()
        await self._running.__aenter__()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._running is not None
        # What the caller raises is none of our tasks' business: their nurseries would wrap it in a group.
        await self._running.__aexit__(None, None, None)

    @property
    def runs(self) -> bool:
        """Whether it was entered and is not being left."""
        return self._running is not None and not self._driver.is_stopped

    def feed(self, event: E | TimePassed | DrainRequested | DrainExpired) -> None:
        """Have the core decide about an event, and act."""
        self._driver.feed(event)

    def at_turn_end(self, callback: Callable[[], None]) -> None:
        """Call back once, when what woke together with whoever asks has run."""
        self._turn_end.call(callback)

    def _after_step(self) -> None:
        if self._is_draining and self.is_idle:
            self._idle.set()

    async def _keep_time(self) -> None:
        with self.health.task("keep_time"):
            await self._driver.run_timer()

    async def drain(self, timeout_s: float) -> bool:
        """Take no new work, let what runs finish within `timeout_s`, cancel the rest. Whether all of it finished."""
        self.health.mark_draining()
        self._is_draining = True
        self.feed(DrainRequested())
        with trio.move_on_after(timeout_s) as scope:
            await self.wait_idle()
        if scope.cancelled_caught:
            self.feed(DrainExpired())
        return not scope.cancelled_caught

    async def wait_idle(self) -> None:
        """Until nothing runs any more; only while draining."""
        await self._idle.wait()
