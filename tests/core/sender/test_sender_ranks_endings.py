"""How a transfer of several ranks ends: for all of them at once, also for those that come late."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from core_parts import keys
from sender_ranks import error_of, open_both, put_all, two_ranks
from sender_world import SenderWorld, failures_in, finished, sent, sent_all

from kvpd.core.events import DrainRequested, RequestCancelled
from kvpd.core.messages import AllocRequest, CancelNotif
from kvpd.core.sender import events as ev
from kvpd.errors import ErrorCode


def end_both(world: SenderWorld, numbers: Sequence[int]) -> list[ev.SenderAction]:
    """The puts of these shares have ended, and their engines let go."""
    actions: list[ev.SenderAction] = []
    for number in numbers:
        actions += world.drained(number)
        actions += world.let_go(number)
    return actions


ENDS = {
    "cancelled": ev.CancelRequested(12),
    "cancelled by name": RequestCancelled("r"),
    "left by one": ev.EngineLetGo(12),
}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_an_end_is_told_to_every_rank_and_to_the_receiver_once(end: ev.SenderEvent) -> None:
    """A rank that never heard of it would wait for the others for ever."""
    world, p = two_ranks()
    open_both(world, p, 11, 1)
    p.stage(11, 0, keys(1), [0], last=True)
    world.stage(12, 0, keys(1), last=True)
    world.fill(11, 0)
    actions = world.feed(end)
    assert finished(actions) == {11: ErrorCode.CANCELLED, 12: ErrorCode.CANCELLED}
    assert [a.transfer_no for a in actions if isinstance(a, ev.CancelTransfer)] == [11, 12]
    assert sent_all(world.drained(12), CancelNotif) == []  # the puts of rank 0 may still land
    notif = sent(world.drained(11), CancelNotif)
    assert (notif.transfer_no, notif.drained) == (11, True)
    assert world.drained(11) == []
    p.ack(notif)
    for number in (11, 12):
        world.let_go(number)
    assert world.core.is_clean


def test_one_rank_whose_puts_do_not_drain_speaks_for_all() -> None:
    """What may still land in one rank's window keeps the slot of every rank."""
    world, p = two_ranks()
    open_both(world, p, 11, 1)
    p.stage(11, 0, keys(1), [0], last=True)
    world.fill(11, 0)
    world.feed(ev.CancelRequested(12))
    world.drained(11, drained=False)
    actions = world.drained(12)
    assert not sent(actions, CancelNotif).drained
    assert world.core.peer_of("decode-0") is None, "the session is of no use any more"
    for number in (11, 12):
        world.let_go(number)
    assert world.core.is_clean


def test_a_lost_receiver_is_greeted_anew_when_every_ranks_puts_have_ended() -> None:
    """Its Hello says that they have."""
    world, p = two_ranks()
    open_both(world, p, 11, 1)
    p.stage(11, 0, keys(1), [0], last=True)
    world.fill(11, 0)
    world.feed(ev.PutsFailed(11, 0, "cut"))
    world.drained(12)
    assert world.core.transfer_count == 1
    world.drained(11)
    assert world.core.transfer_count == 0


def test_slots_that_one_rank_is_filling_wait_for_its_engine_alone() -> None:
    """The other rank's come back without it."""
    world, p = two_ranks(staging=2)
    open_both(world, p, 11, 1)
    p.stage(11, 0, keys(1), [0], last=True)
    world.stage(12, 0, keys(1), last=True)
    assert world.core.is_filling(11)
    world.feed(ev.CancelRequested(11))
    world.let_go(12)
    for number in (11, 12):
        world.drained(number)
    assert (world.core.is_filling(11), world.core.is_filling(12)) == (True, False)
    assert [staging.free_count for staging in world.core.staging] == [1, 2]
    world.let_go(11)
    assert [staging.free_count for staging in world.core.staging] == [2, 2]


def test_a_rank_that_never_opens_ends_it_by_the_request_timeout_which_names_it() -> None:
    """An engine whose rank hangs must be found in the log, not guessed."""
    world, p = two_ranks(request_timeout_s=4.0)
    p.answer(sent(world.open(11, 1, req_id="r"), AllocRequest))
    p.stage(11, 0, keys(1), [0], last=True)
    assert finished(put_all(world, p, 11, 0)) == {}
    actions = world.pass_time(4.0)
    assert finished(actions) == {11: ErrorCode.REQUEST_TIMEOUT}
    assert "of 2 ranks these have not opened it: 1" in error_of(actions, 11).detail


