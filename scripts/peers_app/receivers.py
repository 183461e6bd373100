"""A receiver of either system, as a process, with a buffer of so many chunks of 4 KiB."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Protocol

import attrs

from peers_app.children import Child
from peers_app.daemons import Daemon
from peers_app.raw import Environment
from peers_app.wire import Terms, WireFailed

CHUNK_BYTES: Final = 4096
SYSTEMS: Final = ("kvpd", "LMCache")
START_S: Final = 120.0  # LMCache imports torch and transformers
_UNASSIGNED_PORTS: Final = range(20_000, 32_768)  # below what Linux assigns, unless it is told otherwise
# Nobody is refused for waiting long, or behind many: LMCache's default is to wait for ever.
_PATIENT: Final = {"allocation_timeout_s": 3600, "queue_depth_max": 100_000, "progress_timeout_s": 3600}


class Measured(Protocol):
    """Whatever has a CPU time."""

    def cpu_s(self) -> float:
        """Seconds so far."""


@attrs.frozen
class Receiver:
    """Where it is reached, and its process."""

    terms: Terms
    process: Measured


def free_ports(count: int) -> list[int]:
    """Ports that nobody uses just now; LMCache cannot be asked to choose its own.

    It takes them seconds later, so they are none of those that Linux gives to whoever does not care: anybody's
    connection might have one by then, and LMCache would serve nobody and not say so.
    """
    ports: list[int] = []
    with contextlib.ExitStack() as stack:
        for port in random.sample(_UNASSIGNED_PORTS, len(_UNASSIGNED_PORTS)):
            if len(ports) == count:
                break
            with contextlib.suppress(OSError):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
                ports.append(port)
    return ports


@contextlib.contextmanager
def open_receiver(system: str, environment: Environment, chunks: int) -> Iterator[Receiver]:
    """Serving, until the context is left."""
    if system == "kvpd":
        with tempfile.TemporaryDirectory(prefix="bench-peers-") as folder:
            settings = {"buffer_size": chunks * CHUNK_BYTES, "chunk_bytes": CHUNK_BYTES, **_PATIENT}
            with Daemon("receiver", Path(folder), {"control_address": "127.0.0.1:0", **settings}) as daemon:
                daemon.wait_ready()
                yield Receiver(Terms(daemon.address, CHUNK_BYTES), daemon)
    else:
        init_port, alloc_port, proxy_port = free_ports(3)
        given = {"chunks": chunks, "init_port": init_port, "alloc_port": alloc_port, "proxy_port": proxy_port}
        with start_lmcache("receiver", environment, given) as child:
            said = child.answer(START_S)
            shape = tuple(said["shape"])
            terms = Terms(f"127.0.0.1:{alloc_port}", CHUNK_BYTES, said["format"], shape, said["dtype"])
            try:
                yield Receiver(terms, child)
            except WireFailed as exc:  # its own threads fail without a word on the wire
                raise WireFailed(f"{exc}; the end of what it wrote: {child.tail()}") from exc


def start_lmcache(role: str, environment: Environment, given: dict[str, int]) -> Child:
    """LMCache's backend in that role, coming up; its first answer says how its chunks are described."""
    command = environment.command(False, "peers_app.lmcache_host", role, json.dumps(given))
    return Child(f"LMCache's {role}", command, environment.variables(False))
