"""Moving: a request is opened, its batches are allocated, staged, put and acknowledged, piece by piece.

Remote room comes first, local staging second. A batch's pieces are granted in order; an engine that asks for its next
batch before it has filled this one gets staging only if it is free at once, so nobody waits while holding slots.
"""

from __future__ import annotations

from kvpd.core.events import ReportName
from kvpd.core.messages import (
    BATCH_CHUNKS_MAX,
    BATCH_KEYS_BYTES_MAX,
    CHUNKS_MAX,
    KEY_BYTES_MAX,
    Ack,
    AllocRequest,
    AllocResponse,
    WriteDone,
)
from kvpd.core.sender import events as ev
from kvpd.core.sender.events import StagedSlot
from kvpd.core.sender.peers import Peers
from kvpd.core.sender.records import Batch, Peer, PeerState, Piece, PieceState, Transfer
from kvpd.core.states import SenderCause, SenderState
from kvpd.errors import ErrorCode, TransferError, transfer_error


class Moving(Peers):
    """The life of a transfer that goes well."""

    def _open(self, event: ev.OpenRequested, now: float) -> None:
        assert event.transfer_no > self._highest_no, "transfer numbers must grow"
        self._highest_no = event.transfer_no
        refusal = self._open_refusal(event)
        if refusal is not None:
            self._actions.append(ev.FinishTransfer(event.transfer_no, refusal))
            self._failed(event.notify, event.req_id, event.receiver, event.transfer_no, refusal)
            return
        peer = self._peers.get(event.receiver)
        is_new = peer is None
        if peer is None:
            peer = self._connect(event.receiver, now)
        transfer = Transfer(
            event.transfer_no, event.engine, event.req_id, peer, event.total_chunks, event.notify, opened_at=now
        )
        self._transfers[transfer.number] = peer.transfers[transfer.number] = transfer
        self._by_req_id.setdefault(transfer.req_id, {})[transfer.number] = transfer
        self._timers.set(("request", transfer.number), now + self.settings.request_timeout_s)
        self._report_of(ReportName.TRANSFER_OPENED, transfer, chunks=transfer.total_chunks, engine=transfer.engine)
        if is_new:
            self._say_hello(peer, now)
        elif peer.state is PeerState.UP:
            self._send_open(transfer, now)

    def _open_refusal(self, event: ev.OpenRequested) -> TransferError | None:
        if self._draining:
            return transfer_error(ErrorCode.DRAINING, "this sender is shutting down")
        if event.total_chunks <= 0 or not event.req_id:
            detail = f"req_id {event.req_id!r} declares {event.total_chunks} chunks: both are needed"
            return transfer_error(ErrorCode.LEGACY_SENDER, detail)
        if event.total_chunks > CHUNKS_MAX:
            detail = f"{event.total_chunks} chunks; no request has more than {CHUNKS_MAX}"
            return transfer_error(ErrorCode.TOO_LARGE, detail)
        if len(self._transfers) >= self.settings.transfers_max:
            detail = f"{len(self._transfers)} transfers run; the limit is {self.settings.transfers_max}"
            return transfer_error(ErrorCode.QUEUE_FULL, detail, 1.0)
        if event.receiver not in self._peers and len(self._peers) >= self.settings.peers_max:
            detail = f"{len(self._peers)} receivers are connected; the limit is {self.settings.peers_max}"
            return transfer_error(ErrorCode.QUEUE_FULL, detail, 1.0)
        return None

    def _endpoint_opened(self, peer: Peer, now: float) -> None:
        peer.state = PeerState.UP
        self._reconnect_until.pop(peer.receiver, None)
        self._report(ReportName.SESSION_OPENED, peer.receiver, receiver=peer.receiver_id, chunks=peer.total_chunks)
        for transfer in peer.transfers.values():
            if transfer.is_live:
                self._send_open(transfer, now)

    def _send_open(self, transfer: Transfer, now: float) -> None:
        """Ask for room for all of it; and, where keys are known already, for the batches."""
        transfer.open_sent = True
        self._send_alloc(transfer, None, now)
        for batch in transfer.batches.values():
            self._send_alloc(transfer, batch, now)

    def _send_alloc(self, transfer: Transfer, batch: Batch | None, now: float) -> int:
        peer = transfer.peer
        end = batch.first_chunk + len(batch.keys) if batch is not None else 0
        message = AllocRequest(
            self.settings.incarnation,
            peer.incarnation,
            self._message_id(),
            transfer_no=transfer.number,
            req_id=transfer.req_id,
            # Until it is admitted each of its requests may be the first to arrive: those before it may be lost.
            open=transfer.state is SenderState.OPENING,
            keys=batch.keys if batch is not None else (),
            is_last_batch=end == transfer.total_chunks,
            total_chunks=transfer.total_chunks,
            first_chunk=batch.first_chunk if batch is not None else 0,
            last_chunk_bytes=batch.last_chunk_bytes if batch is not None else 0,
        )
        self._send_until_answered(peer, message, now, transfer)
        return message.message_id

    def _touch(self, transfer: Transfer, now: float) -> None:
        """A batch without keys is progress at the receiver. One at a time is enough."""
        if transfer.state is SenderState.TRANSFERRING and transfer.touch_id is None:
            transfer.touch_id = self._send_alloc(transfer, None, now)

    # -------------------------------------------------------------- batches

    def _stage(self, transfer: Transfer, event: ev.StageRequested, now: float) -> None:
        problem = self._stage_problem(transfer, event)
        if problem is not None:
            self._cancel(transfer, problem)
            return
        batch = Batch(event.stage, transfer.next_chunk, event.keys, event.last_chunk_bytes)
        transfer.last_stage = event.stage
        transfer.next_chunk += len(event.keys)
        transfer.last_seen = transfer.next_chunk == transfer.total_chunks
        transfer.batches[event.stage] = batch
        if transfer.open_sent:
            self._send_alloc(transfer, batch, now)

    def _stage_problem(self, transfer: Transfer, event: ev.StageRequested) -> TransferError | None:
        """Why no correct engine asks for this. Judged here too, so that its error names the engine's own call."""
        chunk_bytes, end = self.settings.chunk_bytes, transfer.next_chunk + len(event.keys)
        keys_bytes = sum(len(key) + 2 for key in event.keys)
        if end > transfer.total_chunks:
            detail = f"chunks up to {end - 1} are staged, but {transfer.total_chunks} were declared"
            return transfer_error(ErrorCode.OVERFLOW, detail)
        if event.is_last and end < transfer.total_chunks:
            detail = f"the last batch ends at chunk {end} of {transfer.total_chunks} declared"
            return transfer_error(ErrorCode.UNDERFLOW, detail)
        if not 0 < event.last_chunk_bytes <= chunk_bytes or (
            event.last_chunk_bytes < chunk_bytes and end < transfer.total_chunks
        ):
            detail = f"last_chunk_bytes {event.last_chunk_bytes}: only the request's last chunk may be short"
            return transfer_error(ErrorCode.PROTOCOL_ERROR, f"{detail} of {chunk_bytes} bytes")
        if not event.keys or len(event.keys) > BATCH_CHUNKS_MAX or keys_bytes > BATCH_KEYS_BYTES_MAX:
            detail = f"{len(event.keys)} keys of {keys_bytes} bytes: a batch has 1 to {BATCH_CHUNKS_MAX} keys"
            return transfer_error(ErrorCode.PROTOCOL_ERROR, f"{detail} of {BATCH_KEYS_BYTES_MAX} bytes; stage less")
        if any(len(key) > KEY_BYTES_MAX for key in event.keys):
            return transfer_error(ErrorCode.PROTOCOL_ERROR, f"a key is longer than {KEY_BYTES_MAX} bytes")
        if event.stage <= transfer.last_stage or len(transfer.batches) >= self.settings.stages_max:
            detail = f"stage {event.stage} after {transfer.last_stage}, {len(transfer.batches)} unfinished"
            return transfer_error(ErrorCode.PROTOCOL_ERROR, f"{detail} (the limit is {self.settings.stages_max})")
        return None

    def _alloc_response(self, peer: Peer, message: AllocResponse, now: float) -> None:
        sent = peer.outbox.answer(message.message_id)
        self._arm_repeat(peer)
        if sent is None:
            return  # a repeat, or of a transfer that has ended
        if not isinstance(sent.message, AllocRequest) or message.transfer_no != sent.message.transfer_no:
            self._peer_misbehaved(peer, f"AllocResponse {message.message_id} does not fit its request")
            return
        peer.lease_from = max(peer.lease_from, sent.at)
        transfer = peer.transfers[message.transfer_no]  # an ended one has no request in the outbox
        transfer.unanswered.discard(message.message_id)
        if message.message_id == transfer.touch_id:
            transfer.touch_id = None
        if message.error is not None:
            error = message.error
            self._cancel(transfer, transfer_error(error.code, error.detail, error.retry_after_s))
            return
        if not self._is_plausible(peer, sent.message, message):
            self._peer_misbehaved(peer, f"AllocResponse {message.message_id} does not fit its request")
            return
        if transfer.state is SenderState.OPENING:
            transfer.move(SenderCause.ADMITTED)
            transfer.admitted_at = now
            self._wait_no_more(transfer, now)
            self._report_of(ReportName.ADMISSION_GRANTED, transfer, waited_s=now - transfer.opened_at)
        for batch in transfer.batches.values():
            if sent.message.keys and batch.first_chunk == sent.message.first_chunk:
                batch.remote_indexes = message.remote_indexes
                batch.asked_at = now
        self._stage_next(transfer, now)

    def _wait_no_more(self, transfer: Transfer, now: float) -> None:
        """It is admitted: whatever else was asked for it is answered together with this, or that answer was lost."""
        peer = transfer.peer
        peer.waiting.discard(transfer.number)
        for message_id in transfer.unanswered:
            peer.outbox.resume(message_id, now=now)
        self._arm_repeat(peer)

    def _is_plausible(self, peer: Peer, request: AllocRequest, message: AllocResponse) -> bool:
        """A wrong index would be a write into somebody else's slot: check every one."""
        indexes = message.remote_indexes
        already_sent = tuple(i for i, index in enumerate(indexes) if index < 0)
        return (
            len(indexes) == len(request.keys)
            and tuple(message.already_sent_indexes) == already_sent
            and all(index < peer.total_chunks for index in indexes)
        )

    # -------------------------------------------------------------- staging

    def _stage_next(self, transfer: Transfer, now: float) -> None:
        """Grant, or get in line for, the next piece of the oldest batch that is not fully staged."""
        while transfer.batches and transfer.is_live:
            batch = next(iter(transfer.batches.values()))
            if batch.remote_indexes is None or batch.is_waiting:
                return
            wanted = batch.slots_wanted
            if wanted == 0:
                self._grant_piece(transfer, batch, (), now)
                continue
            receiver = transfer.peer.receiver
            if not transfer.is_filling:
                batch.is_waiting = True
                self.staging.wait((transfer.number, batch.stage), receiver, wanted)
                return
            slots = self.staging.take_now(receiver, wanted)
            if slots is None:
                self._defer_early(transfer)
                return
            self._grant_piece(transfer, batch, slots, now)

    def _defer_early(self, transfer: Transfer) -> None:
        """The engine holds slots that it must fill first: whoever asked early is told so, once per stage."""
        for batch in transfer.batches.values():
            if batch.remote_indexes is not None and batch.cursor == 0 and not batch.was_deferred:
                batch.was_deferred = True
                self._actions.append(ev.DeferStage(transfer.number, batch.stage))

    def _grant_waiting(self, now: float) -> None:
        """Whatever freed staging, or took the next in line away: here, and only here, those who wait are served."""
        while (grant := self.staging.grant_next()) is not None:
            (number, stage), slots = grant
            transfer = self._transfers[number]
            batch = transfer.batches[stage]
            batch.is_waiting = False
            self._grant_piece(transfer, batch, slots, now)
            if batch.stage in transfer.batches:  # it was cut: the rest waits until this piece is filled
                self._defer_early(transfer)
            else:
                self._stage_next(transfer, now)

    def _grant_piece(self, transfer: Transfer, batch: Batch, slots: tuple[int, ...], now: float) -> None:
        """As many of the batch's next chunks as these slots hold, and those that need none."""
        assert batch.remote_indexes is not None
        entries: list[StagedSlot | None] = []
        free = list(reversed(slots))
        for position in range(batch.cursor, len(batch.keys)):
            remote = batch.remote_indexes[position]
            if remote < 0:
                entries.append(None)
            elif free:
                is_last = position == len(batch.keys) - 1
                length = batch.last_chunk_bytes if is_last else self.settings.chunk_bytes
                entries.append(StagedSlot(free.pop(), remote, length))
            else:
                break
        assert not free, "more staging slots than chunks to stage"
        piece = Piece(transfer.next_piece, batch.first_chunk + batch.cursor, tuple(entries))
        first = batch.cursor
        transfer.next_piece += 1
        transfer.pieces[piece.number] = piece
        batch.cursor += len(entries)
        is_last_piece = batch.cursor == len(batch.keys)
        if is_last_piece:
            del transfer.batches[batch.stage]
        self._actions.append(
            ev.GrantPiece(transfer.number, batch.stage, piece.number, first, piece.entries, is_last_piece)
        )
        self._report_of(
            ReportName.BATCH_STAGED,
            transfer,
            first_chunk=piece.first_chunk,
            chunks=len(entries),
            deduplicated=entries.count(None),
            waited_s=now - batch.asked_at,
        )

    # -------------------------------------------------------------- pieces

    def _piece_filled(self, number: int, piece_no: int, now: float) -> None:
        transfer = self._transfers.get(number)
        piece = transfer.pieces.get(piece_no) if transfer is not None else None
        if transfer is None:
            return
        if piece is None or piece.state is not PieceState.FILLING:
            self._cancel(transfer, transfer_error(ErrorCode.PROTOCOL_ERROR, f"piece {piece_no} is not being filled"))
            return
        if not transfer.is_live:
            self._drop_piece(transfer, piece)
            return
        if piece.puts:
            piece.state = PieceState.WRITING
            self._note_writing(transfer)
            self._actions.append(
                ev.PostPuts(number, piece_no, transfer.peer.endpoint, piece.puts, transfer.peer.verify)
            )
        else:
            self._acknowledge(transfer, piece, now)
        if transfer.is_live:
            self._stage_next(transfer, now)

    def _puts_completed(self, event: ev.PutsCompleted, now: float) -> None:
        transfer = self._transfers.get(event.transfer_no)
        piece = transfer.pieces.get(event.piece) if transfer is not None else None
        if transfer is None or piece is None or piece.state is not PieceState.WRITING:
            return
        if not transfer.is_live:
            self._drop_piece(transfer, piece)
            return
        self.staging.give_back(transfer.peer.receiver, piece.staging_slots)
        piece.state = PieceState.ACKING
        self._note_writing(transfer)
        size = sum(put.length for put in piece.puts)
        transfer.bytes_put += size
        self._report_of(ReportName.PIECE_WRITTEN, transfer, chunks=len(piece.puts), bytes=size, seconds=event.seconds)
        message = WriteDone(
            self.settings.incarnation,
            transfer.peer.incarnation,
            self._message_id(),
            transfer_no=transfer.number,
            rank=0,
            first_chunk=piece.first_chunk,
            count=len(piece.entries),
            checksums=event.checksums,
        )
        self._send_until_answered(transfer.peer, message, now, transfer)

    def _puts_failed(self, event: ev.PutsFailed) -> None:
        """One failed put says that the whole endpoint cannot be trusted: nothing proves what has landed."""
        transfer = self._transfers.get(event.transfer_no)
        if transfer is not None:
            self._lose_peer(transfer.peer, ErrorCode.TRANSPORT_FAILED, event.detail[:1024])

    def _answered(self, peer: Peer, message: Ack, now: float) -> None:
        """An Ack for something in the outbox."""
        asked = peer.outbox.unanswered(message.message_id)
        if asked is not None and isinstance(asked.message, AllocRequest) and message.error is None:
            self._must_wait(peer, asked.message, asked.at)
            return
        sent = peer.outbox.answer(message.message_id)
        self._arm_repeat(peer)
        if sent is None:
            return
        peer.lease_from = max(peer.lease_from, sent.at)
        number = getattr(sent.message, "transfer_no", -1)
        transfer = peer.transfers.get(number)
        if transfer is None:
            return
        transfer.unanswered.discard(message.message_id)
        if transfer.cancel_id == message.message_id:
            transfer.cancel_id = None
            self._settle(transfer)
        elif message.error is not None:
            self._cancel(transfer, transfer_error(message.error.code, message.error.detail))
        else:
            assert isinstance(sent.message, WriteDone)
            (piece,) = (p for p in transfer.pieces.values() if p.first_chunk == sent.message.first_chunk)
            self._acknowledge(transfer, piece, now)

    def _must_wait(self, peer: Peer, request: AllocRequest, sent_at: float) -> None:
        """The receiver has no room yet. Its answer comes by itself, and a Heartbeat finds out if that was lost."""
        peer.lease_from = max(peer.lease_from, sent_at)
        transfer = peer.transfers[request.transfer_no]  # an ended one has no request in the outbox
        if transfer.state is SenderState.OPENING:  # else an answer has overtaken this
            peer.waiting.add(transfer.number)
            peer.outbox.hold_back(request.message_id)
            self._arm_repeat(peer)

    def _acknowledge(self, transfer: Transfer, piece: Piece, now: float) -> None:
        del transfer.pieces[piece.number]
        transfer.acknowledged += len(piece.entries)
        self._finish_if_acknowledged(transfer, now)
