"""The data plane inside one process, for tests and simulation: virtual time, and faults on demand.

Everything that goes through one MemoryFabric belongs together; two fabrics know nothing of each other. It behaves like
UCX over a network: bytes land while the target is open, in whatever order the puts take their time, and closing the
target fences and breaks the endpoints that lead to it. It works under trio's MockClock.
"""

from __future__ import annotations

import itertools
import mmap
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

import attrs
import trio

from kvpd.errors import TransportError
from kvpd.transports._puts import Batch, PutQueue
from kvpd.transports.base import Put, RemoteRegion

PUT_WINDOW_BYTES: Final = 64 << 20

Buffer = mmap.mmap | memoryview | bytearray


def _no_time(_length: int) -> float:
    return 0.0


@attrs.define
class _LateWrite:
    """Bytes that were on their way when their endpoint was force-closed."""

    target: MemoryTarget
    offset: int
    data: bytes


class MemoryFabric:
    """The wire between data planes, and the hand that cuts it.

    `put_s` gives the seconds that a put of so many bytes takes; while `late_landing` is set, what a force-close
    interrupts is kept on the wire until `land_late`.
    """

    def __init__(self, put_s: Callable[[int], float] = _no_time) -> None:
        self.put_s = put_s
        self.late_landing = False
        self._targets: dict[bytes, MemoryTarget] = {}
        self._numbers = itertools.count(1)
        self._flowing = trio.Event()
        self._flowing.set()
        self._failures: list[str] = []
        self._late: list[_LateWrite] = []

    def stall(self) -> None:
        """Let no put end until `resume`, unless its endpoint is force-closed or breaks."""
        if self._flowing.is_set():
            self._flowing = trio.Event()

    def resume(self) -> None:
        """Let puts end again."""
        self._flowing.set()

    def fail_next_puts(self, count: int = 1, detail: str = "injected fault") -> None:
        """Let the next `count` puts that would end fail instead; their endpoints stay up."""
        self._failures += [detail] * count

    def break_target(self, worker_address: bytes, detail: str = "the peer is gone") -> None:
        """Let a target vanish as if its process had died: nothing lands any more, its endpoints break."""
        self._targets[worker_address]._end(detail)

    def land_late(self) -> int:
        """Land what force-closes have left on the wire, where the target is still open; the bytes landed."""
        late, self._late = self._late, []
        return sum(write.target._write(write.offset, write.data) for write in late)

    async def _until_due(self, length: int) -> None:
        await trio.sleep(self.put_s(length))  # a checkpoint even if it takes no time
        while not self._flowing.is_set():
            await self._flowing.wait()


class MemoryTarget:
    """See `kvpd.transports.base.Target`."""

    def __init__(self, plane: MemoryDataPlane) -> None:
        number = next(plane._fabric._numbers)
        self.worker_address = f"memory-worker-{number}".encode()
        self.base_address = number << 40
        self.length = plane._view.nbytes
        self.rkey = f"memory-rkey-{number}".encode()
        self._plane = plane
        self._endpoints: dict[MemoryEndpoint, None] = {}
        self._closed = False
        plane._fabric._targets[self.worker_address] = self

    def close(self) -> None:
        self._end("the target was closed")

    def _end(self, detail: str) -> None:
        if not self._closed:
            self._closed = True
            del self._plane._fabric._targets[self.worker_address]
            del self._plane._targets[self]
            for endpoint in list(self._endpoints):
                endpoint._target_ended(detail)

    def _write(self, offset: int, data: bytes | memoryview) -> int:
        if self._closed:
            return 0
        self._plane._view[offset : offset + len(data)] = data
        return len(data)


