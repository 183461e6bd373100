"""What one core copies in a second: the bound for whoever copies, and the measure of the machine's moment."""

from __future__ import annotations

import ctypes
import mmap
import time
from typing import Final

from kvpd.bench.rounds import Measured

ARENA_BYTES: Final = 256 << 20  # far more than any cache holds
_ROUNDS: Final = 5


class Memcpy:
    """Two arenas of anonymous memory, already touched. A copy of blocks from one to the other, round and round."""

    def __init__(self, arena_bytes: int = ARENA_BYTES) -> None:
        self._length = arena_bytes
        self._arenas = [mmap.mmap(-1, arena_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) for _ in range(2)]
        self._source, self._sink = (ctypes.addressof(ctypes.c_char.from_buffer(arena)) for arena in self._arenas)
        for address in (self._source, self._sink):
            ctypes.memset(address, 1, arena_bytes)

    def gb_s(self, block_bytes: int, total_bytes: int) -> float:
        """Copy about `total_bytes` in blocks, from place to place; 10⁹ bytes per second."""
        blocks = max(1, total_bytes // block_bytes)
        places = self._length // block_bytes
        began = time.perf_counter()
        for number in range(blocks):
            offset = number % places * block_bytes
            ctypes.memmove(self._sink + offset, self._source + offset, block_bytes)
        return blocks * block_bytes / (time.perf_counter() - began) / 1e9


def memcpy_of_the_moment() -> Measured:
    """Blocks of 8 MiB, through 256 MiB; 10⁹ bytes per second."""
    memcpy = Memcpy()
    return Measured.of(memcpy.gb_s(8 << 20, ARENA_BYTES) for _ in range(_ROUNDS))
