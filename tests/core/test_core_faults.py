"""What must be impossible (docs: the reference's faults): a test each, named after its number, as far as cores go.

2 and 7 concern the receiver's ledger, 5 and 16 the sender alone; where both sides take part, both are tested.
"""

from __future__ import annotations

import pytest
from core_parts import keys
from receiver_world import ReceiverWorld, refusal_of, revoked_in
from sender_world import SenderWorld, failures_in, finished, grants, readies_in, sent, sent_all

from kvpd.core.events import DrainRequested, RequestCancelled
from kvpd.core.messages import AllocRequest, CancelNotif, ErrorInfo, Hello, WriteDone
from kvpd.core.pool import PoolCounts
from kvpd.core.receiver import events as rev
from kvpd.core.sender import events as sev
from kvpd.errors import ErrorCode


def test_fault_01_a_batch_of_an_admitted_request_never_waits_behind_one_that_queues() -> None:
    """C holds 6 of 10 mid-prefill, A's 5 wait, C's last batch must not wait behind A: the reference deadlocks."""
    world = ReceiverWorld(slots=10)
    p = world.connect()
    p.alloc(1, 6, keys(*range(4)))
    assert p.alloc(2, 5, keys(*range(10, 15)), last=True) == [p.ack()]
    assert p.alloc(1, 6, keys(4, 5), first=4, open_=False, last=True) == [p.placed(1, [4, 5], first=4)]
    p.done(1, 0, 6)
    world.claim("req-1")
    assert world.release()[-1] == p.placed(2, [5, 4, 3, 2, 1], message_id=3)


def test_fault_01_the_sender_asks_for_any_number_of_things_at_once() -> None:
    """No lock around request and reply: one that waits for admission holds up nobody else's batches."""
    world = SenderWorld()
    p = world.connect()
    p.admit(1, 2)
    waiting = sent(world.open(2, 2), AllocRequest)
    assert len(grants(p.stage(1, 0, keys(1, 2), last=True))) == 1
    world.fill(1, 0)
    assert finished(p.ack(sent(world.land(1, 0), WriteDone))) == {1: None}
    assert p.answer(waiting) == []


def test_fault_02_all_ranks_share_one_ledger() -> None:
    """Two ranks that admit two requests in opposite order finish neither."""
    world = ReceiverWorld(slots=2, ranks=2)
    a, b = world.connect("a"), world.connect("b")
    assert a.alloc(1, 2, keys(1, 2), last=True) == [a.placed(1, [0, 1])]
    assert b.alloc(1, 2, req_id="b") == [b.ack()]
    for rank in (1, 0):
        a.done(1, 0, 2, rank=rank)
        world.claim("req-1", rank=rank, claim=rank)
    world.release(claim=0)
    assert world.release(claim=1)[-1] == b.placed(1)


def test_fault_03_the_cancel_that_frees_the_room_is_just_a_message() -> None:
    """It does not queue behind those that wait for what it frees."""
    world = ReceiverWorld(slots=2)
    p = world.connect()
    p.alloc(1, 2)
    p.alloc(2, 2)
    p.alloc(3, 2)
    assert p.cancel(1)[-1] == p.placed(2, message_id=p.last_id - 2)
    sender = SenderWorld()
    q = sender.connect()
    q.admit(1, 2)
    sender.open(2, 2)  # waits for admission
    sender.feed(sev.CancelRequested(1))
    assert sent(sender.drained(1), CancelNotif).transfer_no == 1


@pytest.mark.parametrize(("req_id", "total"), [("", 2), ("r", 0), ("r", -1)])
def test_fault_04_a_request_without_id_or_total_cannot_bypass_admission(req_id: str, total: int) -> None:
    """It is refused, on both sides."""
    world = ReceiverWorld()
    assert refusal_of(world.connect().alloc(1, total, keys(1), req_id=req_id)).code is ErrorCode.LEGACY_SENDER
    assert world.core.is_clean
    assert finished(SenderWorld().open(1, total, req_id=req_id)) == {1: ErrorCode.LEGACY_SENDER}