# ------------------------------------------------------------------ ranks that come late


def test_a_rank_that_comes_after_the_end_is_told_it_and_opens_nothing() -> None:
    """Anew, and alone, it would hold room until the request timeout."""
    world, p = two_ranks(request_timeout_s=4.0)
    world.open(11, 1, req_id="r")
    world.feed(RequestCancelled("r"))
    p.ack(sent(end_both(world, [11]), CancelNotif))
    actions = world.open(12, 1, req_id="r", rank=1)
    assert finished(actions) == {12: ErrorCode.CANCELLED}
    assert world.core.is_clean
    # All have come: the next open is a new transfer's.
    assert sent(world.open(13, 1, req_id="r", rank=1), AllocRequest).transfer_no == 13
    assert finished(world.pass_time(3.9)) == {}
    assert finished(world.open(14, 1, req_id="r")) == {}


def test_a_refusal_is_every_ranks() -> None:
    """Refused for one and taken for the other, the other would wait alone."""
    world, _ = two_ranks(transfers_max=1)
    world.open(11, 1, req_id="holder")
    assert finished(world.open(12, 1, req_id="r")) == {12: ErrorCode.QUEUE_FULL}
    world.feed(ev.CancelRequested(11))
    end_both(world, [11])
    assert finished(world.open(13, 1, req_id="r", rank=1)) == {13: ErrorCode.QUEUE_FULL}


def test_a_proxy_hears_of_a_failure_once_for_all_ranks() -> None:
    """Of the transfer; not of each rank's part, and not again when a rank comes late."""
    world, p = two_ranks(proxy_address="proxy")
    actions = world.open(11, 1, req_id="r")
    actions += world.feed(ev.CancelRequested(11))
    actions += end_both(world, [11])
    p.ack(sent(actions, CancelNotif))
    (notif,) = failures_in(actions)
    assert (notif.req_id, notif.transfer_no) == ("r", 11)
    late = world.open(12, 1, req_id="r", rank=1)
    assert finished(late) == {12: ErrorCode.CANCELLED}
    assert failures_in(late) == []


def test_a_draining_sender_lets_ranks_join_what_runs() -> None:
    """What runs may finish, and it cannot without them."""
    world, p = two_ranks()
    p.answer(sent(world.open(11, 1, req_id="r"), AllocRequest))
    world.feed(DrainRequested())
    assert finished(world.open(12, 1, req_id="r", rank=1)) == {}
    assert finished(world.open(13, 1, req_id="other")) == {13: ErrorCode.DRAINING}


def test_a_late_ranks_time_is_over_where_it_has_come() -> None:
    """The deadline after which nobody is expected any more then finds nobody, and ends nothing."""
    world, p = two_ranks(request_timeout_s=4.0)
    world.open(11, 1, req_id="r")
    world.feed(RequestCancelled("r"))
    p.ack(sent(end_both(world, [11]), CancelNotif))
    world.open(12, 1, req_id="r", rank=1)
    assert finished(world.pass_time(8.0)) == {}
    assert world.core.is_clean


def test_what_has_ended_is_forgotten_in_time() -> None:
    """A rank that never comes must not cost memory for ever, nor fail a request of the same name tomorrow."""
    world, p = two_ranks(request_timeout_s=4.0)
    world.open(11, 1, req_id="r")
    world.feed(RequestCancelled("r"))
    p.ack(sent(end_both(world, [11]), CancelNotif))
    world.pass_time(8.0)
    assert finished(world.open(12, 1, req_id="r", rank=1)) == {}


def test_what_has_ended_is_remembered_up_to_a_bound() -> None:
    """Invariant 9. What is not remembered is opened anew."""
    world, p = two_ranks(latecomers_max=1)
    for number, req_id in ((11, "a"), (12, "b")):
        world.open(number, 1, req_id=req_id)
        world.feed(RequestCancelled(req_id))
        p.ack(sent(end_both(world, [number]), CancelNotif))
    assert finished(world.open(13, 1, req_id="a", rank=1)) == {13: ErrorCode.CANCELLED}
    assert finished(world.open(14, 1, req_id="b", rank=1)) == {}
