"""Wrong lines in the sender's core: each a patch, whose docstring says what is wrong."""

from __future__ import annotations

from typing import Any

import pytest

from kvpd.core.messages import CancelNotif
from kvpd.core.outbox import Outbox
from kvpd.core.sender.base import SenderBase
from kvpd.core.sender.ending import Ending
from kvpd.core.sender.joining import Joining
from kvpd.core.sender.moving import Moving
from kvpd.core.sender.peers import Peers as SenderPeers
from kvpd.core.sender.records import PieceState
from kvpd.core.sender.staging import Staging
from kvpd.errors import ErrorCode, transfer_error

from .explore_planting import wrap


def cancels_once(patch: pytest.MonkeyPatch) -> None:
    """A CancelNotif is never repeated."""

    def send_until_answered(old: Any, self: Any, peer: Any, message: Any, now: float, transfer: Any = None) -> None:
        if isinstance(message, CancelNotif):
            self._send(peer, message)
        else:
            old(self, peer, message, now, transfer)

    wrap(patch, SenderBase, "_send_until_answered", send_until_answered)


def waits_for_lost_answers(patch: pytest.MonkeyPatch) -> None:
    """The answer to a heartbeat shows that an answer was lost, and nothing is asked for again."""
    patch.setattr(Outbox, "repeat_held_back", lambda self, **_: self._held_back.clear())


def waits_for_the_rest_of_an_answer(patch: pytest.MonkeyPatch) -> None:
    """A transfer is admitted; what was asked for together with it is taken for waiting still."""
    patch.setattr(Moving, "_wait_no_more", lambda self, transfer, now: transfer.peer.waiting.discard(transfer.number))


def believes_its_own_puts(patch: pytest.MonkeyPatch) -> None:
    """The sender does not wait for the receiver's word that everything is ready."""

    def puts_completed(old: Any, self: Any, event: Any, now: float) -> None:
        old(self, event, now)
        share = self._shares.get(event.transfer_no)
        if share is not None and share.transfer.is_live:
            self._acknowledge(share, share.pieces[event.piece], now)

    wrap(patch, Moving, "_puts_completed", puts_completed)


def stages_whole_batches(patch: pytest.MonkeyPatch) -> None:
    """A batch gets all of its staging at once, however large it is."""
    patch.setattr(Staging, "_share", lambda self, receiver: 1 << 20)


def stays_with_the_dead(patch: pytest.MonkeyPatch) -> None:
    """A sender does not believe that its session is over, nor that its receiver has restarted."""

    def ack(old: Any, self: Any, peer: Any, message: Any, now: float) -> None:
        if message.error is None:
            old(self, peer, message, now)

    def is_meant(old: Any, self: Any, peer: Any, message: Any) -> bool:
        known = message.receiver_incarnation == peer.incarnation or not peer.incarnation
        return bool(known and old(self, peer, message))

    wrap(patch, SenderPeers, "_ack", ack)
    wrap(patch, SenderPeers, "_is_meant", is_meant)


def forgets_staging_under_puts(patch: pytest.MonkeyPatch) -> None:
    """A cancelled transfer's staging is free before its puts have ended."""

    def cancel(old: Any, self: Any, transfer: Any, error: Any) -> None:
        was_live = transfer.is_live
        old(self, transfer, error)
        if was_live:
            for share in transfer.shares.values():
                for piece in list(share.pieces.values()):
                    self._drop_piece(share, piece)

    wrap(patch, Ending, "_cancel", cancel)


def drains_without_waiting(patch: pytest.MonkeyPatch) -> None:
    """A cancelled transfer tells its receiver at once that nothing can land."""

    def cancel(old: Any, self: Any, transfer: Any, error: Any) -> None:
        was_live = transfer.is_live
        old(self, transfer, error)
        if was_live:
            for share in transfer.shares.values():
                self._free_share(share)
            self._tell_receiver(transfer, 0.0, drained=True)

    wrap(patch, Ending, "_cancel", cancel)


def lets_nothing_linger(patch: pytest.MonkeyPatch) -> None:
    """A piece without slots is taken for one that its engine still fills."""

    def let_linger(self: Any, share: Any) -> None:
        filling = [piece for piece in share.pieces.values() if piece.state is PieceState.FILLING]
        if filling:
            slots = [slot for piece in filling for slot in piece.staging_slots]
            self._lingering[share.number] = share.rank, slots
            self.staging[share.rank].linger(share.transfer.peer.receiver, slots)
        for piece in filling:
            del share.pieces[piece.number]

    patch.setattr(Ending, "_let_linger", let_linger)


def says_nothing_of_failures(patch: pytest.MonkeyPatch) -> None:
    """A proxy hears of what went well alone."""
    patch.setattr(Ending, "_notify_failures", lambda self, now: self._failures.clear())


def says_failed_of_what_is_ready(patch: pytest.MonkeyPatch) -> None:
    """A proxy hears both of one transfer."""

    def notify(old: Any, self: Any, transfer: Any, now: float) -> None:
        old(self, transfer, now)
        error = transfer_error(ErrorCode.PEER_LOST)
        self._failed(transfer.notify, transfer.req_id, transfer.peer.receiver, transfer.number, error)

    wrap(patch, Ending, "_notify", notify)


def leaves_each_rank_to_itself(patch: pytest.MonkeyPatch) -> None:
    """Each rank's open is a transfer of its own."""
    patch.setattr(Joining, "find", lambda self, key, rank: None)


def is_done_with_the_first_rank(patch: pytest.MonkeyPatch) -> None:
    """A transfer is over when the ranks that have opened it are done."""

    def finish(old: Any, self: Any, transfer: Any, now: float) -> None:
        missing, transfer.roll.missing = transfer.roll.missing, set()
        old(self, transfer, now)
        transfer.roll.missing = missing

    wrap(patch, Ending, "_finish_if_acknowledged", finish)


def drains_the_first_rank(patch: pytest.MonkeyPatch) -> None:
    """The receiver is told that nothing can land when the puts of one rank have ended."""

    def puts_drained(old: Any, self: Any, event: Any, now: float) -> None:
        share = self._shares.get(event.transfer_no)
        if share is not None and not share.transfer.is_live:
            for other in share.transfer.shares.values():
                if other is not share and not other.puts_ended:
                    self._free_share(other)
        old(self, event, now)

    wrap(patch, SenderPeers, "_puts_drained", puts_drained)
