"""The engines as the conductor sees them: processes that report, pause and are started again."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec
import trio

from chaos_app import words
from chaos_app.process import Process, python

_UP_S: Final = 60.0


class Engine(Process):
    """`python -m chaos_app.engine`. `heard` gets its events."""

    def __init__(
        self,
        kind: str,
        name: str,
        seed: str,
        socket: Path,
        threads: int,
        receivers: Callable[[], Sequence[str]],
        heard: Callable[[words.AnyEvent], None],
        prefix: Sequence[str] = (),
    ) -> None:
        super().__init__(name)
        self.kind = kind
        self.lock = trio.Lock()  # one fault at a time
        self._seed = seed
        self._socket = socket
        self._threads = threads
        self._receivers = receivers
        self._on_event = heard
        self._prefix = prefix
        self._starts = 0
        self._came_up = trio.Event()
        self._paused = trio.Event()

    async def up(self, nursery: trio.Nursery) -> None:
        """Start it, under a name that no request has borne yet, and let it work."""
        self._starts += 1
        self._came_up = trio.Event()
        arguments = (self.kind, f"{self.name}#{self._starts}", self._seed, str(self._socket), str(self._threads))
        command = [*self._prefix, *python("-m", "chaos_app.engine", *arguments, *self._receivers())]
        await self.start(nursery, command, on_out=self._heard, on_err=lambda _: None)
        with trio.move_on_after(_UP_S):
            await self.until_said(self._came_up)
        if not self._came_up.is_set():
            raise RuntimeError(f"{self.name} does not come up:\n" + "\n".join(self.tail))
        await self.say(words.RUN)

    def _heard(self, line: bytes) -> None:
        try:
            event = words.decode(line)
        except msgspec.MsgspecError:
            return  # half a line of a process that was killed
        match event:
            case words.Up():
                self._came_up.set()
            case words.Paused():
                self._paused.set()
            case _:
                self._on_event(event)

    async def pause(self, bound_s: float) -> bool:
        """Have it finish what runs and begin nothing. Whether it did so in time."""
        self._paused = trio.Event()
        await self.say(words.PAUSE)
        with trio.move_on_after(bound_s):
            await self._paused.wait()
            return True
        return False

    async def restart(self, nursery: trio.Nursery, pause_s: float) -> None:
        """SIGKILL it and start another one after a while."""
        await self.end(signal.SIGKILL)
        await trio.sleep(pause_s)
        await self.up(nursery)
