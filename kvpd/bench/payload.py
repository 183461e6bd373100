"""What benchmarks move: bytes that both ends can tell, so that each chunk can be known as the right one, and whole.

A chunk's bytes are a piece of one arena of random bytes, the same in every process; which piece depends on the request
and the chunk. On top, its first and last bytes say which chunk of which request it is: those two stamps are all that is
written and looked at where an engine's own copies are not to be measured.
"""

from __future__ import annotations

import mmap
import random
import struct
from typing import Final, Literal

import attrs

# copy: both engines copy every chunk, in and out of their own memory, and the stamps are looked at in the copy.
# in_place: no engine copies; a chunk is what its slot held before, with new stamps.
# check: like copy, and every byte is compared.
Mode = Literal["copy", "in_place", "check"]

_STAMP: Final = struct.Struct("<QII")
_ARENA_BYTES: Final = 64 << 20  # more than caches hold, where no chunk is larger
_BLOCK_BYTES: Final = (1 << 20) + 4093  # repeated; no chunk begins twice at the same place of it
_STRIDE: Final = 7919 * 64
_SEED: Final = 5


@attrs.frozen(kw_only=True)
class Load:
    """What engines are to move: so many requests, at most `depth` of them open at once in the prefill engine."""

    run: int  # a number of its own, so that no key comes twice
    requests: int
    chunks: int  # of each request
    depth: int
    mode: Mode

    def req_id(self, number: int) -> str:
        """The name of a request."""
        return f"bench-{self.run}-{number}"

    def keys(self, number: int) -> list[bytes]:
        """Its chunks' keys."""
        return [b"%d.%d.%d" % (self.run, number, chunk) for chunk in range(self.chunks)]

    def stamp(self, number: int, chunk: int) -> bytes:
        """What a chunk begins and ends with."""
        return stamp(self.run << 32 | number, chunk)


def stamp(number: int, chunk: int) -> bytes:
    """16 bytes that no other chunk has."""
    return _STAMP.pack(number, chunk, ~chunk & 0xFFFFFFFF)


def put_stamps(chunk: memoryview, text: bytes) -> None:
    """Write both."""
    chunk[: len(text)] = text
    chunk[-len(text) :] = text


def has_stamps(chunk: memoryview, text: bytes) -> bool:
    """Whether both are there."""
    return chunk[: len(text)] == text and chunk[-len(text) :] == text


class Payload:
    """The arena, for chunks of one size."""

    def __init__(self, chunk_bytes: int) -> None:
        self.chunk_bytes = chunk_bytes
        block = random.Random(_SEED).randbytes(_BLOCK_BYTES)  # noqa: S311  no secret
        length = max(_ARENA_BYTES, 2 * chunk_bytes)
        arena = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for start in range(0, length, _BLOCK_BYTES):
            end = min(start + _BLOCK_BYTES, length)
            arena[start:end] = block[: end - start]
        self._arena = memoryview(arena).toreadonly()

    def chunk(self, number: int, chunk: int) -> memoryview:
        """The bytes of a chunk, without its stamps."""
        offset = (number * 61 + chunk) * _STRIDE % (len(self._arena) - self.chunk_bytes)
        return self._arena[offset : offset + self.chunk_bytes]

    def is_whole(self, seen: memoryview, number: int, chunk: int, stamped: bytes) -> bool:
        """Whether every byte of a chunk is right."""
        expected = bytearray(self.chunk(number, chunk))
        put_stamps(memoryview(expected), stamped)
        return bytes(seen) == expected
