"""A wrong line for each of the ten invariants of DESIGN section 4, and for the checks that none of them trips."""

from __future__ import annotations

from typing import Any

import attrs

from kvpd.core.ledger import Ledger
from kvpd.core.messages import AllocRequest, ErrorInfo
from kvpd.core.pool import Slot, SlotPool, SlotState
from kvpd.core.receiver import ReceiverCore
from kvpd.core.receiver import events as rev
from kvpd.core.receiver.sessions import Session
from kvpd.core.receiver.transfers import Batch as ReceiverBatch
from kvpd.core.receiver.transfers import Transfer as ReceiverTransfer
from kvpd.core.receiver.transfers import TransferBook
from kvpd.core.sender import SenderCore
from kvpd.core.sender import events as sev
from kvpd.core.sender.notifier import Notifier
from kvpd.core.sender.records import Share
from kvpd.core.sender.records import Transfer as SenderTransfer
from kvpd.errors import ErrorCode, transfer_error
from kvpd.simulation.rules import Rule

from .planting import Bed, Patch, admit_by

INVARIANTS = Bed()
OTHERS = Bed()

# ------------------------------------------------------------------ the ten invariants


@INVARIANTS.plant("invariant-01-conservation", "anything", "AssertionError")
def _lost_slot(patch: Patch) -> None:
    """A slot whose fence has come does not return to the free ones."""

    def free_slot(self: SlotPool, index: int) -> None:
        if self._ready_by_key.get(self._slots[index].key) == index:
            del self._ready_by_key[self._slots[index].key]
        was = self._slots[index].state
        self._slots[index] = Slot()
        if was is not SlotState.QUARANTINED:
            self._free.append(index)

    patch.setattr(SlotPool, "_free_slot", free_slot)


@INVARIANTS.plant(
    "invariant-02-whole-or-nothing", "whole-buffer", Rule.CHARGED, Rule.WHOLE_OR_NOTHING, "AssertionError"
)
def _half_admission(patch: Patch) -> None:
    """Whoever is first in line is admitted with as much as there is."""

    def admit_next(self: Ledger) -> Any:
        if not self._waiting or not self._pool.unreserved:
            return None
        transfer, chunks = self._waiting.popitem(last=False)
        self._reserved[transfer] = min(chunks, self._pool.unreserved)
        self._pool.reserve(self._reserved[transfer])
        return transfer

    patch.setattr(Ledger, "admit_next", admit_next)


@INVARIANTS.plant(
    "invariant-03-charged-until-consumed", "anything", Rule.CHARGED, Rule.TRUTH, Rule.NOTIFY_AFTER_LANDING
)
def _socket_is_life(patch: Patch) -> None:
    """An engine's closed socket is taken for its death, and what it reads for read."""
    handle = ReceiverCore.handle

    def wrong(self: ReceiverCore, event: rev.ReceiverEvent, *, now: float) -> list[rev.ReceiverAction]:
        if isinstance(event, rev.EngineClosed):
            for key in self._desk.held_by(event.engine):
                self._claim_released(key, now)
        return handle(self, event, now=now)

    patch.setattr(ReceiverCore, "handle", wrong)


@INVARIANTS.plant("invariant-04-one-writer", "cancel-storm", Rule.ONE_WRITER, "AssertionError")
def _still_filling(patch: Patch) -> None:
    """Who is told that its transfer has ended is believed to write into its slots no more."""
    handle = SenderCore.handle

    def wrong(self: SenderCore, event: sev.SenderEvent, *, now: float) -> list[sev.SenderAction]:
        actions = handle(self, event, now=now)
        for action in list(actions):
            if isinstance(action, sev.FinishTransfer) and action.error is not None:
                actions += handle(self, sev.EngineLetGo(action.transfer_no), now=now)
        return actions

    patch.setattr(SenderCore, "handle", wrong)


@INVARIANTS.plant("invariant-05-fence", "one-host", Rule.FENCE)
def _worker_is_fence_enough(patch: Patch) -> None:
    """On one host too, the destroyed worker counts as the fence, while the sender's kernel still writes."""
    patch.setattr(Session, "is_fenced", property(lambda self: self.worker_destroyed))


