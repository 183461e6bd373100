"""Virtual time: what happens when, and to which process.

Everything in a simulated world is a call at a moment. Calls of one moment come in the order in which they were asked
for, so that a run depends on its seed and on nothing else. A stopped process's calls wait until it is continued, a
dead one's never come.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

import attrs

Call = Callable[[], None]


class Schedule:
    """The clock and the calls to come. `now` in seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self._calls: list[tuple[float, int, Call]] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self._calls)

    def at(self, when: float, call: Call) -> None:
        """Call at `when`, or now if that is past."""
        self._count += 1
        heapq.heappush(self._calls, (max(when, self.now), self._count, call))

    def after(self, delay_s: float, call: Call) -> None:
        """Call `delay_s` from now."""
        self._count += 1
        heapq.heappush(self._calls, (self.now + delay_s, self._count, call))

    def run_until(self, until: float) -> None:
        """Make every call that is due by `until`, the latest one then being the present."""
        calls = self._calls
        while calls and calls[0][0] <= until:
            self.now, _, call = heapq.heappop(calls)
            call()
        self.now = until


@attrs.define(eq=False)
class Host:
    """A machine: its boot, and until when it is suspended (nothing of it runs or moves meanwhile)."""

    boot_id: str
    suspended_until: float = 0.0


class Process:
    """A process of a host: it runs, is stopped, or is dead."""

    def __init__(self, schedule: Schedule, host: Host, name: str, pid: int) -> None:
        self.schedule = schedule
        self.host = host
        self.name = name
        self.pid = pid
        self.started_at = schedule.now
        self.is_alive = True
        self.stopped_since: float | None = None
        self.stood_still_s = 0.0  # in all
        self.on_continued: Callable[[float], None] | None = None  # called with how long it stood still
        self._stops = 0
        self._deferred: list[tuple[bool, Call]] = []
        self._on_death: dict[int, Call] = {}
        self._watchers = 0

    def __repr__(self) -> str:
        return f"<{self.name}>"

    def soon(self, delay_s: float, call: Call) -> None:
        """Call in this process, `delay_s` from now."""
        self.schedule.after(delay_s, lambda: self.run(call))

    def run(self, call: Call, *, is_timer: bool = False) -> None:
        """Call in this process now, or as soon as it runs again."""
        if not self.is_alive:
            return
        if self.stopped_since is not None:
            self._deferred.append((is_timer, call))
        else:
            call()

    def stop(self) -> None:
        """SIGSTOP. Stops nest, because a stopped process's host may be suspended too."""
        self._stops += 1
        if self.stopped_since is None:
            self.stopped_since = self.schedule.now

    def proceed(self, *, timers_first: bool = False) -> None:
        """SIGCONT: what came meanwhile is met now, in order, but for the timers, which come first or last."""
        self._stops -= 1
        if self._stops > 0 or not self.is_alive:
            return
        assert self.stopped_since is not None
        gap_s = self.schedule.now - self.stopped_since
        self.stopped_since = None
        self.stood_still_s += gap_s
        deferred, self._deferred = self._deferred, []
        timers = [call for is_timer, call in deferred if is_timer]
        others = [call for is_timer, call in deferred if not is_timer]
        if self.on_continued is not None:
            self.on_continued(gap_s)
        for call in timers + others if timers_first else others + timers:
            if self.is_alive:
                call()

    def kill(self) -> None:
        """SIGKILL."""
        if not self.is_alive:
            return
        self.is_alive = False
        self._deferred.clear()
        for call in list(self._on_death.values()):
            call()
        self._on_death.clear()

    def watch(self, call: Call) -> int:
        """Call at its death, which must not have come yet: the number to unwatch by."""
        assert self.is_alive
        self._watchers += 1
        self._on_death[self._watchers] = call
        return self._watchers

    def unwatch(self, number: int) -> None:
        """Do not call at its death."""
        self._on_death.pop(number, None)
