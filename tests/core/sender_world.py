"""A SenderCore under test, the receivers that speak to it, and ways to pick out what it does.

Every event is followed by a full audit, and reports (they are for logs) are left out of what is compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

import attrs
from core_parts import CHUNK, RECEIVER_INCARNATION, SENDER_INCARNATION, code_of, regions

from kvpd.core.events import Report, ReportName, TimePassed
from kvpd.core.messages import (
    PROTOCOL_VERSION,
    Ack,
    AllocRequest,
    AllocResponse,
    ErrorInfo,
    FailNotif,
    PeerMessage,
    ProxyNotif,
    RevokeNotif,
    Verify,
    Welcome,
)
from kvpd.core.sender import SenderCore, SenderSettings
from kvpd.core.sender import events as sev
from kvpd.errors import ErrorCode

M = TypeVar("M", bound=PeerMessage)


class SenderWorld:
    """A SenderCore under test, its clock, and what it reported."""

    def __init__(self, staging: int = 8, **settings: object) -> None:
        self.settings = SenderSettings("prefill-0", SENDER_INCARNATION, staging, CHUNK, **settings)  # type: ignore[arg-type]
        self.core = SenderCore(self.settings)
        self.now = 100.0
        self.reports: list[Report] = []

    def feed(self, event: sev.SenderEvent) -> list[sev.SenderAction]:
        """The actions that an event leads to, without reports."""
        actions = self.core.handle(event, now=self.now)
        self.core.audit()
        self.reports += [action for action in actions if isinstance(action, Report)]
        return [action for action in actions if not isinstance(action, Report)]

    def pass_time(self, seconds: float) -> list[sev.SenderAction]:
        """Every deadline on the way is met when it is due."""
        until = self.now + seconds
        actions: list[sev.SenderAction] = []
        while (at := self.core.next_deadline()) is not None and at <= until:
            self.now = max(self.now, at)
            actions += self.feed(TimePassed())
        self.now = until
        return actions + self.feed(TimePassed())

    def open(
        self,
        transfer_no: int,
        total: int,
        *,
        receiver: str = "decode-0",
        req_id: str | None = None,
        notify: str | None = None,
        engine: int = 1,
        rank: int = 0,
        group: str = "",
        first: Sequence[bytes] = (),
    ) -> list[sev.SenderAction]:
        """An engine opens a transfer, and stages its first batch at once where its keys are given."""
        name = f"req-{transfer_no}" if req_id is None else req_id
        batch = sev.StageRequested(transfer_no, 0, tuple(first), len(first) == total, CHUNK) if first else None
        return self.feed(
            sev.OpenRequested(
                *(transfer_no, engine, name, receiver, total, notify), rank=rank, group=group, first=batch
            )
        )

    def stage(
        self, transfer_no: int, stage: int, names: Sequence[bytes], *, last: bool = False, last_bytes: int = CHUNK
    ) -> list[sev.SenderAction]:
        """An engine has the keys of its next batch."""
        return self.feed(sev.StageRequested(transfer_no, stage, tuple(names), last, last_bytes))

    def fill(self, transfer_no: int, piece: int) -> list[sev.SenderAction]:
        """The engine has filled a piece."""
        return self.feed(sev.PieceFilled(transfer_no, piece))

    def land(self, transfer_no: int, piece: int) -> list[sev.SenderAction]:
        """The puts of a piece have ended well."""
        return self.feed(sev.PutsCompleted(transfer_no, piece))

    def drained(self, transfer_no: int, *, drained: bool = True) -> list[sev.SenderAction]:
        """No put of the transfer is in flight any more."""
        return self.feed(sev.PutsDrained(transfer_no, drained))

    def let_go(self, transfer_no: int) -> list[sev.SenderAction]:
        """The engine writes into none of the transfer's slots any more."""
        return self.feed(sev.EngineLetGo(transfer_no))

    def acknowledge(self, proxy: str, notif: FailNotif | ProxyNotif) -> list[sev.SenderAction]:
        """A proxy has received a notification."""
        return self.feed(sev.ProxyAcknowledged(proxy, notif.sender_incarnation, notif.message_id))

    def receiver(self, address: str = "decode-0", **welcome: object) -> ReceiverPeer:
        """The receiver at this address, before it has said anything."""
        return ReceiverPeer(self, address, **welcome)  # type: ignore[arg-type]

    def connect(self, address: str = "decode-0", **welcome: object) -> ReceiverPeer:
        """A receiver whose session is up, opened by a transfer that was cancelled since, as its proxy knows."""
        peer = self.receiver(address, **welcome)
        peer.serial = self.core._highest_no + 1
        self.open(peer.serial, 1, receiver=address)
        for rank in range(1, self.settings.ranks):
            self.open(peer.serial + rank, 1, receiver=address, req_id=f"req-{peer.serial}", rank=rank)
        for notif in failures_in(self.feed(sev.CancelRequested(peer.serial))):
            assert self.settings.proxy_address is not None
            self.acknowledge(self.settings.proxy_address, notif)
        for rank in range(self.settings.ranks):
            self.drained(peer.serial + rank)
            self.let_go(peer.serial + rank)
        peer.come_up()
        return peer

    def reported(self, name: ReportName) -> list[Report]:
        """The reports of this name, so far."""
        return [report for report in self.reports if report.name is name]

    @property
    def free(self) -> int:
        """Staging slots that nobody holds."""
        return self.core.staging[0].free_count


