"""Builders that every test of the cores shares: one core each, its peers, and the answers one expects of it.

Every event is followed by a full audit, and reports (they are for logs) are left out of what is compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

import attrs

from kvpd.core.events import Report, ReportName, TimePassed, TransferId
from kvpd.core.messages import (
    PROTOCOL_VERSION,
    Ack,
    AllocRequest,
    AllocResponse,
    CancelNotif,
    ErrorInfo,
    Heartbeat,
    Hello,
    HostIdentity,
    PeerMessage,
    Region,
    RevokeNotif,
    Welcome,
    WriteDone,
)
from kvpd.core.receiver import ReceiverCore, ReceiverSettings
from kvpd.core.receiver import events as rev
from kvpd.core.sender import SenderCore, SenderSettings
from kvpd.core.sender import events as sev
from kvpd.errors import ErrorCode, TransferError, transfer_error

M = TypeVar("M", bound=PeerMessage)

CHUNK = 64  # bytes
RECEIVER_INCARNATION = 7000
SENDER_INCARNATION = 3000
OWN_HOST = HostIdentity("boot-1", "pidns-1", 1, 1)


def regions(total_chunks: int, *, chunk_bytes: int = CHUNK) -> tuple[Region, ...]:
    """One rank's region that just holds the chunks."""
    return (Region(0, b"worker", 4096, total_chunks * chunk_bytes, b"rkey"),)


def keys(*names: int | str) -> tuple[bytes, ...]:
    """Chunk keys by name."""
    return tuple(f"key-{name}".encode() for name in names)


def code_of(error: TransferError | ErrorInfo | None) -> ErrorCode | None:
    """Why it failed, or None."""
    return None if error is None else error.code


# ------------------------------------------------------------------ the receiver


class ReceiverWorld:
    """A ReceiverCore under test, its clock, and what it reported."""

    def __init__(self, slots: int = 4, **settings: object) -> None:
        self.settings = ReceiverSettings(
            "decode-0",
            RECEIVER_INCARNATION,
            slots,
            CHUNK,
            host=OWN_HOST,
            **settings,  # type: ignore[arg-type]
        )
        self.core = ReceiverCore(self.settings)
        self.now = 100.0
        self.reports: list[Report] = []

    def feed(self, event: rev.ReceiverEvent) -> list[rev.ReceiverAction]:
        """The actions that an event leads to, without reports."""
        actions = self.core.handle(event, now=self.now)
        self.core.audit()
        self.reports += [action for action in actions if isinstance(action, Report)]
        return [action for action in actions if not isinstance(action, Report)]

    def pass_time(self, seconds: float) -> list[rev.ReceiverAction]:
        """Every deadline on the way is met when it is due; live senders do not keep alive by themselves."""
        until = self.now + seconds
        actions: list[rev.ReceiverAction] = []
        while (at := self.core.next_deadline()) is not None and at <= until:
            self.now = max(self.now, at)
            actions += self.feed(TimePassed())
        self.now = until
        return actions + self.feed(TimePassed())

    def stranger(
        self, sender_id: str = "prefill-0", incarnation: int = SENDER_INCARNATION, *, host: HostIdentity | None = None
    ) -> SenderPeer:
        """A sender that has not said Hello."""
        return SenderPeer(self, sender_id, incarnation, host or HostIdentity("boot-2", "pidns-2", 2, 2))

    def connect(
        self, sender_id: str = "prefill-0", incarnation: int = SENDER_INCARNATION, *, host: HostIdentity | None = None
    ) -> SenderPeer:
        """A sender whose session is open."""
        peer = self.stranger(sender_id, incarnation, host=host)
        opened = peer.hello()[-1]
        assert isinstance(opened, rev.OpenSession)
        peer.session_no = opened.session_no
        self.feed(rev.SessionOpened(opened.session_no, regions(self.settings.total_slots)))
        return peer

    def claim(
        self,
        req_id: str,
        *,
        engine: int = 1,
        claim: int = 1,
        rank: int = 0,
        timeout_s: float = 5.0,
        sender: str | None = None,
    ) -> list[rev.ReceiverAction]:
        """An engine wants a request."""
        return self.feed(rev.ClaimRequested(engine, claim, req_id, rank, timeout_s, sender))

    def release(self, *, engine: int = 1, claim: int = 1) -> list[rev.ReceiverAction]:
        """The engine is done with it."""
        return self.feed(rev.ClaimReleased(engine, claim))

    def reported(self, name: ReportName) -> list[Report]:
        """The reports of this name, so far."""
        return [report for report in self.reports if report.name is name]

    @property
    def free(self) -> int:
        """Slots that are neither used nor promised."""
        return self.core.counts.free


