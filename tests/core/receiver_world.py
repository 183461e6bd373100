"""A ReceiverCore under test, the senders that speak to it, and the answers that one expects of it.

Every event is followed by a full audit, and reports (they are for logs) are left out of what is compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs
from core_parts import CHUNK, OWN_HOST, RECEIVER_INCARNATION, SENDER_INCARNATION, regions

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
    RevokeNotif,
    WriteDone,
)
from kvpd.core.receiver import ReceiverCore, ReceiverSettings
from kvpd.core.receiver import events as rev
from kvpd.errors import ErrorCode, transfer_error


class ReceiverWorld:
    """A ReceiverCore under test, its clock, and what it reported."""

    def __init__(self, slots: int = 4, **settings: object) -> None:
        fields: dict[str, object] = {"host": OWN_HOST}
        self.settings = ReceiverSettings("decode-0", RECEIVER_INCARNATION, slots, CHUNK, **(fields | settings))  # type: ignore[arg-type]
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

    def heartbeat(
        self, oldest_live: int = 0, in_flight: Iterable[tuple[int, int]] = (), *, puts_ended: bool = False
    ) -> list[rev.ReceiverAction]:
        """I live."""
        header = self._header()
        return self.say(Heartbeat(*header, oldest_live=oldest_live, in_flight=tuple(in_flight), puts_ended=puts_ended))

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