def test_fault_05_a_batch_larger_than_the_whole_staging_buffer_is_cut() -> None:
    """It would wait for slots that only it could free."""
    world = SenderWorld(staging=1)
    p = world.connect()
    p.admit(1, 3)
    actions = p.stage(1, 0, keys(1, 2, 3), last=True)
    for piece in range(3):
        assert [g.piece for g in grants(actions)] == [piece]
        world.fill(1, piece)
        actions = world.land(1, piece)
        end = p.ack(sent(actions, WriteDone))
    assert finished(end) == {1: None}


def test_fault_06_a_dead_senders_room_comes_back() -> None:
    """By lease, quarantine and fence."""
    world = ReceiverWorld(slots=4)
    dead, alive = world.connect("dead"), world.connect("alive")
    dead.alloc(1, 4, keys(1, 2))
    dead.done(1, 0, 1)
    alive.alloc(1, 4)
    world.pass_time(6.0)
    alive.heartbeat()
    world.pass_time(4.0)
    assert world.core.counts == PoolCounts(free=3, reserved=0, writing=0, ready=0, quarantined=1)
    assert world.feed(rev.SessionClosed(dead.session_no)) == [
        rev.ForgetSession(dead.session_no),
        alive.placed(1, message_id=2),
    ]


def test_fault_07_one_req_id_from_two_senders_is_two_transfers() -> None:
    """Admitted twice and released twice: a req_id is only a label."""
    world = ReceiverWorld(slots=2)
    a, b = world.connect("a"), world.connect("b")
    a.alloc(1, 1, keys(1), req_id="same")
    b.alloc(1, 1, keys(2), req_id="same")
    a.cancel(1)
    assert world.core.counts.writing == 1
    assert b.done(1, 0, 1)[1] == rev.AnnounceTransfer(rev.Outcome.READY, b.id(1), "same", 1)
    world.claim("same")
    world.release()
    assert world.core.is_clean


def test_fault_08_cancelled_while_waiting_for_admission_is_never_admitted_nor_announced() -> None:
    """Neither when room comes nor when its batches do."""
    world = ReceiverWorld(slots=2)
    p = world.connect()
    p.alloc(1, 2)
    p.alloc(2, 2, keys(1, 2), last=True)
    p.cancel(2)
    assert len(p.cancel(1)) == 2
    assert refusal_of(p.alloc(2, 2, keys(1, 2), open_=False, last=True)).code is ErrorCode.CANCELLED
    assert refusal_of(p.done(2, 0, 2)).code is ErrorCode.CANCELLED
    assert world.core.is_clean


def test_fault_08_a_late_admission_does_not_wake_a_cancelled_request() -> None:
    """The answer that crosses the cancel finds no question."""
    world = SenderWorld(proxy_address="proxy")
    p = world.connect()
    request = sent(world.open(1, 1), AllocRequest)
    world.stage(1, 0, keys(1), last=True)
    (told,) = failures_in(world.feed(sev.CancelRequested(1)))
    assert p.answer(request) == []
    p.ack(sent(world.drained(1), CancelNotif))
    world.let_go(1)
    world.acknowledge("proxy", told)
    assert world.core.is_clean


@pytest.mark.parametrize("bad", ["total", "length", "underflow"])
def test_fault_09_an_error_between_admission_and_placement_leaks_nothing(bad: str) -> None:
    """Rollback covers every path."""
    world = ReceiverWorld()
    p = world.connect()
    p.alloc(1, 3)
    match bad:
        case "total":
            actions = p.alloc(1, 2, keys(1), open_=False)
        case "length":
            actions = p.alloc(1, 3, keys(1), open_=False, last_bytes=0)
        case _:
            actions = p.alloc(1, 3, keys(1), open_=False, last=True)
    assert len(revoked_in(actions)) == 1
    assert world.core.is_clean


def test_fault_10_batches_that_arrive_after_an_abort_do_not_open_the_request_anew() -> None:
    """A cancelled transfer stays cancelled, even by an `open` that comes late or twice."""
    world = ReceiverWorld()
    p = world.connect()
    request = p.request(1, 3, keys(1, 2))
    p.say(request)
    p.cancel(1)
    assert refusal_of(p.say(request)).code is ErrorCode.CANCELLED
    assert refusal_of(p.alloc(1, 3, keys(3), first=2, open_=False)).code is ErrorCode.CANCELLED
    assert world.core.is_clean


