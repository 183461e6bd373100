"""Peers: a session from Hello to fence, its lease, and a sender's word that a transfer is over."""

from __future__ import annotations

from kvpd.core.events import ReportName
from kvpd.core.messages import CancelNotif, ErrorInfo, Heartbeat, Hello, Region, Welcome
from kvpd.core.outbox import Outbox
from kvpd.core.receiver import events as ev
from kvpd.core.receiver.handshake import judge_hello
from kvpd.core.receiver.rollback import Rollback
from kvpd.core.receiver.sessions import Session, SessionState
from kvpd.core.states import ReceiverState
from kvpd.errors import ErrorCode


class Peers(Rollback):
    """Sessions."""

    def _hello(self, peer: bytes, hello: Hello, session: Session | None, now: float) -> None:
        if session is not None and session.hello == hello:  # a repeat: the Welcome was lost, or is under way
            session.heard_at = now
            if session.welcome is not None:
                self._send(session, session.welcome)
            return
        newer = self._sessions.of_sender(hello.sender_id)
        if newer is not None and newer.is_newer_than(hello):
            return  # a straggler: its sender has given up that channel, and opened this session since
        refusal = judge_hello(hello, self.settings, draining=self._draining)
        # Whoever is bound to this channel or to this name has a successor: its session must not outlive that.
        for old in (session, self._sessions.of_sender(hello.sender_id)):
            if old is not None and old.state is not SessionState.CLOSING and refusal is None:
                self._end_session(old, ErrorInfo(ErrorCode.PEER_LOST, "the sender opened a new session"), now)
        if refusal is None and len(self._sessions) >= self.settings.sessions_max:
            detail = f"{len(self._sessions)} sessions; the limit is {self.settings.sessions_max}"
            refusal = ErrorInfo(ErrorCode.QUEUE_FULL, detail, retry_after_s=self.settings.lease_s)
        if refusal is not None:
            self._refuse(peer, hello, refusal)
            return
        if hello.puts_ended:
            self._earlier_puts_ended(hello, now)
        session = self._sessions.start(peer, hello, Outbox(self.settings.repeat_s), now=now)
        self._timers.set(("lease", session.number), now + self.settings.lease_s)
        process = hello.host if session.same_host else None
        self._actions.append(ev.OpenSession(session.number, process, session.sender_id, session.incarnation))

    def _session_opened(self, session_no: int, regions: tuple[Region, ...], now: float) -> None:
        session = self._sessions.numbered(session_no)
        if session is None or session.state is not SessionState.OPENING:
            return  # it ended while its worker was being made; CloseSession is on its way
        session.state = SessionState.OPEN
        session.heard_at = now
        settings = self.settings
        session.welcome = Welcome(
            session.incarnation,
            settings.incarnation,
            session.hello.message_id,
            protocol_version=session.hello.protocol_version,
            receiver_id=settings.receiver_id,
            total_chunks=settings.total_slots,
            chunk_bytes=settings.chunk_bytes,
            layout=settings.layout,
            lease_s=settings.lease_s,
            put_deadline_s=settings.put_deadline_s,
            regions=regions,
            verify=settings.verify,
            share=self._share_for(session),
        )
        self._send(session, session.welcome)
        self._report(ReportName.SESSION_OPENED, peer=session.peer, sender=session.sender_id, session=session.number)

    def _share_for(self, session: Session) -> str:
        """Where this sender's engines are given our memory: on one host only, where their deaths can be seen."""
        return self.settings.share if session.same_host else ""

    def _session_failed(self, session_no: int, detail: str, now: float) -> None:
        session = self._sessions.numbered(session_no)
        if session is not None and session.state is SessionState.OPENING:
            self._end_session(session, ErrorInfo(ErrorCode.TRANSPORT_FAILED, detail[:1024]), now)

    def _end_session(self, session: Session, error: ErrorInfo, now: float) -> None:
        """Believe this sender no more. What has landed whole stays; the rest is revoked and waits for the fence."""
        self._refuse(session.peer, session.hello, error)
        self._sessions.close(session)
        self._timers.clear(("lease", session.number))
        self._timers.clear(("repeat", session.number))
        for transfer in list(session.transfers.values()):
            if transfer.state in (ReceiverState.QUEUED, ReceiverState.ADMITTED):
                self._roll_back(transfer, error, now, fenced=False, tell=False)
        self._report(
            ReportName.SESSION_ENDED, peer=session.peer, session=session.number, code=error.code, detail=error.detail
        )
        self._actions.append(ev.CloseSession(session.number))

    def _peer_misbehaved(self, peer: bytes, detail: str, now: float) -> None:
        """Drop a peer that breaks the protocol; everything it holds is given back."""
        self._report(ReportName.PEER_REJECTED, peer=peer, detail=detail[:256])
        session = self._sessions.of_peer(peer)
        if session is not None:
            self._end_session(session, ErrorInfo(ErrorCode.PROTOCOL_ERROR, detail[:1024]), now)

    def _fence_progressed(
        self,
        session_no: int,
        now: float,
        *,
        worker_destroyed: bool = False,
        process_dead: bool = False,
        puts_ended: bool = False,
    ) -> None:
        session = self._sessions.numbered(session_no)
        if session is None:
            return
        session.worker_destroyed |= worker_destroyed
        session.process_dead |= process_dead
        session.puts_ended |= puts_ended
        if session.state is not SessionState.CLOSING:
            # A dead process sends no more: there is no need to wait for its lease.
            if process_dead:
                self._end_session(session, ErrorInfo(ErrorCode.PEER_LOST, "the sender's process died"), now)
            return
        if session.is_fenced:
            for transfer in list(session.transfers.values()):
                if transfer.state is ReceiverState.REVOKED:
                    self._fence(transfer, now)
        if self._sessions.numbered(session_no) is not None:  # the last fence may have forgotten it already
            self._forget_if_settled(session)

    def _earlier_puts_ended(self, hello: Hello, now: float) -> None:
        """The process that said this Hello has ended every write of the sessions that it had before."""
        for old in self._sessions.closing_before(hello):
            self._fence_progressed(old.number, now, puts_ended=True)

    def _heartbeat(self, session: Session, message: Heartbeat, now: float) -> None:
        session.advance_oldest_live(message.oldest_live)
        if message.puts_ended:
            self._earlier_puts_ended(session.hello, now)
        for transfer_no, _count in message.in_flight:
            transfer = session.transfers.get(transfer_no)
            if transfer is not None and transfer.state is ReceiverState.ADMITTED:
                self._book.progressed(transfer, now=now)
        self._ack(session, message, waiting=session.waiting)

    def _cancel_notif(self, session: Session, message: CancelNotif, now: float) -> None:
        self._ack(session, message)
        number = message.transfer_no
        message_id = session.revoking.pop(number, None)
        if message_id is not None:
            session.outbox.answer(message_id)
        transfer = session.transfers.get(number)
        error = ErrorInfo(message.reason, "cancelled by the sender")
        if transfer is None:
            # Even if its AllocRequest never came: a cancelled transfer stays cancelled.
            if number not in session.outcomes and len(session.outcomes) < self.settings.outcomes_max:
                session.ended(number, error)
        elif transfer.state is ReceiverState.REVOKED:
            if message.drained:
                self._fence(transfer, now)
        elif transfer.state is not ReceiverState.CLAIMED:
            self._roll_back(transfer, error, now, fenced=message.drained, tell=False)
        if not message.drained and not message.goes_on:
            # Its endpoint was cut off: nothing more can come through it, and only the session's end is a fence.
            self._end_session(session, ErrorInfo(ErrorCode.TRANSPORT_FAILED, "the sender cut its puts off"), now)

    def _lease_due(self, session_no: int, now: float, lag_s: float) -> None:
        session = self._sessions.numbered(session_no)
        assert session is not None
        # While our own loop stood still we could not hear anybody: nobody's lease ran.
        session.heard_at = min(now, session.heard_at + lag_s)
        until = session.heard_at + self.settings.lease_s
        if until > now:
            self._timers.set(("lease", session_no), until)
            return
        error = ErrorInfo(ErrorCode.PEER_LOST, f"the sender was silent for {self.settings.lease_s:g} s")
        self._end_session(session, error, now)

    def _repeat_due(self, session_no: int, now: float) -> None:
        session = self._sessions.numbered(session_no)
        assert session is not None
        oldest = session.outbox.oldest_at()
        if oldest is None:
            return
        if oldest + self.settings.lease_s <= now:
            detail = f"the sender did not answer a RevokeNotif for {self.settings.lease_s:g} s"
            self._end_session(session, ErrorInfo(ErrorCode.PEER_LOST, detail), now)
            return
        for message in session.outbox.due(now):
            self._send(session, message)
        next_at = session.outbox.next_at()
        assert next_at is not None
        self._timers.set(("repeat", session_no), next_at)