@attrs.define
class ReceiverPeer:
    """What one receiver says to the sender under test."""

    world: SenderWorld
    address: str
    total_chunks: int = 64
    incarnation: int = RECEIVER_INCARNATION
    lease_s: float = 9.0
    put_deadline_s: float = 2.0
    verify: Verify = "off"
    serial: int = 0
    last_id: int = 0

    def say(self, message: object) -> list[sev.SenderAction]:
        """A message of this receiver arrives."""
        return self.world.feed(sev.PeerMessageReceived(self.address, message))  # type: ignore[arg-type]

    @property
    def hello_id(self) -> int:
        """The id of the Hello that the sender said last."""
        peer = self.world.core.peer_of(self.address)
        assert peer is not None
        return peer.hello_id

    @property
    def endpoint(self) -> int:
        """The number of the endpoint that the sender puts through now."""
        peer = self.world.core.peer_of(self.address)
        assert peer is not None
        return peer.endpoint

    def welcome_message(self, **changes: object) -> Welcome:
        """A Welcome to the sender's Hello."""
        fields: dict[str, object] = {
            "protocol_version": PROTOCOL_VERSION,
            "receiver_id": f"name-of-{self.address}",
            "total_chunks": self.total_chunks,
            "chunk_bytes": CHUNK,
            "layout": "",
            "lease_s": self.lease_s,
            "put_deadline_s": self.put_deadline_s,
            "regions": regions(self.total_chunks, ranks=self.world.settings.ranks),
            "verify": self.verify,
        }
        return Welcome(SENDER_INCARNATION, self.incarnation, self.hello_id, **(fields | changes))  # type: ignore[arg-type]

    def welcome(self, **changes: object) -> list[sev.SenderAction]:
        """The session is open."""
        return self.say(self.welcome_message(**changes))

    def come_up(self) -> list[sev.SenderAction]:
        """Welcome, and the endpoint exists."""
        self.welcome()
        return self.world.feed(sev.EndpointOpened(self.address, self.endpoint))

    def answer(
        self,
        request: AllocRequest,
        indexes: Sequence[int] = (),
        *,
        error: ErrorInfo | None = None,
        **changes: object,
    ) -> list[sev.SenderAction]:
        """The answer to an AllocRequest: these slots, -1 for what is there already."""
        fields: dict[str, object] = {
            "transfer_no": request.transfer_no,
            "first_chunk": request.first_chunk,
            "remote_indexes": tuple(indexes),
            "already_sent_indexes": tuple(i for i, index in enumerate(indexes) if index < 0),
            "error": error,
        }
        message = AllocResponse(SENDER_INCARNATION, self.incarnation, request.message_id, **(fields | changes))  # type: ignore[arg-type]
        return self.say(message)

    def ack(self, message: PeerMessage, error: ErrorInfo | None = None) -> list[sev.SenderAction]:
        """The answer to any other message."""
        return self.say(Ack(SENDER_INCARNATION, self.incarnation, message.message_id, error))

    def revoke(self, transfer_no: int, reason: ErrorCode = ErrorCode.NO_PROGRESS) -> list[sev.SenderAction]:
        """The receiver has rolled a transfer back."""
        self.last_id += 1
        return self.say(RevokeNotif(SENDER_INCARNATION, self.incarnation, self.last_id, transfer_no, reason, "why"))

    def admit(self, transfer_no: int, total: int, **kwargs: object) -> None:
        """A transfer of this receiver is opened and admitted."""
        actions = self.world.open(transfer_no, total, receiver=self.address, **kwargs)  # type: ignore[arg-type]
        self.answer(sent(actions, AllocRequest))

    def stage(
        self,
        transfer_no: int,
        stage: int,
        names: Sequence[bytes],
        indexes: Sequence[int] | None = None,
        *,
        last: bool = False,
        last_bytes: int = CHUNK,
    ) -> list[sev.SenderAction]:
        """A batch is asked for and allocated, by default to the slots 0, 1, ..."""
        actions = self.world.stage(transfer_no, stage, names, last=last, last_bytes=last_bytes)
        return self.answer(sent(actions, AllocRequest), range(len(names)) if indexes is None else indexes)


def sent_all(actions: Iterable[sev.SenderAction], kind: type[M]) -> list[M]:
    """The messages of this kind that the sender sends."""
    return [a.message for a in actions if isinstance(a, sev.SendToPeer) and isinstance(a.message, kind)]


def sent(actions: Iterable[sev.SenderAction], kind: type[M]) -> M:
    """The one message of this kind that the sender sends."""
    (message,) = sent_all(actions, kind)
    return message


def grants(actions: Iterable[sev.SenderAction]) -> list[sev.GrantPiece]:
    """The pieces granted."""
    return [action for action in actions if isinstance(action, sev.GrantPiece)]


def finished(actions: Iterable[sev.SenderAction]) -> dict[int, ErrorCode | None]:
    """Which transfers have ended, and why."""
    return {a.transfer_no: code_of(a.error) for a in actions if isinstance(a, sev.FinishTransfer)}


def readies_in(actions: Iterable[sev.SenderAction]) -> list[ProxyNotif]:
    """What proxies are told to be ready, by these actions."""
    messages = [action.message for action in actions if isinstance(action, sev.NotifyProxy)]
    return [message for message in messages if isinstance(message, ProxyNotif)]


def failures_in(actions: Iterable[sev.SenderAction]) -> list[FailNotif]:
    """What proxies are told to have failed, by these actions."""
    messages = [action.message for action in actions if isinstance(action, sev.NotifyProxy)]
    return [message for message in messages if isinstance(message, FailNotif)]