@INVARIANTS.plant("invariant-06-notify-after-landing", "anything", Rule.TRUTH, Rule.NOTIFY_AFTER_LANDING)
def _ready_when_placed(patch: Patch) -> None:
    """A chunk is ready as soon as it has a slot."""
    place = TransferBook.place

    def wrong(self: TransferBook, transfer: ReceiverTransfer, batch: ReceiverBatch) -> None:
        place(self, transfer, batch)
        self.mark_written(transfer, 0, self.unwritten(transfer, 0, batch.first_chunk, len(batch.keys)))

    patch.setattr(TransferBook, "place", wrong)


@INVARIANTS.plant("invariant-07-no-overtaking", "huge-among-small", Rule.NO_OVERTAKING)
def _last_in_first_out(patch: Patch) -> None:
    """The newest in line is admitted first."""
    patch.setattr(Ledger, "admit_next", admit_by(lambda waiting: list(reversed(waiting))[:1]))


@INVARIANTS.plant("invariant-08-order-of-resources", "calm", Rule.ORDER_OF_RESOURCES)
def _staging_first(patch: Patch) -> None:
    """Staging is taken before there is remote room."""
    stage = SenderCore._stage

    def wrong(self: SenderCore, share: Share, event: sev.StageRequested, now: float) -> None:
        stage(self, share, event, now)
        if (asked := share.stages.get(event.stage)) is not None:
            asked.batch.remote_indexes = tuple(range(len(asked.batch.keys)))
            self._stage_next(share, now)

    patch.setattr(SenderCore, "_stage", wrong)


@INVARIANTS.plant("invariant-09-bounded", "tight-limits", Rule.BOUNDED)
def _endless_queue(patch: Patch) -> None:
    """The queue for admission has no limit."""
    refusal = ReceiverCore._admission_refusal

    def wrong(self: ReceiverCore, session: Session, message: AllocRequest) -> ErrorInfo | None:
        found = refusal(self, session, message)
        return None if found is not None and "queue_depth_max" in found.detail else found

    patch.setattr(ReceiverCore, "_admission_refusal", wrong)


@INVARIANTS.plant("invariant-10-quiet-means-clean", "anything", Rule.QUIET_MEANS_CLEAN)
def _unforgotten_notification(patch: Patch) -> None:
    """What a proxy has acknowledged is kept, and repeated for ever."""
    patch.setattr(Notifier, "acknowledged", lambda self, address, message_id, *, now: None)
    patch.setattr(Notifier, "due", _due_without_giving_up)


# ------------------------------------------------------------------ the checks that no entry above trips


@OTHERS.plant("check-same-answer", "anything", Rule.SAME_ANSWER, Rule.WHOLE_OR_NOTHING, "AssertionError")
def _placed_again(patch: Patch) -> None:
    """A repeated batch is placed anew."""
    place = ReceiverCore._place

    def wrong(self: ReceiverCore, session: Session, transfer: ReceiverTransfer, message: AllocRequest) -> None:
        if message.keys:
            transfer.batches[message.first_chunk].remote_indexes = None
        place(self, session, transfer, message)

    patch.setattr(ReceiverCore, "_place", wrong)


@OTHERS.plant("check-claims-are-answered", "never-staging", Rule.BOUNDED)
def _patient_claims(patch: Patch) -> None:
    """A claim waits beyond its time."""
    claim_requested = ReceiverCore._claim_requested

    def wrong(self: ReceiverCore, claim: rev.ClaimRequested, now: float) -> None:
        claim_requested(self, claim, now)
        self._timers.clear(("claim", (claim.engine, claim.claim)))

    patch.setattr(ReceiverCore, "_claim_requested", wrong)


@OTHERS.plant("check-quarantine-ends", "never-staging", Rule.BOUNDED)
def _revokes_once(patch: Patch) -> None:
    """A RevokeNotif is sent once, and nobody asks whether it was answered."""

    def send_revoke(
        self: ReceiverCore, session: Session, transfer: ReceiverTransfer, error: ErrorInfo, now: float
    ) -> None:
        """Lost, as far as its sender is concerned."""

    patch.setattr(ReceiverCore, "_send_revoke", send_revoke)


@OTHERS.plant("check-overdue-claims-are-still-read", "anything", Rule.CHARGED, Rule.TRUTH, Rule.NOTIFY_AFTER_LANDING)
def _overdue_is_over(patch: Patch) -> None:
    """A claim that is held for too long is taken for released."""
    claim_overdue = ReceiverCore._claim_overdue

    def wrong(self: ReceiverCore, key: tuple[int, int]) -> None:
        claim_overdue(self, key)
        self._claim_released(key, 0.0)

    patch.setattr(ReceiverCore, "_claim_overdue", wrong)


