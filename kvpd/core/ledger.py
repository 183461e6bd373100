"""Admission control: how many slots each transfer may fill, and whose turn it is.

A transfer holds all the room it will ever need, or none. Nobody waits while holding, so two half-admitted transfers
can never deadlock each other. The queue is first in, first out: a large transfer at its head is not overtaken, so
nobody starves. Where it is allowed, a bounded number of smaller ones may pass a head that does not fit, and then
nobody may until it has been admitted. Room stays charged from the reservation until the last reader has released the
chunk.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Collection
from typing import Final

from kvpd.core.events import TransferId
from kvpd.core.pool import SlotPool

_BYPASS_SCAN_MAX: Final = 64  # how far behind the head one that fits is looked for


class Ledger:
    """Reservations of a pool, by transfer."""

    def __init__(self, pool: SlotPool, *, bypass_max: int = 0) -> None:
        self._pool = pool
        self._bypass_max = bypass_max
        self._bypassed = 0  # how many have passed the head that waits now
        self._waiting: OrderedDict[TransferId, int] = OrderedDict()
        self._reserved: dict[TransferId, int] = {}

    @property
    def depth(self) -> int:
        """Transfers that wait."""
        return len(self._waiting)

    def join(self, transfer: TransferId, chunks: int) -> None:
        """Wait for room for `chunks` chunks, behind everybody else."""
        assert 0 < chunks <= self._pool.total_slots, f"{chunks} chunks can never fit"
        self._waiting[transfer] = chunks

    def leave(self, transfer: TransferId) -> None:
        """Stop waiting: those behind move up."""
        if transfer == next(iter(self._waiting)):
            self._bypassed = 0
        del self._waiting[transfer]

    def admit_next(self) -> TransferId | None:
        """Admit whose turn it is, if all of it fits: its room is now reserved. None when everybody must wait."""
        transfer = self.next_that_fits()
        if transfer is None:
            return None
        self._bypassed = 0 if transfer == next(iter(self._waiting)) else self._bypassed + 1
        chunks = self._waiting.pop(transfer)
        self._pool.reserve(chunks)
        self._reserved[transfer] = chunks
        return transfer

    def next_that_fits(self) -> TransferId | None:
        """Whose turn it is: the head; or, while it does not fit and may be passed, the first behind it that does."""
        if not self._waiting:  # as after nearly every event
            return None
        scan = _BYPASS_SCAN_MAX if self._bypassed < self._bypass_max else 1
        for transfer, chunks in itertools.islice(self._waiting.items(), scan):
            if chunks <= self._pool.unreserved:
                return transfer
        return None

    def draw(self, transfer: TransferId, chunks: Collection[tuple[bytes, int]]) -> list[tuple[int, bool]]:
        """A slot for each chunk, of a key and a length: its index, and whether it holds the chunk's bytes already.

        A chunk that is READY here, whoever wrote it, is pinned, and its share of the reservation is returned.
        """
        self._reserved[transfer] -= len(chunks)
        assert self._reserved[transfer] >= 0, "more chunks than the transfer reserved room for"
        return [self._draw(key, length) for key, length in chunks]

    def _draw(self, key: bytes, length: int) -> tuple[int, bool]:
        pinned = self._pool.pin_ready(key, length)
        if pinned is None:
            return self._pool.draw(key, length), False
        self._pool.unreserve(1)
        return pinned, True

    def settle(self, transfer: TransferId) -> None:
        """The transfer will draw no more: what is left of its reservation is returned. Once."""
        self._pool.unreserve(self._reserved.pop(transfer))

    def audit(self) -> None:
        """The reservations by transfer add up to the pool's own count, and the head waits only if it must."""
        assert sum(self._reserved.values()) == self._pool.counts.reserved
        assert self._waiting.keys().isdisjoint(self._reserved)
        if self._waiting:
            assert next(iter(self._waiting.values())) > self._pool.unreserved, "the head fits, yet waits"

    @property
    def is_empty(self) -> bool:
        """Nobody waits and nobody holds a reservation."""
        return not self._waiting and not self._reserved
