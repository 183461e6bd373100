"""A wrong line for each entry of DESIGN section 12 that the cores can meet: each does what the reference did."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

from kvpd.core.ledger import Ledger
from kvpd.core.messages import AllocRequest, CancelNotif, ErrorInfo, Message, Region
from kvpd.core.pool import SlotPool, SlotState
from kvpd.core.receiver import ReceiverCore
from kvpd.core.receiver import events as rev
from kvpd.core.receiver.claims import ClaimDesk
from kvpd.core.receiver.sessions import Session
from kvpd.core.receiver.transfers import Transfer as ReceiverTransfer
from kvpd.core.receiver.transfers import TransferBook
from kvpd.core.sender import SenderCore
from kvpd.core.sender import events as sev
from kvpd.core.sender.joining import Joining
from kvpd.core.sender.notifier import Notifier, Pending
from kvpd.core.sender.records import Peer
from kvpd.core.sender.staging import Staging
from kvpd.core.states import ReceiverState
from kvpd.errors import TransferError
from kvpd.simulation.rules import Rule

from .planting import Bed, Patch, admit_by

ENTRIES = Bed()

# ------------------------------------------------------------------ the entries of section 12


@ENTRIES.plant("fault-01-lock-around-replies", "anything", Rule.WHOLE_OR_NOTHING, Rule.ONLY_ADMISSION_WAITS)
def _one_at_a_time(patch: Patch) -> None:
    """While one of a sender's requests waits for admission, its others' batches wait behind it."""
    patch.setattr(ReceiverCore, "_message_received", _deaf_while_queued(AllocRequest))


@ENTRIES.plant("fault-02-each-rank-by-itself", "calm-ranks", Rule.PROGRESS, Rule.BOUNDED)
def _ranks_apart(patch: Patch) -> None:
    """Each rank's open is a transfer of its own, admitted by itself."""
    patch.setattr(Joining, "find", lambda self, key, rank: None)


@ENTRIES.plant("fault-03-cancel-behind-the-lock", "cancel-storm", Rule.ONLY_ADMISSION_WAITS)
def _cancels_wait(patch: Patch) -> None:
    """While one of a sender's requests waits for admission, nobody hears its cancels."""
    patch.setattr(ReceiverCore, "_message_received", _deaf_while_queued(CancelNotif))


@ENTRIES.plant("fault-04-no-total", "anything", "AssertionError")
def _legacy_admitted(patch: Patch) -> None:
    """A request without a total is let in."""
    refusal = ReceiverCore._admission_refusal

    def wrong(self: ReceiverCore, session: Session, message: AllocRequest) -> ErrorInfo | None:
        return None if message.total_chunks <= 0 else refusal(self, session, message)

    patch.setattr(ReceiverCore, "_admission_refusal", wrong)


@ENTRIES.plant("fault-05-batch-larger-than-staging", "calm", Rule.PROGRESS, Rule.BOUNDED, "AssertionError")
def _uncut_batches(patch: Patch) -> None:
    """A batch gets staging for all of it, or none."""
    patch.setattr(Staging, "_share", lambda self, receiver: 1 << 30)


@ENTRIES.plant("fault-06-dead-sender", "anything", Rule.QUIET_MEANS_CLEAN)
def _no_lease(patch: Patch) -> None:
    """A silent sender is waited for, whatever its lease says."""

    def lease_due(self: ReceiverCore, session_no: int, now: float, lag_s: float) -> None:
        self._timers.set(("lease", session_no), now + self.settings.lease_s)

    patch.setattr(ReceiverCore, "_lease_due", lease_due)


@ENTRIES.plant("fault-07-one-label-two-transfers", "anything", Rule.AS_NAMED)
def _guess(patch: Patch) -> None:
    """A claim of a label that two transfers bear is granted one of them."""
    judge = ClaimDesk.judge

    def wrong(self: ClaimDesk, claim: rev.ClaimRequested, bearing: Any) -> ReceiverTransfer | TransferError | None:
        complete = [t for t in bearing if t.state is ReceiverState.COMPLETE]
        return judge(self, claim, complete[:1])

    patch.setattr(ClaimDesk, "judge", wrong)


