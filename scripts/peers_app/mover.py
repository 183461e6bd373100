"""One end of a system that moves bytes, as a process: `python -m peers_app.mover SYSTEM source|sink TLS BYTES KIND`.

It tells its address first and then does as the conductor says. `ready` names the system's own version where it has one.
"""

from __future__ import annotations

import importlib
import select
import sys
import time
from typing import Final

import numpy as np

from peers_app.commands import Commands, Words
from peers_app.memory import Buffer, MemoryKind, pattern
from peers_app.movers.base import End, Sink, Source
from peers_app.pipeline import Job, SinkRun, run_source

_TCP_PAUSE_S: Final = 50e-6
# Which module of `peers_app.movers` has a system's two ends.
_MODULES: Final = {
    "memcpy": "copies",
    "ucx": "ucx",
    "nixl": "nixl",
    "nixl-nothread": "nixl",
    "mooncake": "mooncake",
    "socket": "sockets",
}


def make_end(system: str, role: str, tls: str, buffer: Buffer) -> End:
    """An end of that system. Only its own module is imported: the environments do not have them all."""
    module = importlib.import_module(f"peers_app.movers.{_MODULES[system]}")
    end: End = module.make_end(system, role, tls, buffer)
    if isinstance(end, Source) and tls == "tcp":
        end.pause_s = _TCP_PAUSE_S
    return end


class Mover:
    """The process's one end and its work."""

    def __init__(self, end: End, commands: Commands) -> None:
        self._end = end
        self._commands = commands
        self._expected = pattern(end.buffer.length)
        self._sink_run: SinkRun | None = None

    def serve(self) -> None:
        """Until the conductor ends it. A sink makes progress, and hears what comes, between commands."""
        while True:
            while not select.select([self._commands.descriptor], [], [], 0)[0]:
                self._end.wait(self._commands.descriptor)
                self._end.heard()
            self._commands.reply(**self._obey(self._commands.next()))

    def _obey(self, words: Words) -> Words:
        end = self._end
        match words["do"]:
            case "connect":
                assert isinstance(end, Source)
                end.connect(words["address"])
                return {"introduction": end.introduction}
            case "meet":
                assert isinstance(end, Sink)
                end.meet(words["introduction"])
            case "run":
                return self._run(words["count"], words["chunk_bytes"], words["in_flight"])
            case "poison":
                self._target().poison()
            case "check":
                length = words["length"]
                return {"equal": np.array_equal(self._target().array[:length], self._expected[:length])}
            case "job":
                return self._run_job(Job(**words["job"]))
            case "check_job":
                assert self._sink_run is not None
                return {"equal": self._sink_run.is_equal()}
            case unknown:
                raise SystemExit(f"no command is called {unknown!r}")
        return {}

    def _target(self) -> Buffer:
        target: Buffer = getattr(self._end, "target", self._end.buffer)
        return target

    def _run(self, count: int, chunk_bytes: int, in_flight: int) -> Words:
        assert isinstance(self._end, Source)
        self._end.prepare(chunk_bytes)
        began = time.monotonic()
        self._end.run(count, chunk_bytes, in_flight)
        return {"seconds": time.monotonic() - began}

    def _run_job(self, job: Job) -> Words:
        if isinstance(self._end, Source):
            return {"began": run_source(self._end, job, self._commands.descriptor)}
        assert isinstance(self._end, Sink)
        self._sink_run = SinkRun(self._end, job)
        self._commands.reply(serving=True)
        return {"ended": self._sink_run.run(self._commands.descriptor)}


def main() -> None:
    """Serve as the command line says."""
    system, role, tls, length, kind = sys.argv[1:6]
    commands = Commands()
    memory: MemoryKind = "memfd" if kind == "memfd" else "anonymous"
    buffer = Buffer(int(length), memory)
    if role == "source":
        buffer.fill()
    end = make_end(system, role, tls, buffer)
    commands.reply(address=getattr(end, "address", {}))
    Mover(end, commands).serve()


if __name__ == "__main__":
    main()
