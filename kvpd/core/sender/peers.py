"""Peers: a session with a receiver from Hello on, and when this sender stops believing in it.

A sender fences itself: its view of its lease runs from when it *sent* the newest message that was acknowledged, and
well before the receiver may give its slots away it begins no more puts and cuts the endpoint. A receiver that is lost
is forgotten whole; the next transfer to it says Hello anew.
"""

from __future__ import annotations

from kvpd.core.events import ReportName
from kvpd.core.messages import PROTOCOL_VERSION, Ack, Heartbeat, PeerMessage, Region, RevokeNotif, Welcome
from kvpd.core.outbox import Outbox
from kvpd.core.sender import events as ev
from kvpd.core.sender.ending import Ending
from kvpd.core.sender.records import Peer, PeerState, PieceState, Transfer
from kvpd.errors import ErrorCode, transfer_error


class Peers(Ending):
    """Sessions, leases and revocations."""

    def _connect(self, receiver: str, now: float) -> Peer:
        peer = Peer(receiver, self._message_id(), Outbox(self.settings.hello_repeat_s))
        self._peers[receiver] = peer
        self._actions.append(ev.ConnectPeer(receiver))
        self._timers.set(("connect", receiver), now + self.settings.connect_timeout_s)
        return peer

    def _say_hello(self, peer: Peer, now: float) -> None:
        """Not before every put of an earlier session has ended: the Hello says so, and the receiver relies on it."""
        if peer.receiver not in self._undrained:
            hello = self._hello(peer)
            peer.said_puts_ended = hello.puts_ended
            self._send_until_answered(peer, hello, now)

    def _plan_reconnects(self, now: float) -> None:
        """A session that was up is opened anew, also when nobody asks: its end may have left slots without a fence.

        On one host only this sender's word may free those, so it never gives up; it tries less often the longer the
        receiver is gone, and forgets the one that was lost first where there are too many.
        """
        lost, self._lost = self._lost, []
        for peer in lost:
            if peer.endpoint:
                self._lost_since.pop(peer.receiver, None)
                self._lost_since[peer.receiver] = now
            if peer.receiver in self._lost_since and not self._draining:
                self._plan_reconnect(peer.receiver, now)
        while len(self._lost_since) > self.settings.peers_max:
            first = next(iter(self._lost_since))
            del self._lost_since[first]
            self._timers.clear(("reconnect", first))

    def _plan_reconnect(self, receiver: str, now: float) -> None:
        pause_s = (now - self._lost_since[receiver]) / 4
        pause_s = min(max(pause_s, self.settings.reconnect_s), self.settings.reconnect_max_s)
        self._timers.set(("reconnect", receiver), now + pause_s)

    def _reconnect_due(self, receiver: str, now: float) -> None:
        if receiver in self._peers or self._draining:
            return
        if len(self._peers) < self.settings.peers_max:
            self._say_hello(self._connect(receiver, now), now)
        else:
            self._plan_reconnect(receiver, now)  # there is no room for it now

    def _lose_peer(self, peer: Peer, code: ErrorCode, detail: str, retry_after_s: float | None = None) -> None:
        """Forget a receiver: cut its endpoint, end its transfers. What is at the receiver ends there by its lease."""
        if peer.state is PeerState.LOST:
            return
        was_up = peer.state is PeerState.UP
        peer.state = PeerState.LOST
        del self._peers[peer.receiver]
        self._timers.clear(("connect", peer.receiver))
        self._timers.clear(("repeat", peer.receiver))
        self._timers.clear(("heartbeat", peer.receiver))
        self._timers.clear(("fence", peer.receiver))
        if peer.endpoint:
            self._actions.append(ev.CloseEndpoint(peer.receiver, peer.endpoint))
        for transfer in list(peer.transfers.values()):
            self._cancel(transfer, transfer_error(code, detail, retry_after_s))
            transfer.cancel_id = None  # nobody is there to answer
            if transfer.puts_drained:
                self._settle(transfer)
            else:
                waiting = self._overdue if transfer.is_overdue else self._undrained
                waiting[peer.receiver] = waiting.get(peer.receiver, 0) + 1
        self._actions.append(ev.DisconnectPeer(peer.receiver))
        self._lost.append(peer)
        if was_up:
            self._report(ReportName.SESSION_ENDED, peer.receiver, code=code, detail=detail)

    def _puts_drained(self, event: ev.PutsDrained, now: float) -> None:
        share = self._shares.get(event.transfer_no)
        if share is None or share.transfer.is_live or share.puts_ended:
            return
        transfer = share.transfer
        self._free_share(share)
        transfer.all_drained &= event.drained
        if not event.ended:
            self._never_ended.add(transfer.peer.receiver)
        if not share.writes_ended:
            self._timers.set(("let go", transfer.number), now + transfer.peer.put_deadline_s)
        self._end_if_drained(transfer, now)

    def _end_if_drained(self, transfer: Transfer, now: float) -> None:
        """Nothing of an ending transfer is on its way any more, in any rank: say so."""
        if transfer.puts_drained or not all(share.writes_ended for share in transfer.shares.values()):
            return
        peer = transfer.peer
        self._timers.clear(("let go", transfer.number))
        if peer.state is PeerState.LOST:
            self._drained_after_loss(transfer, now)
        self._tell_receiver(transfer, now, drained=transfer.all_drained)
        if not transfer.all_drained:
            # The endpoint was cut off, so the session is of no use; its end at the receiver is what fences its slots.
            detail = f"puts did not drain within {peer.put_deadline_s:g} s: the endpoint was cut off"
            self._lose_peer(peer, ErrorCode.TRANSPORT_FAILED, detail)

    def _engine_let_go(self, number: int, now: float) -> None:
        """The engine writes into none of its share's slots any more; the transfer ends for every rank."""
        if number in self._lingering:
            rank, slots = self._lingering.pop(number)
            self.staging[rank].recover(slots)
        share = self._shares.get(number)
        if share is None:
            return
        self._cancel(share.transfer, transfer_error(ErrorCode.CANCELLED, f"{self._engine_of(share)} left the transfer"))
        for piece in list(share.pieces.values()):
            if piece.state is PieceState.FILLING:
                self._drop_piece(share, piece)
        self._end_if_drained(share.transfer, now)

    def _let_go_overdue(self, transfer: Transfer, now: float) -> None:
        """An engine may fill slots in place for ever; nobody else is to wait for it.

        The receiver is told that the transfer is over, and keeps those slots. A lost session gets its successor, whose
        Hello does not say that all has ended.
        """
        transfer.is_overdue = True
        peer = transfer.peer
        if peer.state is not PeerState.LOST:
            self._send_cancel_notif(transfer, now, drained=False)
            return
        self._overdue[peer.receiver] = self._overdue.get(peer.receiver, 0) + 1
        self._waits_no_more(peer.receiver, now)

    def _drained_after_loss(self, transfer: Transfer, now: float) -> None:
        receiver = transfer.peer.receiver
        if not transfer.is_overdue:
            self._waits_no_more(receiver, now)
            return
        self._overdue[receiver] -= 1
        if not self._overdue[receiver]:
            del self._overdue[receiver]  # the next Heartbeat says so

    def _waits_no_more(self, receiver: str, now: float) -> None:
        """When the last write of a lost session has ended, or is overdue, the next session may be opened."""
        self._undrained[receiver] -= 1
        if self._undrained[receiver]:
            return
        del self._undrained[receiver]
        successor = self._peers.get(receiver)
        if successor is not None:
            self._say_hello(successor, now)

    # -------------------------------------------------------------- messages

    def _peer_misbehaved(self, peer: Peer, detail: str) -> None:
        self._report(ReportName.PEER_REJECTED, peer.receiver, detail=detail[:256])
        self._lose_peer(peer, ErrorCode.PROTOCOL_ERROR, detail[:1024])

    def _is_meant(self, peer: Peer, message: PeerMessage) -> bool:
        """Whether a message belongs to this session. One of a restarted receiver ends it."""
        if message.sender_incarnation != self.settings.incarnation:
            return False
        if peer.state is PeerState.CONNECTING:
            return message.message_id == peer.hello_id and isinstance(message, Welcome | Ack)
        if message.receiver_incarnation != peer.incarnation:
            if isinstance(message, Ack) and message.message_id > peer.hello_id:
                self._lose_peer(peer, ErrorCode.PEER_LOST, "the receiver has restarted")
            return False
        return True

    def _welcome(self, peer: Peer, message: Welcome, now: float) -> None:
        hello = peer.outbox.answer(message.message_id)
        if hello is None or peer.state is not PeerState.CONNECTING:
            return  # a repeat
        problem = self._welcome_problem(message)
        if problem is not None:
            self._lose_peer(peer, *problem)
            return
        self._timers.clear(("connect", peer.receiver))
        peer.state = PeerState.WELCOMED
        peer.receiver_id, peer.incarnation = message.receiver_id, message.receiver_incarnation
        peer.total_chunks = message.total_chunks
        peer.lease_s, peer.put_deadline_s = message.lease_s, message.put_deadline_s
        peer.lease_from = hello.at
        peer.verify = message.verify
        peer.outbox = Outbox(peer.lease_s / 3)
        self._arm_repeat(peer)
        self._timers.set(("heartbeat", peer.receiver), now + peer.heartbeat_s)
        self._timers.set(("fence", peer.receiver), self._fence_at(peer))
        peer.endpoint = self._next_endpoint
        self._next_endpoint += 1
        self._actions.append(
            ev.OpenEndpoint(peer.receiver, peer.endpoint, message.regions, message.share, peer.incarnation)
        )

    def _welcome_problem(self, message: Welcome) -> tuple[ErrorCode, str] | None:
        """Why this receiver cannot be put to, with both sides' values."""
        settings = self.settings
        if message.protocol_version != PROTOCOL_VERSION:
            detail = f"the receiver speaks version {message.protocol_version}, this sender {PROTOCOL_VERSION}"
            return ErrorCode.PROTOCOL_VERSION, detail
        if (message.chunk_bytes, message.layout) != (settings.chunk_bytes, settings.layout):
            detail = (
                f"the receiver has chunk_bytes {message.chunk_bytes} and layout {message.layout[:512]!r}, "
                f"this sender {settings.chunk_bytes} and {settings.layout[:512]!r}"
            )
            return ErrorCode.LAYOUT_MISMATCH, detail
        if len(message.regions) != settings.ranks:
            detail = (
                f"the receiver serves {len(message.regions)} ranks, this sender {settings.ranks}: set ranks to the "
                "number of the engines' tensor-parallel ranks on both sides"
            )
            return ErrorCode.LAYOUT_MISMATCH, detail
        if not _is_one_piece(message.regions):
            return ErrorCode.PROTOCOL_ERROR, "the receiver's regions are not one piece of memory, rank by rank"
        if any(region.length < message.total_chunks * message.chunk_bytes for region in message.regions):
            return ErrorCode.PROTOCOL_ERROR, "the receiver's regions are smaller than its chunks"
        if message.put_deadline_s >= message.lease_s / 2:
            detail = f"put_deadline_s {message.put_deadline_s:g} is not below half of lease_s {message.lease_s:g}"
            return ErrorCode.PROTOCOL_ERROR, detail
        return None

    def _ack(self, peer: Peer, message: Ack, now: float) -> None:
        error = message.error
        if error is not None and (message.message_id == peer.hello_id or error.code is ErrorCode.NO_SESSION):
            # The Hello was refused, or the session that it opened is over.
            code = ErrorCode.PEER_LOST if error.code is ErrorCode.NO_SESSION else error.code
            self._lose_peer(peer, code, error.detail, error.retry_after_s)
            return
        sent_at = peer.heartbeats.pop(message.message_id, None)
        if sent_at is None:
            return
        peer.lease_from = max(peer.lease_from, sent_at)
        if message.waiting < len(peer.waiting):
            # What the receiver said before this has arrived by now, or never will: some of its answers were lost.
            peer.waiting.clear()
            peer.outbox.repeat_held_back(now=now)
            self._arm_repeat(peer)

    def _revoke_notif(self, peer: Peer, message: RevokeNotif, now: float) -> None:
        transfer = peer.transfers.get(message.transfer_no)
        if transfer is not None:
            detail = f"the receiver revoked it: {message.detail}"
            self._cancel(transfer, transfer_error(message.reason, detail))
        else:
            # It ended here before: its puts had all drained then, or this session would be no more.
            self._send(peer, self._cancel_notif(peer, message.transfer_no, message.reason, drained=True))

    # -------------------------------------------------------------- time

    def _fence_at(self, peer: Peer) -> float:
        return peer.lease_from + peer.lease_s - peer.put_deadline_s

    def _fence_due(self, peer: Peer, now: float) -> None:
        at = self._fence_at(peer)
        if at > now:
            self._timers.set(("fence", peer.receiver), at)
            return
        silent_s = now - peer.lease_from
        detail = f"no message was acknowledged for {silent_s:.3g} s of a lease of {peer.lease_s:g} s"
        self._lose_peer(peer, ErrorCode.PEER_LOST, detail)

    def _connect_due(self, peer: Peer) -> None:
        detail = f"no Welcome from {peer.receiver} within {self.settings.connect_timeout_s:g} s"
        self._lose_peer(peer, ErrorCode.PEER_LOST, detail)

    def _heartbeat_due(self, peer: Peer, now: float) -> None:
        in_flight = tuple((t.number, puts) for t in peer.writing.values() if (puts := _puts_in_flight(t)))
        message = Heartbeat(
            self.settings.incarnation,
            peer.incarnation,
            self._message_id(),
            oldest_live=self._oldest_live(peer),
            in_flight=in_flight[:16384],
            puts_ended=not peer.said_puts_ended and self._earlier_puts_ended(peer.receiver),
        )
        # Answers to heartbeats older than the lease prove nothing that still matters.
        peer.heartbeats = {n: at for n, at in peer.heartbeats.items() if at + peer.lease_s > now}
        peer.heartbeats[message.message_id] = now
        self._timers.set(("heartbeat", peer.receiver), now + peer.heartbeat_s)
        # What was acknowledged since the last one: while the receiver answers, nothing wakes only to find it alive.
        self._timers.set(("fence", peer.receiver), self._fence_at(peer))
        self._send(peer, message)

    def _repeat_due(self, peer: Peer, now: float) -> None:
        for message in peer.outbox.due(now):
            self._send(peer, message)
        self._arm_repeat(peer)


def _is_one_piece(regions: tuple[Region, ...]) -> bool:
    """Whether one endpoint reaches all of them: windows of one memory, in the order of their ranks, without gaps."""
    first, base = regions[0], regions[0].base_address
    for rank, region in enumerate(regions):
        way = region.rank, region.worker_address, region.rkey, region.base_address
        if way != (rank, first.worker_address, first.rkey, base):
            return False
        base += region.length
    return True


def _puts_in_flight(transfer: Transfer) -> int:
    pieces = (piece for share in transfer.shares.values() for piece in share.pieces.values())
    return sum(len(piece.puts) for piece in pieces if piece.state is PieceState.WRITING)
