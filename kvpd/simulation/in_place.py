"""Engines that fill a receiver's slots themselves: who may be writing, and whom the receiver waits for.

What the world knows: an engine may write into the slots of a piece from its hearing of it until it has filled it, has
left its transfer, or is dead, whatever became of its sender, of the session or of its own connection.
"""

from __future__ import annotations

import attrs

from kvpd.core.events import TransferId
from kvpd.simulation.schedule import Call

Start = tuple[str, int]  # a sender's name and incarnation


@attrs.frozen(eq=False)
class Filling:
    """A piece that an engine may be writing: places in a receiver's memory, counted through all ranks."""

    transfer: TransferId
    places: tuple[int, ...]


class Writers:
    """The engines that have one receiver's memory; see kvpd.service.sharing.Writers."""

    def __init__(self) -> None:
        self._starts: dict[int, Start] = {}  # by session
        self._holders: dict[Start, dict[object, None]] = {}
        self._dead: dict[Start, list[Call]] = {}  # and who is told when its engines are gone too

    def session_began(self, session_no: int, start: Start) -> None:
        """A session of a sender on this host."""
        self._starts[session_no] = start

    def session_forgotten(self, session_no: int) -> None:
        """Nothing of it matters any more."""
        self._starts.pop(session_no, None)

    def admit(self, start: Start, holder: object) -> bool:
        """Whether an engine gets the memory, on behalf of this start of a sender."""
        if start not in self._starts.values() or start in self._dead:
            return False
        self._holders.setdefault(start, {})[holder] = None
        return True

    def let_go(self, start: Start, holder: object) -> None:
        """An engine has let go, or is dead; harmless for one that has done so before."""
        holders = self._holders.get(start, {})
        holders.pop(holder, None)
        if not holders:
            self._holders.pop(start, None)
            for call in self._dead.get(start, ()):
                call()
            if start in self._dead:
                self._dead[start] = []

    def when_gone(self, session_no: int, call: Call) -> None:
        """The sender of this session is dead: call when its engines are gone too, which may be now."""
        start = self._starts.get(session_no)
        if start is None:
            return
        calls = self._dead.setdefault(start, [])
        if start in self._holders:
            calls.append(call)
        else:
            call()
