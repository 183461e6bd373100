"""Staging: which batch gets the sender's slots next, and how many of them.

All or none, first in, first out. Staging is asked for only after admission, so whoever holds it can always finish
without waiting for another request: it always drains. One receiver holds at most its share, so that a slow one does
not stop the transfers to the others; a batch that waits for its own receiver's share lets those behind it pass.
"""

from __future__ import annotations

from collections import OrderedDict

import attrs

AskKey = tuple[int, int]  # transfer_no, stage


@attrs.frozen
class Ask:
    """A batch waits for `want` slots, or as many as its receiver may hold."""

    order: int
    want: int


class Staging:
    """The sender's slots and those who wait for them."""

    def __init__(self, total_slots: int) -> None:
        self.total_slots = total_slots
        self._free = list(range(total_slots - 1, -1, -1))
        self._held: dict[str, int] = {}  # by receiver, without zeros
        self._lingering = 0  # held by nobody's transfer, and yet not to be given away
        self._waiting: dict[str, OrderedDict[AskKey, Ask]] = {}  # by receiver, without empty ones
        self._order = 0

    @property
    def free_count(self) -> int:
        """Slots that nobody holds."""
        return len(self._free)

    @property
    def waiting_count(self) -> int:
        """Batches that wait."""
        return sum(len(asks) for asks in self._waiting.values())

    def _share(self, receiver: str) -> int:
        """How many slots one receiver may hold while this many are served."""
        active = len(self._held.keys() | self._waiting.keys() | {receiver})
        return max(1, (self.total_slots - self._lingering) // active)

    def take_now(self, receiver: str, want: int) -> tuple[int, ...] | None:
        """Slots for a batch, if they are free and nobody waits; None: not now."""
        size = min(want, self._share(receiver))
        if self._waiting or size > len(self._free) or self._held.get(receiver, 0) + size > self._share(receiver):
            return None
        return self._take(receiver, size)

    def wait(self, key: AskKey, receiver: str, want: int) -> None:
        """Join the line."""
        self._order += 1
        self._waiting.setdefault(receiver, OrderedDict())[key] = Ask(self._order, want)

    def withdraw(self, key: AskKey, receiver: str) -> None:
        """Leave the line; harmless for one that is not in it."""
        asks = self._waiting.get(receiver)
        if asks is not None and asks.pop(key, None) is not None and not asks:
            del self._waiting[receiver]

    def grant_next(self) -> tuple[AskKey, tuple[int, ...]] | None:
        """Whose turn it is, and its slots; None when nobody's, or the next in line does not fit yet."""
        best: tuple[int, str, AskKey, int] | None = None
        for receiver, asks in self._waiting.items():
            key, ask = next(iter(asks.items()))
            share = self._share(receiver)
            size = min(ask.want, share)
            if self._held.get(receiver, 0) + size <= share and (best is None or ask.order < best[0]):
                best = ask.order, receiver, key, size
        if best is None or best[3] > len(self._free):
            return None
        _, receiver, key, size = best
        self.withdraw(key, receiver)
        return key, self._take(receiver, size)

    def _take(self, receiver: str, size: int) -> tuple[int, ...]:
        cut = len(self._free) - size
        slots = tuple(self._free[cut:])
        del self._free[cut:]
        self._held[receiver] = self._held.get(receiver, 0) + size
        return slots

    def give_back(self, receiver: str, slots: list[int]) -> None:
        """These slots are read and written by nobody any more."""
        if not slots:
            return
        self._free.extend(slots)
        self._drop_hold(receiver, len(slots))

    def linger(self, receiver: str, slots: list[int]) -> None:
        """The slots' transfer is over, but its engine may still write into them: they count for nobody's share."""
        self._lingering += len(slots)
        self._drop_hold(receiver, len(slots))

    def recover(self, slots: list[int]) -> None:
        """Nobody writes into these lingering slots any more."""
        self._lingering -= len(slots)
        assert self._lingering >= 0, "lingering slots were freed twice"
        self._free.extend(slots)

    def _drop_hold(self, receiver: str, count: int) -> None:
        left = self._held[receiver] - count
        assert left >= 0, "staging slots were freed twice"
        if left:
            self._held[receiver] = left
        else:
            del self._held[receiver]

    def check(self) -> None:
        """Conservation, in O(receivers)."""
        used = sum(self._held.values()) + self._lingering
        assert len(self._free) + used == self.total_slots, "staging slots were lost or doubled"

    def audit(self) -> None:
        """No slot is free twice, and the next in line waits only if it must."""
        self.check()
        assert len(set(self._free)) == len(self._free)
        is_stuck = self._waiting and not self._held and self._lingering < self.total_slots
        assert not is_stuck, "somebody waits for staging while all of it is free"
