"""Ranks: each opens a request by itself, one transfer serves them all, and it ends for all of them at once."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from core_parts import CHUNK, code_of, keys, regions
from sender_world import ReceiverPeer, SenderWorld, failures_in, finished, grants, sent, sent_all

from kvpd.core.events import DrainRequested, ReportName, RequestCancelled, TimePassed
from kvpd.core.messages import AllocRequest, CancelNotif, Heartbeat, Region, WriteDone
from kvpd.core.sender import events as ev
from kvpd.errors import ErrorCode, TransferError


def two_ranks(staging: int = 8, **settings: object) -> tuple[SenderWorld, ReceiverPeer]:
    """A sender for engines of two ranks, and a receiver whose session is up. Numbers from 11 on are unused."""
    world = SenderWorld(staging, ranks=2, **settings)
    return world, world.connect()


def open_both(world: SenderWorld, p: ReceiverPeer, first: int, total: int, *, req_id: str = "r") -> None:
    """Rank 0 opens by `first`, rank 1 by the number behind it; the transfer is admitted."""
    actions = world.open(first, total, req_id=req_id)
    actions += world.open(first + 1, total, req_id=req_id, rank=1)
    p.answer(sent(actions, AllocRequest))


def put_all(world: SenderWorld, p: ReceiverPeer, number: int, piece: int) -> list[ev.SenderAction]:
    """A piece is filled, put and acknowledged."""
    actions = world.fill(number, piece)
    actions += world.land(number, piece)
    return actions + p.ack(sent(actions, WriteDone))


def error_of(actions: Sequence[ev.SenderAction], number: int) -> TransferError:
    """Why this open's transfer has ended."""
    (error,) = [a.error for a in actions if isinstance(a, ev.FinishTransfer) and a.transfer_no == number]
    assert error is not None
    return error


# ------------------------------------------------------------------ a transfer that goes well


@pytest.mark.parametrize("first", [0, 1])
def test_ranks_join_in_either_order_and_one_transfer_serves_both(first: int) -> None:
    """One request at the receiver, one allocation of each batch, and one word to the proxy (entry 2)."""
    world, p = two_ranks(proxy_address="proxy")
    request = sent(world.open(11, 2, req_id="r", rank=first), AllocRequest)
    assert sent_all(world.open(12, 2, req_id="r", rank=1 - first), AllocRequest) == []
    p.answer(request)
    (grant,) = grants(p.stage(12, 0, keys(1, 2), [5, 3], last=True))
    assert (grant.transfer_no, [e and e.remote for e in grant.entries]) == (12, [5, 3])
    actions = world.stage(11, 0, keys(1, 2), last=True)
    assert sent_all(actions, AllocRequest) == []
    assert [(g.transfer_no, [e and e.remote for e in g.entries]) for g in grants(actions)] == [(11, [5, 3])]
    (post,) = (action for action in world.fill(12, 0) if isinstance(action, ev.PostPuts))
    assert (post.rank, post.transfer_no) == (1 - first, 12)
    done = sent(world.land(12, 0), WriteDone)
    assert (done.transfer_no, done.rank, done.first_chunk, done.count) == (11, 1 - first, 0, 2)
    assert finished(p.ack(done)) == {}
    actions = put_all(world, p, 11, 0)
    assert sent(actions, WriteDone).rank == first
    assert finished(actions) == {11: None, 12: None}
    (told,) = (action.message for action in actions if isinstance(action, ev.NotifyProxy))
    assert (told.req_id, told.transfer_no) == ("r", 11)
    world.feed(ev.ProxyAcknowledged("proxy", told.sender_incarnation, told.message_id))
    assert world.core.is_clean
    assert [report.fields["rank"] for report in world.reported(ReportName.TRANSFER_JOINED)[1:]] == [1 - first]
    assert world.reported(ReportName.TRANSFER_DONE)[0].fields["bytes"] == 4 * CHUNK


def test_a_batch_that_is_being_allocated_is_granted_to_every_rank_that_asked() -> None:
    """Whoever asks first, asks for all; the answer serves all who have asked meanwhile."""
    world, p = two_ranks()
    open_both(world, p, 11, 1)
    request = sent(world.stage(12, 0, keys(1), last=True), AllocRequest)
    assert world.stage(11, 0, keys(1), last=True) == []
    assert [g.transfer_no for g in grants(p.answer(request, [7]))] == [11, 12]