def test_fault_11_deduplicated_chunks_do_not_leak_if_the_second_reader_never_reads() -> None:
    """Pins belong to transfers, and go with them."""
    world = ReceiverWorld(slots=5)
    a, b = world.connect("a"), world.connect("b")
    a.complete(1, keys(1, 2))
    b.alloc(2, 3, keys(1, 2))
    world.claim("req-1")
    world.release()
    assert world.core.counts.ready == 2
    b.cancel(2)
    assert world.core.is_clean


def test_fault_12_a_slot_is_not_reused_under_a_write_that_is_still_in_flight() -> None:
    """It waits in quarantine until its fence, however many wait for room and however long."""
    world = ReceiverWorld(slots=2, allocation_timeout_s=1e6)
    p, q = world.connect("p"), world.connect("q")
    p.alloc(1, 2, keys(1, 2), last=True)
    assert q.alloc(1, 2, req_id="q") == [q.ack()]
    waiting = q.last_id
    world.feed(RequestCancelled("req-1"))
    for _ in range(3):
        world.pass_time(2.0)
        q.heartbeat()
    assert world.core.counts.quarantined == 2
    assert p.cancel(1)[-1] == q.placed(1, message_id=waiting)


def test_fault_13_a_chunk_that_is_placed_but_not_written_never_deduplicates() -> None:
    """Not while it is written, nor in quarantine: it would be announced before its data."""
    world = ReceiverWorld()
    a, b = world.connect("a"), world.connect("b")
    a.alloc(1, 1, keys(1), last=True)
    assert b.alloc(2, 1, keys(1), last=True) == [b.placed(2, [1])]
    world.feed(RequestCancelled("req-1"))
    assert b.alloc(3, 1, keys(1), last=True) == [b.placed(3, [2])]


def test_fault_14_rollback_and_then_cancel_free_once() -> None:
    """The second time it would free what is another's by then."""
    world = ReceiverWorld(slots=2)
    p = world.connect()
    p.alloc(1, 2, keys(1))
    p.alloc(1, 2, keys(2, 3), first=1, open_=False)  # overflow
    p.cancel(1)
    p.alloc(2, 2, keys(4, 5), last=True)
    p.cancel(1)
    world.feed(RequestCancelled("req-1"))
    assert world.core.counts.writing == 2
    assert p.done(2, 0, 2)[1] == p.ready(2, 2)


@pytest.mark.parametrize("when", ["connecting", "opening", "acking"])
def test_fault_15_a_hung_receiver_blocks_the_sender_no_longer_than_its_deadlines(when: str) -> None:
    """It accepts connections and answers nothing."""
    world = SenderWorld()
    p = world.receiver()
    if when == "connecting":
        world.open(1, 1)
        actions = world.pass_time(world.settings.connect_timeout_s)
    else:
        p = world.connect()
        if when == "opening":
            world.open(1, 1)
        else:
            p.admit(1, 1)
            p.stage(1, 0, keys(1), last=True)
            world.fill(1, 0)
            world.land(1, 0)
        actions = world.pass_time(p.lease_s)
    assert finished(actions) == {1: ErrorCode.PEER_LOST}
    later = world.drained(1)
    world.let_go(1)
    assert world.core.is_clean
    assert sent_all(later + world.open(2, 1), Hello) != []


def test_fault_15_a_restarted_receiver_is_noticed_at_once() -> None:
    """By the first message that meets its new incarnation."""
    old = ReceiverWorld()
    p = old.connect()
    p.alloc(1, 2)
    new = ReceiverWorld()
    p.world = new
    assert refusal_of(p.heartbeat()).code is ErrorCode.NO_SESSION
    assert new.core.is_clean


def test_fault_16_a_proxy_that_is_down_delays_no_transfer() -> None:
    """Its queue is bounded; what does not fit is sent once and counted."""
    world = SenderWorld(proxy_address="down", notifications_max=3)
    p = world.connect()
    for number in range(1, 9):
        p.admit(number, 1)
        p.stage(number, 0, keys(1), [-1], last=True)
        assert finished(world.fill(number, 0)) == {number: None}
    assert world.core.notifications_pending == 3


def test_fault_17_hundreds_of_small_requests_do_not_overtake_a_large_one() -> None:
    """It is admitted as soon as those before it have gone."""
    world = ReceiverWorld(slots=4)
    p = world.connect()
    p.alloc(1, 1)
    assert p.alloc(2, 4) == [p.ack()]
    large = p.last_id
    for number in range(3, 303):
        assert p.alloc(number, 1) == [p.ack()]
    assert p.cancel(1)[-1] == p.placed(2, message_id=large)


