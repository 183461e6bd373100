"""Slots that are filled in place: who has a receiver's memory to write into, and who may have it.

An engine that was given the memory can write into it until it has said that it let go, or is dead. The death of the
sender that it works for ends nothing of that: here a sender counts as dead only when its engines are gone too.
"""

from __future__ import annotations

import socket
from typing import Final

import attrs
import trio

from kvpd.errors import RemoteProtocolError

_WRITERS_MAX: Final = 1024  # of one receiver that have not let go, connected or not


@attrs.frozen
class SenderStart:
    """One start of a sender."""

    sender_id: str
    incarnation: int


@attrs.define(eq=False)
class _Sender:
    """What is known of a start of a sender on this host."""

    sessions: set[int] = attrs.field(factory=set)  # that the core has not forgotten
    writers: int = 0
    is_dead: bool = False
    gone: trio.Event = attrs.field(factory=trio.Event)  # it is dead, and so is, or has let go, every writer


class Writers:
    """The engines that have one receiver's memory, by the start of the sender that they work for."""

    def __init__(self) -> None:
        self._senders: dict[SenderStart, _Sender] = {}
        self._starts: dict[int, SenderStart] = {}  # by session
        self._count = 0

    def session_began(self, session_no: int, start: SenderStart) -> None:
        """A session of a sender on this host: from now on its engines may have the memory."""
        self._starts[session_no] = start
        self._senders.setdefault(start, _Sender()).sessions.add(session_no)

    def session_forgotten(self, session_no: int) -> None:
        """Nothing of a session matters any more; harmless for one of another host."""
        start = self._starts.pop(session_no, None)
        if start is not None:
            self._senders[start].sessions.discard(session_no)
            self._forget_if_over(start)

    def admit(self, start: SenderStart) -> None:
        """Count an engine that is about to be given the memory.

        Raises:
            RemoteProtocolError: this start of the sender has no session here, or is dead: nobody would wait for the
                engine before its slots are used again. Or there are too many already.
        """
        sender = self._senders.get(start)
        if sender is None or not sender.sessions:
            raise RemoteProtocolError(f"sender {start.sender_id!r} has no session here in that incarnation")
        if sender.is_dead:
            raise RemoteProtocolError(f"sender {start.sender_id!r} is dead: its engines get no memory any more")
        if self._count >= _WRITERS_MAX:
            raise RemoteProtocolError(f"{self._count} engines have this memory; the limit is {_WRITERS_MAX}")
        sender.writers += 1
        self._count += 1

    def let_go(self, start: SenderStart) -> None:
        """An engine that was counted has said that it let go, or is dead."""
        sender = self._senders[start]
        sender.writers -= 1
        self._count -= 1
        assert sender.writers >= 0, "an engine let go twice"
        if sender.is_dead and not sender.writers:
            sender.gone.set()
        self._forget_if_over(start)

    async def wait_gone(self, session_no: int) -> None:
        """The sender of this session is dead: until its engines are gone too. No more of them are admitted.

        A session that was forgotten in the same turn of the loop is waited for no more.
        """
        start = self._starts.get(session_no)
        if start is None:
            return
        sender = self._senders[start]
        sender.is_dead = True
        if not sender.writers:
            sender.gone.set()
        await sender.gone.wait()

    def _forget_if_over(self, start: SenderStart) -> None:
        sender = self._senders[start]
        if not sender.sessions and not sender.writers:
            del self._senders[start]


def can_connect(path: str) -> bool:
    """Whether somebody takes connections at this Unix socket, and takes ours."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # a Unix socket takes us at once, or its backlog is full
        try:
            probe.connect(path)
        except (OSError, ValueError):  # ValueError: the path holds a null character
            return False
        return True