def test_a_rank_that_joins_a_waiting_transfer_is_admitted_with_it() -> None:
    """And its batch, asked for before the session was up, goes out once."""
    world = SenderWorld(ranks=2)
    p = world.receiver()
    world.open(1, 1, req_id="r")
    world.stage(1, 0, keys(1), last=True)
    world.open(2, 1, req_id="r", rank=1)
    world.stage(2, 0, keys(1), last=True)
    (batch,) = sent_all(p.come_up(), AllocRequest)
    assert [g.transfer_no for g in grants(p.answer(batch, [0]))] == [1, 2]


def test_a_rank_far_behind_gets_every_batch_that_the_others_have_done() -> None:
    """Ranks compute in their own time: what was allocated stays known until the last has staged it."""
    world, p = two_ranks(staging=1)
    open_both(world, p, 11, 3)
    for stage, index in enumerate((4, 2, 9)):
        p.stage(11, stage, keys(stage), [index])
        put_all(world, p, 11, stage)
    for stage, index in enumerate((4, 2, 9)):
        (grant,) = grants(world.stage(12, stage, keys(stage)))
        assert grant.entries == (ev.StagedSlot(0, index, CHUNK),)
        actions = put_all(world, p, 12, stage)
    assert finished(actions) == {11: None, 12: None}


def test_ranks_that_take_two_requests_in_opposite_order_both_finish() -> None:
    """Entry 2: with one staging buffer for all ranks, each would hold what the other waits for."""
    world, p = two_ranks(staging=1)
    open_both(world, p, 11, 1, req_id="a")
    open_both(world, p, 13, 1, req_id="b")
    p.stage(11, 0, keys("a"), [0], last=True)  # rank 0 begins with a
    p.stage(14, 0, keys("b"), [1], last=True)  # rank 1 with b
    put_all(world, p, 11, 0)
    put_all(world, p, 14, 0)
    world.stage(13, 0, keys("b"), last=True)
    world.stage(12, 0, keys("a"), last=True)
    assert finished(put_all(world, p, 13, 0)) == {13: None, 14: None}
    assert finished(put_all(world, p, 12, 0)) == {11: None, 12: None}


def test_the_staging_of_one_rank_is_no_others() -> None:
    """Each has its own window, so an engine that is slow stops nobody but itself."""
    world, p = two_ranks(staging=1)
    open_both(world, p, 11, 1, req_id="a")
    open_both(world, p, 13, 1, req_id="b")
    p.stage(11, 0, keys("a"), [0], last=True)
    assert grants(p.stage(13, 0, keys("b"), [1], last=True)) == []  # rank 0 has no room
    assert [g.transfer_no for g in grants(world.stage(14, 0, keys("b"), last=True))] == [14]
    assert [staging.waiting_count for staging in world.core.staging] == [1, 0]


def test_chunks_that_the_receiver_has_are_done_when_every_rank_has_passed_them() -> None:
    """Nothing travels, and still no rank may be left behind by the end of the others."""
    world, p = two_ranks()
    open_both(world, p, 11, 1)
    (grant,) = grants(p.stage(11, 0, keys(1), [-1], last=True))
    assert grant.entries == (None,)
    assert finished(world.fill(11, 0)) == {}
    world.stage(12, 0, keys(1), last=True)
    assert finished(world.fill(12, 0)) == {11: None, 12: None}


def test_a_heartbeat_counts_the_puts_of_every_rank() -> None:
    """They are progress, whosever they are."""
    world, p = two_ranks()
    open_both(world, p, 11, 1)
    p.stage(11, 0, keys(1), [0], last=True)
    world.stage(12, 0, keys(1), last=True)
    world.fill(11, 0)
    world.fill(12, 0)
    peer = world.core.peer_of("decode-0")
    assert peer is not None
    world.now += peer.heartbeat_s
    assert sent(world.feed(TimePassed()), Heartbeat).in_flight == ((11, 2),)


def test_it_is_not_over_before_the_last_of_many_ranks_has_come() -> None:
    """Two that are done with it are not all."""
    world = SenderWorld(ranks=3)
    p = world.connect()
    p.answer(sent(world.open(11, 1, req_id="r", rank=2), AllocRequest))
    p.stage(11, 0, keys(1), [0], last=True)
    put_all(world, p, 11, 0)
    for number, rank, end in ((12, 0, {}), (13, 1, {11: None, 12: None, 13: None})):
        world.open(number, 1, req_id="r", rank=rank)
        world.stage(number, 0, keys(1), last=True)
        assert finished(put_all(world, p, number, 0)) == end


# ------------------------------------------------------------------ whose open belongs to which transfer


