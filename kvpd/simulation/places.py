"""The receivers' memories that an engine has, to fill slots in place, and when it lets go of them."""

from __future__ import annotations

from typing import Final

from kvpd.simulation.plane import Memory
from kvpd.simulation.sender import SimulatedSender
from kvpd.simulation.truth import Truth

_HEARD_AFTER_S: Final = 0.0005  # by the receiver


class Places:
    """The receivers' memories that one engine has; see kvpd.client._places."""

    def __init__(self, sender: SimulatedSender, truth: Truth) -> None:
        self._start = sender.settings.sender_id, sender.settings.incarnation
        self._truth = truth
        self._memories: dict[int, Memory] = {}
        self._users: dict[int, set[int]] = {}
        self._gone: set[int] = set()

    def use(self, place: int, memory: Memory, transfer: int) -> bool:
        """Whether the transfer's slots there can be written."""
        if place in self._gone:
            return False
        if place not in self._memories:
            receiver, start = self._truth.receivers[memory], self._start
            is_there = receiver.process.is_alive and receiver.process.stopped_since is None
            if not is_there or not receiver.writers.admit(start, (self, place)):
                return False
            self._memories[place], self._users[place] = memory, set()
        self._users[place].add(transfer)
        return True

    def left(self, transfer: int) -> None:
        """A transfer was left."""
        for place, users in list(self._users.items()):
            users.discard(transfer)
            self._let_go_if_unused(place)

    def gone(self, place: int) -> None:
        """No slot of it is granted any more."""
        self._gone.add(place)
        self._let_go_if_unused(place)

    def all_gone(self) -> None:
        """The sender is dead."""
        for place in list(self._memories):
            self.gone(place)

    def process_died(self, seen_after_s: float) -> None:
        """Each receiver sees that after so many seconds."""
        for place in list(self._memories):
            self._tell(place, seen_after_s)

    def _let_go_if_unused(self, place: int) -> None:
        if place in self._gone and place in self._memories and not self._users[place]:
            self._tell(place, _HEARD_AFTER_S)

    def _tell(self, place: int, after_s: float) -> None:
        receiver = self._truth.receivers[self._memories.pop(place)]
        del self._users[place]
        start, holder = self._start, (self, place)
        receiver.process.soon(after_s, lambda: receiver.writers.let_go(start, holder))
