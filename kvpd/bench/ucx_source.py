"""A worker: it writes into a target's memory by bare UCX puts, through kvpd's data plane and with no daemon.

It is the same kind of memory as a sender's staging buffer: a sealed memfd, faulted in.
"""

from __future__ import annotations

import time
from collections import deque

import attrs
import trio

from kvpd.bench.payload import Payload, put_stamps, stamp
from kvpd.bench.wires import Binding, version_of
from kvpd.bench.workers import serve_async
from kvpd.service.buffer import Buffer
from kvpd.service.defaults import data_plane_factory
from kvpd.transports.base import Endpoint, Put, PutBatch, RemoteRegion


@attrs.frozen(kw_only=True)
class OpenSource:
    """What to write from, and whereto."""

    chunk_bytes: int
    slots: int
    binding: Binding
    tls: str
    region: RemoteRegion


@attrs.frozen(kw_only=True)
class Opened:
    """What it goes over, as UCX calls it, and the versions of what was loaded for it."""

    carried_by: tuple[str, ...]
    versions: str


@attrs.frozen(kw_only=True)
class PutAll:
    """Put so many batches of `batch` chunks, slot after slot, `in_flight` batches at a time."""

    stamp: int
    batches: int
    batch: int
    in_flight: int


async def main() -> None:
    """Serve until stdin ends."""
    async with trio.open_nursery() as nursery:
        source = _Source(nursery)
        await serve_async({"open": source.open, "put": source.put})
        nursery.cancel_scope.cancel()


class _Source:
    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery

    async def open(self, wanted: OpenSource) -> Opened:
        """Connect, until the worker ends."""
        opened: Opened = await self._nursery.start(self._connect, wanted)
        return opened

    async def _connect(self, wanted: OpenSource, *, task_status: trio.TaskStatus[Opened]) -> None:
        self._payload = Payload(wanted.chunk_bytes)
        open_plane = data_plane_factory(wanted.binding, "auto", wanted.tls)
        with Buffer("bench", wanted.slots, wanted.chunk_bytes, engines_may_write=True) as self._buffer:
            await self._buffer.fault_in(lambda _: None)
            for index in range(wanted.slots):
                self._buffer.slot(index, wanted.chunk_bytes)[:] = self._payload.chunk(0, index)
            async with open_plane(self._buffer.memory, None) as plane:
                self._endpoint: Endpoint = await plane.connect(wanted.region, _broken)
                carried_by = tuple(sorted(self._endpoint.transports))
                task_status.started(Opened(carried_by=carried_by, versions=version_of(wanted.binding)))
                await trio.sleep_forever()

    async def put(self, wanted: PutAll) -> float:
        """How many seconds it took."""
        length, slots = self._payload.chunk_bytes, self._buffer.slots
        for index in range(slots):
            put_stamps(self._buffer.slot(index, length), stamp(wanted.stamp, index))
        began = time.perf_counter()
        posted: deque[PutBatch] = deque()
        for number in range(wanted.batches):
            if len(posted) == wanted.in_flight:
                await posted.popleft().wait()
            offsets = [(number * wanted.batch + n) % slots * length for n in range(wanted.batch)]
            posted.append(self._endpoint.post([Put(offset, offset, length) for offset in offsets]))
        while posted:
            await posted.popleft().wait()
        return time.perf_counter() - began


def _broken(detail: str) -> None:
    raise AssertionError(f"the target has died: {detail}")


if __name__ == "__main__":
    trio.run(main)
