"""A daemon's chunk memory: a sealed memfd that engines map too, with a window for each rank of an engine.

Nobody can resize it under another's feet, it has no name that could be left behind, and it goes with its last holder.
It is faulted in before the daemon says that it is ready: a first touch during a transfer would cost its time.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import trio

from kvpd.errors import ConfigError

_SLICE_BYTES: Final = 64 << 20  # faulted in between two checkpoints
_MADV_POPULATE_WRITE: Final = 23  # not in Python's mmap module; Linux 5.14
_F_SEAL_FUTURE_WRITE: Final = 0x10  # not in Python's fcntl module; Linux 5.1
_PROGRESS_S: Final = 2.0


class Buffer:
    """For each of `ranks` ranks `slots` places of `chunk_bytes` bytes. A context manager: leaving unmaps and closes.

    `length` is what one rank's places take, `window_bytes` from where one rank's begin to where the next one's do, and
    `total_bytes` all of it.
    """

    def __init__(self, name: str, slots: int, chunk_bytes: int, *, engines_may_write: bool, ranks: int = 1) -> None:
        self.slots = slots
        self.chunk_bytes = chunk_bytes
        self.length = slots * chunk_bytes
        # An engine maps its own window alone, which must begin at a page.
        self.window_bytes = self.length if ranks == 1 else -(-self.length // mmap.PAGESIZE) * mmap.PAGESIZE
        self.total_bytes = ranks * self.window_bytes
        self.descriptor = os.memfd_create(f"kvpd-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, self.total_bytes)
            self.memory = mmap.mmap(self.descriptor, self.total_bytes)
        except (OSError, ValueError, OverflowError) as exc:
            os.close(self.descriptor)
            raise ConfigError(
                [f"{self.total_bytes} bytes of chunk memory cannot be had ({exc}); set a smaller size"]
            ) from exc
        with contextlib.suppress(OSError):  # a kernel that has no huge pages for it serves as well, only slower
            self.memory.madvise(mmap.MADV_HUGEPAGE)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
        if not engines_may_write:
            seals |= _F_SEAL_FUTURE_WRITE
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, seals | fcntl.F_SEAL_SEAL)
        # Slots are shared by dedupe: a decode engine that wrote into one would change another request's bytes. Where
        # the seal does not forbid it, since others must write, the way in which this one was opened does.
        self.reading_descriptor = os.open(f"/proc/self/fd/{self.descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        self._view = memoryview(self.memory)

    async def fault_in(self, on_progress: Callable[[int], None]) -> None:
        """Touch every page, between checkpoints; `on_progress(bytes so far)` every two seconds.

        Raises:
            ConfigError: the machine has not that much memory.
        """
        told_at = time.monotonic()
        for start in range(0, self.total_bytes, _SLICE_BYTES):
            end = min(start + _SLICE_BYTES, self.total_bytes)
            try:
                self.memory.madvise(_MADV_POPULATE_WRITE, start, end - start)
            except OSError as exc:
                detail = f"after {start} of {self.total_bytes} bytes of chunk memory the machine had no more ({exc})"
                raise ConfigError([f"{detail}; set a smaller size, or raise the container's memory limit"]) from exc
            await trio.lowlevel.checkpoint()
            if time.monotonic() - told_at >= _PROGRESS_S:
                told_at = time.monotonic()
                on_progress(end)

    def huge_page_bytes(self) -> int | None:
        """Of the bytes faulted in, those in huge pages, as the kernel has mapped them; None if it does not tell.

        The kernel looks at every page for this, 20 ms a GiB where they are small; ask in a thread.
        """
        begin = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        try:
            with Path("/proc/self/smaps").open(encoding="utf-8", errors="replace") as mappings:
                return huge_bytes_between(begin, begin + self.total_bytes, mappings)
        except OSError:
            return None

    def offset(self, index: int, rank: int) -> int:
        """Where slot `index` of this rank begins, in bytes."""
        return rank * self.window_bytes + index * self.chunk_bytes

    def slot(self, index: int, length: int, rank: int = 0) -> memoryview:
        """The first `length` bytes of slot `index` of this rank."""
        assert 0 <= index < self.slots, f"slot {index} of {self.slots}"
        assert 0 < length <= self.chunk_bytes, f"{length} of {self.chunk_bytes} bytes"
        start = self.offset(index, rank)
        return self._view[start : start + length]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self.descriptor)
        os.close(self.reading_descriptor)
        self._view.release()
        try:
            self.memory.close()
        except BufferError:
            # A caller still holds a view of it: the mapping goes with that view.
            return


def huge_bytes_between(begin: int, end: int, smaps: Iterable[str]) -> int | None:
    """Bytes of shared memory in huge pages, of the mappings that begin in [begin, end); None if none tells."""
    total: int | None = None
    is_inside = False
    for line in smaps:
        first, _, rest = line.partition(" ")
        if first == "ShmemPmdMapped:" and is_inside:
            total = (total or 0) + int(rest.split()[0]) * 1024
        elif not first.endswith(":"):  # a new mapping, "7f3000000000-7f3040000000 rw-s ..."; they come by address
            start = int(first.partition("-")[0], 16)
            if start >= end:
                break
            is_inside = start >= begin
    return total
