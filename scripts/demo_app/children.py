"""The demo's processes: started, listened to, and surely ended.

Threads read everything a process writes, so none ever blocks on a full pipe; what matters goes into one queue, which
the conductor waits on. A family never leaves a process behind: leaving it ends them all, gently and then by force.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final

import attrs
import msgspec

from demo_app import words
from demo_app.environment import child_environment

_EVENTS_MAX: Final = 10_000
_TAIL_LINES: Final = 15
_GRACE_S: Final = 5.0
_INTERRUPTS: Final = (signal.SIGINT, signal.SIGTERM)


@attrs.frozen
class Said:
    """An engine or the proxy reported an event."""

    child: str
    event: words.AnyEvent


@attrs.frozen
class Logged:
    """A daemon wrote a log line."""

    child: str
    fields: Mapping[str, Any]


@attrs.frozen
class Exited:
    """A process is gone and everything it wrote has been read."""

    child: str
    status: int


Happening = Said | Logged | Exited


class ChildFailed(Exception):
    """A process ended, or fell silent, when it should not have; the text has its last words."""


class Child:
    """One process; its lines go to the family's queue and, where logs are kept, to a file."""

    def __init__(self, name: str, command: Sequence[str], happenings: queue.Queue[Happening], log: Path | None) -> None:
        self.name = name
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._happenings = happenings
        self._log = log
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=child_environment()
        )
        self._threads = [threading.Thread(target=target, name=name) for target in (self._listen, self._read_log)]
        for thread in self._threads:
            thread.start()

    def say(self, command: words.Command) -> None:
        """Send a command.

        Raises:
            ChildFailed: the process does not listen any more.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(words.encode(command))
            self._process.stdin.flush()
        except BrokenPipeError as exc:
            raise self.failure("does not listen any more") from exc

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; a process that is gone already is left in peace."""
        self._process.send_signal(number)

    def end(self) -> None:
        """End it now, gently at first, and return when it is gone and its lines are read."""
        self.signal(signal.SIGTERM)
        try:
            self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for thread in self._threads:
            thread.join()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert pipe is not None
            _close(pipe)

    def failure(self, what: str) -> ChildFailed:
        """What to raise when this process has done `what`: the text ends with its last log lines."""
        last_words = "\n".join(f"    {line}" for line in list(self.tail)) or "    (it wrote nothing)"
        return ChildFailed(f"{self.name} {what}; its last lines:\n{last_words}")

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                self._happen(Said(self.name, words.decode_event(line)))
            except msgspec.MsgspecError:
                self.tail.append(line.decode(errors="replace").rstrip())
        status = self._process.wait()
        self._threads[1].join()
        self._happen(Exited(self.name, status))

    def _read_log(self) -> None:
        assert self._process.stderr is not None
        with open(self._log or os.devnull, "wb") as copy:  # noqa: PTH123 - one expression for both kinds of name
            for line in self._process.stderr:
                copy.write(line)
                self.tail.append(line.decode(errors="replace").rstrip())
                if line.startswith(b"{"):
                    self._take_log_line(line)

    def _take_log_line(self, line: bytes) -> None:
        try:
            fields = json.loads(line)
        except ValueError:
            return  # half a line of a process that was killed; it is in the tail and in the file
        self._happen(Logged(self.name, fields))

    def _happen(self, happening: Happening) -> None:
        try:
            self._happenings.put_nowait(happening)
        except queue.Full:
            # Nobody reads any more, or a process runs wild: its pipe must be emptied all the same.
            self.tail.append(f"(not looked at: {happening})")


class Family:
    """All processes of one run. Entered and left by the main thread, which is the one that signals interrupt."""

    def __init__(self, logs: Path | None) -> None:
        self._logs = logs
        self._happenings: queue.Queue[Happening] = queue.Queue(maxsize=_EVENTS_MAX)
        self._children: dict[str, Child] = {}

    def __enter__(self) -> Family:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # A second Ctrl-C has nothing to hasten, for each child has a time limit, and must not leave half of them alive.
        with interrupts_held():
            # All hear it first, so that the slowest alone decides how long this takes.
            for child in self._children.values():
                child.signal(signal.SIGTERM)
            for child in self._children.values():
                child.end()

    def __getitem__(self, name: str) -> Child:
        return self._children[name]

    def start_daemon(self, name: str, role: str, settings: Mapping[str, object]) -> None:
        """Start `kvpd serve ROLE` with these settings."""
        flags = [flag for key, value in settings.items() for flag in ("--set", f"{key}={value}")]
        self._start(name, [sys.executable, "-m", "kvpd", "serve", role, *flags], ".jsonl")

    def start_program(self, name: str, module: str, *arguments: str) -> None:
        """Start one of the demo's own programs."""
        self._start(name, [sys.executable, "-m", f"demo_app.{module}", *arguments], ".log")

    def _start(self, name: str, command: Sequence[str], suffix: str) -> None:
        log = self._logs / f"{name}{suffix}" if self._logs is not None else None
        # An interrupt between the start of a process and its entry here would leave it behind.
        with interrupts_held():
            self._children[name] = Child(name, command, self._happenings, log)

    def next(self, timeout_s: float) -> Happening:
        """What happens next.

        Raises:
            queue.Empty: nothing did, for `timeout_s`.
        """
        return self._happenings.get(timeout=timeout_s)


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    """SIGINT and SIGTERM that come meanwhile are acted on afterwards."""
    held: list[int] = []
    # Caught, not ignored or blocked: a process that is started meanwhile would inherit either.
    handlers = {number: signal.signal(number, lambda interrupt, _: held.append(interrupt)) for number in _INTERRUPTS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    for came in held:
        signal.raise_signal(came)


def _close(pipe: IO[bytes]) -> None:
    with contextlib.suppress(BrokenPipeError):  # what was still buffered for a process that is gone
        pipe.close()