@ENTRIES.plant("fault-08-cancelled-while-waiting", "cancel-storm", "KeyError", "AssertionError", Rule.CONSERVATION)
def _stays_in_line(patch: Patch) -> None:
    """Who is cancelled while it waits for admission keeps its place in the queue."""
    patch.setattr(Ledger, "leave", lambda self, transfer: None)


@ENTRIES.plant("fault-09-error-after-admission", "anything", Rule.CHARGED, "AssertionError")
def _reservation_leaks(patch: Patch) -> None:
    """A rollback after admission forgets what was reserved and not placed."""

    def roll_back(self: TransferBook, transfer: ReceiverTransfer, error: ErrorInfo, *, fenced: bool) -> None:
        with patch.context() as inside:
            inside.setattr(Ledger, "settle", lambda ledger, of: ledger._reserved.pop(of))
            original(self, transfer, error, fenced=fenced)

    original = TransferBook.roll_back
    patch.setattr(TransferBook, "roll_back", roll_back)


@ENTRIES.plant("fault-10-batches-after-an-abort", "cancel-storm", Rule.ONE_END)
def _forgets_ends(patch: Patch) -> None:
    """How a transfer ended is not remembered, so that a late batch opens it anew."""
    patch.setattr(Session, "ended", lambda self, transfer_no, error: self.transfers.pop(transfer_no, None))


@ENTRIES.plant("fault-11-deduplicated-chunks-leak", "hot-prefixes", "AssertionError", Rule.QUIET_MEANS_CLEAN)
def _shared_slots_stay(patch: Patch) -> None:
    """A chunk that two transfers share is let go only by the one that is read."""
    free = TransferBook._free

    def wrong(self: TransferBook, transfer: ReceiverTransfer, *, fenced: bool) -> None:
        if transfer.state is not ReceiverState.CLAIMED:
            shared = [position for position, index in transfer.slots.items() if self.pool.slot(index).pins > 1]
            for position in shared:
                del transfer.slots[position]
        free(self, transfer, fenced=fenced)

    patch.setattr(TransferBook, "_free", wrong)


@ENTRIES.plant("fault-12-reused-under-a-write", "slow-wire", Rule.FENCE)
def _revoked_is_free(patch: Patch) -> None:
    """What a revoked transfer was writing is free at once, while its puts are on their way."""
    roll_back = TransferBook.roll_back

    def wrong(self: TransferBook, transfer: ReceiverTransfer, error: ErrorInfo, *, fenced: bool) -> None:
        roll_back(self, transfer, error, fenced=True)

    patch.setattr(TransferBook, "roll_back", wrong)


@ENTRIES.plant("fault-13-dedupe-against-unwritten", "hot-prefixes", "AssertionError", Rule.TRUTH)
def _placed_is_ready(patch: Patch) -> None:
    """A chunk that is placed and not yet written counts as there."""
    draw = SlotPool.draw

    def wrong(self: SlotPool, key: bytes, length: int) -> int:
        index = draw(self, key, length)
        self._ready_by_key.setdefault(key, index)
        return index

    patch.setattr(SlotPool, "draw", wrong)


@ENTRIES.plant("fault-14-freed-twice", "anything", "AssertionError", Rule.FENCE)
def _rollback_and_fence_free(patch: Patch) -> None:
    """A rollback frees what its fence will free again."""
    let_go = SlotPool.let_go

    def wrong(self: SlotPool, index: int, *, fenced: bool) -> bool:
        return let_go(self, index, fenced=True) or (not fenced and self.slot(index).state is SlotState.FREE)

    patch.setattr(SlotPool, "let_go", wrong)


@ENTRIES.plant("fault-15-hung-receiver", "never-staging", Rule.BOUNDED)
def _no_deadline(patch: Patch) -> None:
    """A request has no deadline of its own."""
    open_ = SenderCore._open

    def wrong(self: SenderCore, event: sev.OpenRequested, now: float) -> None:
        open_(self, event, now)
        self._timers.clear(("request", event.transfer_no))

    patch.setattr(SenderCore, "_open", wrong)


