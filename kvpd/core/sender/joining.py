"""Joining: to which transfer a rank's open belongs.

Every rank of an engine opens each request by itself, in any order and in its own time. The n-th open of a request by
one rank belongs to the n-th open of it by every other rank. A transfer that has ended is remembered until every rank
has opened it: a rank that comes late is told how it ended, instead of opening it anew and waiting for the others.
"""

from __future__ import annotations

import attrs

from kvpd.errors import TransferError


@attrs.frozen
class JoinKey:
    """What the opens of one transfer have in common. `group` tells engines apart whose requests bear the same name."""

    group: str
    req_id: str
    receiver: str
    total_chunks: int
    notify: str | None


@attrs.define(eq=False)
class Roll:
    """Which ranks have not opened a transfer yet."""

    key: JoinKey
    number: int  # the transfer's
    missing: set[int]
    error: TransferError | None = None  # how it has ended, if it has


class Joining:
    """All transfers that some rank has still to open."""

    def __init__(self, ranks: int, ended_max: int) -> None:
        self._ranks = ranks
        self._ended_max = ended_max
        self._rolls: dict[JoinKey, dict[int, Roll]] = {}  # by number, the oldest first; without empty ones
        self._ended: dict[int, Roll] = {}

    def find(self, key: JoinKey, rank: int) -> Roll | None:
        """The oldest transfer of this key that the rank has not opened, or None: it begins one."""
        return next((roll for roll in self._rolls.get(key, {}).values() if rank in roll.missing), None)

    def begin(self, key: JoinKey, number: int, rank: int) -> Roll:
        """A rank is the first to open a transfer."""
        roll = Roll(key, number, set(range(self._ranks)) - {rank})
        if roll.missing:
            self._rolls.setdefault(key, {})[number] = roll
        return roll

    def join(self, roll: Roll, rank: int) -> None:
        """A rank opens a transfer that others have opened."""
        roll.missing.remove(rank)
        if not roll.missing:
            self._remove(roll)

    def end(self, roll: Roll, error: TransferError) -> bool:
        """The transfer is over. True: some rank has not opened it, and will find it here until `forget`."""
        roll.error = error
        if not roll.missing:
            return False
        if len(self._ended) >= self._ended_max:
            self._remove(roll)
            return False
        self._ended[roll.number] = roll
        return True

    def forget(self, number: int) -> None:
        """Nobody is expected any more; harmless where all have come."""
        roll = self._ended.get(number)
        if roll is not None:
            self._remove(roll)

    def _remove(self, roll: Roll) -> None:
        self._ended.pop(roll.number, None)
        same = self._rolls[roll.key]
        del same[roll.number]
        if not same:
            del self._rolls[roll.key]
