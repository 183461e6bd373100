"""The receiver's core: events in, actions out, time as an argument."""

from __future__ import annotations

from typing import assert_never

from kvpd.core.events import DrainExpired, DrainRequested, RequestCancelled, TimePassed
from kvpd.core.messages import AllocRequest, CancelNotif, ErrorInfo, Heartbeat, Hello, PeerMessage, WriteDone
from kvpd.core.receiver import events as ev
from kvpd.core.receiver.admission import Admission
from kvpd.core.receiver.events import ReceiverAction, ReceiverEvent
from kvpd.core.receiver.sessions import Session, SessionState
from kvpd.core.states import ReceiverState
from kvpd.errors import ErrorCode


class ReceiverCore(Admission):
    """One receiver's decisions."""

    def handle(self, event: ReceiverEvent, *, now: float) -> list[ReceiverAction]:
        """Decide about one event. `now`: seconds on a clock that never goes back and does not stop in suspend."""
        match event:
            case ev.MessageReceived(peer, message):
                self._message_received(peer, message, now)
            case ev.MessageRejected(peer, detail):
                self._peer_misbehaved(peer, detail, now)
            case ev.SessionOpened(session_no, regions):
                self._session_opened(session_no, regions, now)
            case ev.SessionFailed(session_no, detail):
                self._session_failed(session_no, detail, now)
            case ev.SessionClosed(session_no):
                self._fence_progressed(session_no, now, worker_destroyed=True)
            case ev.ProcessDied(session_no):
                self._fence_progressed(session_no, now, process_dead=True)
            case ev.ChunksVerified():
                self._chunks_verified(event, now)
            case ev.ClaimRequested():
                self._claim_requested(event, now)
            case ev.ClaimReleased(engine, claim):
                self._claim_released((engine, claim), now)
            case ev.EngineClosed(engine):
                for key in self._desk.waiting_of(engine):
                    self._stop_waiting(key)
            case ev.EngineDied(engine):
                self._engine_died(engine, now)
            case RequestCancelled(req_id):
                self._request_cancelled(req_id, now)
            case TimePassed(lag_s):
                self._time_passed(now, lag_s)
            case DrainRequested():
                self._draining = True
                self._roll_back_all(ReceiverState.QUEUED, now)
            case DrainExpired():
                self._roll_back_all(ReceiverState.ADMITTED, now)
                self._roll_back_all(ReceiverState.COMPLETE, now)
            case _:
                assert_never(event)
        # Whatever made room, or took the head of the queue away: here, and only here, others are admitted.
        self._admit(now)
        self._tell_waiting()
        self._arm_progress_timer()
        self.check()
        actions, self._actions = self._actions, []
        return actions

    def next_deadline(self) -> float | None:
        """When `handle(TimePassed())` must be called next, or None."""
        return self._timers.next_at()

    @property
    def session_count(self) -> int:
        """Sessions, closing ones included."""
        return len(self._sessions)

    def ready(self) -> list[ev.AnnounceTransfer]:
        """What an engine that attaches now has missed: whatever is complete and not claimed. O(transfers)."""
        complete = self._book.in_state(ReceiverState.COMPLETE)
        return [ev.AnnounceTransfer(ev.Outcome.READY, t.id, t.req_id, t.total_chunks) for t in complete]

    def holds(self, engine: int) -> bool:
        """Whether the engine may be reading any slot."""
        return bool(self._desk.held_by(engine))

    @property
    def is_idle(self) -> bool:
        """Nothing is on its way, waiting to be read or being read."""
        return not self._book.in_state(
            ReceiverState.QUEUED, ReceiverState.ADMITTED, ReceiverState.COMPLETE, ReceiverState.CLAIMED
        )

    @property
    def is_clean(self) -> bool:
        """Invariant 10: no transfer, no claim, every slot free."""
        counts = self.counts
        return not self._book and self._desk.is_empty and counts.free == self.settings.total_slots

    def check(self) -> None:
        """The invariants that cost O(1), after every event."""
        self._book.pool.check()

    def audit(self) -> None:
        """All invariants by a full scan, for tests and simulation."""
        self._book.audit()
        for session in self._sessions.all():
            states = [transfer.state for transfer in session.transfers.values()]
            assert session.waiting == states.count(ReceiverState.QUEUED)
            assert session.unfenced == states.count(ReceiverState.REVOKED)
        if not self._book:
            assert self._book.ledger.is_empty

    def _message_received(self, peer: bytes, message: object, now: float) -> None:
        session = self._sessions.of_peer(peer)
        if isinstance(message, Hello):
            self._hello(peer, message, session, now)
            return
        if not isinstance(message, AllocRequest | WriteDone | CancelNotif | Heartbeat):
            self._peer_misbehaved(peer, f"{type(message).__name__} is no message for a receiver", now)
            return
        if session is None or session.state is not SessionState.OPEN or not self._is_meant(message, session):
            # It speaks to an incarnation or a session that is no more, or never was: it must say Hello.
            self._refuse(peer, message, ErrorInfo(ErrorCode.NO_SESSION, "no session here bears these incarnations"))
            return
        session.heard_at = now
        match message:
            case AllocRequest():
                self._alloc_request(session, message, now)
            case WriteDone():
                self._write_done(session, message, now)
            case CancelNotif():
                self._cancel_notif(session, message, now)
            case Heartbeat():
                self._heartbeat(session, message, now)
            case _:
                assert_never(message)

    def _is_meant(self, message: PeerMessage, session: Session) -> bool:
        return (message.sender_incarnation, message.receiver_incarnation) == (
            session.incarnation,
            self.settings.incarnation,
        )

    def _time_passed(self, now: float, lag_s: float) -> None:
        while (deadline := self._timers.pop_due(now)) is not None:
            match deadline:
                case ("allocation", transfer_id):
                    self._admission_timed_out(transfer_id, now)
                case ("ready", transfer_id):
                    self._expire(transfer_id, now)
                case ("lease", session_no):
                    self._lease_due(session_no, now, lag_s)
                case ("repeat", session_no):
                    self._repeat_due(session_no, now)
                case ("claim", key):
                    self._claim_timed_out(key)
                case ("overdue", key):
                    self._claim_overdue(key)
                case ("progress", _):
                    self._revoke_idle(now)
                case _:
                    assert_never(deadline)
