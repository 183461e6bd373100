"""Raw transfers: each system's source and sink as two fresh processes, one system after the other, round after round.

Processes are fresh because some systems burn CPU while nobody uses them, and would slow down whoever comes next.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import attrs

from peers_app.children import Child
from peers_app.figures import Pass, cpu_since
from peers_app.sizes import Sizes

_START_S: Final = 60.0
_PASS_S: Final = 120.0


@attrs.frozen
class Environment:
    """Where the interpreters are."""

    peers_python: Path
    native: Path  # libraries that the peers need and the system lacks

    @staticmethod
    def ours(*arguments: str) -> list[str | Path]:
        """A command line of this program's in kvpd's own environment."""
        return [Path(sys.executable), "-m", *arguments]

    def command(self, ours: bool, *arguments: str) -> list[str | Path]:
        """A command line of this program's in one of the environments."""
        return self.ours(*arguments) if ours else [self.peers_python, "-m", *arguments]

    def variables(self, ours: bool) -> dict[str, str]:
        """What to add to a process's environment."""
        return {} if ours else {"LD_LIBRARY_PATH": str(self.native)}


@attrs.frozen
class System:
    """Something that moves bytes, over one path, in one setting."""

    name: str  # as in tables
    module: str  # as `peers_app.mover` calls it
    path: str  # cma, tcp, memory or, for jobs, local
    memory: str = "anonymous"
    ours: bool = False  # runs in kvpd's environment

    @property
    def has_sink(self) -> bool:
        """Whether the other end is a process of its own."""
        return self.path != "memory"

    @property
    def tls(self) -> str:
        """What UCX may use; empty leaves the choice to it, which is CMA on one host."""
        return "tcp" if self.path == "tcp" else ""


SYSTEMS: Final = (
    System("memcpy, one thread", "memcpy", "memory", ours=True),
    System("bare UCX puts", "ucx", "cma", ours=True),
    System("bare UCX puts, memfd", "ucx", "cma", memory="memfd", ours=True),
    System("NIXL", "nixl", "cma"),
    System("NIXL, no progress thread", "nixl-nothread", "cma"),
    System("bare UCX puts", "ucx", "tcp", ours=True),
    System("NIXL", "nixl", "tcp"),
    System("NIXL, no progress thread", "nixl-nothread", "tcp"),
    System("Mooncake", "mooncake", "tcp"),
    System("TCP socket", "socket", "tcp", ours=True),
)


@attrs.frozen
class Pair:
    """A system's running ends; a copy within one process has only the one."""

    source: Child
    sink: Child | None

    @property
    def target(self) -> Child:
        """Who holds what was written."""
        return self.sink or self.source

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds of each so far."""
        ends = {"source": self.source, **({"sink": self.sink} if self.sink else {})}
        return {name: end.cpu_s() for name, end in ends.items()}


@contextlib.contextmanager
def open_pair(system: System, environment: Environment, buffer_bytes: int) -> Iterator[Pair]:
    """Both ends, connected."""
    variables = environment.variables(system.ours)
    if system.tls and system.module.startswith("nixl"):
        variables["UCX_TLS"] = system.tls

    def start(role: str) -> Child:
        arguments = ("peers_app.mover", system.module, role, system.tls, str(buffer_bytes), system.memory)
        return Child(f"{system.name}, {role}", environment.command(system.ours, *arguments), variables)

    with contextlib.ExitStack() as stack:
        source = stack.enter_context(start("source"))
        sink = stack.enter_context(start("sink")) if system.has_sink else None
        source.answer(_START_S)
        address = sink.answer(_START_S)["address"] if sink else {}
        introduction = source.ask(_START_S, do="connect", address=address)["introduction"]
        if sink:
            sink.ask(_START_S, do="meet", introduction=introduction)
        yield Pair(source, sink)


def measure_raw(system: System, environment: Environment, sizes: Sizes) -> Iterator[Pass]:
    """One pass for every chunk size, each after a short one that nobody measures, each verified.

    Raises:
        ChildFailed: an end did not come up, did not answer, or died.
    """
    with open_pair(system, environment, sizes.buffer_bytes) as pair:
        for chunk_bytes in sizes.chunk_bytes:
            warm_up = {"count": sizes.in_flight, "chunk_bytes": chunk_bytes, "in_flight": sizes.in_flight}
            pair.source.ask(_PASS_S, do="run", **warm_up)
            pair.target.ask(_PASS_S, do="poison")
            count = sizes.chunks_in_pass(chunk_bytes)
            cpu_s = pair.cpu_s()
            seconds = pair.source.ask(_PASS_S, do="run", **{**warm_up, "count": count})["seconds"]
            cpu_s = cpu_since(cpu_s, pair.cpu_s())
            length = sizes.slots_touched(chunk_bytes) * chunk_bytes
            equal = pair.target.ask(_PASS_S, do="check", length=length)["equal"]
            yield Pass(system.name, system.path, chunk_bytes, count * chunk_bytes, seconds, cpu_s, equal)


def in_turns(systems: Sequence[System], rounds: int) -> Iterator[tuple[int, System]]:
    """Every system once a round; every other round backwards, so that no system always follows the same one."""
    for number in range(rounds):
        for system in systems if number % 2 == 0 else reversed(systems):
            yield number, system
