"""Rollback: every way in which a transfer ends before anybody has read it.

Whatever fails, at any point, the whole transfer goes: what is ready is freed, what may still be written waits for its
fence. Freeing is by transfer and happens once.
"""

from __future__ import annotations

from kvpd.core.events import ReportName, TransferId
from kvpd.core.messages import ErrorInfo, RevokeNotif
from kvpd.core.receiver import events as ev
from kvpd.core.receiver.reading import Reading
from kvpd.core.receiver.sessions import Session
from kvpd.core.receiver.transfers import Transfer
from kvpd.core.states import ReceiverState
from kvpd.errors import ErrorCode


class Rollback(Reading):
    """Ends without success."""

    def _roll_back(self, transfer: Transfer, error: ErrorInfo, now: float, *, fenced: bool, tell: bool) -> None:
        """End a transfer that nobody reads, whole: whatever it held is free, or waits for its fence."""
        session = self._sessions.numbered(transfer.session_no)
        before = transfer.state
        self._timers.clear(("allocation", transfer.id))
        self._timers.clear(("ready", transfer.id))
        self._book.roll_back(transfer, error, fenced=fenced)
        if session is not None:
            session.waiting -= before is ReceiverState.QUEUED
            session.unfenced += transfer.state is ReceiverState.REVOKED
        self._report_of(
            ReportName.TRANSFER_REVOKED,
            transfer,
            reason=error.code,
            detail=error.detail,
            was=before.value,
            quarantined=len(transfer.quarantined),
        )
        if session is not None:
            for message in transfer.unanswered.values():
                self._answer_error(session, message, error)
            if tell and before is ReceiverState.ADMITTED:
                self._send_revoke(session, transfer, error, now)
            if transfer.state is ReceiverState.GONE:
                session.ended(transfer.id.transfer_no, error)
        transfer.unanswered.clear()
        self._announce(ev.Outcome.FAILED, transfer, error)
        if not self._book.bearing(transfer.req_id):
            self._fail_waiting(transfer.req_id, error)

    def _send_revoke(self, session: Session, transfer: Transfer, error: ErrorInfo, now: float) -> None:
        number = transfer.id.transfer_no
        message = RevokeNotif(
            session.incarnation, self.settings.incarnation, self._message_id(), number, error.code, error.detail
        )
        session.revoking[number] = message.message_id
        session.outbox.add(message, now=now)
        next_at = session.outbox.next_at()
        assert next_at is not None
        self._timers.set(("repeat", session.number), next_at)
        self._send(session, message)

    def _fence(self, transfer: Transfer, now: float) -> None:
        """No write can land for this revoked transfer any more: its slots are free."""
        count = len(transfer.quarantined)
        session = self._sessions.numbered(transfer.session_no)
        assert session is not None
        session.unfenced -= 1
        self._book.fence(transfer)
        self._gone(transfer, transfer.error)
        self._report_of(ReportName.TRANSFER_FENCED, transfer, slots=count)

    def _request_cancelled(self, req_id: str, now: float) -> None:
        error = ErrorInfo(ErrorCode.CANCELLED, "cancelled by the decode engine")
        for transfer in self._book.bearing(req_id):
            if transfer.state is not ReceiverState.CLAIMED:
                self._roll_back(transfer, error, now, fenced=False, tell=True)
        self._fail_waiting(req_id, error)

    def _roll_back_all(self, state: ReceiverState, now: float) -> None:
        error = ErrorInfo(ErrorCode.DRAINING, "this receiver is shutting down", retry_after_s=self.settings.lease_s)
        for transfer in self._book.in_state(state):
            self._roll_back(transfer, error, now, fenced=False, tell=True)

    def _admission_timed_out(self, transfer_id: TransferId, now: float) -> None:
        transfer = self._book.get(transfer_id)
        assert transfer is not None
        detail = (
            f"no room for {transfer.total_chunks} chunks within {self.settings.allocation_timeout_s:g} s; "
            f"{self._book.pool.unreserved} of {self.settings.total_slots} are free"
        )
        error = ErrorInfo(ErrorCode.ADMISSION_TIMEOUT, detail, retry_after_s=self.settings.allocation_timeout_s)
        self._roll_back(transfer, error, now, fenced=False, tell=False)

    def _revoke_idle(self, now: float) -> None:
        """Nobody holds room by doing nothing while others wait. One at a time: its room may be all that they need."""
        transfer = self._book.longest_idle() if self._book.ledger.depth else None
        if transfer is None or self._idle_until(transfer) > now:
            return
        detail = f"no progress for {self.settings.progress_timeout_s:g} s while {self.queue_depth} wait"
        self._roll_back(transfer, ErrorInfo(ErrorCode.NO_PROGRESS, detail), now, fenced=False, tell=True)

    def _idle_until(self, transfer: Transfer) -> float:
        """Nobody is revoked for the time when nobody waited."""
        return max(transfer.last_progress, self._waiting_since) + self.settings.progress_timeout_s

    def _arm_progress_timer(self) -> None:
        idle = self._book.longest_idle() if self._book.ledger.depth else None
        if idle is None:
            self._timers.clear(("progress", None))
        else:
            self._timers.set(("progress", None), self._idle_until(idle))
