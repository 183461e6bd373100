"""Moving: the batches of a transfer are allocated, staged, put and acknowledged, piece by piece.

Remote room comes first, local staging second. A batch's pieces are granted in order; an engine that asks for its next
batch before it has filled this one gets staging only if it is free at once, so nobody waits while holding slots.

The ranks of an engine share a transfer: the first to ask for a batch has it allocated, and the others must ask for the
same one. Each then stages, puts and acknowledges it by itself, so that none waits for another but at the end.
"""

from __future__ import annotations

from kvpd.core.events import ReportName
from kvpd.core.messages import (
    BATCH_CHUNKS_MAX,
    BATCH_KEYS_BYTES_MAX,
    KEY_BYTES_MAX,
    Ack,
    AllocRequest,
    AllocResponse,
    WriteDone,
)
from kvpd.core.sender import events as ev
from kvpd.core.sender.events import StagedSlot
from kvpd.core.sender.opening import Opening
from kvpd.core.sender.records import Batch, Peer, Piece, PieceState, Share, Stage, Transfer
from kvpd.core.states import SenderCause, SenderState
from kvpd.errors import ErrorCode, TransferError, transfer_error


class Moving(Opening):
    """The life of a transfer that goes well."""

    # -------------------------------------------------------------- batches

    def _stage(self, share: Share, event: ev.StageRequested, now: float) -> None:
        transfer = share.transfer
        batch = transfer.batches.get(share.next_chunk)
        is_new = batch is None
        if batch is None:
            batch = Batch(share.next_chunk, event.keys, event.last_chunk_bytes, self.settings.ranks)
        problem = self._stage_problem(share, event) or self._disagreement(share, batch, event)
        if problem is not None:
            self._cancel(transfer, problem)
            return
        share.last_stage = event.stage
        share.next_chunk += len(event.keys)
        share.stages[event.stage] = Stage(event.stage, batch, asked_at=now)
        if not is_new:
            self._stage_next(share, now)
            return
        transfer.batches[batch.first_chunk] = batch
        if transfer.open_sent:
            self._send_alloc(transfer, batch, now)

    def _disagreement(self, share: Share, batch: Batch, event: ev.StageRequested) -> TransferError | None:
        """Why this rank's batch cannot be the one that another rank has asked for."""
        if (event.keys, event.last_chunk_bytes) == (batch.keys, batch.last_chunk_bytes):
            return None
        which = "the same" if event.keys == batch.keys else "other"
        detail = (
            f"all ranks must stage the same batches: from chunk {batch.first_chunk} on rank {share.rank} stages "
            f"{len(event.keys)} chunks, the last of {event.last_chunk_bytes} bytes, and another rank has staged "
            f"{len(batch.keys)} with {which} keys, the last of {batch.last_chunk_bytes} bytes"
        )
        return transfer_error(ErrorCode.PROTOCOL_ERROR, detail)

    def _stage_problem(self, share: Share, event: ev.StageRequested) -> TransferError | None:
        """Why no correct engine asks for this. Judged here too, so that its error names the engine's own call."""
        total_chunks = share.transfer.total_chunks
        chunk_bytes, end = self.settings.chunk_bytes, share.next_chunk + len(event.keys)
        keys_bytes = sum(len(key) + 2 for key in event.keys)
        if end > total_chunks:
            detail = f"chunks up to {end - 1} are staged, but {total_chunks} were declared"
            return transfer_error(ErrorCode.OVERFLOW, detail)
        if event.is_last and end < total_chunks:
            detail = f"the last batch ends at chunk {end} of {total_chunks} declared"
            return transfer_error(ErrorCode.UNDERFLOW, detail)
        if not 0 < event.last_chunk_bytes <= chunk_bytes or (
            event.last_chunk_bytes < chunk_bytes and end < total_chunks
        ):
            detail = f"last_chunk_bytes {event.last_chunk_bytes}: only the request's last chunk may be short"
            return transfer_error(ErrorCode.PROTOCOL_ERROR, f"{detail} of {chunk_bytes} bytes")
        if not event.keys or len(event.keys) > BATCH_CHUNKS_MAX or keys_bytes > BATCH_KEYS_BYTES_MAX:
            detail = f"{len(event.keys)} keys of {keys_bytes} bytes: a batch has 1 to {BATCH_CHUNKS_MAX} keys"
            return transfer_error(ErrorCode.PROTOCOL_ERROR, f"{detail} of {BATCH_KEYS_BYTES_MAX} bytes; stage less")
        if any(len(key) > KEY_BYTES_MAX for key in event.keys):
            return transfer_error(ErrorCode.PROTOCOL_ERROR, f"a key is longer than {KEY_BYTES_MAX} bytes")
        if event.stage <= share.last_stage or len(share.stages) >= self.settings.stages_max:
            detail = f"stage {event.stage} after {share.last_stage}, {len(share.stages)} unfinished"
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
        if sent.message.keys:
            self._allocated(transfer, transfer.batches[sent.message.first_chunk], message.remote_indexes, now)

    def _allocated(self, transfer: Transfer, batch: Batch, remote_indexes: tuple[int, ...], now: float) -> None:
        """A batch has its slots at the receiver: every rank that has asked for it may stage it."""
        batch.remote_indexes = remote_indexes
        for share in transfer.shares.values():
            for stage in share.stages.values():
                if stage.batch is batch:
                    stage.asked_at = now
            self._stage_next(share, now)

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

    def _stage_next(self, share: Share, now: float) -> None:
        """Grant, or get in line for, the next piece of the rank's oldest batch that is not fully staged."""
        while share.stages and share.transfer.is_live:
            stage = next(iter(share.stages.values()))
            if stage.batch.remote_indexes is None or stage.is_waiting:
                return
            wanted = stage.slots_wanted
            in_place = share.in_place and share.transfer.peer.in_place
            if wanted == 0 or in_place:
                self._grant_piece(share, stage, (), now, in_place=wanted > 0)
                continue
            receiver, staging = share.transfer.peer.receiver, self.staging[share.rank]
            if not share.is_filling:
                stage.is_waiting = True
                staging.wait((share.number, stage.number), receiver, wanted)
                return
            slots = staging.take_now(receiver, wanted)
            if slots is None:
                self._defer_early(share)
                return
            self._grant_piece(share, stage, slots, now)

    def _defer_early(self, share: Share) -> None:
        """The engine holds slots that it must fill first: whoever asked early is told so, once per stage."""
        for stage in share.stages.values():
            if stage.batch.remote_indexes is not None and stage.cursor == 0 and not stage.was_deferred:
                stage.was_deferred = True
                self._actions.append(ev.DeferStage(share.number, stage.number))

    def _grant_waiting(self, now: float) -> None:
        """Whatever freed staging, or took the next in line away: here, and only here, those who wait are served."""
        for staging in self.staging:
            while (grant := staging.grant_next()) is not None:
                (number, stage_no), slots = grant
                share = self._shares[number]
                stage = share.stages[stage_no]
                stage.is_waiting = False
                self._grant_piece(share, stage, slots, now)
                if stage_no in share.stages:  # it was cut: the rest waits until this piece is filled
                    self._defer_early(share)
                else:
                    self._stage_next(share, now)

    def _grant_piece(
        self, share: Share, stage: Stage, slots: tuple[int, ...], now: float, *, in_place: bool = False
    ) -> None:
        """As many of the batch's next chunks as these slots hold, and those that need none. In place: all of them."""
        batch, first = stage.batch, stage.cursor
        assert batch.remote_indexes is not None
        entries: list[StagedSlot | None] = []
        free = list(reversed(slots))
        for position in range(first, len(batch.keys)):
            remote = batch.remote_indexes[position]
            if remote < 0:
                entries.append(None)
            elif free or in_place:
                is_last = position == len(batch.keys) - 1
                length = batch.last_chunk_bytes if is_last else self.settings.chunk_bytes
                entries.append(StagedSlot(remote if in_place else free.pop(), remote, length))
            else:
                break
        assert not free, "more staging slots than chunks to stage"
        piece = Piece(share.next_piece, batch.first_chunk + first, tuple(entries), in_place=in_place)
        share.next_piece += 1
        share.pieces[piece.number] = piece
        stage.cursor += len(entries)
        is_last_piece = stage.cursor == len(batch.keys)
        if is_last_piece:
            self._staged(share, stage)
        place = share.transfer.peer.endpoint if in_place else 0
        self._actions.append(
            ev.GrantPiece(share.number, stage.number, piece.number, first, piece.entries, is_last_piece, place)
        )
        self._report_of(
            ReportName.BATCH_STAGED,
            share.transfer,
            rank=share.rank,
            first_chunk=piece.first_chunk,
            chunks=len(entries),
            deduplicated=entries.count(None),
            waited_s=now - stage.asked_at,
        )

    def _staged(self, share: Share, stage: Stage) -> None:
        """The rank has staged all of a batch, which is kept for those that have not."""
        del share.stages[stage.number]
        stage.batch.ranks_left -= 1
        if not stage.batch.ranks_left:
            del share.transfer.batches[stage.batch.first_chunk]

    # -------------------------------------------------------------- pieces

    def _piece_filled(self, number: int, piece_no: int, now: float) -> None:
        share = self._shares.get(number)
        piece = share.pieces.get(piece_no) if share is not None else None
        if share is None:
            return
        transfer = share.transfer
        if piece is None or piece.state is not PieceState.FILLING:
            self._cancel(transfer, transfer_error(ErrorCode.PROTOCOL_ERROR, f"piece {piece_no} is not being filled"))
            return
        if not transfer.is_live:
            self._drop_piece(share, piece)
            self._end_if_drained(transfer, now)
            return
        if piece.in_place:
            self._piece_landed(share, piece, now)
            self._report_of(
                ReportName.PIECE_FILLED,
                transfer,
                rank=share.rank,
                chunks=len(piece.puts),
                bytes=sum(put.length for put in piece.puts),
            )
        elif piece.puts:
            piece.state = PieceState.WRITING
            peer = transfer.peer
            self._note_writing(transfer)
            self._actions.append(ev.PostPuts(number, piece_no, peer.endpoint, piece.puts, peer.verify, rank=share.rank))
        else:
            self._acknowledge(share, piece, now)
        if transfer.is_live:
            self._stage_next(share, now)

    def _puts_completed(self, event: ev.PutsCompleted, now: float) -> None:
        share = self._shares.get(event.transfer_no)
        piece = share.pieces.get(event.piece) if share is not None else None
        if share is None or piece is None or piece.state is not PieceState.WRITING:
            return
        transfer = share.transfer
        if not transfer.is_live:
            self._drop_piece(share, piece)
            return
        self.staging[share.rank].give_back(transfer.peer.receiver, piece.staging_slots)
        self._report_of(
            ReportName.PIECE_WRITTEN,
            transfer,
            rank=share.rank,
            chunks=len(piece.puts),
            bytes=sum(put.length for put in piece.puts),
            seconds=event.seconds,
        )
        self._piece_landed(share, piece, now, event.checksums)

    def _piece_landed(self, share: Share, piece: Piece, now: float, checksums: tuple[int, ...] = ()) -> None:
        """Its bytes are in the receiver's slots, and nobody writes there any more: say so."""
        transfer = share.transfer
        piece.state = PieceState.ACKING
        self._note_writing(transfer)
        transfer.bytes_sent += sum(put.length for put in piece.puts)
        message = WriteDone(
            self.settings.incarnation,
            transfer.peer.incarnation,
            self._message_id(),
            transfer_no=transfer.number,
            rank=share.rank,
            first_chunk=piece.first_chunk,
            count=len(piece.entries),
            checksums=checksums,
        )
        self._send_until_answered(transfer.peer, message, now, transfer)

    def _puts_failed(self, event: ev.PutsFailed) -> None:
        """One failed put says that the whole endpoint cannot be trusted: nothing proves what has landed."""
        share = self._shares.get(event.transfer_no)
        if share is not None:
            self._lose_peer(share.transfer.peer, ErrorCode.TRANSPORT_FAILED, event.detail[:1024])

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
            share = transfer.shares[sent.message.rank]
            (piece,) = (p for p in share.pieces.values() if p.first_chunk == sent.message.first_chunk)
            self._acknowledge(share, piece, now)

    def _must_wait(self, peer: Peer, request: AllocRequest, sent_at: float) -> None:
        """The receiver has no room yet. Its answer comes by itself, and a Heartbeat finds out if that was lost."""
        peer.lease_from = max(peer.lease_from, sent_at)
        transfer = peer.transfers[request.transfer_no]  # an ended one has no request in the outbox
        if transfer.state is SenderState.OPENING:  # else an answer has overtaken this
            peer.waiting.add(transfer.number)
            peer.outbox.hold_back(request.message_id)
            self._arm_repeat(peer)

    def _acknowledge(self, share: Share, piece: Piece, now: float) -> None:
        del share.pieces[piece.number]
        share.acknowledged += len(piece.entries)
        self._finish_if_acknowledged(share.transfer, now)
