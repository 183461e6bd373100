"""What every part of the sender's core shares: its records, its deadlines, its way to send and to report."""

from __future__ import annotations

from typing import Literal

from kvpd.core.events import Report, ReportName, TransferId
from kvpd.core.messages import PROTOCOL_VERSION, FailNotif, Hello, PeerMessage
from kvpd.core.sender import events as ev
from kvpd.core.sender.joining import Joining
from kvpd.core.sender.notifier import Notifier
from kvpd.core.sender.records import Peer, Repeated, Share, Transfer
from kvpd.core.sender.settings import SenderSettings
from kvpd.core.sender.staging import Staging
from kvpd.core.timers import Timers

Deadline = (
    tuple[Literal["connect", "reconnect", "repeat", "heartbeat", "fence"], str]
    | tuple[Literal["request", "latecomers", "let go"], int]
    | tuple[Literal["notify"], None]
)


class SenderBase:
    """The records and the small change."""

    def __init__(self, settings: SenderSettings) -> None:
        self.settings = settings
        self.staging = tuple(Staging(settings.staging_slots) for _ in range(settings.ranks))  # by rank
        self._peers: dict[str, Peer] = {}
        self._transfers: dict[int, Transfer] = {}
        self._by_req_id: dict[str, dict[int, Transfer]] = {}  # without empty ones
        self._shares: dict[int, Share] = {}  # of these transfers, by their opens' numbers
        self._joining = Joining(settings.ranks, settings.latecomers_max)
        # Slots that the engine of an ended share may still be filling: their rank and themselves, until it lets go.
        self._lingering: dict[int, tuple[int, list[int]]] = {}
        # Transfers of lost sessions whose puts have not ended, by receiver: until then no new session is opened.
        self._undrained: dict[str, int] = {}
        self._never_ended: set[str] = set()  # receivers to which a put may be in flight for ever
        # Transfers of lost sessions of which an engine still fills slots in place, by receiver: they are waited for no
        # more, but until then no Hello says that all has ended.
        self._overdue: dict[str, int] = {}
        self._lost: list[Peer] = []  # in this step
        self._failures: list[tuple[str, FailNotif]] = []  # of this step, and the proxies that must hear of them
        # Receivers with which a session was up and none is now, and when it was lost, the longest ago first.
        self._lost_since: dict[str, float] = {}
        self._notifier = Notifier(settings)
        self._timers: Timers[Deadline] = Timers()
        self._actions: list[ev.SenderAction] = []
        self._next_message_id = 1
        self._next_endpoint = 1
        self._highest_no = -1
        self._draining = False

    def _message_id(self) -> int:
        self._next_message_id += 1
        return self._next_message_id - 1

    def _send(self, peer: Peer, message: PeerMessage) -> None:
        self._actions.append(ev.SendToPeer(peer.receiver, message))

    def _send_until_answered(self, peer: Peer, message: Repeated, now: float, transfer: Transfer | None = None) -> None:
        peer.outbox.add(message, now=now)
        if transfer is not None:
            transfer.unanswered.add(message.message_id)
        self._arm_repeat(peer)
        self._send(peer, message)

    def _arm_repeat(self, peer: Peer) -> None:
        next_at = peer.outbox.next_at()
        if next_at is None:
            self._timers.clear(("repeat", peer.receiver))
        else:
            self._timers.set_by(("repeat", peer.receiver), next_at)

    def _hello(self, peer: Peer) -> Hello:
        """What opens a session: nothing older than the transfers we know now will be spoken of in it."""
        settings = self.settings
        return Hello(
            settings.incarnation,
            0,
            peer.hello_id,
            protocol_version=PROTOCOL_VERSION,
            sender_id=settings.sender_id,
            chunk_bytes=settings.chunk_bytes,
            layout=settings.layout,
            oldest_live=self._oldest_live(peer),
            host=settings.host,
            puts_ended=self._earlier_puts_ended(peer.receiver),
        )

    def _earlier_puts_ended(self, receiver: str) -> bool:
        """Whether nothing of an earlier session can still write into this receiver's slots."""
        return receiver not in self._never_ended and receiver not in self._overdue

    def _oldest_live(self, peer: Peer) -> int:
        return next(iter(peer.transfers), self._highest_no + 1)

    def _report_of(self, name: ReportName, transfer: Transfer, **fields: int | float | str) -> None:
        settings = self.settings
        identity = TransferId(settings.sender_id, settings.incarnation, transfer.number)
        self._actions.append(Report(name, identity, transfer.req_id, transfer.peer.receiver, fields))

    def _report(self, name: ReportName, peer: str, **fields: int | float | str) -> None:
        self._actions.append(Report(name, peer=peer, fields=fields))
