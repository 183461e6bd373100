"""A sender in a process of its own that writes for as long as it is let: argv is the region, as JSON, and UCX's TLS.

It says `begun` when some of its batches have landed, and then how many of them did and how many failed.
"""

from __future__ import annotations

import json
import mmap
import sys

import trio

from kvpd.errors import TransportError
from kvpd.transports.base import Put, PutBatch, RemoteRegion
from kvpd.transports.ucx import open_ucx_data_plane

PIECE = 1 << 20
BEGUN = 4  # batches


def tell(word: str) -> None:
    """A line to the test."""
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


async def main() -> None:
    """Put everything, piece by piece, and tell how it went."""
    told = json.loads(sys.argv[1])
    region = RemoteRegion(bytes.fromhex(told["worker"]), told["base"], told["length"], bytes.fromhex(told["rkey"]))
    buffer = mmap.mmap(-1, region.length)
    buffer.write(b"\x02" * region.length)
    async with open_ucx_data_plane(buffer, tls=sys.argv[2]) as plane:
        endpoint = await plane.connect(region, lambda _: None)
        batches: list[PutBatch] = [
            endpoint.post([Put(offset, offset, PIECE)]) for offset in range(0, region.length, PIECE)
        ]
        for batch in batches[:BEGUN]:
            await batch.wait()
        tell("begun")
        landed = 0
        for batch in batches[BEGUN:]:
            try:
                await batch.wait()
                landed += 1
            except TransportError:
                continue
        tell(f"ended {landed + BEGUN} {len(batches)}")


trio.run(main)
