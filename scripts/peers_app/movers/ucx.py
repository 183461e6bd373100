"""Bare UCX puts, through kvpd's own data plane, without its daemons: what kvpd's goodput is measured against.

A data plane lives in a trio loop, so the loop runs in a thread of its own and one call per pass crosses over to it.
The receiving side only makes progress.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import trio

from kvpd.transports.base import Put, PutBatch, RemoteRegion
from kvpd.transports.ucx import UcxDataPlane, UcxEndpoint, open_ucx_data_plane
from peers_app.memory import Buffer
from peers_app.movers.base import Address, Chunks, End, Sink, Source

Result = TypeVar("Result")


class _UcxEnd(End):
    def __init__(self, buffer: Buffer, tls: str) -> None:
        super().__init__(buffer)
        self._tls = tls
        self._ready = threading.Event()
        self._plane: UcxDataPlane | None = None
        self._token: trio.lowlevel.TrioToken | None = None
        threading.Thread(target=trio.run, args=(self._serve,), daemon=True).start()
        self._ready.wait()

    async def _serve(self) -> None:
        async with open_ucx_data_plane(self.buffer.map, tls=self._tls) as self._plane:
            self._token = trio.lowlevel.current_trio_token()
            self._ready.set()
            await trio.sleep_forever()

    @property
    def plane(self) -> UcxDataPlane:
        assert self._plane is not None
        return self._plane

    def in_loop(self, work: Callable[..., Awaitable[Result]], *arguments: Any) -> Result:
        """Run `work` in the loop and wait for it."""
        return trio.from_thread.run(work, *arguments, trio_token=self._token)

    def tell(self, words: bytes) -> None:
        raise NotImplementedError("bare puts say nothing")

    def heard(self) -> list[bytes]:
        return []


def _raise(detail: str) -> None:
    raise RuntimeError(detail)


class UcxSource(_UcxEnd, Source):
    """See `Source`."""

    def connect(self, address: Address) -> None:
        region = RemoteRegion(
            bytes.fromhex(address["worker"]), address["base"], address["length"], bytes.fromhex(address["rkey"])
        )
        self._endpoint: UcxEndpoint = self.in_loop(self.plane.connect, region, _raise)

    def begin(self, chunks: Chunks, notice: bytes = b"") -> Any:
        raise NotImplementedError("puts are begun in the loop, a pass at a time")

    def is_done(self, write: Any) -> bool:
        raise NotImplementedError("puts are waited for in the loop")

    def run(self, count: int, chunk_bytes: int, in_flight: int) -> None:
        self.in_loop(self._run, count, chunk_bytes, in_flight)

    async def _run(self, count: int, chunk_bytes: int, in_flight: int) -> None:
        slots = self.buffer.length // chunk_bytes
        under_way: deque[PutBatch] = deque()
        for number in range(count):
            if len(under_way) == in_flight:
                await under_way.popleft().wait()
            offset = number % slots * chunk_bytes
            under_way.append(self._endpoint.post([Put(offset, offset, chunk_bytes)]))
        while under_way:
            await under_way.popleft().wait()


class UcxSink(_UcxEnd, Sink):
    """See `Sink`."""

    def __init__(self, buffer: Buffer, tls: str) -> None:
        super().__init__(buffer, tls)
        target = self.in_loop(self.plane.open_target)
        self.address = {
            "worker": target.worker_address.hex(),
            "base": target.base_address,
            "length": target.length,
            "rkey": target.rkey.hex(),
        }


def make_end(system: str, role: str, tls: str, buffer: Buffer) -> End:
    """See `peers_app.mover`."""
    return UcxSource(buffer, tls) if role == "source" else UcxSink(buffer, tls)
