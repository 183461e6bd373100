"""A sender in a process of its own: argv is the region, as JSON, UCX's TLS, and what it does.

It says `begun` when some of its batches have landed. To `write` is to go on for as long as it is let, and then to say
how many of its batches landed, of how many. To `fence` is what a sender does that has lost its lease: it closes its
endpoint by force, waits until no put is in flight any more, says `fenced`, and connects anew to write its last piece.
"""

from __future__ import annotations

import json
import mmap
import sys

import trio

from kvpd.errors import TransportError
from kvpd.transports.base import DataPlane, Put, PutBatch, RemoteRegion
from kvpd.transports.ucx import open_ucx_data_plane

PIECE = 1 << 20
BEGUN = 4  # batches


def tell(word: str) -> None:
    """A line to the test."""
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


async def main() -> None:
    """Put piece by piece, and tell how it went."""
    told = json.loads(sys.argv[1])
    region = RemoteRegion(bytes.fromhex(told["worker"]), told["base"], told["length"], bytes.fromhex(told["rkey"]))
    buffer = mmap.mmap(-1, region.length)
    buffer.write(b"\x02" * region.length)
    async with open_ucx_data_plane(buffer, tls=sys.argv[2]) as plane:
        match sys.argv[3]:
            case "write":
                await write(plane, region)
            case "fence":
                last = region.length - PIECE
                buffer[last:] = b"\x03" * PIECE
                await fence(plane, region, last)


async def write(plane: DataPlane, region: RemoteRegion) -> None:
    """Everything, to the end."""
    endpoint = await plane.connect(region, lambda _: None)
    batches = [endpoint.post([Put(offset, offset, PIECE)]) for offset in range(0, region.length, PIECE)]
    await begin(batches)
    landed = 0
    for batch in batches[BEGUN:]:
        try:
            await batch.wait()
            landed += 1
        except TransportError:
            continue
    tell(f"ended {landed + BEGUN} {len(batches)}")


async def fence(plane: DataPlane, region: RemoteRegion, last: int) -> None:
    """Some of it, then the fence, then the last piece through a new endpoint."""
    endpoint = await plane.connect(region, lambda _: None)
    batches = [endpoint.post([Put(offset, offset, PIECE)]) for offset in range(0, last, PIECE)]
    await begin(batches)
    endpoint.force_close()
    for batch in batches:
        await batch.drain()
    tell("fenced")
    endpoint = await plane.connect(region, lambda _: None)
    await endpoint.post([Put(last, last, PIECE)]).wait()
    tell("ended")


async def begin(batches: list[PutBatch]) -> None:
    """The first of them have landed."""
    for batch in batches[:BEGUN]:
        await batch.wait()
    tell("begun")


trio.run(main)
