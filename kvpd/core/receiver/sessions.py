"""A session: what the receiver knows of one incarnation of one sender, and when it stops believing it.

Nothing that a session's sender may still write is reused before the session's fence: over a network that is the
destruction of its worker, on one host the death of the sender's process too, because there the sender's own kernel
does the writing, and the death of each engine that was given the memory. Time alone never frees a slot.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

import attrs

from kvpd.core.events import TransferId
from kvpd.core.messages import ErrorInfo, Hello, HostIdentity, RevokeNotif, Welcome
from kvpd.core.outbox import Outbox
from kvpd.core.receiver.transfers import Transfer


class SessionState(enum.Enum):
    """How far a session is."""

    OPENING = "opening"  # its worker is being made
    OPEN = "open"
    CLOSING = "closing"  # its transfers are revoked; quarantined slots wait for the fence


@attrs.define(eq=False)
class Session:
    """One session."""

    number: int
    peer: bytes
    hello: Hello
    same_host: bool
    heard_at: float
    outbox: Outbox[RevokeNotif]
    state: SessionState = SessionState.OPENING
    welcome: Welcome | None = None
    oldest_live: int = 0
    transfers: dict[int, Transfer] = attrs.field(factory=dict)  # not gone, by transfer_no
    # How transfers ended that are gone: None is success. Pruned by oldest_live.
    outcomes: dict[int, ErrorInfo | None] = attrs.field(factory=dict)
    revoking: dict[int, int] = attrs.field(factory=dict)  # transfer_no → message_id of the RevokeNotif
    waiting: int = 0  # transfers that are QUEUED
    unfenced: int = 0  # transfers that are REVOKED
    worker_destroyed: bool = False
    process_dead: bool = False  # and with it every engine that fills slots on its behalf
    puts_ended: bool = False  # by its process's own word, in a later Hello or Heartbeat

    @property
    def sender_id(self) -> str:
        """The sender's own name for itself."""
        return self.hello.sender_id

    @property
    def incarnation(self) -> int:
        """Which start of the sender this is."""
        return self.hello.sender_incarnation

    @property
    def is_fenced(self) -> bool:
        """Whether no write through this session can land any more."""
        return self.worker_destroyed and (self.process_dead or self.puts_ended or not self.same_host)

    def is_newer_than(self, hello: Hello) -> bool:
        """Whether the same start of the sender said another Hello before the one that opened this session."""
        return self.incarnation == hello.sender_incarnation and hello.message_id < self.hello.message_id

    def transfer_id(self, transfer_no: int) -> TransferId:
        """The identity of a transfer of this session. Nobody can name another's."""
        return TransferId(self.sender_id, self.incarnation, transfer_no)

    def ended(self, transfer_no: int, error: ErrorInfo | None) -> None:
        """A transfer is gone; remember how, so that a repeat finds the same answer."""
        self.transfers.pop(transfer_no, None)
        if transfer_no >= self.oldest_live:
            self.outcomes[transfer_no] = error

    def advance_oldest_live(self, oldest_live: int) -> None:
        """The sender speaks of nothing below this any more."""
        if oldest_live <= self.oldest_live:
            return
        self.oldest_live = oldest_live
        # Outcomes are in the order of their ends, not of their numbers, and few: a scan is cheaper than a second index.
        self.outcomes = {number: error for number, error in self.outcomes.items() if number >= oldest_live}


class SessionBook:
    """All sessions, open and closing."""

    def __init__(self, own_host: HostIdentity) -> None:
        self._own_host = own_host
        self._count = 0
        self._by_number: dict[int, Session] = {}
        self._by_peer: dict[bytes, Session] = {}  # open or opening
        self._by_sender: dict[str, Session] = {}  # open or opening

    def __len__(self) -> int:
        return len(self._by_number)

    def start(self, peer: bytes, hello: Hello, outbox: Outbox[RevokeNotif], *, now: float) -> Session:
        """A new session; its sender's earlier one has been closed before."""
        assert peer not in self._by_peer
        assert hello.sender_id not in self._by_sender
        self._count += 1
        session = Session(self._count, peer, hello, self._is_same_host(hello.host), now, outbox)
        session.oldest_live = hello.oldest_live
        self._by_number[session.number] = session
        self._by_peer[peer] = session
        self._by_sender[hello.sender_id] = session
        return session

    def _is_same_host(self, host: HostIdentity) -> bool:
        """Across pid namespaces the kernel cannot copy between processes, so UCX uses the network there."""
        own = self._own_host
        return bool(own.boot_id) and (own.boot_id, own.pid_namespace) == (host.boot_id, host.pid_namespace)

    def close(self, session: Session) -> None:
        """Its sender is not spoken to any more."""
        session.state = SessionState.CLOSING
        del self._by_peer[session.peer]
        del self._by_sender[session.sender_id]

    def forget(self, session: Session) -> None:
        """Nothing of a closed session matters any more."""
        del self._by_number[session.number]

    def all(self) -> Iterable[Session]:
        """Every session, open or closing."""
        return self._by_number.values()

    def numbered(self, number: int) -> Session | None:
        """The session of this number, open or closing."""
        return self._by_number.get(number)

    def closing_before(self, hello: Hello) -> list[Session]:
        """The closing sessions that the same start of this sender opened before it said this Hello."""
        same = (
            s for s in self._by_number.values() if s.state is SessionState.CLOSING and s.sender_id == hello.sender_id
        )
        return [s for s in same if s.incarnation == hello.sender_incarnation and not s.is_newer_than(hello)]

    def of_peer(self, peer: bytes) -> Session | None:
        """The session that this channel identity is bound to."""
        return self._by_peer.get(peer)

    def of_sender(self, sender_id: str) -> Session | None:
        """The session that this sender is spoken to in."""
        return self._by_sender.get(sender_id)