def test_the_next_open_of_the_same_rank_is_another_transfer() -> None:
    """A retry, or two requests of one name: the n-th of one rank goes with the n-th of the other."""
    world, p = two_ranks()
    first = sent(world.open(11, 1, req_id="r"), AllocRequest)
    second = sent(world.open(12, 1, req_id="r"), AllocRequest)
    assert (first.transfer_no, second.transfer_no) == (11, 12)
    world.open(13, 1, req_id="r", rank=1)
    world.open(14, 1, req_id="r", rank=1)
    p.answer(first)
    p.answer(second)
    p.stage(13, 0, keys("x"), [0], last=True)
    p.stage(14, 0, keys("y"), [1], last=True)
    assert [g.transfer_no for g in grants(world.stage(11, 0, keys("x"), last=True))] == [11]
    assert [g.transfer_no for g in grants(world.stage(12, 0, keys("y"), last=True))] == [12]


@pytest.mark.parametrize(
    "other",
    [{"group": "another"}, {"receiver": "decode-1"}, {"total": 2}, {"notify": "its own proxy"}, {"req_id": "s"}],
    ids=str,
)
def test_an_open_that_differs_in_anything_joins_nothing(other: dict[str, object]) -> None:
    """Two engines' bytes in one transfer would be nobody's request."""
    world, _ = two_ranks()
    world.open(11, 1, req_id="r")
    world.open(12, **{"total": 1, "req_id": "r", "rank": 1, **other})  # type: ignore[arg-type]
    assert world.core.transfer_count == 2


@pytest.mark.parametrize("rank", [2, -1])
def test_a_rank_that_the_sender_does_not_have_is_refused(rank: int) -> None:
    """Its bytes would land in somebody else's window."""
    world, _ = two_ranks()
    assert finished(world.open(11, 1, rank=rank)) == {11: ErrorCode.PROTOCOL_ERROR}
    assert world.core.is_clean


@pytest.mark.parametrize(
    ("stage", "last_bytes", "words"),
    [
        (keys(1, 3), CHUNK, "2 chunks, the last of 64 bytes, and another rank has staged 2 with other keys"),
        (keys(1), CHUNK, "1 chunks, the last of 64 bytes, and another rank has staged 2 with other keys"),
        (keys(1, 2), 5, "2 chunks, the last of 5 bytes, and another rank has staged 2 with the same keys"),
    ],
)
def test_a_rank_that_stages_something_else_ends_the_transfer(
    stage: tuple[bytes, ...], last_bytes: int, words: str
) -> None:
    """Its bytes are another request's, or cut otherwise: the slots would hold half of this and half of that."""
    world, p = two_ranks()
    open_both(world, p, 11, 2)
    p.stage(11, 0, keys(1, 2), last=True)
    actions = world.stage(12, 0, stage, last_bytes=last_bytes)
    assert finished(actions) == {11: ErrorCode.PROTOCOL_ERROR, 12: ErrorCode.PROTOCOL_ERROR}
    assert "from chunk 0 on rank 1 stages " + words in error_of(actions, 11).detail


# ------------------------------------------------------------------ ends


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


# ------------------------------------------------------------------ the receiver's regions


def changed(which: int, /, **changes: object) -> tuple[Region, ...]:
    """Two ranks' regions, one of them changed."""
    two = list(regions(64, ranks=2))
    fields = {name: getattr(two[which], name) for name in two[which].__struct_fields__}
    two[which] = Region(**{**fields, **changes})
    return tuple(two)


@pytest.mark.parametrize(
    ("given", "code", "words"),
    [
        (regions(64), ErrorCode.LAYOUT_MISMATCH, "the receiver serves 1 ranks, this sender 2: set ranks"),
        (changed(1, rank=2), ErrorCode.PROTOCOL_ERROR, "one piece"),
        (changed(1, worker_address=b"another"), ErrorCode.PROTOCOL_ERROR, "one piece"),
        (changed(1, rkey=b"another"), ErrorCode.PROTOCOL_ERROR, "one piece"),
        (changed(1, base_address=4096), ErrorCode.PROTOCOL_ERROR, "one piece"),
        (changed(1, length=63 * CHUNK), ErrorCode.PROTOCOL_ERROR, "smaller"),
    ],
)
def test_a_receiver_of_other_ranks_is_refused(given: tuple[Region, ...], code: ErrorCode, words: str) -> None:
    """One endpoint puts for all ranks: it must reach each one's window, and nothing else."""
    world = SenderWorld(ranks=2)
    world.open(1, 1)
    actions = world.receiver().welcome(regions=given)
    assert code_of(error_of(actions, 1)) is code
    assert words in error_of(actions, 1).detail
