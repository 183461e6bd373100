"""Two ends of a data plane, whichever it is: what the contract tests run on."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, Final, Protocol

import attrs
import pytest
import trio

from kvpd.transports.base import DataPlane, Endpoint, RemoteRegion, Target
from kvpd.transports.memory_data import MemoryFabric, open_memory_data_plane
from kvpd.transports.ucx import UcxDataPlane, UcxEndpoint

from .marks import needs_ucx_py
from .ucx_modes import open_ucx, transports_of

DEADLINE_S: Final = 20.0
_TESTS: Final = Path(__file__).parents[1]


def _over_ucx_py(wire: str) -> Any:
    return pytest.param(f"ucx-py-{wire}", marks=needs_ucx_py)


NETWORK_MODES: Final = ("memory", "ucx-tcp", _over_ucx_py("tcp"))
MODES: Final = ("memory", "ucx-cma", "ucx-tcp", _over_ucx_py("cma"), _over_ucx_py("tcp"))


def never_broken(detail: str) -> None:
    """An `on_broken` for tests in which it must not be called."""
    raise AssertionError(f"on_broken was called: {detail}")


def region_of(target: Target) -> RemoteRegion:
    """What a Welcome would carry."""
    return RemoteRegion(target.worker_address, target.base_address, target.length, target.rkey)


def check_mode(mode: str, endpoint: Endpoint) -> None:
    """A test that means CMA must not pass over TCP."""
    if isinstance(endpoint, UcxEndpoint):
        assert endpoint.transports == transports_of(mode)


@asynccontextmanager
async def open_plane(
    mode: str, fabric: MemoryFabric, buffer: mmap.mmap, window_bytes: int | None = None
) -> AsyncIterator[DataPlane]:
    """A data plane of that mode for `buffer`. Whatever a test waits for meanwhile has DEADLINE_S."""
    with trio.fail_after(DEADLINE_S):
        async with _open_plane(mode, fabric, buffer, window_bytes) as plane:
            yield plane


def _open_plane(
    mode: str, fabric: MemoryFabric, buffer: mmap.mmap, window_bytes: int | None
) -> AbstractAsyncContextManager[DataPlane]:
    if mode == "memory":
        return open_memory_data_plane(buffer, fabric=fabric, put_window_bytes=window_bytes or 64 << 20)
    return open_ucx(mode, buffer, window_bytes)


@attrs.frozen
class Pair:
    """A sender's and a receiver's plane in this process, and one way from the one to the other."""

    mode: str
    fabric: MemoryFabric
    source: mmap.mmap
    sink: mmap.mmap
    sender: DataPlane
    receiver: DataPlane
    target: Target
    endpoint: Endpoint

    @property
    def progress_rounds(self) -> int:
        """How often progress tasks have gone round, in planes that have such tasks."""
        planes = (self.sender, self.receiver)
        return sum(plane.progress_rounds for plane in planes if isinstance(plane, UcxDataPlane))


@asynccontextmanager
async def open_pair(
    mode: str,
    buffer_bytes: int,
    *,
    window_bytes: int | None = None,
    on_broken: Callable[[str], None] = never_broken,
) -> AsyncIterator[Pair]:
    """Two planes with `buffer_bytes` each; the source holds random bytes, the sink zeros."""
    fabric = MemoryFabric()
    source, sink = mmap.mmap(-1, buffer_bytes), mmap.mmap(-1, buffer_bytes)
    source[:] = os.urandom(buffer_bytes)
    async with (
        open_plane(mode, fabric, sink) as receiver,
        open_plane(mode, fabric, source, window_bytes) as sender,
    ):
        target = await receiver.open_target()
        endpoint = await sender.connect(region_of(target), on_broken)
        check_mode(mode, endpoint)
        yield Pair(mode, fabric, source, sink, sender, receiver, target, endpoint)


class Remote(Protocol):
    """A receiver that can be asked what it holds, and killed."""

    region: RemoteRegion

    async def digest(self) -> str:
        """SHA-256 of its buffer."""

    async def kill(self) -> None:
        """Dead, and reaped."""

    def stop(self) -> None:
        """Freeze it: it lives, but does nothing."""


class MemoryRemote:
    """The same in this process."""

    def __init__(self, fabric: MemoryFabric, sink: mmap.mmap, target: Target) -> None:
        self.region = region_of(target)
        self._fabric = fabric
        self._sink = sink

    async def digest(self) -> str:
        return hashlib.sha256(self._sink).hexdigest()

    async def kill(self) -> None:
        self._fabric.break_target(self.region.worker_address)

    def stop(self) -> None:
        self._fabric.stall()


class ProcessRemote:
    """data_plane_peer.py in a process of its own."""

    def __init__(self, process: trio.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._commands = process.stdin
        self._answers = process.stdout

    async def start(self) -> None:
        """Wait for its region."""
        fields = json.loads(await self._line())
        self.region = RemoteRegion(
            bytes.fromhex(fields["worker_address"]),
            fields["base_address"],
            fields["length"],
            bytes.fromhex(fields["rkey"]),
        )

    async def _line(self) -> str:
        line = b""
        while not line.endswith(b"\n"):
            data = await self._answers.receive_some()
            assert data, "the peer has died"
            line += data
        return line.decode()

    async def digest(self) -> str:
        await self._commands.send_all(b"digest\n")
        return (await self._line()).strip()

    async def kill(self) -> None:
        self._process.kill()
        await self._process.wait()

    def stop(self) -> None:
        self._process.send_signal(signal.SIGSTOP)


@asynccontextmanager
async def open_remote(mode: str, fabric: MemoryFabric, buffer_bytes: int) -> AsyncIterator[Remote]:
    """A receiver: in another process, except over memory. It comes up, and the test ends, within DEADLINE_S."""
    if mode == "memory":
        sink = mmap.mmap(-1, buffer_bytes)
        async with open_plane(mode, fabric, sink) as plane:
            yield MemoryRemote(fabric, sink, await plane.open_target())
        return
    program = "transports.data_plane_peer"
    process = await trio.lowlevel.open_process(
        [sys.executable, "-m", program, mode, str(buffer_bytes)],
        cwd=_TESTS,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        with trio.fail_after(DEADLINE_S):
            remote = ProcessRemote(process)
            await remote.start()
            yield remote
    finally:
        process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                await pipe.aclose()
