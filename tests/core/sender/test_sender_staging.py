"""Staging: backpressure and wake-up, pieces, shares, and early stages."""

from __future__ import annotations

from core_parts import CHUNK, keys
from sender_world import ReceiverPeer, SenderWorld, finished, grants, sent

from kvpd.core.messages import AllocRequest, WriteDone
from kvpd.core.sender import events as ev
from kvpd.core.sender.events import StagedSlot


def land(world: SenderWorld, p: ReceiverPeer, number: int, piece: int) -> list[ev.SenderAction]:
    """A piece is filled, put and acknowledged."""
    actions = world.fill(number, piece)
    actions += world.land(number, piece)
    return actions + p.ack(sent(actions, WriteDone))


def test_a_batch_waits_for_staging_and_is_woken_by_the_puts_that_free_it() -> None:
    """This is the backpressure: an engine blocks here, and nowhere else."""
    world = SenderWorld(staging=2)
    p = world.connect()
    p.admit(1, 2)
    p.admit(2, 1)
    p.stage(1, 0, keys(1, 2), last=True)
    assert grants(p.stage(2, 0, keys(3), [9], last=True)) == []
    assert world.core.staging[0].waiting_count == 1
    assert grants(world.fill(1, 0)) == []
    (grant,) = grants(world.land(1, 0))
    assert (grant.transfer_no, len(grant.entries)) == (2, 1)


def test_staging_is_all_or_none() -> None:
    """Two batches that each hold half of what they need would wait for each other."""
    world = SenderWorld(staging=3)
    p = world.connect()
    p.admit(1, 2)
    p.admit(2, 2)
    p.stage(1, 0, keys(1, 2), last=True)
    assert grants(p.stage(2, 0, keys(3, 4), last=True)) == []
    assert world.free == 1


def test_a_small_batch_does_not_overtake_a_large_one_of_its_receiver() -> None:
    """First in, first out: nobody starves."""
    world = SenderWorld(staging=3)
    p = world.connect()
    for number, total in ((1, 2), (2, 2), (3, 1)):
        p.admit(number, total)
    p.stage(1, 0, keys(1, 2), last=True)
    p.stage(2, 0, keys(3, 4), last=True)
    assert grants(p.stage(3, 0, keys(5), last=True)) == []
    world.fill(1, 0)
    assert [g.transfer_no for g in grants(world.land(1, 0))] == [2, 3]


def test_a_batch_larger_than_the_staging_buffer_is_cut_into_pieces() -> None:
    """The reference blocks its own thread for ever here (fault 5)."""
    world = SenderWorld(staging=2)
    p = world.connect()
    p.admit(1, 5)
    (grant,) = grants(p.stage(1, 0, keys(1, 2, 3, 4, 5), last=True, last_bytes=7))
    assert (grant.first, len(grant.entries), grant.is_last_piece) == (0, 2, False)
    (grant,) = grants(land(world, p, 1, 0))
    assert (grant.first, len(grant.entries), grant.is_last_piece) == (2, 2, False)
    (grant,) = grants(land(world, p, 1, 1))
    assert (grant.first, grant.is_last_piece) == (4, True)
    assert grant.entries[0] is not None
    assert (grant.entries[0].remote, grant.entries[0].length) == (4, 7)
    assert finished(land(world, p, 1, 2)) == {1: None}
    assert world.core.is_clean


def test_known_chunks_at_the_seams_of_pieces_cost_no_staging() -> None:
    """A piece takes those along that need no slot."""
    world = SenderWorld(staging=2)
    p = world.connect()
    p.admit(1, 6)
    (grant,) = grants(p.stage(1, 0, keys(*range(6)), [-1, 4, 5, -1, 6, -1], last=True))
    assert grant.entries == (None, StagedSlot(1, 4, CHUNK), StagedSlot(0, 5, CHUNK), None)
    (grant,) = grants(land(world, p, 1, 0))
    assert (grant.first, len(grant.entries), grant.is_last_piece) == (4, 2, True)
    assert finished(land(world, p, 1, 1)) == {1: None}


