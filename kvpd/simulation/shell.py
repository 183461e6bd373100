"""What carries out a core's actions in a simulated process: the service's driver, on virtual time.

Exactly as kvpd/service does it: what an action causes at once is a new event, handled after the current one, and one
timer wakes the core when a deadline is due, late where the process stood still.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from kvpd.core.events import TimePassed
from kvpd.simulation.schedule import Process

E = TypeVar("E")
A = TypeVar("A")
E_contra = TypeVar("E_contra", contravariant=True)
A_contra = TypeVar("A_contra", contravariant=True)
A_co = TypeVar("A_co", covariant=True)


class Core(Protocol[E_contra, A_co]):
    """What a shell drives."""

    def handle(self, event: E_contra, *, now: float) -> Sequence[A_co]: ...

    def next_deadline(self) -> float | None: ...


class Observer(Protocol[E_contra, A_contra]):
    """Who sees every step: the checks, the trace and the count."""

    def before(self, event: E_contra) -> None: ...

    def after(self, event: E_contra, actions: Sequence[A_contra]) -> None: ...


class Shell(Generic[E, A]):
    """One core in its process. A subclass performs the actions."""

    def __init__(self, process: Process, core: Core[E | TimePassed, A]) -> None:
        self.process = process
        self.schedule = process.schedule
        self.observers: list[Observer[E | TimePassed, A]] = []
        self._core = core
        self._events: deque[E | TimePassed] = deque()
        self._is_running = False
        self._wakes_at: float | None = None

    def perform(self, action: A) -> None:
        """Carry out one action."""
        raise NotImplementedError

    def feed(self, event: E | TimePassed) -> None:
        """Have the core decide about an event, and act."""
        self._events.append(event)
        if self._is_running:
            return
        self._is_running = True
        while self._events:
            event = self._events.popleft()
            for observer in self.observers:
                observer.before(event)
            actions = self._core.handle(event, now=self.schedule.now)
            for observer in self.observers:
                observer.after(event, actions)
            for action in actions:
                self.perform(action)
        self._is_running = False
        self._arm()

    def _arm(self) -> None:
        at = self._core.next_deadline()
        if at is not None and (self._wakes_at is None or at < self._wakes_at):
            self._wakes_at = at
            self.schedule.at(at, lambda: self.process.run(lambda: self._wake(at), is_timer=True))

    def _wake(self, planned: float) -> None:
        if planned != self._wakes_at:
            return  # an earlier one has been set since
        self._wakes_at = None
        at, now = self._core.next_deadline(), self.schedule.now
        if at is not None and at <= now:
            self.feed(TimePassed(lag_s=now - at))
        else:
            self._arm()
