"""Wrong lines in the cores, planted one at a time, and the shortest way to what each of them breaks.

A search that finds nothing proves something only if it would have found these. Each is one of the faults that the
design calls impossible, made possible by a patch in the test, in the smallest world that shows it.
"""

from __future__ import annotations

import pytest

from kvpd.simulation.explore import search
from kvpd.simulation.explore_state import WorldConfig
from kvpd.simulation.explore_worlds import of_two_ranks, request

from . import explore_wrong_receiver as receiver
from . import explore_wrong_sender as sender
from .explore_planting import Planted, find, with_faults

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


PLANTED = [
    Planted("02-each-rank-by-itself", RANKS, sender.leaves_each_rank_to_itself, "no clean ending"),
    Planted("ranks-first-is-enough", RANKS, sender.is_done_with_the_first_rank, "never complete"),
    Planted("ranks-first-is-drained", with_faults(RANKS, cancel=1), sender.drains_the_first_rank, "late write"),
    Planted("01-hold-and-wait", PAIRS, receiver.admits_without_room, "admitted, but not whole"),
    Planted(
        "01-staging-of-the-whole-batch",
        ONE_STAGED,
        sender.stages_whole_batches,
        "waits for staging while all of it is free",
    ),
    Planted(
        "06-dead-sender-keeps-its-room",
        with_faults(ONE, sender_restarts=1),
        receiver.believes_the_dead,
        "no clean ending",
    ),
    Planted("07-identity-by-req-id", SAME_LABEL, receiver.knows_transfers_by_label, "late write"),
    Planted("08-cancelled-while-queued", with_faults(TWO, cancel=1), receiver.stays_in_line, "KeyError"),
    Planted("09-reservation-leaks", with_faults(ONE, cancel_claim=1), receiver.keeps_the_reservation, "AssertionError"),
    Planted(
        "10-late-batch-reopens", with_faults(ONE, cancel_claim=1), receiver.reopens_by_late_batch, "taken for a new one"
    ),
    Planted("11-pins", with_faults(SAME_KEY, cancel_claim=1), receiver.frees_under_other_readers, "AssertionError"),
    Planted("12-no-fence", with_faults(TWO, cancel_claim=1), receiver.needs_no_fence, "late write"),
    Planted(
        "12-undrained-cancel", with_faults(ONE, cancel=1, force=1), receiver.fences_by_undrained_cancel, "late write"
    ),
    Planted("12-cancel-before-drained", with_faults(ONE, cancel=1), sender.drains_without_waiting, "late write"),
    Planted(
        "13-dedupe-on-unwritten", with_faults(SAME_KEY, slow=1), receiver.deduplicates_what_is_placed, "AssertionError"
    ),
    Planted("14-double-free", with_faults(ONE, cancel_claim=1), receiver.frees_twice, "AssertionError"),
    Planted(
        "15-stays-with-the-dead", with_faults(ONE, receiver_restarts=1), sender.stays_with_the_dead, "no clean ending"
    ),
    Planted("17-overtaking", QUEUE, receiver.admits_whoever_fits, "is admitted, but the queue is"),
    Planted("19-strangers-cancel", with_faults(PAIRS, cancel=1), receiver.lets_strangers_cancel, "late write"),
    Planted("20-believes-its-puts", ONE, sender.believes_its_own_puts, "never complete at the receiver"),
    Planted(
        "20-claim-too-early", with_faults(ONE, early=1), receiver.grants_what_is_not_complete, "nothing that has landed"
    ),
    Planted("revoke-not-repeated", with_faults(STALLED, loss=1), receiver.revokes_once, "no clean ending"),
    Planted("cancel-not-repeated", with_faults(ONE, cancel=1, loss=1), sender.cancels_once, "no clean ending"),
    Planted("lost-answer-unnoticed", with_faults(TWO, loss=1), sender.waits_for_lost_answers, "no clean ending"),
    Planted(
        "rest-of-an-answer-lost", with_faults(TWO, loss=1), sender.waits_for_the_rest_of_an_answer, "no clean ending"
    ),
    Planted(
        "acks-what-was-revoked",
        with_faults(ONE, cancel_claim=1, loss=1),
        receiver.acknowledges_what_was_revoked,
        "never complete",
    ),
    Planted(
        "restart-ends-claims", with_faults(ONE, slow=1), receiver.ends_claims_with_the_session, "under their reader"
    ),
    Planted("nothing-lingers", with_faults(SAME_KEY, cancel=1), sender.lets_nothing_linger, "KeyError"),
    Planted("failures-are-not-told", with_faults(TOLD, cancel=1), sender.says_nothing_of_failures, "told otherwise"),
    Planted("told-as-ready-and-as-failed", TOLD, sender.says_failed_of_what_is_ready, "told otherwise"),
    Planted(
        "staging-freed-under-puts", with_faults(ONE_SENDER, cancel=1), sender.forgets_staging_under_puts, "staging slot"
    ),
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
