"""The driver: it hands events to a core and carries out what the core decides, in the same step.

No await lies between deciding and acting, so no task ever sees half a step and kvpd needs no locks. What an action
causes at once is a new event, handled after the current one. One timer task wakes the core when a deadline is due.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final, Generic, Protocol, TypeVar

import trio

from kvpd.core.events import TimePassed

# A loop that is this late is no busy loop.
_STANDSTILL_S: Final = 0.5

E_contra = TypeVar("E_contra", contravariant=True)
A_co = TypeVar("A_co", covariant=True)
E = TypeVar("E")
A = TypeVar("A")


class Core(Protocol[E_contra, A_co]):
    """What a driver drives."""

    def handle(self, event: E_contra, *, now: float) -> Iterable[A_co]: ...

    def next_deadline(self) -> float | None: ...


class Driver(Generic[E, A]):
    """One core, its clock and its timer."""

    def __init__(
        self,
        core: Core[E | TimePassed, A],
        perform: Callable[[A], None],
        *,
        now: Callable[[], float] | None = None,
        stood_still: Callable[[float], E] | None = None,
    ) -> None:
        self._core = core
        self._perform = perform
        self._now = now or trio.current_time
        # Makes the event that the core must hear before any other when the loop did not run for so many seconds.
        self._stood_still = stood_still
        self._events: deque[E | TimePassed] = deque()
        self._is_running = False
        self._is_stopped = False
        self._sleep = trio.CancelScope()
        self._wakes_at = math.inf  # when the timer does, as `now` tells the time
        self._due_at: float | None = None  # the core's next deadline, which only its steps change
        self._after_step: Callable[[], None] = lambda: None

    @property
    def is_stopped(self) -> bool:
        """Whether events are ignored by now."""
        return self._is_stopped

    def on_step(self, callback: Callable[[], None]) -> None:
        """Call back after every step, when all that followed from an event has been carried out."""
        self._after_step = callback

    def feed(self, event: E | TimePassed) -> None:
        """Decide about an event and act. From within an action: as soon as that has been carried out."""
        if self._is_stopped:
            return
        self._events.append(event)
        if self._is_running:
            return
        self._is_running = True
        try:
            now = self._now()
            self._notice_standstill(now)
            while self._events:
                for action in self._core.handle(self._events.popleft(), now=now):
                    self._perform(action)
        finally:
            self._is_running = False
        self._after_step()
        self._due_at = self._core.next_deadline()
        if self._due_at is not None and self._due_at < self._wakes_at:
            self._arm()  # a timer that wakes too early looks again; moving it at every step would cost more

    def _notice_standstill(self, now: float) -> None:
        """A deadline that is long overdue says that the loop stood still: stopped, suspended or starved."""
        if self._stood_still is None:
            return
        if self._due_at is not None and now - self._due_at > _STANDSTILL_S:
            self._events.appendleft(self._stood_still(now - self._due_at))

    def stop(self) -> None:
        """Decide and do nothing from now on: what an action needs is being taken down."""
        self._is_stopped = True

    def _arm(self) -> None:
        """Have the timer wake when the next deadline is due."""
        self._wakes_at = math.inf if self._due_at is None else self._due_at
        self._sleep.deadline = trio.current_time() + max(0.0, self._wakes_at - self._now())

    async def run_timer(self) -> None:
        """Feed TimePassed whenever a deadline is due, once what has already arrived was heard."""
        self._due_at = self._core.next_deadline()
        while True:
            with trio.CancelScope() as self._sleep:
                self._arm()
                await trio.sleep_forever()
            # Two turns of the loop: in the first the sockets' pumps run, in the second those whom they woke.
            await trio.lowlevel.checkpoint()
            await trio.lowlevel.checkpoint()
            now = self._now()
            if self._due_at is not None and self._due_at <= now:
                self.feed(TimePassed(lag_s=now - self._due_at))