class MemoryEndpoint(PutQueue):
    """See `kvpd.transports.base.Endpoint`."""

    transports: Final = frozenset({"memory"})

    def __init__(
        self, plane: MemoryDataPlane, target: MemoryTarget, on_broken: Callable[[str], None], put_window_bytes: int
    ) -> None:
        super().__init__(
            local_bytes=plane._view.nbytes,
            remote_bytes=target.length,
            window_bytes=put_window_bytes,
            piece_bytes=None,
        )
        self._plane = plane
        self._fabric = plane._fabric
        self._target = target
        self._on_broken = on_broken
        self._scopes: dict[trio.CancelScope, None] = {}  # one around every put in flight
        target._endpoints[self] = None
        plane._endpoints[self] = None

    def force_close(self) -> None:
        if not self.broken:
            self._end("the endpoint was force-closed")

    def _end(self, detail: str) -> None:
        self._target._endpoints.pop(self, None)
        self._plane._endpoints.pop(self, None)
        self._break(detail)
        for scope in self._scopes:
            scope.cancel()

    def _target_ended(self, detail: str) -> None:
        self._end(detail)
        self._plane._nursery.start_soon(self._report, detail)

    async def _report(self, detail: str) -> None:
        await trio.lowlevel.checkpoint()
        self._on_broken(detail)

    def _begin_put(self, batch: Batch, put: Put) -> None:
        # Shielded, as a wire would be: who waits for a put while everything around is cancelled still sees it end.
        scope = trio.CancelScope(shield=True)
        self._scopes[scope] = None
        self._plane._nursery.start_soon(self._carry, batch, put, scope)

    async def _carry(self, batch: Batch, put: Put, scope: trio.CancelScope) -> None:
        with scope:
            await self._fabric._until_due(put.length)
        del self._scopes[scope]
        self._put_ended(batch, put.length, self._land(put))
        self.pump()

    def _land(self, put: Put) -> str | None:
        """Write the bytes, if nothing has come between; otherwise what has."""
        data = self._plane._view[put.local_offset : put.local_offset + put.length]
        if self._broken is not None:
            if self._fabric.late_landing:
                self._fabric._late.append(_LateWrite(self._target, put.remote_offset, bytes(data)))
            return self._broken
        if self._fabric._failures:
            return self._fabric._failures.pop(0)
        self._target._write(put.remote_offset, data)
        return None

    def _begin_flush(self, batch: Batch) -> None:
        # A put ends here when its bytes are there; nothing is left to flush.
        self._flush_ended(batch, None)


class MemoryDataPlane:
    """See `kvpd.transports.base.DataPlane`; made by `open_memory_data_plane`."""

    transport = "memory"

    def __init__(self, fabric: MemoryFabric, view: memoryview, nursery: trio.Nursery, put_window_bytes: int) -> None:
        self._fabric = fabric
        self._view = view
        self._nursery = nursery
        self._put_window_bytes = put_window_bytes
        self._targets: dict[MemoryTarget, None] = {}
        self._endpoints: dict[MemoryEndpoint, None] = {}
        self._closing = False

    async def open_target(self) -> MemoryTarget:
        """See `kvpd.transports.base.DataPlane`."""
        await trio.lowlevel.checkpoint()
        self._refuse_when_closing()
        target = MemoryTarget(self)
        self._targets[target] = None
        return target

    async def connect(self, region: RemoteRegion, on_broken: Callable[[str], None]) -> MemoryEndpoint:
        """See `kvpd.transports.base.DataPlane`."""
        await trio.lowlevel.checkpoint()
        self._refuse_when_closing()
        target = self._fabric._targets.get(region.worker_address)
        if target is None:
            raise TransportError("no target has that worker address")
        if (region.base_address, region.length, region.rkey) != (target.base_address, target.length, target.rkey):
            raise TransportError("the region is not the target's")
        return MemoryEndpoint(self, target, on_broken, self._put_window_bytes)

    def _refuse_when_closing(self) -> None:
        if self._closing:
            raise TransportError("the data plane is closed")

    def _close(self) -> None:
        self._closing = True
        for target in list(self._targets):
            target.close()
        for endpoint in list(self._endpoints):
            endpoint.force_close()


@asynccontextmanager
async def open_memory_data_plane(
    buffer: Buffer, *, fabric: MemoryFabric, put_window_bytes: int = PUT_WINDOW_BYTES
) -> AsyncIterator[MemoryDataPlane]:
    """A data plane for `buffer` on `fabric`. Leaving force-closes every endpoint and closes every target."""
    with memoryview(buffer) as whole, whole.cast("B") as view:
        async with trio.open_nursery() as nursery:
            plane = MemoryDataPlane(fabric, view, nursery, put_window_bytes)
            try:
                yield plane
            finally:
                plane._close()
