"""The processes that a measurement consists of: started, asked, their CPU time read, and surely gone in the end.

Every question has a deadline. A child that is late, or ends by itself, is a ChildFailed with the end of what it wrote.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

_END_S: Final = 10.0
_TAIL_BYTES: Final = 2000


class ChildFailed(Exception):
    """A process did not do what it was asked in its time, or is gone."""


def child_environment(more: Mapping[str, str]) -> dict[str, str]:
    """This environment without what would change a daemon or UCX, with this package to import, and with `more`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("KVPD_", "UCX_", "NOTIFY_"))}
    ours = str(Path(__file__).resolve().parents[1])
    paths = os.pathsep.join(filter(None, [ours, os.environ.get("PYTHONPATH")]))
    return {**kept, "PYTHONPATH": paths, "UCX_WARN_UNUSED_ENV_VARS": "n", **more}


class Child:
    """A process that talks JSON, a line at a time; see `peers_app.commands`. A context manager: leaving ends it."""

    def __init__(self, name: str, command: Sequence[str | Path], environment: Mapping[str, str] | None = None) -> None:
        self.name = name
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  closed on leaving
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=child_environment(environment or {}),
        )
        self._pending = b""

    @property
    def pid(self) -> int:
        """Its number."""
        return self._process.pid

    def cpu_s(self) -> float:
        """CPU seconds that all of its threads have used so far."""
        return cpu_seconds(self.pid)

    def say(self, **words: Any) -> None:
        """A command, without waiting for its answer."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(words).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise ChildFailed(f"{self.name} is gone:\n{self.tail()}") from None

    def answer(self, within_s: float) -> dict[str, Any]:
        """Its next answer."""
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        deadline = time.monotonic() + within_s
        while b"\n" not in self._pending:
            remaining = deadline - time.monotonic()
            if remaining <= 0 or not select.select([descriptor], [], [], remaining)[0]:
                raise ChildFailed(f"{self.name} did not answer within {within_s:g} s:\n{self.tail()}")
            data = os.read(descriptor, 65536)
            if not data:
                raise ChildFailed(f"{self.name} ended by itself:\n{self.tail()}")
            self._pending += data
        line, self._pending = self._pending.split(b"\n", 1)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, within_s: float, **words: Any) -> dict[str, Any]:
        """A command and its answer."""
        self.say(**words)
        return self.answer(within_s)

    def tail(self) -> str:
        """The end of what it wrote to standard error."""
        size = os.fstat(self._errors.fileno()).st_size
        return os.pread(self._errors.fileno(), _TAIL_BYTES, max(0, size - _TAIL_BYTES)).decode(errors="replace")

    def kill(self) -> None:
        """SIGKILL; it is gone when this returns."""
        self._process.kill()
        self._process.wait(_END_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it is gone already
            self._process.stdin.close()
        try:
            self._process.wait(_END_S if kind is None else 0)
        except subprocess.TimeoutExpired:
            self.kill()
        self._process.stdout.close()
        self._errors.close()


def cpu_seconds(pid: int) -> float:
    """CPU seconds of a process, all threads, to the nanosecond: Linux has a clock for every process."""
    return time.clock_gettime(((~pid) << 3) | 2)