def test_the_next_piece_waits_until_this_one_is_filled() -> None:
    """An engine fills one after the other; granting both at once would take twice the staging."""
    world = SenderWorld(staging=4)
    p, q = world.connect("p"), world.connect("q")
    q.admit(q.serial + 1, 1)
    q.stage(q.serial + 1, 0, keys("q"))
    number = q.serial + 2
    p.admit(number, 4)
    assert len(grants(p.stage(number, 0, keys(1, 2, 3, 4), last=True))) == 1
    assert world.free == 1
    # Its share is two slots while another receiver holds some; freed ones go to the next piece only after this one.
    world.fill(number, 0)
    assert [g.first for g in grants(world.land(number, 0))] == [2]


# ------------------------------------------------------------------ early stages


def test_an_early_stage_takes_staging_that_is_free_at_once() -> None:
    """An engine may ask for its next batch before it has filled this one: a round trip saved."""
    world = SenderWorld(staging=2)
    p = world.connect()
    p.admit(1, 2)
    p.stage(1, 0, keys(1))
    assert len(grants(p.stage(1, 1, keys(2), [1], last=True))) == 1


def test_an_early_stage_never_waits_while_its_request_holds_unfilled_slots() -> None:
    """It is told so once, and gets in line when the earlier slots are filled: nobody waits while holding."""
    world = SenderWorld(staging=1)
    p = world.connect()
    p.admit(1, 3)
    p.stage(1, 0, keys(1))
    assert p.stage(1, 1, keys(2), [1]) == [ev.DeferStage(1, 1)]
    assert p.stage(1, 2, keys(3), [2], last=True) == [ev.DeferStage(1, 2)]
    assert world.core.staging[0].waiting_count == 0
    assert grants(world.fill(1, 0)) == []
    assert world.core.staging[0].waiting_count == 1
    (grant,) = grants(world.land(1, 0))
    assert (grant.stage, grant.piece) == (1, 1)


def test_an_early_stage_does_not_overtake_those_that_wait() -> None:
    """Free slots belong to the line first."""
    world = SenderWorld(staging=3)
    p = world.connect()
    p.admit(1, 3)
    p.admit(2, 3)
    p.stage(1, 0, keys(1))
    p.stage(2, 0, keys(4, 5, 6), last=True)
    assert p.stage(1, 1, keys(2), [1]) == [ev.DeferStage(1, 1)]


def test_the_rest_of_an_early_stage_that_was_cut_is_not_deferred_again() -> None:
    """Its engine has a piece of it already and knows that more comes."""
    world = SenderWorld(staging=3)
    p = world.connect()
    p.admit(1, 9)
    p.stage(1, 0, keys(1))
    actions = p.stage(1, 1, keys(2, 3, 4, 5), [1, 2, 3, 4])
    assert actions == [ev.DeferStage(1, 1)]
    (grant,) = grants(land(world, p, 1, 0))
    assert len(grant.entries) == 3
    assert world.fill(1, 1)[1:] == []


def test_early_stages_that_were_allocated_while_the_first_waited_are_granted_or_deferred_with_it() -> None:
    """An engine that asked for several at once must hear of each, or it waits for what it holds itself."""
    world = SenderWorld(staging=3)
    p = world.connect()
    p.admit(1, 3)
    p.stage(1, 0, keys(0, 0, 0), last=True)
    p.admit(2, 9)
    for stage in range(4):
        p.stage(2, stage, keys(stage), [stage])
    world.fill(1, 0)
    actions = world.land(1, 0)
    assert [g.stage for g in grants(actions)] == [0, 1, 2]
    assert ev.DeferStage(2, 3) in actions


