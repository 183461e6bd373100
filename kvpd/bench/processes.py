"""Processes that a benchmark starts: their CPU time, and an end for every one of them.

A child is in a session of its own, so that a Ctrl-C reaches the benchmark alone, which then ends its children in
order; and the kernel sends each of them SIGTERM should the benchmark die without a chance to.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from kvpd.bench.failure import BenchmarkFailed

START_S: Final = 60.0
END_S: Final = 20.0
_TAIL_BYTES: Final = 4000
_CPUCLOCK_SCHED: Final = 2

# Ties the child to its parent's life, then becomes the program.
_LAUNCHER: Final = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


def clean_environment(**more: str) -> dict[str, str]:
    """This environment without what would change a daemon behind the benchmark's back."""
    ours = ("KVPD_", "NOTIFY_SOCKET")
    return {**{name: value for name, value in os.environ.items() if not name.startswith(ours)}, **more}


def cpu_seconds(pid: int) -> float:
    """CPU time that a process has used, in user and kernel mode, over all threads it ever had; in nanoseconds' steps.

    /proc/PID/stat says the same in steps of 10 ms, which is more than an idle daemon uses in a minute.
    """
    return time.clock_gettime((~pid << 3) | _CPUCLOCK_SCHED)  # what clock_getcpuclockid(3) gives


def cores_used(children: Sequence[Child], seconds: float) -> list[float]:
    """CPU time that each of them uses, of every second that passes, while nothing is done here for `seconds`."""
    before, began = [child.cpu_seconds for child in children], time.monotonic()
    time.sleep(seconds)
    passed = time.monotonic() - began
    return [(child.cpu_seconds - used) / passed for child, used in zip(children, before, strict=True)]


class Child:
    """A Python program in a process of its own. A context manager: leaving ends it.

    `arguments` are the interpreter's. What it writes to stderr goes to `log`.
    """

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        log: Path,
        *,
        environment: Mapping[str, str] | None = None,
        piped: bool = False,
    ) -> None:
        self.name = name
        self.log = log
        command = [sys.executable, "-c", _LAUNCHER, str(os.getpid()), *arguments]
        pipe = subprocess.PIPE if piped else subprocess.DEVNULL
        with log.open("wb") as stderr:
            self.process = subprocess.Popen(  # noqa: S603  our own programs
                command,
                stdin=pipe,
                stdout=pipe,
                stderr=stderr,
                env=clean_environment(**(environment or {})),
                start_new_session=True,
            )
        self.pid = self.process.pid
        self._pidfd = os.pidfd_open(self.pid)
        self._is_asked = False
        self._is_told = False

    @property
    def cpu_seconds(self) -> float:
        """See `cpu_seconds`."""
        return cpu_seconds(self.pid)

    def wait_readable(self, descriptor: int, timeout_s: float, what: str) -> None:
        """Until `descriptor` can be read.

        Raises:
            BenchmarkFailed: the process has ended without a word there, or the time is over.
        """
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        poll.register(self._pidfd, select.POLLIN)
        ready = {which for which, _ in poll.poll(timeout_s * 1000)}
        if descriptor in ready:
            return
        if ready:
            raise self.failure(f"ended with status {self.process.wait()} instead of {what}")
        raise self.failure(f"did not come to {what} within {timeout_s:g} s")

    def check_alive(self) -> None:
        """Whether it runs.

        Raises:
            BenchmarkFailed: it has ended.
        """
        if self.process.poll() is not None:
            raise self.failure(f"has ended with status {self.process.returncode}")

    def failure(self, detail: str) -> BenchmarkFailed:
        """What to raise about it: the detail and the end of what it said. Its end will be no news then."""
        self._is_told = True
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - _TAIL_BYTES))
            tail = file.read().decode(errors="replace").strip()
        return BenchmarkFailed(f"{self.name} {detail}" + (f"; the end of what it said:\n{tail}" if tail else ""))

    def ask_to_end(self) -> None:
        """SIGTERM, once: a daemon takes a second one for impatience."""
        if not self._is_asked:
            self._is_asked = True
            self.process.send_signal(signal.SIGTERM)

    def end(self) -> None:
        """SIGTERM, and SIGKILL if it has not gone in END_S. Idempotent.

        Raises:
            BenchmarkFailed: it did not end well, and nobody has been told.
        """
        if self._pidfd < 0:
            return
        self.ask_to_end()
        status = self._reap()
        if status not in (0, -signal.SIGTERM) and not self._is_told:
            raise self.failure(f"ended with status {status}")

    def _reap(self) -> int:
        try:
            return self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()
        finally:
            if self.process.poll() is None:  # interrupted
                self.process.kill()
                self.process.wait()
            for pipe in (self.process.stdin, self.process.stdout):
                if pipe is not None:
                    pipe.close()
            os.close(self._pidfd)
            self._pidfd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.end()
        except BenchmarkFailed:
            if error is None:  # else that is what must be told
                raise
