"""The sender's core: events in, actions out, time as an argument."""

from __future__ import annotations

from typing import assert_never

from kvpd.core.events import DrainExpired, DrainRequested, RequestCancelled, TimePassed
from kvpd.core.messages import Ack, AllocResponse, Message, PeerMessage, RevokeNotif, Welcome
from kvpd.core.sender import events as ev
from kvpd.core.sender.events import SenderAction, SenderEvent
from kvpd.core.sender.moving import Moving
from kvpd.core.sender.records import Peer, PeerState, PieceState, Transfer
from kvpd.core.states import SenderState
from kvpd.errors import ErrorCode, transfer_error


class SenderCore(Moving):
    """One sender's decisions."""

    def handle(self, event: SenderEvent, *, now: float) -> list[SenderAction]:
        """Decide about one event. `now`: seconds on a clock that never goes back and does not stop in suspend."""
        match event:
            case ev.OpenRequested(number, first=first):
                self._open(event, now)
                if first is not None:
                    self._engine_spoke(first, now)
                self._ask_for_room(number, now)
            case ev.StageRequested() | ev.TransferTouched() | ev.CancelRequested():
                self._engine_spoke(event, now)
            case ev.PieceFilled(number, piece):
                self._piece_filled(number, piece, now)
            case ev.EngineLetGo(number):
                self._engine_let_go(number, now)
            case RequestCancelled(req_id):
                for transfer in list(self._by_req_id.get(req_id, {}).values()):
                    self._cancel(transfer, transfer_error(ErrorCode.CANCELLED, "cancelled by the prefill engine"))
            case ev.PeerMessageReceived(receiver, message):
                self._message_received(receiver, message, now)
            case ev.PeerMessageRejected(receiver, detail):
                if (peer := self._peers.get(receiver)) is not None:
                    self._peer_misbehaved(peer, detail)
            case ev.EndpointOpened() | ev.EndpointBroken():
                self._endpoint_changed(event, now)
            case ev.PutsCompleted():
                self._puts_completed(event, now)
            case ev.PutsFailed():
                self._puts_failed(event)
            case ev.PutsDrained():
                self._puts_drained(event, now)
            case ev.ProxyAcknowledged():
                self._proxy_acknowledged(event, now)
            case ev.ClockJumped(gap_s):
                self._clock_jumped(gap_s)
            case TimePassed():
                self._time_passed(now)
            case DrainRequested():
                self._draining = True
            case DrainExpired():
                self._cancel_all(transfer_error(ErrorCode.DRAINING, "this sender is shutting down"))
            case _:
                assert_never(event)
        self._plan_reconnects(now)
        self._notify_failures(now)
        self._grant_waiting(now)
        for staging in self.staging:
            staging.check()
        actions, self._actions = self._actions, []
        return actions

    def next_deadline(self) -> float | None:
        """When `handle(TimePassed())` must be called next, or None."""
        return self._timers.next_at()

    def is_filling(self, transfer_no: int) -> bool:
        """Whether the engine that has opened a transfer by this number may be writing into any staging slot."""
        share = self._shares.get(transfer_no)
        return transfer_no in self._lingering or (share is not None and share.is_filling)

    @property
    def transfer_count(self) -> int:
        """Transfers that are not gone."""
        return len(self._transfers)

    @property
    def peer_count(self) -> int:
        """Receivers that this sender speaks to, or tries to."""
        return len(self._peers)

    @property
    def notifications_pending(self) -> int:
        """Notifications that no proxy has acknowledged yet."""
        return self._notifier.pending_count

    @property
    def is_idle(self) -> bool:
        """Nothing is on its way, every receiver and every proxy knows what it must know."""
        return not self._transfers and not self._notifier.pending_count

    @property
    def is_clean(self) -> bool:
        """Invariant 10: no transfer, no notification, every staging slot free."""
        return self._is_settled and all(staging.free_count == staging.total_slots for staging in self.staging)

    def audit(self) -> None:
        """All invariants by a full scan, for tests and simulation."""
        assert sum(len(transfer.shares) for transfer in self._transfers.values()) == len(self._shares)
        lost = [t for t in self._transfers.values() if t.peer.state is PeerState.LOST and not t.puts_drained]
        waited_for = sum(self._undrained.values()), sum(self._overdue.values())
        assert waited_for == (sum(not t.is_overdue for t in lost), sum(t.is_overdue for t in lost))
        for rank, staging in enumerate(self.staging):
            staging.audit()
            shares = [share for share in self._shares.values() if share.rank == rank]
            held = [slot for share in shares for piece in share.pieces.values() for slot in piece.staging_slots]
            held += [slot for of, slots in self._lingering.values() if of == rank for slot in slots]
            assert len(held) == len(set(held)), "a staging slot has two holders"
            assert len(held) + staging.free_count == staging.total_slots, "staging slots without a holder"
        assert sum(map(len, self._by_req_id.values())) == len(self._transfers), "transfers without a name"
        for peer in self._peers.values():
            transfers = peer.transfers.values()
            pieces = [(t.number, p) for t in transfers for share in t.shares.values() for p in share.pieces.values()]
            writing = {number for number, piece in pieces if piece.state is PieceState.WRITING}
            assert peer.writing.keys() == writing, "heartbeats name others than those with puts in flight"
            assert peer.waiting <= {t.number for t in transfers if t.state is SenderState.OPENING}

    def _engine_spoke(self, event: ev.StageRequested | ev.TransferTouched | ev.CancelRequested, now: float) -> None:
        """About a transfer that is live here; one that has ended was told so already."""
        share = self._shares.get(event.transfer_no)
        if share is None or not share.transfer.is_live:
            return
        match event:
            case ev.StageRequested():
                self._stage(share, event, now)
            case ev.TransferTouched():
                self._touch(share.transfer, now)
            case ev.CancelRequested(_, code, detail):
                self._cancel(share.transfer, transfer_error(code, detail))
            case _:
                assert_never(event)

    def _message_received(self, receiver: str, message: Message, now: float) -> None:
        peer = self._peers.get(receiver)
        if peer is None:
            return  # its channel is being closed
        if not isinstance(message, PeerMessage) or not isinstance(message, Welcome | AllocResponse | Ack | RevokeNotif):
            self._peer_misbehaved(peer, f"{type(message).__name__} is no message for a sender")
            return
        if not self._is_meant(peer, message):
            return
        match message:
            case Welcome():
                self._welcome(peer, message, now)
            case AllocResponse():
                self._alloc_response(peer, message, now)
            case Ack():
                self._ack(peer, message, now)
                if peer.state is not PeerState.LOST:
                    self._answered(peer, message, now)
            case RevokeNotif():
                self._revoke_notif(peer, message, now)
            case _:
                assert_never(message)

    def _endpoint_changed(self, event: ev.EndpointOpened | ev.EndpointBroken, now: float) -> None:
        peer = self._peers.get(event.receiver)
        if peer is None or peer.endpoint != event.endpoint:
            return  # of a session that is over
        if isinstance(event, ev.EndpointBroken):
            self._lose_peer(peer, ErrorCode.TRANSPORT_FAILED, event.detail[:1024])
        elif peer.state is PeerState.WELCOMED:
            self._endpoint_opened(peer, event, now)

    def _clock_jumped(self, gap_s: float) -> None:
        """While the loop stood still leases ran on: cut every endpoint before anything else is put."""
        for peer in list(self._peers.values()):
            if peer.state is not PeerState.CONNECTING and gap_s > peer.put_deadline_s:
                self._lose_peer(peer, ErrorCode.PEER_LOST, f"this process stood still for {gap_s:.3g} s")

    def _time_passed(self, now: float) -> None:
        while (deadline := self._timers.pop_due(now)) is not None:
            match deadline:
                case ("request", number):
                    self._request_timed_out(self._transfers[number])
                case ("latecomers", number):
                    self._joining.forget(number)
                case ("let go", number):
                    self._let_go_overdue(self._transfers[number], now)
                case ("notify", _):
                    self._notify_due(now)
                case ("connect", receiver):
                    self._connect_due(self._peers[receiver])
                case ("reconnect", receiver):
                    self._reconnect_due(receiver, now)
                case ("repeat", receiver):
                    self._repeat_due(self._peers[receiver], now)
                case ("heartbeat", receiver):
                    self._heartbeat_due(self._peers[receiver], now)
                case ("fence", receiver):
                    self._fence_due(self._peers[receiver], now)
                case _:
                    assert_never(deadline)

    def _request_timed_out(self, transfer: Transfer) -> None:
        detail = f"not done within request_timeout_s of {self.settings.request_timeout_s:g} s"
        if transfer.roll.missing:
            ranks = ", ".join(map(str, sorted(transfer.roll.missing)))
            detail += f"; of {self.settings.ranks} ranks these have not opened it: {ranks}"
        self._cancel(transfer, transfer_error(ErrorCode.REQUEST_TIMEOUT, detail))

    def peer_of(self, receiver: str) -> Peer | None:
        """The session with this receiver, for tests and statistics."""
        return self._peers.get(receiver)
