"""Real daemons and workers of a benchmark, as processes, in a temporary folder.

Whoever leaves a fleet, by whatever way, leaves no process behind.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Literal, Self, TypeVar

from kvpd.bench.loopwatch import LoopWatch
from kvpd.bench.processes import START_S, Child
from kvpd.bench.workers import Worker

C = TypeVar("C", bound=Child)

_DRAIN_S: Final = 1  # what runs when a benchmark ends is nobody's
_numbers: Final = itertools.count()  # names are used once, so that a log says whose it is


class Daemon(Child):
    """One `kvpd serve`; Fleet makes them, ready.

    A watched one also counts how long its loop's turns last, in `watch`; see `kvpd.bench.loopwatch`.
    """

    def __init__(
        self,
        role: Literal["receiver", "sender"],
        folder: Path,
        settings: Mapping[str, object],
        overrides: Sequence[str],
        *,
        watched: bool,
    ) -> None:
        name = f"{role}-{next(_numbers)}"
        self.socket = folder / f"{name}.sock"
        self.watch = LoopWatch.create(folder / f"{name}.turns") if watched else None
        self._addresses_file = folder / f"{name}.json"
        values = {"name": name, "engine_socket": self.socket, "drain_timeout_s": _DRAIN_S, **settings}
        flags = [*(f"{role}.{key}={value}" for key, value in values.items()), *overrides]
        program = ["-m", "kvpd"] if self.watch is None else ["-m", "kvpd.bench.watched", str(self.watch.file)]
        command = [*program, "serve", role, "--address-file", str(self._addresses_file)]
        for flag in flags:
            command += ["--set", flag]
        self._ready = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        ready_path = str(folder / f"{name}.ready")
        self._ready.bind(ready_path)
        super().__init__(name, command, folder / f"{name}.log", environment={"NOTIFY_SOCKET": ready_path})
        self.addresses: Mapping[str, str] = {}  # once it is ready

    def wait_ready(self) -> None:
        """Until it serves.

        Raises:
            BenchmarkFailed: it does not; the message ends with what it said.
        """
        with self._ready:
            self.wait_readable(self._ready.fileno(), START_S, "saying that it is ready")
        self.addresses = json.loads(self._addresses_file.read_bytes())

    @property
    def address(self) -> str:
        """A receiver: where senders reach it, `host:port`."""
        return self.addresses["control_address"]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ready.close()
        super().__exit__(kind, error, trace)


class Fleet:
    """Daemons and workers; they end together.

    `settings` are a daemon's keys of its own section; the user's own `--set` are stronger.
    """

    def __init__(self, folder: Path, overrides: Sequence[str] = ()) -> None:
        self._folder = folder
        self._overrides = overrides
        self._stack = contextlib.ExitStack()
        self._children: list[Child] = []

    def receiver(self, *, chunk_bytes: int, slots: int, watched: bool = False, **settings: object) -> Daemon:
        """A receiver that is ready, on a port of the kernel's choice.

        Raises:
            BenchmarkFailed: it cannot serve.
        """
        sizes = {"chunk_bytes": chunk_bytes, "buffer_size": slots * chunk_bytes, "control_address": "127.0.0.1:0"}
        return self._started(Daemon("receiver", self._folder, sizes | settings, self._overrides, watched=watched))

    def sender(self, *, chunk_bytes: int, slots: int, watched: bool = False, **settings: object) -> Daemon:
        """A sender that is ready.

        Raises:
            BenchmarkFailed: it cannot serve.
        """
        sizes = {"chunk_bytes": chunk_bytes, "staging_size": slots * chunk_bytes}
        return self._started(Daemon("sender", self._folder, sizes | settings, self._overrides, watched=watched))

    def worker(self, module: str) -> Worker:
        """A worker that runs `module`; see `kvpd.bench.workers`."""
        name = f"{module.rpartition('.')[2].strip('_')}-{next(_numbers)}"
        return self._kept(Worker(name, module, self._folder / f"{name}.log"))

    def _started(self, daemon: Daemon) -> Daemon:
        self._kept(daemon).wait_ready()
        return daemon

    def _kept(self, child: C) -> C:
        self._children.append(child)
        self._stack.enter_context(child)
        return child

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for child in self._children:
            child.ask_to_end()
        self._stack.__exit__(kind, error, trace)
