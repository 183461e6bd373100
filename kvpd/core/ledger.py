"""Admission control: how many slots each transfer may fill, and whose turn it is.

A transfer holds all the room it will ever need, or none. Nobody waits while holding, so two half-admitted transfers
can never deadlock each other. The queue is first in, first out: a large transfer at its head is not overtaken, so
nobody starves. Room stays charged from the reservation until the last reader has released the chunk.
"""

from __future__ import annotations

from collections import OrderedDict

from kvpd.core.events import TransferId
from kvpd.core.pool import SlotPool


class Ledger:
    """Reservations of a pool, by transfer."""

    def __init__(self, pool: SlotPool) -> None:
        self._pool = pool
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
        del self._waiting[transfer]

    def admit_next(self) -> TransferId | None:
        """Admit the head of the queue if all of it fits: its room is now reserved. None when it must wait."""
        if not self._waiting:
            return None
        transfer, chunks = next(iter(self._waiting.items()))
        if chunks > self._pool.unreserved:
            return None
        del self._waiting[transfer]
        self._pool.reserve(chunks)
        self._reserved[transfer] = chunks
        return transfer

    def draw(self, transfer: TransferId, key: bytes, length: int) -> tuple[int, bool]:
        """A slot for a chunk: its index, and whether it holds the chunk's bytes already.

        A chunk that is READY here, whoever wrote it, is pinned, and its share of the reservation is returned.
        """
        self._reserved[transfer] -= 1
        assert self._reserved[transfer] >= 0, "more chunks than the transfer reserved room for"
        pinned = self._pool.pin_ready(key, length)
        if pinned is not None:
            self._pool.unreserve(1)
            return pinned, True
        return self._pool.draw(key, length), False

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
