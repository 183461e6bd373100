"""The receiver's slots: which is free, written, ready or in quarantine, and who may still read or write it.

Always: free + reserved + writing + ready + quarantined == total. A slot has one writer at most. A slot that may still
be written is never free: it goes from WRITING to QUARANTINED and stays there until its fence. A READY slot is freed
when its last pin goes, whoever wrote it.
"""

from __future__ import annotations

import enum

import attrs


class SlotState(enum.Enum):
    """What a slot is used for."""

    FREE = "free"  # reserved slots are free ones that are spoken for
    WRITING = "writing"
    READY = "ready"
    QUARANTINED = "quarantined"


@attrs.define
class Slot:
    """One chunk-sized place, for one use of it."""

    state: SlotState = SlotState.FREE
    key: bytes = b""
    length: int = 0  # bytes
    pins: int = 0  # chunks of transfers that count on it
    ranks_missing: frozenset[int] = frozenset()


@attrs.frozen
class PoolCounts:
    """Invariant 1: these add up to the total."""

    free: int
    reserved: int
    writing: int
    ready: int
    quarantined: int


class SlotPool:
    """All slots of one buffer, the same numbers in every rank's region."""

    def __init__(self, total_slots: int, *, ranks: int = 1) -> None:
        self.total_slots = total_slots
        self._all_ranks = frozenset(range(ranks))
        self._slots = [Slot() for _ in range(total_slots)]
        self._free = list(range(total_slots - 1, -1, -1))
        self._ready_by_key: dict[bytes, int] = {}
        self._reserved = self._writing = self._ready = self._quarantined = 0

    @property
    def unreserved(self) -> int:
        """Free slots that nobody has been promised."""
        return len(self._free) - self._reserved

    @property
    def counts(self) -> PoolCounts:
        """How many slots are in which state."""
        return PoolCounts(self.unreserved, self._reserved, self._writing, self._ready, self._quarantined)

    def slot(self, index: int) -> Slot:
        """The slot's record, to be read only."""
        return self._slots[index]

    def reserve(self, count: int) -> None:
        """Promise `count` free slots."""
        assert 0 <= count <= self.unreserved, f"{count} of {self.unreserved} slots"
        self._reserved += count

    def unreserve(self, count: int) -> None:
        """Take back the promise of `count` slots."""
        assert 0 <= count <= self._reserved, f"{count} of {self._reserved} reserved slots"
        self._reserved -= count

    def draw(self, key: bytes, length: int) -> int:
        """A promised slot, to be written: its index."""
        assert self._reserved > 0, "drawn without a reservation"
        index = self._free.pop()
        self._slots[index] = Slot(SlotState.WRITING, key, length, 1, self._all_ranks)
        self._reserved -= 1
        self._writing += 1
        return index

    def pin_ready(self, key: bytes, length: int) -> int | None:
        """Pin the READY slot that holds this very chunk, if there is one. Placed but unwritten never counts."""
        index = self._ready_by_key.get(key)
        if index is None or self._slots[index].length != length:
            return None
        self._slots[index].pins += 1
        return index

    def written(self, index: int, rank: int) -> bool:
        """Rank `rank` of a slot has been written. True when that made it READY."""
        slot = self._slots[index]
        assert slot.state is SlotState.WRITING, f"slot {index} is {slot.state}"
        assert rank in slot.ranks_missing, f"rank {rank} of slot {index} was written before"
        slot.ranks_missing -= {rank}
        if slot.ranks_missing:
            return False
        slot.state = SlotState.READY
        self._ready_by_key.setdefault(slot.key, index)
        self._writing -= 1
        self._ready += 1
        return True

    def let_go(self, index: int, *, fenced: bool) -> bool:
        """A transfer counts on this slot no more. True when the slot may still be written and waits for its fence."""
        slot = self._slots[index]
        if slot.state is SlotState.READY:
            slot.pins -= 1
            if slot.pins == 0:
                self._ready -= 1
                self._free_slot(index)
            return False
        assert slot.state is SlotState.WRITING, f"slot {index} is {slot.state}"
        self._writing -= 1
        if fenced:
            self._free_slot(index)
            return False
        slot.state = SlotState.QUARANTINED
        self._quarantined += 1
        return True

    def fence(self, index: int) -> None:
        """No write can land in this slot any more: free it."""
        assert self._slots[index].state is SlotState.QUARANTINED, f"slot {index} is {self._slots[index].state}"
        self._quarantined -= 1
        self._free_slot(index)

    def _free_slot(self, index: int) -> None:
        key = self._slots[index].key
        if self._ready_by_key.get(key) == index:
            del self._ready_by_key[key]
        self._slots[index] = Slot()
        self._free.append(index)

    def check(self) -> None:
        """Invariant 1 in O(1), for every event in production."""
        used = self._writing + self._ready + self._quarantined
        assert len(self._free) + used == self.total_slots, "slots were lost or doubled"
        assert 0 <= self._reserved <= len(self._free), "more slots are promised than free"

    def audit(self) -> None:
        """Invariant 1 by a full scan, for tests and simulation."""
        self.check()
        states = [slot.state for slot in self._slots]
        assert states.count(SlotState.FREE) == len(self._free) == len(set(self._free))
        assert states.count(SlotState.WRITING) == self._writing
        assert states.count(SlotState.READY) == self._ready
        assert states.count(SlotState.QUARANTINED) == self._quarantined
        assert all(self._slots[index].state is SlotState.FREE for index in self._free)
        assert all(self._slots[index].state is SlotState.READY for index in self._ready_by_key.values())
        assert all(slot.pins > 0 for slot in self._slots if slot.state is SlotState.READY)
