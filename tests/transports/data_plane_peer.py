"""A receiver in a process of its own, for the data planes' contract tests.

`python -m transports.data_plane_peer MODE BYTES` opens a data plane over UCX and one target, writes the region
as a line of JSON to its standard output, and answers each line `digest` with the SHA-256 of its buffer. It ends when
its standard input does.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import sys

import trio

from .ucx_modes import open_ucx


async def main(mode: str, length: int) -> None:
    """Serve until standard input ends."""
    buffer = mmap.mmap(-1, length)
    async with open_ucx(mode, buffer) as plane:
        target = await plane.open_target()
        region = {
            "worker_address": target.worker_address.hex(),
            "base_address": target.base_address,
            "length": target.length,
            "rkey": target.rkey.hex(),
        }
        sys.stdout.write(json.dumps(region) + "\n")
        sys.stdout.flush()
        async with trio.lowlevel.FdStream(os.dup(0)) as commands:
            async for data in commands:
                for _ in range(data.count(b"\n")):
                    sys.stdout.write(hashlib.sha256(buffer).hexdigest() + "\n")
                    sys.stdout.flush()
        target.close()


if __name__ == "__main__":
    trio.run(main, sys.argv[1], int(sys.argv[2]))