@OTHERS.plant("check-checksums", "corrupting-wire", Rule.TRUTH)
def _mismatch_is_ignored(patch: Patch) -> None:
    """Checksums are computed, sent and compared, and it makes no difference."""
    chunks_verified = ReceiverCore._chunks_verified

    def wrong(self: ReceiverCore, event: rev.ChunksVerified, now: float) -> None:
        chunks_verified(self, attrs.evolve(event, mismatched=0), now)

    patch.setattr(ReceiverCore, "_chunks_verified", wrong)


@OTHERS.plant("check-windows", "calm-ranks", Rule.TRUTH, Rule.NOTIFY_AFTER_LANDING)
def _one_window(patch: Patch) -> None:
    """All ranks' puts go into the first one's window."""
    piece_filled = SenderCore._piece_filled

    def wrong(self: SenderCore, number: int, piece_no: int, now: float) -> None:
        piece_filled(self, number, piece_no, now)
        self._actions = [attrs.evolve(a, rank=0) if isinstance(a, sev.PostPuts) else a for a in self._actions]

    patch.setattr(SenderCore, "_piece_filled", wrong)


@OTHERS.plant("check-every-rank-is-awaited", "calm-ranks", Rule.NOTIFY_AFTER_LANDING)
def _first_rank_is_enough(patch: Patch) -> None:
    """A transfer is done when the ranks that have opened it are."""
    finish = SenderCore._finish_if_acknowledged

    def wrong(self: SenderCore, transfer: SenderTransfer, now: float) -> None:
        missing, transfer.roll.missing = transfer.roll.missing, set()
        finish(self, transfer, now)
        transfer.roll.missing = missing

    patch.setattr(SenderCore, "_finish_if_acknowledged", wrong)


@OTHERS.plant("check-slots-wait-for-every-rank", "calm-ranks", Rule.NOTIFY_AFTER_LANDING, Rule.TRUTH)
def _one_rank_makes_ready(patch: Patch) -> None:
    """A slot is ready when one rank's part of it has landed."""
    written = SlotPool.written

    def wrong(self: SlotPool, index: int, rank: int) -> bool:
        self.slot(index).ranks_missing &= {rank}
        return written(self, index, rank)

    patch.setattr(SlotPool, "written", wrong)


@OTHERS.plant("check-bypass-is-bounded", "huge-among-small", Rule.NO_OVERTAKING)
def _bypass_without_end(patch: Patch) -> None:
    """Where some may pass the head of the queue, all may."""
    next_that_fits = Ledger.next_that_fits

    def wrong(self: Ledger) -> Any:
        if self._bypass_max:
            self._bypassed = 0
        return next_that_fits(self)

    patch.setattr(Ledger, "next_that_fits", wrong)


@OTHERS.plant("check-proxies-are-told", "deaf-proxies", Rule.QUIET_MEANS_CLEAN)
def _told_once(patch: Patch) -> None:
    """A notification is sent once, and whether it was heard is nobody's business."""
    patch.setattr(Notifier, "add", lambda self, address, message, *, now: True)


@OTHERS.plant("check-failures-are-told", "anything", Rule.ONE_END)
def _silent_about_failures(patch: Patch) -> None:
    """A proxy hears of what went well alone."""
    patch.setattr(SenderCore, "_notify_failures", lambda self, now: self._failures.clear())


@OTHERS.plant("check-told-as-it-ended", "anything", Rule.ONE_END)
def _told_as_failed_too(patch: Patch) -> None:
    """What is ready is said to have failed, besides."""
    notify = SenderCore._notify

    def wrong(self: SenderCore, transfer: SenderTransfer, now: float) -> None:
        notify(self, transfer, now)
        error = transfer_error(ErrorCode.PEER_LOST)
        self._failed(transfer.notify, transfer.req_id, transfer.peer.receiver, transfer.number, error)

    patch.setattr(SenderCore, "_notify", wrong)


def _due_without_giving_up(self: Notifier, now: float) -> tuple[list[Any], list[Any]]:
    again: list[Any] = []
    while (address := self._timers.pop_due(now)) is not None:
        proxy = self._proxies[address]
        again += [(address, pending.message) for pending in proxy.pending.values()]
        self._arm(address, proxy, now + 1.0)
    return again, []
