"""Ranks: each opens a request by itself, in any order, and one transfer serves them all."""

from __future__ import annotations

import pytest
from core_parts import CHUNK, code_of, keys, regions
from sender_ranks import error_of, open_both, put_all, two_ranks
from sender_world import SenderWorld, finished, grants, sent, sent_all

from kvpd.core.events import ReportName, TimePassed
from kvpd.core.messages import AllocRequest, Heartbeat, Region, WriteDone
from kvpd.core.sender import events as ev
from kvpd.errors import ErrorCode


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
    room, batch = sent_all(p.come_up(), AllocRequest)
    p.answer(room)
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