@ENTRIES.plant("fault-16-proxy-is-down", "deaf-proxies", Rule.BOUNDED)
def _endless_notifications(patch: Patch) -> None:
    """Notifications for a proxy that does not answer pile up."""
    add = Notifier.add

    def wrong(self: Notifier, address: str, message: Any, *, now: float) -> bool:
        if not add(self, address, message, now=now) and address in self._proxies:
            self._proxies[address].pending[message.message_id] = Pending(message, now)
        return True

    patch.setattr(Notifier, "add", wrong)


@ENTRIES.plant("fault-17-small-ones-overtake", "huge-among-small", Rule.NO_OVERTAKING)
def _best_fit(patch: Patch) -> None:
    """Whoever fits is admitted."""
    patch.setattr(Ledger, "admit_next", admit_by(list))


@ENTRIES.plant("fault-18-stale-addresses", "anything", Rule.PROGRESS, Rule.FENCE)
def _remembers_regions(patch: Patch) -> None:
    """What a receiver said first of where to put is believed for ever."""
    welcome = SenderCore._welcome
    remembered: dict[tuple[SenderCore, str], tuple[Region, ...]] = {}

    def wrong(self: SenderCore, peer: Peer, message: Any, now: float) -> None:
        welcome(self, peer, message, now)
        for place, action in enumerate(self._actions):
            if isinstance(action, sev.OpenEndpoint):
                regions = remembered.setdefault((self, action.receiver), action.regions)
                self._actions[place] = attrs.evolve(action, regions=regions)

    patch.setattr(SenderCore, "_welcome", wrong)


@ENTRIES.plant("fault-19-stranger-cancels", "anything", Rule.OWN_TRANSFERS)
def _anybody_may_cancel(patch: Patch) -> None:
    """A transfer is found by its number, whoever names it."""
    cancel_notif = ReceiverCore._cancel_notif

    def wrong(self: ReceiverCore, session: Session, message: CancelNotif, now: float) -> None:
        if message.transfer_no not in session.transfers:
            for other in self._sessions._by_peer.values():
                if message.transfer_no in other.transfers:
                    session = other
        cancel_notif(self, session, message, now)

    patch.setattr(ReceiverCore, "_cancel_notif", wrong)


@ENTRIES.plant("fault-20-never-landed", "slow-wire", Rule.TRUTH, Rule.NOTIFY_AFTER_LANDING)
def _failure_is_success(patch: Patch) -> None:
    """That a put failed is not looked at."""
    handle = SenderCore.handle

    def wrong(self: SenderCore, event: sev.SenderEvent, *, now: float) -> list[sev.SenderAction]:
        if isinstance(event, sev.PutsFailed):
            event = sev.PutsCompleted(event.transfer_no, event.piece)
        return handle(self, event, now=now)

    patch.setattr(SenderCore, "handle", wrong)


@ENTRIES.plant("fault-21-abort-storm", "cancel-storm", Rule.BOUNDED)
def _one_cancel_at_a_time(patch: Patch) -> None:
    """Each cancel waits for the one before it, and every one for the put deadline."""
    handle = SenderCore.handle
    waiting: dict[SenderCore, list[sev.CancelTransfer]] = {}
    busy_until: dict[SenderCore, float] = {}

    def wrong(self: SenderCore, event: sev.SenderEvent, *, now: float) -> list[sev.SenderAction]:
        actions: list[sev.SenderAction] = []
        queue = waiting.setdefault(self, [])
        for action in handle(self, event, now=now):
            (queue if isinstance(action, sev.CancelTransfer) else actions).append(action)  # type: ignore[arg-type]
        if queue and busy_until.get(self, 0.0) <= now:
            busy_until[self] = now + queue[0].put_deadline_s
            actions.append(queue.pop(0))
        return actions

    patch.setattr(SenderCore, "handle", wrong)


def _deaf_while_queued(kind: type[Message]) -> Callable[[ReceiverCore, bytes, object, float], None]:
    """A `_message_received` that drops one kind of message of a sender that has a request in the queue."""
    original = ReceiverCore._message_received

    def wrong(self: ReceiverCore, peer: bytes, message: object, now: float) -> None:
        session = self._sessions.of_peer(peer)
        transfers = session.transfers.values() if session is not None else ()
        if not (isinstance(message, kind) and any(t.state is ReceiverState.QUEUED for t in transfers)):
            original(self, peer, message, now)

    return wrong
