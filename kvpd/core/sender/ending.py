"""Ends: how a transfer is cancelled, drained and settled, whatever state it is in.

Cancelling is one path for every reason. The engine is told at once; the puts in flight drain, bounded by the put
deadline; then the receiver is told, until it answers. Staging slots are free again only when nobody can read or write
them: a put's when the put has ended, an unfilled one when the engine has let go of the transfer. Nothing can cut off an
engine that fills the receiver's slots in place: only its own word, or its death, says that it has ended.
"""

from __future__ import annotations

from kvpd.core.events import Report, ReportName, TransferId
from kvpd.core.messages import CancelNotif, ErrorInfo, FailNotif, Notification, ProxyNotif
from kvpd.core.sender import events as ev
from kvpd.core.sender.base import SenderBase
from kvpd.core.sender.joining import Roll
from kvpd.core.sender.records import Peer, PeerState, Piece, PieceState, Share, Transfer
from kvpd.core.states import SenderCause, SenderState
from kvpd.errors import ErrorCode, TransferError

_DEFAULT_PUT_DEADLINE_S = 4.0  # of a receiver that has not said its own: nothing can be in flight to it


class Ending(SenderBase):
    """Cancels, ends and notifications."""

    def _cancel(self, transfer: Transfer, error: TransferError) -> None:
        """Begin the end of a live transfer; harmless for one that is ending already."""
        if not transfer.is_live:
            return
        peer = transfer.peer
        transfer.move(SenderCause.CANCEL)
        transfer.error = error
        self._timers.clear(("request", transfer.number))
        self._remember(transfer.roll, error, transfer.opened_at)
        for share in transfer.shares.values():
            for stage in share.stages:
                self.staging[share.rank].withdraw((share.number, stage), peer.receiver)
            share.stages.clear()
        transfer.batches.clear()
        self._stop_repeating(transfer)
        name = ReportName.TRANSFER_CANCELLED if error.code is ErrorCode.CANCELLED else ReportName.TRANSFER_FAILED
        self._report_of(name, transfer, code=error.code, detail=error.detail)
        for share in transfer.shares.values():
            self._actions.append(ev.FinishTransfer(share.number, error))
            self._actions.append(ev.CancelTransfer(share.number, peer.put_deadline_s or _DEFAULT_PUT_DEADLINE_S))
        self._failed(transfer.notify, transfer.req_id, peer.receiver, transfer.number, error)

    def _remember(self, roll: Roll, error: TransferError, opened_at: float) -> None:
        """Ranks that open it late are told its end, as long as any rank may still open it or time out over it."""
        if self._joining.end(roll, error):
            self._timers.set(("latecomers", roll.number), opened_at + 2 * self.settings.request_timeout_s)

    def _stop_repeating(self, transfer: Transfer) -> None:
        """Nothing that was asked for a transfer matters once it is over. A reply that still comes finds no question."""
        transfer.peer.waiting.discard(transfer.number)
        for message_id in transfer.unanswered:
            transfer.peer.outbox.answer(message_id)
        transfer.unanswered.clear()

    def _tell_receiver(self, transfer: Transfer, now: float, *, drained: bool) -> None:
        """The puts have ended: say so to the receiver, if it can know of the transfer at all."""
        peer = transfer.peer
        transfer.puts_drained = True
        if transfer.open_sent and peer.state is not PeerState.LOST:
            if drained:
                self._send_cancel_notif(transfer, now, drained=True)
            else:
                assert transfer.error is not None
                self._send(peer, self._cancel_notif(peer, transfer.number, transfer.error.code, drained=False))
        self._settle(transfer)

    def _send_cancel_notif(self, transfer: Transfer, now: float, *, drained: bool) -> None:
        """Until it is answered, or makes way for the next one. One that is not drained lets the session go on."""
        assert transfer.error is not None
        peer = transfer.peer
        if transfer.cancel_id is not None:
            peer.outbox.answer(transfer.cancel_id)
        notif = self._cancel_notif(peer, transfer.number, transfer.error.code, drained=drained, goes_on=not drained)
        transfer.cancel_id = notif.message_id
        self._send_until_answered(peer, notif, now)

    def _cancel_notif(
        self, peer: Peer, number: int, reason: ErrorCode, *, drained: bool, goes_on: bool = False
    ) -> CancelNotif:
        incarnation = self.settings.incarnation
        return CancelNotif(incarnation, peer.incarnation, self._message_id(), number, (), reason, drained, goes_on)

    def _settle(self, transfer: Transfer) -> None:
        """Forget an ending transfer once its puts are drained and the receiver knows, or cannot know."""
        if not transfer.puts_drained or transfer.cancel_id is not None:
            return
        transfer.move(SenderCause.SETTLED)
        self._forget(transfer)

    def _free_share(self, share: Share) -> None:
        """Its puts have ended. Only the slots that its engine may still be filling are not free yet."""
        share.puts_ended = True
        self._let_linger(share)
        for piece in list(share.pieces.values()):
            if not (piece.in_place and piece.state is PieceState.FILLING):
                self._drop_piece(share, piece)

    def _let_linger(self, share: Share) -> None:
        """Staging slots that the engine may still be filling are no transfer's any more, and nobody else's yet."""
        filling = [p for p in share.pieces.values() if p.state is PieceState.FILLING and not p.in_place]
        slots = [slot for piece in filling for slot in piece.staging_slots]
        if slots:  # a piece whose chunks the receiver has already holds none
            self._lingering[share.number] = share.rank, slots
            self.staging[share.rank].linger(share.transfer.peer.receiver, slots)
        for piece in filling:
            del share.pieces[piece.number]

    def _forget(self, transfer: Transfer) -> None:
        for share in transfer.shares.values():
            del self._shares[share.number]
        del self._transfers[transfer.number]
        del transfer.peer.transfers[transfer.number]
        same = self._by_req_id[transfer.req_id]
        del same[transfer.number]
        if not same:
            del self._by_req_id[transfer.req_id]

    def _drop_piece(self, share: Share, piece: Piece) -> None:
        """Nobody reads or writes the piece's staging slots any more."""
        self.staging[share.rank].give_back(share.transfer.peer.receiver, piece.staging_slots)
        del share.pieces[piece.number]
        self._note_writing(share.transfer)

    def _note_writing(self, transfer: Transfer) -> None:
        """A heartbeat names those with puts in flight, and must not search all transfers for them."""
        pieces = (piece for share in transfer.shares.values() for piece in share.pieces.values())
        if any(piece.state is PieceState.WRITING for piece in pieces):
            transfer.peer.writing[transfer.number] = transfer
        else:
            transfer.peer.writing.pop(transfer.number, None)

    def _engine_of(self, share: Share) -> str:
        """Whom an error speaks of."""
        return "the engine" if self.settings.ranks == 1 else f"the engine of rank {share.rank}"

    def _finish_if_acknowledged(self, transfer: Transfer, now: float) -> None:
        """Once everything of every rank has landed and was acknowledged, the engines and then the proxy are told."""
        is_whole = not transfer.roll.missing
        if not is_whole or any(share.acknowledged < transfer.total_chunks for share in transfer.shares.values()):
            return
        transfer.move(SenderCause.ALL_ACKNOWLEDGED)
        self._timers.clear(("request", transfer.number))
        self._stop_repeating(transfer)
        self._forget(transfer)
        self._actions += [ev.FinishTransfer(share.number) for share in transfer.shares.values()]
        self._report_of(
            ReportName.TRANSFER_DONE,
            transfer,
            seconds=now - transfer.opened_at,
            admission_s=transfer.admitted_at - transfer.opened_at,
            chunks=transfer.total_chunks,
            bytes=transfer.bytes_sent,
        )
        self._notify(transfer, now)

    # -------------------------------------------------------------- the proxy

    def _notify(self, transfer: Transfer, now: float) -> None:
        address = self._proxy_of(transfer.notify)
        if address is None:
            return
        message = ProxyNotif(
            req_id=transfer.req_id,
            message_id=self._message_id(),
            receiver_id=transfer.peer.receiver_id,
            sender_id=self.settings.sender_id,
            sender_incarnation=self.settings.incarnation,
            transfer_no=transfer.number,
        )
        self._tell_proxy(address, message, now)
        self._report_of(ReportName.PROXY_NOTIFIED, transfer, proxy=address)

    def _failed(self, notify: str | None, req_id: str, receiver: str, number: int, error: TransferError) -> None:
        """A transfer ends without success: its proxy, which waits for it, is to hear of it in this step.

        Not one that takes plain pushes: proxies that were written for those know of success alone.
        """
        address = self._proxy_of(notify)
        if address is None or not self.settings.notify_is_acknowledged:
            return
        message = FailNotif(
            req_id=req_id,
            message_id=self._message_id(),
            receiver=receiver,
            sender_id=self.settings.sender_id,
            sender_incarnation=self.settings.incarnation,
            transfer_no=number,
            error=ErrorInfo(error.code, error.detail[:1024], error.retry_after_s),
        )
        self._failures.append((address, message))

    def _notify_failures(self, now: float) -> None:
        """The end of a step: tell the proxies of what has failed in it."""
        failures, self._failures = self._failures, []
        for address, message in failures:
            self._tell_proxy(address, message, now)
            code = message.error.code
            self._report_told(ReportName.PROXY_TOLD_OF_FAILURE, address, message, code=code)

    def _proxy_of(self, notify: str | None) -> str | None:
        """Who is to hear of a transfer: the proxy that it names, or the configured one, or nobody."""
        return notify or self.settings.proxy_address

    def _tell_proxy(self, address: str, message: Notification, now: float) -> None:
        if self.settings.notify_is_acknowledged and not self._notifier.add(address, message, now=now):
            self._report_dropped(address, message, "the proxy's queue is full")
        self._actions.append(ev.NotifyProxy(address, message))
        self._arm_notifier()

    def _arm_notifier(self) -> None:
        next_at = self._notifier.next_at()
        if next_at is None:
            self._timers.clear(("notify", None))
        else:
            self._timers.set(("notify", None), next_at)

    def _notify_due(self, now: float) -> None:
        again, dropped = self._notifier.due(now)
        self._actions += [ev.NotifyProxy(address, message) for address, message in again]
        for address, message in dropped:
            self._report_dropped(address, message, f"no answer for {self.settings.notify_give_up_s:g} s")
        self._arm_notifier()

    def _report_dropped(self, address: str, message: Notification, detail: str) -> None:
        self._report_told(ReportName.PROXY_NOTIFICATION_DROPPED, address, message, detail=detail)

    def _report_told(self, name: ReportName, address: str, message: Notification, **fields: str) -> None:
        identity = TransferId(message.sender_id, message.sender_incarnation, message.transfer_no)
        self._actions.append(Report(name, identity, message.req_id, address, fields))

    def _proxy_acknowledged(self, event: ev.ProxyAcknowledged, now: float) -> None:
        if event.sender_incarnation == self.settings.incarnation:
            self._notifier.acknowledged(event.proxy, event.message_id, now=now)
            self._arm_notifier()

    @property
    def _is_settled(self) -> bool:
        return not self._transfers and not self._lingering and not self._notifier.pending_count

    def _cancel_all(self, error: TransferError) -> None:
        for transfer in [t for t in self._transfers.values() if t.state is not SenderState.CANCELLING]:
            self._cancel(transfer, error)