def test_an_early_stage_behind_one_that_was_cut_is_deferred() -> None:
    """Its turn comes after the other's last piece; until then the engine must not block on it."""
    world = SenderWorld(staging=2)
    p = world.connect()
    p.admit(1, 2)
    p.stage(1, 0, keys(0, 0), last=True)
    p.admit(2, 5)
    p.stage(2, 0, keys(1, 2, 3))
    p.stage(2, 1, keys(4, 5), [3, 4], last=True)
    world.fill(1, 0)
    actions = world.land(1, 0)
    assert [(g.stage, g.is_last_piece) for g in grants(actions)] == [(0, False)]
    assert ev.DeferStage(2, 1) in actions
    assert [g.stage for g in grants(land(world, p, 2, 0))] == [0]
    assert [g.stage for g in grants(land(world, p, 2, 1))] == [1]


def test_batches_are_granted_in_order_even_if_allocated_out_of_order() -> None:
    """`stage()` hands them out in order."""
    world = SenderWorld()
    p = world.connect()
    p.admit(1, 2)
    first = sent(world.stage(1, 0, keys(1)), AllocRequest)
    second = sent(world.stage(1, 1, keys(2), last=True), AllocRequest)
    assert grants(p.answer(second, [1])) == []
    assert [g.stage for g in grants(p.answer(first, [0]))] == [0, 1]


# ------------------------------------------------------------------ two receivers in parallel


def test_one_receiver_holds_at_most_its_share() -> None:
    """A receiver that is slow must not stop the transfers to the others."""
    world = SenderWorld(staging=4)
    slow, fast = world.connect("slow"), world.connect("fast")
    first, second, third = (fast.serial + i for i in (1, 2, 3))
    slow.admit(first, 4)
    fast.admit(second, 2)
    slow.stage(first, 0, keys(1, 2, 3, 4), last=True)  # alone, it may take everything
    assert world.free == 0
    fast.stage(second, 0, keys(5, 6), last=True)
    slow.admit(third, 4)
    slow.stage(third, 0, keys(7, 8, 9, 10), last=True)
    world.fill(first, 0)
    granted = grants(world.land(first, 0))
    assert [(g.transfer_no, len(g.entries)) for g in granted] == [(second, 2), (third, 2)]
    assert world.free == 0


def test_a_batch_that_waits_for_its_own_receivers_share_lets_others_pass() -> None:
    """Its own receiver's puts will wake it; the others need not wait for those."""
    world = SenderWorld(staging=4)
    slow, fast = world.connect("slow"), world.connect("fast")
    numbers = iter(range(fast.serial + 1, 100))
    one, two, three, four = next(numbers), next(numbers), next(numbers), next(numbers)
    fast.admit(one, 1)
    fast.stage(one, 0, keys(0))
    slow.admit(two, 2)
    slow.stage(two, 0, keys(1, 2), last=True)  # its whole share
    slow.admit(three, 1)
    assert grants(slow.stage(three, 0, keys(3), last=True)) == []
    fast.admit(four, 1)
    assert len(grants(fast.stage(four, 0, keys(4), [8], last=True))) == 1


def test_with_more_receivers_than_slots_everyone_has_one() -> None:
    """A share of nothing would be a wait for ever."""
    world = SenderWorld(staging=1)
    a, b = world.connect("a"), world.connect("b")
    first, second = b.serial + 1, b.serial + 2
    a.admit(first, 1)
    b.admit(second, 1)
    a.stage(first, 0, keys(1), last=True)
    b.stage(second, 0, keys(2), last=True)
    world.fill(first, 0)
    assert [g.transfer_no for g in grants(world.land(first, 0))] == [second]


def test_slots_of_a_dead_request_do_not_hold_up_a_batch_as_large_as_the_rest() -> None:
    """An engine that hangs with one slot in its hands must not stop every request that wants all of the staging."""
    world = SenderWorld(staging=4)
    p = world.connect()
    p.admit(1, 1)
    p.stage(1, 0, keys(0), last=True)
    world.feed(ev.CancelRequested(1))
    world.drained(1)  # the engine has not let go of its slot
    p.admit(2, 4)
    granted = grants(p.stage(2, 0, keys(1, 2, 3, 4), last=True))
    assert [len(grant.entries) for grant in granted] == [3]
    world.let_go(1)
    assert world.free == 1
