"""Chunk memory: sealed, writable for those who may, faulted in before it is used, and gone with its last holder."""

from __future__ import annotations

import fcntl
import mmap
import os
import re
from pathlib import Path

import numpy as np
import pytest
import trio

from kvpd.errors import ConfigError
from kvpd.service import buffer as buffer_module
from kvpd.service.buffer import Buffer, huge_bytes_between

PAGE = mmap.PAGESIZE


@pytest.mark.parametrize("engines_may_write", [False, True])
def test_nobody_can_resize_it_under_anothers_feet(engines_may_write: bool) -> None:
    """Behind the end of the file a mapping still exists, and kills who touches it."""
    with Buffer("b", 4, PAGE, engines_may_write=engines_may_write) as buffer:
        for length in (0, PAGE, 5 * PAGE):
            with pytest.raises(PermissionError):
                os.ftruncate(buffer.descriptor, length)
        with pytest.raises(PermissionError):
            fcntl.fcntl(buffer.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_a_decode_engine_can_map_it_for_reading_only() -> None:
    """Slots are shared by dedupe: whoever could write would change another request's bytes."""
    with Buffer("b", 4, PAGE, engines_may_write=False) as buffer:
        with pytest.raises(PermissionError):
            mmap.mmap(buffer.descriptor, buffer.length)
        with pytest.raises(PermissionError):
            os.pwrite(buffer.descriptor, b"x", 0)
        with mmap.mmap(buffer.descriptor, buffer.length, access=mmap.ACCESS_READ) as theirs:
            buffer.slot(1, PAGE)[:] = b"k" * PAGE
            assert theirs[PAGE : 2 * PAGE] == b"k" * PAGE


def test_a_prefill_engine_writes_where_the_daemon_reads() -> None:
    """One memory, two mappings, no copy."""
    with (
        Buffer("b", 4, PAGE, engines_may_write=True) as buffer,
        mmap.mmap(buffer.descriptor, buffer.length) as theirs,
    ):
        theirs[2 * PAGE : 2 * PAGE + 5] = b"bytes"
        assert bytes(buffer.slot(2, 5)) == b"bytes"


def test_a_slot_is_its_own_bytes_and_no_others() -> None:
    """An index or a length outside is our own bug, and never a write into the next slot."""
    with Buffer("b", 3, 100, engines_may_write=True) as buffer:
        assert buffer.length == 300
        buffer.slot(1, 100)[:] = b"1" * 100
        assert bytes(buffer.slot(0, 100)) == bytes(buffer.slot(2, 100)) == bytes(100)
        for index, length in ((3, 1), (-1, 1), (0, 0), (0, 101)):
            with pytest.raises(AssertionError):
                buffer.slot(index, length)


def test_it_is_not_inherited() -> None:
    """P73: a child that keeps the descriptor keeps a dead daemon's memory alive."""
    with Buffer("b", 1, PAGE, engines_may_write=True) as buffer:
        assert not os.get_inheritable(buffer.descriptor)


def test_leaving_closes_it_even_while_somebody_holds_a_view() -> None:
    """A caller's array must not turn a clean end into an exception."""
    with Buffer("b", 1, PAGE, engines_may_write=True) as buffer:
        array = np.frombuffer(buffer.slot(0, PAGE), np.uint8)
        descriptor = buffer.descriptor
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    assert not array.any()


def test_more_than_there_is_closes_what_was_open() -> None:
    """The error says what to change."""
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    with pytest.raises(ConfigError, match="smaller size"):
        Buffer("b", 1 << 20, 1 << 43, engines_may_write=True)
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


async def test_it_is_faulted_in_with_progress_and_between_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first touch during a transfer would cost its time; and the loop must answer meanwhile."""
    monkeypatch.setattr(buffer_module, "_SLICE_BYTES", 4 * PAGE)
    monkeypatch.setattr(buffer_module, "_PROGRESS_S", 0.0)
    told: list[int] = []
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await trio.lowlevel.checkpoint()

    with trio.fail_after(10), Buffer("faulted", 10, PAGE, engines_may_write=True) as buffer:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(count_turns)
            await buffer.fault_in(told.append)
            nursery.cancel_scope.cancel()
        assert told == [4 * PAGE, 8 * PAGE, 10 * PAGE]
        assert turns >= 2
        assert os.fstat(buffer.descriptor).st_blocks * 512 == 10 * PAGE, "every page exists"


async def test_progress_is_told_only_now_and_then() -> None:
    """A log line per slice would be thousands for a large buffer."""
    told: list[int] = []
    with Buffer("b", 10, PAGE, engines_may_write=True) as buffer:
        await buffer.fault_in(told.append)
    assert told == []


async def test_faulting_in_can_be_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM during the start of a daemon with a large buffer must not wait for all of it."""
    monkeypatch.setattr(buffer_module, "_SLICE_BYTES", PAGE)
    with Buffer("b", 1000, PAGE, engines_may_write=True) as buffer, trio.CancelScope() as scope:
        monkeypatch.setattr(buffer_module, "_PROGRESS_S", 0.0)
        await buffer.fault_in(lambda _: scope.cancel())
    assert scope.cancelled_caught


def test_the_kernel_is_asked_for_huge_pages() -> None:
    """Copies between processes were twice as fast with them; whether there are any is the machine's setting."""
    with Buffer("advised", 10, PAGE, engines_may_write=True):
        maps = Path("/proc/self/smaps").read_text()
    (flags,) = re.findall(r"memfd:kvpd-advised.*?VmFlags:([^\n]*)", maps, re.DOTALL)
    assert "hg" in flags.split()


HUGE = 2 << 20
SMAPS = """\
7f0000000000-7f0000800000 rw-s 00000000 00:01 10 /memfd:kvpd-other (deleted)
Size:               8192 kB
ShmemPmdMapped:     8192 kB
VmFlags: rd wr sh hg
7f0000800000-7f0000a00000 rw-s 00000000 00:01 11 /memfd:kvpd-ours (deleted)
Size:               2048 kB
ShmemPmdMapped:     2048 kB
7f0000a00000-7f0000b00000 rw-s 00200000 00:01 11 /memfd:kvpd-ours (deleted)
Size:               1024 kB
ShmemPmdMapped:        0 kB
7f0000b00000-7f0000d00000 rw-s 00000000 00:01 12 /memfd:kvpd-next (deleted)
ShmemPmdMapped:     2048 kB
"""


def are_forbidden() -> bool:
    """Whether this machine gives shared memory no huge pages."""
    setting = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    return not setting.exists() or "[never]" in setting.read_text() or "[deny]" in setting.read_text()


async def test_it_says_how_much_of_it_is_in_huge_pages() -> None:
    """Asking is not getting: where the machine forbids them there are none, and nobody else would say so."""
    with Buffer("huge", 4, HUGE, engines_may_write=True) as buffer:
        await buffer.fault_in(lambda _: None)
        found = buffer.huge_page_bytes()
    assert found in range(0, buffer.total_bytes + 1, HUGE)
    if are_forbidden():
        assert found == 0


def test_huge_pages_of_other_mappings_are_not_ours() -> None:
    """A program may have several daemons, and engines, in one process; a mapping may be told in parts."""
    lines = SMAPS.splitlines(keepends=True)
    assert huge_bytes_between(0x7F0000800000, 0x7F0000B00000, lines) == HUGE
    assert huge_bytes_between(0x7F0000A00000, 0x7F0000B00000, lines) == 0
    assert huge_bytes_between(0x7F0000000000, 0x7F0000D00000, lines) == 6 * HUGE


def test_a_kernel_that_does_not_tell_is_not_taken_for_none() -> None:
    """Nor is a mapping that is not there."""
    lines = [line for line in SMAPS.splitlines(keepends=True) if "Pmd" not in line]
    assert huge_bytes_between(0x7F0000800000, 0x7F0000B00000, lines) is None
    assert huge_bytes_between(0x7E0000000000, 0x7E0000800000, SMAPS.splitlines()) is None
