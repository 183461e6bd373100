"""What every part of the receiver's core shares: its books, its deadlines, its way to answer and to report."""

from __future__ import annotations

from typing import Literal

from kvpd.core.events import Report, ReportName, TransferId
from kvpd.core.messages import Ack, AllocRequest, AllocResponse, ErrorInfo, PeerMessage
from kvpd.core.pool import PoolCounts
from kvpd.core.receiver import events as ev
from kvpd.core.receiver.claims import ClaimDesk
from kvpd.core.receiver.sessions import Session, SessionBook, SessionState
from kvpd.core.receiver.settings import ReceiverSettings
from kvpd.core.receiver.transfers import Batch, Transfer, TransferBook
from kvpd.core.timers import Timers
from kvpd.errors import transfer_error

Deadline = (
    tuple[Literal["allocation", "ready"], TransferId]
    | tuple[Literal["lease", "repeat"], int]
    | tuple[Literal["claim", "overdue"], tuple[int, int]]
    | tuple[Literal["progress"], None]
)


class ReceiverBase:
    """What every part of the receiver shares."""

    def __init__(self, settings: ReceiverSettings) -> None:
        self.settings = settings
        self._book = TransferBook(
            settings.total_slots,
            chunk_bytes=settings.chunk_bytes,
            ranks=settings.ranks,
            bypass_max=settings.bypass_max,
        )
        self._sessions = SessionBook(settings.host)
        self._desk = ClaimDesk()
        self._timers: Timers[Deadline] = Timers()
        self._actions: list[ev.ReceiverAction] = []
        self._next_message_id = 1
        self._waiting_since = 0.0  # when the queue last began to be one
        self._unanswered: tuple[Session, Transfer, AllocRequest] | None = None  # came in this step and may have to wait
        self._draining = False

    @property
    def counts(self) -> PoolCounts:
        """Slots by state."""
        return self._book.pool.counts

    @property
    def queue_depth(self) -> int:
        """Transfers that wait for admission."""
        return self._book.ledger.depth

    def _ack(self, session: Session, message: PeerMessage, error: ErrorInfo | None = None, *, waiting: int = 0) -> None:
        self._send(session, Ack(session.incarnation, self.settings.incarnation, message.message_id, error, waiting))

    def _send(self, session: Session, message: PeerMessage) -> None:
        self._actions.append(ev.SendMessage(session.peer, message))

    def _refuse(self, peer: bytes, message: PeerMessage, error: ErrorInfo) -> None:
        """Answer a peer that has no session."""
        answer = Ack(message.sender_incarnation, self.settings.incarnation, message.message_id, error)
        self._actions.append(ev.SendMessage(peer, answer))
        self._report(ReportName.MESSAGE_REFUSED, peer=peer, code=error.code, kind=type(message).__name__)

    def _message_id(self) -> int:
        self._next_message_id += 1
        return self._next_message_id - 1

    def _announce(self, outcome: ev.Outcome, transfer: Transfer, error: ErrorInfo | None = None) -> None:
        exc = transfer_error(error.code, error.detail, error.retry_after_s) if error is not None else None
        self._actions.append(ev.AnnounceTransfer(outcome, transfer.id, transfer.req_id, transfer.total_chunks, exc))

    def _report_of(self, name: ReportName, transfer: Transfer, **fields: int | float | str) -> None:
        session = self._sessions.numbered(transfer.session_no)
        self._report(name, transfer.id, transfer.req_id, session.peer if session else None, **fields)

    def _report(
        self,
        name: ReportName,
        transfer: TransferId | None = None,
        req_id: str | None = None,
        peer: bytes | None = None,
        **fields: int | float | str,
    ) -> None:
        label = peer.decode(errors="backslashreplace") if peer is not None else None
        self._actions.append(Report(name, transfer, req_id, label, fields))

    def _answer(self, session: Session, message: AllocRequest, batch: Batch, error: ErrorInfo | None = None) -> None:
        self._send(
            session,
            AllocResponse(
                session.incarnation,
                self.settings.incarnation,
                message.message_id,
                transfer_no=message.transfer_no,
                first_chunk=batch.first_chunk,
                remote_indexes=batch.remote_indexes or (),
                already_sent_indexes=batch.already_sent_indexes,
                error=error,
            ),
        )

    def _answer_error(self, session: Session, message: AllocRequest, error: ErrorInfo) -> None:
        self._answer(session, message, Batch(0, (), ()), error)

    def _forget_if_settled(self, session: Session) -> None:
        """A closed session is kept only as long as a slot waits for its fence."""
        if session.state is SessionState.CLOSING and session.worker_destroyed and not session.unfenced:
            self._sessions.forget(session)
            self._actions.append(ev.ForgetSession(session.number))

    def _gone(self, transfer: Transfer, error: ErrorInfo | None) -> None:
        session = self._sessions.numbered(transfer.session_no)
        if session is not None:
            session.ended(transfer.id.transfer_no, error)
            self._forget_if_settled(session)
