"""A process of the chaos: started, listened to, killed, and surely gone in the end.

Whatever it writes is read, so that it never blocks on a full pipe. A process that ends when nobody ended it has
crashed, and says so in `crashed`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import trio

_TAIL_LINES: Final = 40
_END_S: Final = 20.0
_LINE_BYTES_MAX: Final = 1 << 20


def child_environment() -> dict[str, str]:
    """The caller's own, without what would change a daemon, and with this package to import."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("KVPD_", "UCX_", "NOTIFY_"))}
    ours = str(Path(__file__).resolve().parents[1])
    paths = os.pathsep.join(filter(None, [ours, os.environ.get("PYTHONPATH")]))
    return {**kept, "PYTHONPATH": paths, "UCX_WARN_UNUSED_ENV_VARS": "n"}


class Process:
    """One process. `on_out` and `on_err` get its lines, from the loop."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self.crashed = ""
        self._process: trio.Process | None = None
        self._gone = trio.Event()
        self._is_ending = False

    @property
    def pid(self) -> int:
        """The process's number."""
        assert self._process is not None
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether it runs, or is stopped."""
        return self._process is not None and not self._gone.is_set()

    async def start(
        self,
        nursery: trio.Nursery,
        command: Sequence[str],
        *,
        on_out: Callable[[bytes], None],
        on_err: Callable[[bytes], None],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start it; tasks of `nursery` read what it writes until it is gone."""
        assert not self.is_alive
        self._gone = trio.Event()
        self._is_ending = False
        self._process = await trio.lowlevel.open_process(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**child_environment(), **(environment or {})},
        )
        nursery.start_soon(self._watch, self._process, on_out, on_err)

    async def _watch(
        self, process: trio.Process, on_out: Callable[[bytes], None], on_err: Callable[[bytes], None]
    ) -> None:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_read_lines, process.stdout, on_out)
                nursery.start_soon(_read_lines, process.stderr, self._keep(on_err))
            status = await process.wait()
            if not self._is_ending:
                self.crashed = f"{self.name} ended by itself with status {status}"
        finally:
            with trio.CancelScope(shield=True):
                if process.returncode is None:
                    process.kill()
                    await process.wait()
                for stream in (process.stdin, process.stdout, process.stderr):
                    assert stream is not None
                    await stream.aclose()
            self._gone.set()

    def _keep(self, on_err: Callable[[bytes], None]) -> Callable[[bytes], None]:
        def keep(line: bytes) -> None:
            self.tail.append(line.decode(errors="replace"))
            on_err(line)

        return keep

    async def say(self, line: str) -> None:
        """A line to its standard input; without a word where it is gone."""
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            await self._process.stdin.send_all(line.encode() + b"\n")
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, where there is somebody to take it."""
        if self.is_alive and self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)

    async def until_said(self, said: trio.Event) -> None:
        """Until it has said so, or is gone."""
        async with trio.open_nursery() as nursery:

            async def wait(event: trio.Event) -> None:
                await event.wait()
                nursery.cancel_scope.cancel()

            nursery.start_soon(wait, said)
            nursery.start_soon(wait, self._gone)

    async def end(self, number: signal.Signals) -> bool:
        """End it by a signal and wait until it is gone. Whether it went within its time; if not, it was killed."""
        self._is_ending = True
        self.send_signal(number)
        with trio.move_on_after(_END_S) as scope:
            await self._gone.wait()
        if scope.cancelled_caught:
            self.send_signal(signal.SIGKILL)
            await self._gone.wait()
        return not scope.cancelled_caught


async def _read_lines(stream: trio.abc.ReceiveStream, on_line: Callable[[bytes], None]) -> None:
    pending = b""
    async for data in stream:
        *lines, pending = (pending + data).split(b"\n")
        for line in lines:
            on_line(line)
        if len(pending) > _LINE_BYTES_MAX:
            pending = b""


def python(*arguments: str) -> list[str]:
    """A command that runs this interpreter."""
    return [sys.executable, *arguments]
