"""Checksums of chunks: computed where they are staged, compared where they have landed."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import trio

from kvpd.core.messages import Verify


def _algorithm(verify: Verify) -> Callable[[memoryview], int]:
    match verify:
        case "crc32c":
            from crc32c import crc32c  # noqa: PLC0415  loaded only where it is used

            return crc32c
        case "xxh3":
            from xxhash import xxh3_64_intdigest  # noqa: PLC0415  loaded only where it is used

            return xxh3_64_intdigest
        case "off":
            raise AssertionError("nobody asked for checksums")


async def checksums_of(chunks: Iterable[memoryview], verify: Verify) -> tuple[int, ...]:
    """The checksum of each chunk. Others run between two chunks: one of 8 MiB takes about a millisecond."""
    compute = _algorithm(verify)
    found = []
    for chunk in chunks:
        found.append(compute(chunk))
        await trio.lowlevel.checkpoint()
    return tuple(found)
