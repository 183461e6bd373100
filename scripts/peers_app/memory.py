"""The memory that is moved, and what it must hold.

A source's and a sink's buffers have the same size; both sides can draw the pattern that the source holds. Imported by
processes of both environments: numpy and the standard library only.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import struct
from typing import Any, Literal

import numpy as np

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
MemoryKind = Literal["anonymous", "memfd"]

AnyBytes = memoryview | Bytes

_STAMP = struct.Struct("<q")
_SEED = 20_260
_POISON = 0xA5


class Buffer:
    """Page-aligned memory, all of it touched: `anonymous` in huge pages where the system has them, or a `memfd`."""

    def __init__(self, length: int, kind: MemoryKind = "anonymous") -> None:
        self.length = length
        if kind == "memfd":
            descriptor = os.memfd_create("bench-peers")
            os.ftruncate(descriptor, length)
            self.map = mmap.mmap(descriptor, length)
            os.close(descriptor)
        else:
            self.map = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self.map.madvise(mmap.MADV_HUGEPAGE)
        self.array: Bytes = np.frombuffer(self.map, np.uint8)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self.poison()

    def poison(self) -> None:
        """Forget what it holds."""
        self.array.fill(_POISON)

    def fill(self) -> None:
        """Take the pattern."""
        self.array[:] = pattern(self.length)

    def chunk(self, slot: int, chunk_bytes: int) -> Bytes:
        """The bytes of a slot, in place."""
        return self.array[slot * chunk_bytes : (slot + 1) * chunk_bytes]


@functools.lru_cache(maxsize=1)
def pattern(length: int) -> Bytes:
    """Random bytes, the same ones in every process; read-only."""
    drawn = np.random.default_rng(_SEED).integers(0, 256, length, dtype=np.uint8)
    drawn.flags.writeable = False
    return drawn


def stamp(chunk: AnyBytes, number: int) -> None:
    """Write a number at both ends of a chunk: it tells this content from the same slot's last one."""
    view = chunk if isinstance(chunk, memoryview) else chunk.data
    _STAMP.pack_into(view, 0, number)
    _STAMP.pack_into(view, view.nbytes - _STAMP.size, number)


def check_stamp(chunk: AnyBytes, number: int) -> None:
    """Raises AssertionError where either end of a chunk is another's, or nobody's."""
    view = chunk if isinstance(chunk, memoryview) else chunk.data
    ends = (_STAMP.unpack_from(view, 0)[0], _STAMP.unpack_from(view, view.nbytes - _STAMP.size)[0])
    assert ends == (number, number), f"a chunk of number {number} is stamped {ends}"


def is_equal_between_stamps(chunk: AnyBytes, expected: AnyBytes) -> bool:
    """Whether two chunks are the same but for their stamps."""
    inner = slice(_STAMP.size, -_STAMP.size)
    return np.array_equal(np.frombuffer(chunk, np.uint8)[inner], np.frombuffer(expected, np.uint8)[inner])
