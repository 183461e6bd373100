"""Opening: a request's transfer begins, the ranks of its engine join it, and its room is asked for.

The first rank's open begins it, and the receiver is asked at once, so that its queue is stood in while the others come.
Who decides which transfer a later open belongs to is `joining`.
"""

from __future__ import annotations

from kvpd.core.events import ReportName
from kvpd.core.messages import CHUNKS_MAX, AllocRequest
from kvpd.core.sender import events as ev
from kvpd.core.sender.joining import JoinKey, Roll
from kvpd.core.sender.peers import Peers
from kvpd.core.sender.records import Batch, Peer, PeerState, Share, Transfer
from kvpd.core.states import SenderState
from kvpd.errors import ErrorCode, TransferError, transfer_error


class Opening(Peers):
    """The beginning of a transfer."""

    def _open(self, event: ev.OpenRequested, now: float) -> None:
        assert event.transfer_no > self._highest_no, "transfer numbers must grow"
        self._highest_no = event.transfer_no
        if not 0 <= event.rank < self.settings.ranks:
            detail = f"rank {event.rank}; this sender has {self.settings.ranks}"
            refusal = transfer_error(ErrorCode.PROTOCOL_ERROR, detail)
            self._actions.append(ev.FinishTransfer(event.transfer_no, refusal))
            return
        key = JoinKey(event.group, event.req_id, event.receiver, event.total_chunks, event.notify)
        roll = self._joining.find(key, event.rank)
        if roll is not None:
            self._join(roll, event)
        else:
            self._begin(self._joining.begin(key, event.transfer_no, event.rank), event, now)

    def _join(self, roll: Roll, event: ev.OpenRequested) -> None:
        """Another rank has opened this transfer."""
        self._joining.join(roll, event.rank)
        if roll.error is not None:
            self._actions.append(ev.FinishTransfer(event.transfer_no, roll.error))
            return
        transfer = self._transfers[roll.number]
        self._add_share(transfer, event)
        self._report_of(ReportName.TRANSFER_JOINED, transfer, engine=event.engine, rank=event.rank)

    def _begin(self, roll: Roll, event: ev.OpenRequested, now: float) -> None:
        refusal = self._open_refusal(event)
        if refusal is not None:
            self._remember(roll, refusal, now)
            self._actions.append(ev.FinishTransfer(event.transfer_no, refusal))
            self._failed(event.notify, event.req_id, event.receiver, event.transfer_no, refusal)
            return
        peer = self._peers.get(event.receiver)
        is_new = peer is None
        if peer is None:
            peer = self._connect(event.receiver, now)
        transfer = Transfer(
            event.transfer_no, event.req_id, peer, event.total_chunks, event.notify, roll, opened_at=now
        )
        self._transfers[transfer.number] = peer.transfers[transfer.number] = transfer
        self._by_req_id.setdefault(transfer.req_id, {})[transfer.number] = transfer
        self._add_share(transfer, event)
        self._timers.set(("request", transfer.number), now + self.settings.request_timeout_s)
        self._report_of(
            ReportName.TRANSFER_OPENED, transfer, chunks=transfer.total_chunks, engine=event.engine, rank=event.rank
        )
        if is_new:
            self._say_hello(peer, now)

    def _add_share(self, transfer: Transfer, event: ev.OpenRequested) -> None:
        share = Share(event.transfer_no, event.engine, event.rank, transfer, event.in_place)
        self._shares[share.number] = transfer.shares[share.rank] = share

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

    def _endpoint_opened(self, peer: Peer, event: ev.EndpointOpened, now: float) -> None:
        peer.state = PeerState.UP
        # Nobody sums what an engine writes by itself.
        peer.in_place = event.in_place and peer.verify == "off"
        self._lost_since.pop(peer.receiver, None)
        self._report(
            ReportName.SESSION_OPENED, peer.receiver, receiver=peer.receiver_id, chunks=peer.total_chunks, way=event.way
        )
        for transfer in peer.transfers.values():
            if transfer.is_live:
                self._send_open(transfer, now)

    def _ask_for_room(self, number: int, now: float) -> None:
        """A transfer was opened by this number: ask for its room, unless that is done, or can only be done later.

        Its first batch, if it has come with the opening, is asked for in the same message.
        """
        share = self._shares.get(number)
        if share is None:
            return
        transfer = share.transfer
        if transfer.is_live and not transfer.open_sent and transfer.peer.state is PeerState.UP:
            transfer.open_sent = True
            self._send_alloc(transfer, transfer.batches.get(0), now)

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
