"""A worker: memory that bare UCX puts are written to, with no daemon around it.

It is the same kind of memory as a receiver's buffer: a sealed memfd, faulted in.
"""

from __future__ import annotations

import attrs
import trio

from kvpd.bench.payload import Payload, has_stamps, stamp
from kvpd.bench.wires import Binding
from kvpd.bench.workers import serve_async
from kvpd.service.buffer import Buffer
from kvpd.service.defaults import data_plane_factory
from kvpd.transports.base import RemoteRegion


@attrs.frozen(kw_only=True)
class OpenTarget:
    """What to offer."""

    chunk_bytes: int
    slots: int
    binding: Binding
    tls: str


@attrs.frozen(kw_only=True)
class LookAt:
    """The first `slots` slots should bear the stamps of this round; `whole`: and have every byte right."""

    stamp: int
    slots: int
    whole: bool


async def main() -> None:
    """Serve until stdin ends."""
    async with trio.open_nursery() as nursery:
        target = _Target(nursery)
        await serve_async({"open": target.open, "look": target.look})
        nursery.cancel_scope.cancel()


class _Target:
    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery

    async def open(self, wanted: OpenTarget) -> RemoteRegion:
        """Offer it until the worker ends."""
        region: RemoteRegion = await self._nursery.start(self._offer, wanted)
        return region

    async def _offer(self, wanted: OpenTarget, *, task_status: trio.TaskStatus[RemoteRegion]) -> None:
        self._payload = Payload(wanted.chunk_bytes)
        open_plane = data_plane_factory(wanted.binding, "auto", wanted.tls)
        with Buffer("bench", wanted.slots, wanted.chunk_bytes, engines_may_write=False) as self._buffer:
            await self._buffer.fault_in(lambda _: None)
            async with open_plane(self._buffer.memory, None) as plane:
                target = await plane.open_target()
                task_status.started(
                    RemoteRegion(target.worker_address, target.base_address, target.length, target.rkey)
                )
                await trio.sleep_forever()

    async def look(self, at: LookAt) -> int:
        """How many of the slots are wrong."""
        chunk_bytes = self._payload.chunk_bytes
        wrong = 0
        for index in range(at.slots):
            chunk, text = self._buffer.slot(index, chunk_bytes), stamp(at.stamp, index)
            right = self._payload.is_whole(chunk, 0, index, text) if at.whole else has_stamps(chunk, text)
            wrong += not right
        return wrong


if __name__ == "__main__":
    trio.run(main)