def test_fault_18_after_a_restart_nothing_of_the_old_incarnation_is_used() -> None:
    """Endpoints are rebuilt; a put goes only through the endpoint of its own session."""
    world = SenderWorld()
    p = world.connect()
    p.admit(1, 1)
    p.stage(1, 0, keys(1), last=True)
    p.incarnation += 1
    request = sent(world.open(2, 1), AllocRequest)
    actions = p.ack(request, ErrorInfo(ErrorCode.NO_SESSION))
    assert finished(actions) == {1: ErrorCode.PEER_LOST, 2: ErrorCode.PEER_LOST}
    assert world.fill(1, 0) == []  # filled after the loss: it is not put anywhere
    world.open(3, 1)
    world.drained(1)
    world.drained(2)
    p.come_up()
    p.admit(4, 1)
    p.stage(4, 0, keys(2), last=True)
    assert [a.endpoint for a in world.fill(4, 0) if isinstance(a, sev.PostPuts)] == [2]


@pytest.mark.parametrize("what", ["cancel", "write", "batch", "heartbeat"])
def test_fault_19_a_stranger_cannot_act_on_somebody_elses_transfer(what: str) -> None:
    """A peer can name only transfers of its own session."""
    world = ReceiverWorld()
    owner, stranger = world.connect("owner"), world.connect("stranger")
    owner.alloc(1, 2, keys(1, 2), last=True)
    match what:
        case "cancel":
            stranger.cancel(1)
        case "write":
            assert refusal_of(stranger.done(1, 0, 2)).code is ErrorCode.PEER_LOST
        case "batch":
            assert refusal_of(stranger.alloc(1, 2, keys(9), open_=False)).code is ErrorCode.PEER_LOST
        case _:
            stranger.heartbeat(oldest_live=99, in_flight=[(1, 5)])
    assert world.core.counts.writing == 2
    assert owner.done(1, 0, 2) == [owner.ack(), owner.ready(1, 2)]


def test_fault_20_nothing_is_ready_before_everything_is_committed() -> None:
    """Neither claimed nor announced; and what was rolled back is never acknowledged as written."""
    world = ReceiverWorld()
    p = world.connect()
    p.alloc(1, 2, keys(1, 2), last=True)
    p.done(1, 0, 1)
    assert world.claim("req-1") == []
    world.feed(RequestCancelled("req-1"))
    assert refusal_of(p.done(1, 1, 1)).code is ErrorCode.CANCELLED
    sender = SenderWorld(proxy_address="proxy")
    q = sender.connect()
    q.admit(1, 2)
    q.stage(1, 0, keys(1, 2), last=True)
    sender.fill(1, 0)
    landed = sender.land(1, 0)
    assert readies_in(landed) == []
    refused = q.ack(sent(landed, WriteDone), ErrorInfo(ErrorCode.CANCELLED))
    assert readies_in(refused) == []


def test_fault_21_a_storm_of_cancels_is_handled_at_once() -> None:
    """None waits for another: all are told in the same instant, and all are settled by one answer each."""
    world = SenderWorld()
    p = world.connect()
    numbers = range(1, 301)
    for number in numbers:
        p.admit(number, 1)
    for number in numbers:
        world.feed(sev.CancelRequested(number))
    for notif in [sent(world.drained(number), CancelNotif) for number in numbers]:
        p.ack(notif)
    for number in numbers:
        world.let_go(number)
    assert world.core.is_clean
    receiver = ReceiverWorld(slots=8)
    q = receiver.connect()
    for number in numbers:
        q.alloc(number, 2)
    for number in reversed(numbers):
        assert q.cancel(number)[0] == q.ack()
    assert receiver.core.is_clean


def test_fault_22_a_drain_ends_by_itself_what_does_not_end_in_time() -> None:
    """The core's part of a shutdown with a deadline: no new work, and nothing that waits for ever."""
    world = ReceiverWorld(slots=2)
    p = world.connect()
    p.alloc(1, 2)
    p.alloc(2, 2)
    assert refusal_of(world.feed(DrainRequested())).code is ErrorCode.DRAINING
    assert world.core.queue_depth == 0
