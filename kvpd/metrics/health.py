"""Whether a daemon lives and whether it can serve: asked from other threads than the loop's.

A daemon lives when its loop answers; peers have no say in it. It can serve once it has said so, as long as every
long-lived task runs and no drain has begun.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Final

import trio

LOOP_TIMEOUT_S: Final = 1.0


class Health:
    """The long-lived tasks and where the daemon is in its life. Every method may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tasks: dict[str, bool] = {}
        self._conditions: dict[str, tuple[bool, str]] = {}
        self._ready = False
        self._draining = False
        self._token: trio.lowlevel.TrioToken | None = None

    def attach_loop(self, token: trio.lowlevel.TrioToken) -> None:
        """Name the loop that must answer: `trio.lowlevel.current_trio_token()`."""
        self._token = token

    @contextlib.contextmanager
    def task(self, name: str) -> Iterator[None]:
        """The body of a long-lived task, whose end, however it comes, ends readiness."""
        self.task_started(name)
        try:
            yield
        finally:
            self.task_ended(name)

    def task_started(self, name: str) -> None:
        """A task that must run for ever has begun."""
        with self._lock:
            self._tasks[name] = True

    def task_ended(self, name: str) -> None:
        """It has ended."""
        with self._lock:
            self._tasks[name] = False

    def set_condition(self, name: str, holds: bool, text: str) -> None:
        """Something else that readiness depends on: whether it holds, and in words how it stands."""
        with self._lock:
            self._conditions[name] = (holds, text)

    def mark_ready(self) -> None:
        """Everything is bound and running."""
        self._ready = True

    def mark_draining(self) -> None:
        """No new work is taken any more."""
        self._draining = True

    @property
    def ready(self) -> bool:
        """Whether it can serve, its loop's answer aside."""
        return all(holds for _, holds, _ in self.conditions())

    def loop_answers(self, timeout_s: float = LOOP_TIMEOUT_S) -> bool:
        """Whether the loop runs a call within `timeout_s` seconds. Blocks: not for the loop's own thread."""
        token = self._token
        if token is None:
            return False
        answered = threading.Event()
        try:
            token.run_sync_soon(answered.set)
        except trio.RunFinishedError:
            return False
        return answered.wait(timeout_s)

    def report(self) -> list[tuple[str, bool, str]]:
        """Every condition of readiness: its name, whether it holds, and in words how it stands. Blocks, too."""
        answers = self.loop_answers()
        return [
            ("loop", answers, "answers" if answers else f"does not answer within {LOOP_TIMEOUT_S:g} s"),
            *self.conditions(),
        ]

    def conditions(self) -> list[tuple[str, bool, str]]:
        """The same, the loop's answer aside: for the loop's own thread."""
        with self._lock:
            tasks = sorted(self._tasks.items())
            others = sorted(self._conditions.items())
        return [
            ("started", self._ready, "yes" if self._ready else "not yet"),
            ("accepting", not self._draining, "draining" if self._draining else "yes"),
            *((f"task {name}", alive, "runs" if alive else "has ended") for name, alive in tasks),
            *((name, holds, text) for name, (holds, text) in others),
        ]