@attrs.define
class SenderPeer:
    """What one sender says to the receiver under test. Transfers are numbered by the test."""

    world: ReceiverWorld
    sender_id: str
    incarnation: int
    host: HostIdentity
    session_no: int = 0
    last_id: int = 0
    last_hello: Hello | None = None

    @property
    def channel(self) -> bytes:
        """The identity of its control channel."""
        return f"{self.sender_id}-{self.incarnation}".encode()

    def id(self, transfer_no: int) -> TransferId:
        """The identity of its transfer."""
        return TransferId(self.sender_id, self.incarnation, transfer_no)

    def say(self, message: PeerMessage) -> list[rev.ReceiverAction]:
        """A message of this sender arrives."""
        return self.world.feed(rev.MessageReceived(self.channel, message))

    def _header(self, message_id: int | None = None) -> tuple[int, int, int]:
        if message_id is None:
            self.last_id += 1
            message_id = self.last_id
        return self.incarnation, RECEIVER_INCARNATION, message_id

    def hello(self, **changes: object) -> list[rev.ReceiverAction]:
        """Here I am."""
        self.last_id += 1
        fields: dict[str, object] = {
            "protocol_version": PROTOCOL_VERSION,
            "sender_id": self.sender_id,
            "chunk_bytes": CHUNK,
            "layout": "",
            "oldest_live": 0,
            "host": self.host,
        }
        self.last_hello = Hello(self.incarnation, 0, self.last_id, **(fields | changes))  # type: ignore[arg-type]
        return self.say(self.last_hello)

    def request(
        self,
        transfer_no: int,
        total: int,
        names: Sequence[bytes] = (),
        *,
        first: int = 0,
        open_: bool = True,
        last: bool = False,
        last_bytes: int = CHUNK,
        req_id: str | None = None,
        message_id: int | None = None,
    ) -> AllocRequest:
        """An AllocRequest, not sent yet."""
        return AllocRequest(
            *self._header(message_id),
            transfer_no=transfer_no,
            req_id=f"req-{transfer_no}" if req_id is None else req_id,
            open=open_,
            keys=tuple(names),
            is_last_batch=last,
            total_chunks=total,
            first_chunk=first,
            last_chunk_bytes=last_bytes,
        )

    def alloc(
        self,
        transfer_no: int,
        total: int,
        names: Sequence[bytes] = (),
        *,
        first: int = 0,
        open_: bool = True,
        last: bool = False,
        last_bytes: int = CHUNK,
        req_id: str | None = None,
    ) -> list[rev.ReceiverAction]:
        """Room for all of it, please; and slots for these keys."""
        return self.say(
            self.request(
                transfer_no, total, names, first=first, open_=open_, last=last, last_bytes=last_bytes, req_id=req_id
            )
        )

    def done(self, transfer_no: int, first: int, count: int, *, rank: int = 0) -> list[rev.ReceiverAction]:
        """These chunks have landed."""
        return self.say(WriteDone(*self._header(), transfer_no=transfer_no, rank=rank, first_chunk=first, count=count))

    def cancel(
        self, transfer_no: int, *, drained: bool = True, reason: ErrorCode = ErrorCode.CANCELLED
    ) -> list[rev.ReceiverAction]:
        """This transfer is over."""
        return self.say(CancelNotif(*self._header(), transfer_no, (), reason, drained))

    def heartbeat(self, oldest_live: int = 0, in_flight: Iterable[tuple[int, int]] = ()) -> list[rev.ReceiverAction]:
        """I live."""
        return self.say(Heartbeat(*self._header(), oldest_live=oldest_live, in_flight=tuple(in_flight)))

    def complete(self, transfer_no: int, names: Sequence[bytes], *, req_id: str | None = None) -> None:
        """A whole transfer, written."""
        self.alloc(transfer_no, len(names), names, last=True, req_id=req_id)
        self.done(transfer_no, 0, len(names))

    # ---------------------------------------------------------- what it should be told

    def told(self, message: PeerMessage) -> rev.SendMessage:
        """The receiver sends this to us."""
        return rev.SendMessage(self.channel, message)

    def placed(
        self,
        transfer_no: int,
        indexes: Sequence[int] = (),
        *,
        first: int = 0,
        message_id: int | None = None,
    ) -> rev.SendMessage:
        """The answer to our last AllocRequest: these slots, -1 for what is there already."""
        return self.told(
            AllocResponse(
                self.incarnation,
                RECEIVER_INCARNATION,
                self.last_id if message_id is None else message_id,
                transfer_no=transfer_no,
                first_chunk=first,
                remote_indexes=tuple(indexes),
                already_sent_indexes=tuple(i for i, index in enumerate(indexes) if index < 0),
            )
        )

    def failed(
        self, transfer_no: int, total: int, code: ErrorCode, detail: str, *, retry_after_s: float | None = None
    ) -> rev.AnnounceTransfer:
        """The engines are told that our transfer `req-<number>` has failed."""
        error = transfer_error(code, detail, retry_after_s)
        return rev.AnnounceTransfer(rev.Outcome.FAILED, self.id(transfer_no), f"req-{transfer_no}", total, error)

    def ready(self, transfer_no: int, total: int) -> rev.AnnounceTransfer:
        """The engines are told that our transfer `req-<number>` is complete."""
        return rev.AnnounceTransfer(rev.Outcome.READY, self.id(transfer_no), f"req-{transfer_no}", total)

    def ack(self, error: ErrorInfo | None = None, *, message_id: int | None = None) -> rev.SendMessage:
        """The answer to our last other message."""
        number = self.last_id if message_id is None else message_id
        return self.told(Ack(self.incarnation, RECEIVER_INCARNATION, number, error))


