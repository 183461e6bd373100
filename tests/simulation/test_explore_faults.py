"""Wrong lines in the cores, planted one at a time, and the shortest way to what each of them breaks.

A search that finds nothing proves something only if it would have found these. Each is one of the faults that the
design calls impossible, made possible by a patch in the test, in the smallest world that shows it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import attrs
import msgspec
import pytest

from kvpd.core import ledger as ledger_module
from kvpd.core.messages import CancelNotif
from kvpd.core.outbox import Outbox
from kvpd.core.pool import SlotPool, SlotState
from kvpd.core.receiver.admission import Admission
from kvpd.core.receiver.claims import ClaimDesk
from kvpd.core.receiver.peers import Peers as ReceiverPeers
from kvpd.core.receiver.transfers import TransferBook
from kvpd.core.sender.base import SenderBase
from kvpd.core.sender.ending import Ending
from kvpd.core.sender.joining import Joining
from kvpd.core.sender.moving import Moving
from kvpd.core.sender.peers import Peers as SenderPeers
from kvpd.core.sender.records import PieceState
from kvpd.core.sender.staging import Staging
from kvpd.core.states import ReceiverState
from kvpd.errors import ErrorCode, transfer_error
from kvpd.simulation.explore import Counterexample, search
from kvpd.simulation.explore_state import WorldConfig
from kvpd.simulation.explore_worlds import of_two_ranks, request

Patch = Callable[[pytest.MonkeyPatch], None]

ONE = WorldConfig("one", (request(0, 0, 2),), slots=2)
TWO = WorldConfig("two", (request(0, 0, 1), request(1, 0, 1)), slots=1)
PAIRS = WorldConfig("pairs", (request(0, 0, 2), request(1, 0, 2)), slots=3)
ONE_SENDER = WorldConfig("one sender", (request(0, 0, 1), request(0, 1, 1)), slots=2, staging_slots=1)
STALLED = WorldConfig("stalled", (request(0, 0, 1),), slots=1, stalled=frozenset({0}))
QUEUE = WorldConfig("queue", (request(0, 0, 1), request(0, 1, 2), request(1, 0, 1)), slots=2)
TOLD = WorldConfig("told", (request(0, 0, 1),), slots=1, has_proxy=True)
ONE_STAGED = WorldConfig("one staged", (request(0, 0, 2),), slots=2, staging_slots=1)
SAME_LABEL = WorldConfig(
    "label", (request(0, 0, 1, label="q", keys="k"), request(1, 0, 1, label="q", keys="k")), slots=2
)
RANKS = WorldConfig("ranks", of_two_ranks(request(0, 0, 1)), slots=1)
SAME_KEY = WorldConfig("key", (request(0, 0, 1, keys="k"), request(1, 0, 1, keys="k")), slots=2)


def with_faults(world: WorldConfig, **budget: int) -> WorldConfig:
    """A world in which these may happen."""
    return attrs.evolve(world, budget=budget)


def find(world: WorldConfig) -> Counterexample:
    """What the search finds wrong in a world; it is printed by a test that fails."""
    result = search(world, states_max=200_000, seconds_max=100.0)
    assert result.counterexample is not None, f"{result.states} states, and nothing was found"
    sys.stdout.write(f"{result.counterexample}\n")
    return result.counterexample


@attrs.frozen
class Planted:
    """A wrong line, the world that shows it, and what is found there."""

    name: str
    world: WorldConfig
    patch: Patch
    what: str


def wrap(patch: pytest.MonkeyPatch, owner: type, name: str, new: Callable[..., Any]) -> None:
    """`new` gets the method that was there before, then its arguments."""
    old = getattr(owner, name)
    patch.setattr(owner, name, lambda *args, **kwargs: new(old, *args, **kwargs))


# ------------------------------------------------------------------ the wrong lines


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


def grants_what_is_not_complete(patch: pytest.MonkeyPatch) -> None:
    """A claim gets a transfer as soon as all of its chunks have a slot."""

    def judge(old: Any, self: Any, claim: Any, bearing: Any) -> Any:
        for transfer in bearing:
            if transfer.state is ReceiverState.ADMITTED and len(transfer.slots) == transfer.total_chunks:
                transfer.ranks_unclaimed = {0}
                return transfer
        return old(self, claim, bearing)

    wrap(patch, ClaimDesk, "judge", judge)


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


PLANTED = [
    Planted("02-each-rank-by-itself", RANKS, leaves_each_rank_to_itself, "no clean ending"),
    Planted("ranks-first-is-enough", RANKS, is_done_with_the_first_rank, "never complete"),
    Planted("ranks-first-is-drained", with_faults(RANKS, cancel=1), drains_the_first_rank, "late write"),
    Planted("01-hold-and-wait", PAIRS, admits_without_room, "admitted, but not whole"),
    Planted(
        "01-staging-of-the-whole-batch", ONE_STAGED, stages_whole_batches, "waits for staging while all of it is free"
    ),
    Planted("06-dead-sender-keeps-its-room", with_faults(ONE, sender_restarts=1), believes_the_dead, "no clean ending"),
    Planted("07-identity-by-req-id", SAME_LABEL, knows_transfers_by_label, "late write"),
    Planted("08-cancelled-while-queued", with_faults(TWO, cancel=1), stays_in_line, "KeyError"),
    Planted("09-reservation-leaks", with_faults(ONE, cancel_claim=1), keeps_the_reservation, "AssertionError"),
    Planted("10-late-batch-reopens", with_faults(ONE, cancel_claim=1), reopens_by_late_batch, "taken for a new one"),
    Planted("11-pins", with_faults(SAME_KEY, cancel_claim=1), frees_under_other_readers, "AssertionError"),
    Planted("12-no-fence", with_faults(TWO, cancel_claim=1), needs_no_fence, "late write"),
    Planted("12-undrained-cancel", with_faults(ONE, cancel=1, force=1), fences_by_undrained_cancel, "late write"),
    Planted("12-cancel-before-drained", with_faults(ONE, cancel=1), drains_without_waiting, "late write"),
    Planted("13-dedupe-on-unwritten", with_faults(SAME_KEY, slow=1), deduplicates_what_is_placed, "AssertionError"),
    Planted("14-double-free", with_faults(ONE, cancel_claim=1), frees_twice, "AssertionError"),
    Planted("15-stays-with-the-dead", with_faults(ONE, receiver_restarts=1), stays_with_the_dead, "no clean ending"),
    Planted("17-overtaking", QUEUE, admits_whoever_fits, "is admitted, but the queue is"),
    Planted("19-strangers-cancel", with_faults(PAIRS, cancel=1), lets_strangers_cancel, "late write"),
    Planted("20-believes-its-puts", ONE, believes_its_own_puts, "never complete at the receiver"),
    Planted("20-claim-too-early", with_faults(ONE, early=1), grants_what_is_not_complete, "nothing that has landed"),
    Planted("revoke-not-repeated", with_faults(STALLED, loss=1), revokes_once, "no clean ending"),
    Planted("cancel-not-repeated", with_faults(ONE, cancel=1, loss=1), cancels_once, "no clean ending"),
    Planted("lost-answer-unnoticed", with_faults(TWO, loss=1), waits_for_lost_answers, "no clean ending"),
    Planted("rest-of-an-answer-lost", with_faults(TWO, loss=1), waits_for_the_rest_of_an_answer, "no clean ending"),
    Planted(
        "acks-what-was-revoked",
        with_faults(ONE, cancel_claim=1, loss=1),
        acknowledges_what_was_revoked,
        "never complete",
    ),
    Planted("restart-ends-claims", with_faults(ONE, slow=1), ends_claims_with_the_session, "under their reader"),
    Planted("nothing-lingers", with_faults(SAME_KEY, cancel=1), lets_nothing_linger, "KeyError"),
    Planted("failures-are-not-told", with_faults(TOLD, cancel=1), says_nothing_of_failures, "told otherwise"),
    Planted("told-as-ready-and-as-failed", TOLD, says_failed_of_what_is_ready, "told otherwise"),
    Planted("staging-freed-under-puts", with_faults(ONE_SENDER, cancel=1), forgets_staging_under_puts, "staging slot"),
]


WORLDS = {f"{p.world.name} {', '.join(p.world.budget)}".strip(): p.world for p in PLANTED}


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.name)
def test_a_planted_fault_is_found(planted: Planted, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that no fault can trip is worth nothing."""
    planted.patch(monkeypatch)
    found = find(planted.world)
    assert planted.what in found.what


@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS)
def test_nothing_is_found_where_nothing_was_planted(world: WorldConfig) -> None:
    """The worlds of the planted faults hold as they are: what is found there is the fault, not the world."""
    result = search(world, states_max=200_000, seconds_max=100.0)
    assert result.counterexample is None
    assert result.is_exhausted
