"""Wrong lines in the receiver's core: each a patch, whose docstring says what is wrong."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvpd.core import ledger as ledger_module
from kvpd.core.pool import SlotPool, SlotState
from kvpd.core.receiver.admission import Admission
from kvpd.core.receiver.claims import ClaimDesk
from kvpd.core.receiver.peers import Peers as ReceiverPeers
from kvpd.core.receiver.transfers import TransferBook
from kvpd.core.states import ReceiverState

from .explore_planting import wrap


def admits_without_room(patch: pytest.MonkeyPatch) -> None:
    """A transfer begins with room for its first chunk only."""

    def admit_next(self: Any) -> Any:
        if not self._waiting or not self._pool.unreserved:
            return None
        transfer, _ = self._waiting.popitem(last=False)
        self._pool.reserve(1)
        self._reserved[transfer] = 1
        return transfer

    patch.setattr(ledger_module.Ledger, "admit_next", admit_next)


def admits_whoever_fits(patch: pytest.MonkeyPatch) -> None:
    """The first that fits is admitted, whoever came before."""

    def admit_next(self: Any) -> Any:
        for transfer, chunks in self._waiting.items():
            if chunks <= self._pool.unreserved:
                del self._waiting[transfer]
                self._pool.reserve(chunks)
                self._reserved[transfer] = chunks
                return transfer
        return None

    patch.setattr(ledger_module.Ledger, "admit_next", admit_next)


def stays_in_line(patch: pytest.MonkeyPatch) -> None:
    """A cancelled transfer keeps its place in the queue."""
    patch.setattr(ledger_module.Ledger, "leave", lambda self, transfer: None)


def needs_no_fence(patch: pytest.MonkeyPatch) -> None:
    """A slot under write is free as soon as its transfer is rolled back."""
    wrap(patch, SlotPool, "let_go", lambda old, self, index, *, fenced: old(self, index, fenced=True))


def fences_by_undrained_cancel(patch: pytest.MonkeyPatch) -> None:
    """Any CancelNotif counts as a fence."""

    def cancel_notif(old: Any, self: Any, session: Any, message: Any, now: float) -> None:
        old(self, session, msgspec.structs.replace(message, drained=True), now)

    wrap(patch, ReceiverPeers, "_cancel_notif", cancel_notif)


def knows_transfers_by_label(patch: pytest.MonkeyPatch) -> None:
    """A batch belongs to whatever transfer bears its req_id."""

    def alloc_request(old: Any, self: Any, session: Any, message: Any, now: float) -> None:
        bearing = self._book.bearing(message.req_id)
        if bearing:
            self._batch(session, bearing[0], message, now)
        else:
            old(self, session, message, now)

    wrap(patch, Admission, "_alloc_request", alloc_request)


def lets_strangers_cancel(patch: pytest.MonkeyPatch) -> None:
    """A CancelNotif ends the transfer of that number, whoever's it is."""

    def cancel_notif(old: Any, self: Any, session: Any, message: Any, now: float) -> None:
        for transfer in self._book.in_state(ReceiverState.ADMITTED):
            if transfer.id.transfer_no == message.transfer_no:
                session = self._sessions.numbered(transfer.session_no)
        old(self, session, message, now)

    wrap(patch, ReceiverPeers, "_cancel_notif", cancel_notif)


def reopens_by_late_batch(patch: pytest.MonkeyPatch) -> None:
    """A batch of a transfer that is not known opens it."""

    def alloc_request(old: Any, self: Any, session: Any, message: Any, now: float) -> None:
        if message.transfer_no in session.transfers:
            old(self, session, message, now)
        else:
            self._open(session, message, now)

    wrap(patch, Admission, "_alloc_request", alloc_request)


def deduplicates_what_is_placed(patch: pytest.MonkeyPatch) -> None:
    """A key that has a slot counts as there, written or not."""

    def pin_ready(self: Any, key: bytes, length: int) -> int | None:
        for index, slot in enumerate(self._slots):
            if slot.key == key and slot.state in (SlotState.WRITING, SlotState.READY):
                slot.pins += 1
                return index
        return None

    patch.setattr(SlotPool, "pin_ready", pin_ready)


def frees_twice(patch: pytest.MonkeyPatch) -> None:
    """A rollback leaves the slots booked, for the fence to free them once more."""

    def free(self: Any, transfer: Any, *, fenced: bool) -> None:
        for index in transfer.slots.values():
            self.pool.let_go(index, fenced=fenced)
            transfer.quarantined.append(index)

    patch.setattr(TransferBook, "_free", free)


def frees_under_other_readers(patch: pytest.MonkeyPatch) -> None:
    """A shared slot is freed by the first who is done with it."""

    def let_go(old: Any, self: Any, index: int, *, fenced: bool) -> Any:
        if self._slots[index].state is SlotState.READY:
            self._slots[index].pins = 1
        return old(self, index, fenced=fenced)

    wrap(patch, SlotPool, "let_go", let_go)


def revokes_once(patch: pytest.MonkeyPatch) -> None:
    """A RevokeNotif is never repeated."""
    patch.setattr(ReceiverPeers, "_repeat_due", lambda self, session_no, now: None)


def acknowledges_what_was_revoked(patch: pytest.MonkeyPatch) -> None:
    """A WriteDone is acknowledged plainly, whatever became of its transfer."""

    def write_done(old: Any, self: Any, session: Any, message: Any, now: float) -> None:
        transfer = session.transfers.get(message.transfer_no)
        if transfer is None or transfer.state is ReceiverState.REVOKED:
            self._ack(session, message)
        else:
            old(self, session, message, now)

    wrap(patch, Admission, "_write_done", write_done)


def ends_claims_with_the_session(patch: pytest.MonkeyPatch) -> None:
    """A session takes everything with it, what is being read too."""

    def end_session(old: Any, self: Any, session: Any, error: Any, now: float) -> None:
        for transfer in list(session.transfers.values()):
            if transfer.state is ReceiverState.CLAIMED:
                self._book.release(transfer)
                self._gone(transfer, error)
        old(self, session, error, now)

    wrap(patch, ReceiverPeers, "_end_session", end_session)


def believes_the_dead(patch: pytest.MonkeyPatch) -> None:
    """A silent sender's lease never ends."""
    patch.setattr(ReceiverPeers, "_lease_due", lambda self, session_no, now, lag_s: None)


def keeps_the_reservation(patch: pytest.MonkeyPatch) -> None:
    """A transfer that fails between admission and its last batch keeps what it had reserved."""

    def leave_admitted(self: Any, transfer: Any) -> None:
        del self._admitted[transfer.id]
        if transfer.state is not ReceiverState.REVOKED:
            self.ledger.settle(transfer.id)

    patch.setattr(TransferBook, "_leave_admitted", leave_admitted)


def grants_what_is_not_complete(patch: pytest.MonkeyPatch) -> None:
    """A claim gets a transfer as soon as all of its chunks have a slot."""

    def judge(old: Any, self: Any, claim: Any, bearing: Any) -> Any:
        for transfer in bearing:
            if transfer.state is ReceiverState.ADMITTED and len(transfer.slots) == transfer.total_chunks:
                transfer.ranks_unclaimed = {0}
                return transfer
        return old(self, claim, bearing)

    wrap(patch, ClaimDesk, "judge", judge)
