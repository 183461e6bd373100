"""Progress on stderr: a bar on a terminal, otherwise a line for each step."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress


class Progress:
    """How far a run has come. A context manager; `console` says whether it is a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began = time.monotonic()
        self._done = 0
        self._total = 0
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = RichProgress(*columns, console=console, disable=not console.is_terminal, transient=True)
        self._task = self._bar.add_task("", total=None)

    def plan(self, steps: int) -> None:
        """So many more steps will come."""
        self._total += steps
        self._bar.update(self._task, total=self._total)

    def step(self, what: str) -> None:
        """A step begins; the one before it has ended."""
        self._bar.update(self._task, description=what, completed=self._done)
        self._done += 1
        if not self._console.is_terminal:
            passed = time.monotonic() - self._began
            self._console.print(f"{passed:6.1f} s  {self._done}/{self._total}  {what}", highlight=False, soft_wrap=True)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
