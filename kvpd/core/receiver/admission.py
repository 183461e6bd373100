"""Admission: a transfer gets room for all of its chunks or for none, its batches are placed, its writes counted."""

from __future__ import annotations

from kvpd.core.events import ReportName
from kvpd.core.messages import AllocRequest, ErrorInfo, WriteDone
from kvpd.core.receiver import events as ev
from kvpd.core.receiver.peers import Peers
from kvpd.core.receiver.sessions import Session
from kvpd.core.receiver.transfers import Batch, BatchRefused, Transfer
from kvpd.core.states import ReceiverState
from kvpd.errors import ErrorCode


class Admission(Peers):
    """Admission."""

    def _alloc_request(self, session: Session, message: AllocRequest, now: float) -> None:
        transfer = session.transfers.get(message.transfer_no)
        transfer_id = session.transfer_id(message.transfer_no)
        if transfer is not None:
            self._batch(session, transfer, message, now)
            return
        if message.transfer_no in session.outcomes:
            self._answer_gone(session, message)
        elif not message.open or message.transfer_no < session.oldest_live or self._book.get(transfer_id) is not None:
            # The last: an earlier session of this incarnation opened it, and it is read or in quarantine still.
            detail = f"transfer {message.transfer_no} is not known here"
            self._answer_error(session, message, ErrorInfo(ErrorCode.PEER_LOST, detail))
        else:
            self._open(session, message, now)

    def _answer_gone(self, session: Session, message: AllocRequest) -> None:
        """A repeat about a transfer that has ended. If it ended well, every chunk of it has landed."""
        error = session.outcomes[message.transfer_no]
        if error is not None:
            self._answer_error(session, message, error)
            return
        batch = Batch(message.first_chunk, message.keys, ())
        batch.remote_indexes = (-1,) * len(message.keys)
        batch.already_sent_indexes = tuple(range(len(message.keys)))
        self._answer(session, message, batch)

    def _open(self, session: Session, message: AllocRequest, now: float) -> None:
        transfer_id = session.transfer_id(message.transfer_no)
        refusal = self._admission_refusal(session, message)
        if refusal is not None:
            if len(session.outcomes) < self.settings.outcomes_max:
                session.ended(message.transfer_no, refusal)
            self._answer_error(session, message, refusal)
            self._report(
                ReportName.TRANSFER_REFUSED,
                transfer_id,
                message.req_id,
                session.peer,
                code=refusal.code,
                detail=refusal.detail,
            )
            return
        transfer = Transfer(transfer_id, message.req_id, session.number, message.total_chunks, now)
        session.transfers[message.transfer_no] = transfer
        session.waiting += 1
        if self._book.ledger.depth == 0:
            self._waiting_since = now
        self._book.open(transfer)
        self._report_of(
            ReportName.TRANSFER_QUEUED,
            transfer,
            chunks=transfer.total_chunks,
            depth=self.queue_depth,
            waits=self._book.ledger.next_that_fits() != transfer_id,
        )
        self._batch(session, transfer, message, now)
        self._recheck_claims(transfer.req_id, now)

    def _admission_refusal(self, session: Session, message: AllocRequest) -> ErrorInfo | None:
        """Why a new transfer cannot even wait, judged in the order that docs/PROTOCOL.md gives."""
        settings = self.settings
        if message.total_chunks <= 0 or not message.req_id:
            return ErrorInfo(
                ErrorCode.LEGACY_SENDER,
                f"req_id {message.req_id[:128]!r} declares {message.total_chunks} chunks: admission needs both",
            )
        if message.total_chunks > settings.total_slots:
            return ErrorInfo(
                ErrorCode.TOO_LARGE,
                f"{message.total_chunks} chunks do not fit the buffer's {settings.total_slots}: raise buffer_size",
            )
        if self._book.ledger.depth >= settings.queue_depth_max:
            detail = f"{self._book.ledger.depth} transfers wait; queue_depth_max is {settings.queue_depth_max}"
            return ErrorInfo(ErrorCode.QUEUE_FULL, detail, retry_after_s=1.0)
        if len(session.outcomes) >= settings.outcomes_max:
            detail = f"{len(session.outcomes)} ended transfers are remembered: oldest_live does not advance"
            return ErrorInfo(ErrorCode.QUEUE_FULL, detail, retry_after_s=settings.lease_s)
        if self._draining:
            return ErrorInfo(ErrorCode.DRAINING, "this receiver is shutting down", retry_after_s=settings.lease_s)
        return None

    def _admit(self, now: float) -> None:
        """Admit from the head of the queue while it fits whole."""
        while (transfer := self._book.admit_next(now=now)) is not None:
            self._timers.clear(("allocation", transfer.id))
            self._report_of(
                ReportName.TRANSFER_ADMITTED, transfer, queued_s=now - transfer.opened_at, chunks=transfer.total_chunks
            )
            session = self._sessions.numbered(transfer.session_no)
            assert session is not None
            session.waiting -= 1
            for message in transfer.unanswered.values():
                self._place(session, transfer, message)
            transfer.unanswered.clear()
            self._complete_if_ready(transfer, now)

    def _tell_waiting(self) -> None:
        """Whoever asked in this step and must wait is told so, and need not ask again. It does not wait for ever."""
        asked, self._unanswered = self._unanswered, None
        if asked is not None and asked[1].state is ReceiverState.QUEUED:
            session, transfer, message = asked
            self._timers.set(("allocation", transfer.id), transfer.opened_at + self.settings.allocation_timeout_s)
            self._ack(session, message)

    def _batch(self, session: Session, transfer: Transfer, message: AllocRequest, now: float) -> None:
        """A batch of a transfer that is not gone: keep it until admission, or place it at once."""
        if transfer.state is ReceiverState.REVOKED:
            assert transfer.error is not None
            self._answer_error(session, message, transfer.error)
            return
        try:
            self._book.batch(transfer, message)
        except BatchRefused as exc:
            self._answer_error(session, message, exc.info)
            if transfer.state in (ReceiverState.QUEUED, ReceiverState.ADMITTED):
                self._roll_back(transfer, exc.info, now, fenced=False, tell=True)
            return
        if transfer.state is ReceiverState.QUEUED:
            transfer.unanswered[message.first_chunk if message.keys else -1] = message
            self._unanswered = session, transfer, message
            return
        if transfer.state is ReceiverState.ADMITTED:
            self._book.progressed(transfer, now=now)
        self._place(session, transfer, message)
        self._complete_if_ready(transfer, now)

    def _place(self, session: Session, transfer: Transfer, message: AllocRequest) -> None:
        """Answer a batch of an admitted transfer, the same way every time."""
        batch = transfer.batches[message.first_chunk] if message.keys else Batch(message.first_chunk, (), (), ())
        if batch.remote_indexes is None:
            self._book.place(transfer, batch)
            self._report_of(
                ReportName.BATCH_ALLOCATED,
                transfer,
                first_chunk=batch.first_chunk,
                chunks=len(batch.keys),
                deduplicated=len(batch.already_sent_indexes),
            )
        self._answer(session, message, batch)

    def _write_done(self, session: Session, message: WriteDone, now: float) -> None:
        transfer = session.transfers.get(message.transfer_no)
        if transfer is None:
            unknown = ErrorInfo(ErrorCode.PEER_LOST, f"transfer {message.transfer_no} is not known here")
            self._ack(session, message, session.outcomes.get(message.transfer_no, unknown))
            return
        if transfer.state not in (ReceiverState.QUEUED, ReceiverState.ADMITTED):
            # COMPLETE and CLAIMED: a repeat. REVOKED: never plainly acknowledged.
            self._ack(session, message, transfer.error)
            return
        try:
            slots = self._book.unwritten(transfer, message.rank, message.first_chunk, message.count)
            if self.settings.verify != "off" and slots and len(message.checksums) != len(slots):
                detail = f"{len(message.checksums)} checksums for {len(slots)} chunks written"
                raise BatchRefused(ErrorCode.PROTOCOL_ERROR, detail)
        except BatchRefused as exc:
            self._ack(session, message, exc.info)
            self._roll_back(transfer, exc.info, now, fenced=False, tell=True)
            return
        self._book.progressed(transfer, now=now)
        if self.settings.verify == "off" or not slots:
            self._written(session, transfer, message, slots, now)
        elif message.message_id not in transfer.verifying:
            transfer.verifying.add(message.message_id)
            chunks = zip(slots, message.checksums, strict=True)
            length_of = self._book.pool.slot
            written = tuple(ev.WrittenSlot(index, length_of(index).length, checksum) for index, checksum in chunks)
            self._actions.append(ev.VerifyChunks(transfer.id, message, written))

    def _chunks_verified(self, event: ev.ChunksVerified, now: float) -> None:
        """The bytes are those that were sent, or the whole transfer goes."""
        transfer, message = self._book.get(event.transfer), event.message
        if transfer is None or transfer.state is not ReceiverState.ADMITTED:
            return  # it ended meanwhile, and a repeat of the message finds out how
        session = self._sessions.numbered(transfer.session_no)
        assert session is not None
        transfer.verifying.discard(message.message_id)
        if event.mismatched:
            detail = f"{event.mismatched} of the chunks from {message.first_chunk} on hold other bytes than were sent"
            error = ErrorInfo(ErrorCode.CHECKSUM_MISMATCH, detail)
            self._ack(session, message, error)
            self._roll_back(transfer, error, now, fenced=False, tell=True)
            return
        slots = self._book.unwritten(transfer, message.rank, message.first_chunk, message.count)
        self._written(session, transfer, message, slots, now)

    def _written(self, session: Session, transfer: Transfer, message: WriteDone, slots: list[int], now: float) -> None:
        self._book.mark_written(transfer, message.rank, slots)
        self._report_of(
            ReportName.CHUNKS_WRITTEN,
            transfer,
            rank=message.rank,
            first_chunk=message.first_chunk,
            chunks=message.count,
        )
        self._ack(session, message)
        self._complete_if_ready(transfer, now)

    def _complete_if_ready(self, transfer: Transfer, now: float) -> None:
        if not self._book.complete_if_ready(transfer):
            return
        transfer.ready_until = now + self.settings.ready_ttl_s
        self._timers.set(("ready", transfer.id), transfer.ready_until)
        self._report_of(
            ReportName.TRANSFER_COMPLETED,
            transfer,
            seconds=now - transfer.opened_at,
            chunks=transfer.total_chunks,
            deduplicated=transfer.deduplicated,
            bytes=transfer.bytes_placed,
        )
        self._announce(ev.Outcome.READY, transfer)
        self._recheck_claims(transfer.req_id, now)