def refusal_of(actions: Iterable[rev.ReceiverAction]) -> ErrorInfo:
    """The error in the only answer among these actions: an AllocResponse or an Ack."""
    answers = [
        action.message
        for action in actions
        if isinstance(action, rev.SendMessage) and isinstance(action.message, AllocResponse | Ack)
    ]
    (answer,) = answers
    assert answer.error is not None
    return answer.error


def revoked_in(actions: Iterable[rev.ReceiverAction]) -> list[RevokeNotif]:
    """The RevokeNotifs among these actions."""
    return [a.message for a in actions if isinstance(a, rev.SendMessage) and isinstance(a.message, RevokeNotif)]


# ------------------------------------------------------------------ the sender


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
    ) -> list[sev.SenderAction]:
        """An engine opens a transfer."""
        name = f"req-{transfer_no}" if req_id is None else req_id
        return self.feed(sev.OpenRequested(transfer_no, engine, name, receiver, total, notify))

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

    def receiver(self, address: str = "decode-0", **welcome: object) -> ReceiverPeer:
        """The receiver at this address, before it has said anything."""
        return ReceiverPeer(self, address, **welcome)  # type: ignore[arg-type]

    def connect(self, address: str = "decode-0", **welcome: object) -> ReceiverPeer:
        """A receiver whose session is up, opened by a transfer that has been cancelled since."""
        peer = self.receiver(address, **welcome)
        peer.serial = self.core._highest_no + 1
        self.open(peer.serial, 1, receiver=address)
        self.feed(sev.CancelRequested(peer.serial))
        self.drained(peer.serial)
        self.let_go(peer.serial)
        peer.come_up()
        return peer

    def reported(self, name: ReportName) -> list[Report]:
        """The reports of this name, so far."""
        return [report for report in self.reports if report.name is name]

    @property
    def free(self) -> int:
        """Staging slots that nobody holds."""
        return self.core.staging.free_count


@attrs.define
class ReceiverPeer:
    """What one receiver says to the sender under test."""

    world: SenderWorld
    address: str
    total_chunks: int = 64
    incarnation: int = RECEIVER_INCARNATION
    lease_s: float = 9.0
    put_deadline_s: float = 2.0
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
            "regions": regions(self.total_chunks),
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
