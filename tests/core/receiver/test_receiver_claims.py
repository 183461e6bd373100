"""Who may read a complete transfer, and what happens when they go."""

from __future__ import annotations

from core_parts import CHUNK, code_of, keys
from receiver_world import ReceiverWorld, SenderPeer

from kvpd.core.events import ReportName, RequestCancelled
from kvpd.core.receiver import events as ev
from kvpd.errors import AdmissionRefused, ErrorCode, TransferFailed


def granted(p: SenderPeer, transfer_no: int, *slots: int, engine: int = 1, claim: int = 1) -> ev.GrantClaim:
    """Chunks `key-0`, `key-1`, ... in these slots are handed out."""
    chunks = (ev.ClaimedSlot(keys(i)[0], slot, CHUNK) for i, slot in enumerate(slots))
    return ev.GrantClaim(engine, claim, p.id(transfer_no), tuple(chunks))


def refused(actions: list[ev.ReceiverAction]) -> list[tuple[int, int, ErrorCode | None]]:
    """The claims that are refused: engine, claim, code."""
    return [(a.engine, a.claim, code_of(a.error)) for a in actions if isinstance(a, ev.RefuseClaim)]


def test_a_claim_gets_the_chunks_in_request_order() -> None:
    """Exactly the chunks' own bytes, wherever they lie."""
    world = ReceiverWorld()
    p = world.connect()
    p.alloc(1, 3, keys(2), first=2, last=True)
    p.alloc(1, 3, keys(0, 1), open_=False)
    p.done(1, 0, 3)
    assert world.claim("req-1") == [granted(p, 1, 1, 2, 0)]


def test_a_claim_that_comes_first_is_granted_when_the_last_chunk_lands() -> None:
    """A decode engine need not guess when to ask."""
    world = ReceiverWorld()
    p = world.connect()
    assert world.claim("req-1") == []
    p.alloc(1, 2, keys(0, 1), last=True)
    p.done(1, 0, 1)
    assert p.done(1, 1, 1) == [p.ack(), p.ready(1, 2), granted(p, 1, 0, 1)]


def test_a_claim_times_out_with_what_it_waited_for() -> None:
    """A claim blocks until complete, failed or timed out, never for ever."""
    world = ReceiverWorld(lease_s=100.0)
    p = world.connect()
    p.alloc(1, 2, keys(0))
    world.claim("req-1", timeout_s=5.0)
    world.claim("req-2", claim=2, timeout_s=6.0)
    assert world.pass_time(4.9) == []
    (first, second) = world.pass_time(1.1)
    assert isinstance(first, ev.RefuseClaim)
    assert isinstance(second, ev.RefuseClaim)
    assert first.error.code is second.error.code is ErrorCode.CLAIM_TIMEOUT
    assert f"{p.id(1)} is admitted" in first.error.detail
    assert "no transfer of this req_id is known" in second.error.detail


def test_a_waiting_claim_fails_with_its_transfer() -> None:
    """The engine learns at once that nothing will come."""
    world = ReceiverWorld()
    p = world.connect()
    p.alloc(1, 2, keys(0))
    world.claim("req-1", timeout_s=1e6)
    assert refused(p.cancel(1, reason=ErrorCode.REQUEST_TIMEOUT)) == [(1, 1, ErrorCode.REQUEST_TIMEOUT)]


def test_a_second_claim_of_the_same_transfer_is_refused() -> None:
    """Two engines that decode one request answer it twice."""
    world = ReceiverWorld()
    p = world.connect()
    p.complete(1, keys(0))
    world.claim("req-1")
    assert refused(world.claim("req-1", engine=2, claim=1)) == [(2, 1, ErrorCode.CLAIMED)]
    assert world.core.holds(1)
    assert not world.core.holds(2)


def test_of_two_claims_that_wait_the_first_is_granted_and_the_other_refused() -> None:
    """First come, first served, and the loser need not wait for its timeout."""
    world = ReceiverWorld()
    p = world.connect()
    world.claim("req-1", engine=1)
    world.claim("req-1", engine=2)
    p.alloc(1, 1, keys(0), last=True)
    actions = p.done(1, 0, 1)
    assert granted(p, 1, 0, engine=1) in actions
    assert refused(actions) == [(2, 1, ErrorCode.CLAIMED)]


def test_a_req_id_that_two_transfers_bear_is_ambiguous_unless_the_sender_is_named() -> None:
    """Guessing would hand out the wrong prompt's KV."""
    world = ReceiverWorld()
    a, b = world.connect("a"), world.connect("b")
    a.complete(1, keys(0), req_id="same")
    b.complete(1, keys("other"), req_id="same")
    assert refused(world.claim("same")) == [(1, 1, ErrorCode.AMBIGUOUS_REQUEST)]
    assert world.claim("same", sender="a") == [granted(a, 1, 0)]


def test_a_claim_that_waits_becomes_ambiguous_with_the_second_transfer() -> None:
    """And is refused at once: waiting longer cannot make it clear."""
    world = ReceiverWorld()
    a, b = world.connect("a"), world.connect("b")
    a.alloc(1, 1, req_id="same")
    world.claim("same")
    world.claim("same", claim=2, sender="b")
    assert refused(b.alloc(1, 1, req_id="same")) == [(1, 1, ErrorCode.AMBIGUOUS_REQUEST)]


def test_a_revoked_attempt_does_not_make_its_successor_ambiguous() -> None:
    """A retry bears the same req_id while the first attempt's slots still wait for their fence."""
    world = ReceiverWorld()
    p = world.connect()
    p.alloc(1, 1, keys("a"), req_id="same")
    world.feed(RequestCancelled("same"))
    p.alloc(2, 1, keys(0), last=True, req_id="same")
    p.done(2, 0, 1)
    assert world.claim("same") == [granted(p, 2, 1)]


def test_a_claim_number_in_use_a_rank_too_many_and_a_full_desk_are_refused() -> None:
    """An engine that counts wrongly gets an error, not somebody else's answer."""
    world = ReceiverWorld(claims_max=1)
    p = world.connect()
    world.claim("later", claim=1)
    assert refused(world.claim("other", claim=1)) == [(1, 1, ErrorCode.PROTOCOL_ERROR)]
    assert refused(world.claim("other", claim=2, rank=1)) == [(1, 2, ErrorCode.PROTOCOL_ERROR)]
    assert refused(world.claim("other", claim=3)) == [(1, 3, ErrorCode.QUEUE_FULL)]
    p.complete(1, keys(0))
    assert world.claim("req-1", claim=4) == [granted(p, 1, 0, claim=4)]
    assert refused(world.claim("req-1", claim=4)) == [(1, 4, ErrorCode.PROTOCOL_ERROR)]


def test_releasing_a_claim_that_waits_only_stops_the_waiting() -> None:
    """The engine gave up; the transfer is still there for the next."""
    world = ReceiverWorld()
    p = world.connect()
    world.claim("req-1")
    assert world.release() == []
    assert world.release() == []
    p.complete(1, keys(0))
    assert world.claim("req-1") == [granted(p, 1, 0)]


def test_an_engine_that_disconnects_waits_for_nothing_but_keeps_what_it_reads() -> None:
    """A closed socket does not prove that nobody reads: a fork may hold the memory."""
    world = ReceiverWorld()
    p = world.connect()
    p.complete(1, keys(0))
    world.claim("req-1", claim=1)
    world.claim("req-2", claim=2)
    world.claim("req-2", engine=2, claim=1)
    assert world.feed(ev.EngineClosed(1)) == []
    assert world.core.counts.ready == 1
    p.complete(2, keys(1))
    assert world.feed(ev.EngineDied(2)) == []


def test_a_claim_returns_when_its_engine_has_died() -> None:
    """Another engine can still answer the request."""
    world = ReceiverWorld()
    p = world.connect()
    p.complete(1, keys(0))
    world.claim("req-1", engine=1)
    world.claim("later", engine=1, claim=2)
    assert world.feed(ev.EngineDied(1)) == []
    assert [r.fields for r in world.reported(ReportName.CLAIM_RETURNED)] == [{"engine": 1, "rank": 0}]
    assert world.claim("req-1", engine=2) == [granted(p, 1, 0, engine=2)]


def test_a_claim_returns_once() -> None:
    """A request that kills its engine must not kill them all, one after another."""
    world = ReceiverWorld()
    p = world.connect()
    p.complete(1, keys(0))
    world.claim("req-1", engine=1)
    world.feed(ev.EngineDied(1))
    world.claim("req-1", engine=2)
    assert world.feed(ev.EngineDied(2)) == [ev.AnnounceTransfer(ev.Outcome.RELEASED, p.id(1), "req-1", 1)]
    assert world.core.is_clean


def test_a_returned_claim_has_its_original_time_to_live() -> None:
    """Returning must not keep a request alive that nobody wants."""
    world = ReceiverWorld(ready_ttl_s=60.0, claim_grace_s=10.0, lease_s=1e4)
    p = world.connect()
    p.complete(1, keys(0))
    world.claim("req-1")
    world.pass_time(30.0)
    world.feed(ev.EngineDied(1))
    assert world.pass_time(29.9) == []
    assert len(world.pass_time(0.1)) == 1
    assert world.core.is_clean


def test_a_returned_claim_has_at_least_the_grace() -> None:
    """However long the dead engine had read, the next one gets a chance."""
    world = ReceiverWorld(ready_ttl_s=60.0, claim_grace_s=10.0, lease_s=1e4)
    p = world.connect()
    p.complete(1, keys(0))
    world.claim("req-1")
    world.pass_time(500.0)
    assert world.core.counts.ready == 1
    world.feed(ev.EngineDied(1))
    assert world.pass_time(9.9) == []
    assert len(world.pass_time(0.1)) == 1
    assert world.core.is_clean


def test_a_complete_transfer_that_nobody_claims_expires() -> None:
    """Its reader may never come; its room is needed."""
    world = ReceiverWorld(ready_ttl_s=60.0, lease_s=1e4)
    p = world.connect()
    p.complete(1, keys(0))
    assert world.pass_time(59.9) == []
    assert world.pass_time(0.1) == [p.failed(1, 1, ErrorCode.READY_EXPIRED, "nobody claimed it within 60 s")]
    assert world.core.is_clean
    assert [code_of(r.error) for r in p.alloc(1, 1, keys(0)) if isinstance(r, ev.AnnounceTransfer)] == []


def test_errors_of_claims_are_exceptions_of_the_right_kind() -> None:
    """The service raises them as they are."""
    world = ReceiverWorld(claims_max=0)
    (full,) = world.claim("x")
    (bad,) = world.claim("x", rank=9)
    assert isinstance(full, ev.RefuseClaim)
    assert isinstance(bad, ev.RefuseClaim)
    assert isinstance(full.error, AdmissionRefused)
    assert isinstance(bad.error, TransferFailed)


# ------------------------------------------------------------------ two ranks, one ledger


def two_ranks(**settings: object) -> tuple[ReceiverWorld, SenderPeer]:
    """A receiver whose engine has two ranks, with transfer 1 complete."""
    world = ReceiverWorld(ranks=2, lease_s=1e4, **settings)  # type: ignore[arg-type]
    p = world.connect()
    p.alloc(1, 2, keys(0, 1), last=True)
    p.done(1, 0, 2, rank=0)
    assert world.core.counts.writing == 2
    assert p.done(1, 0, 2, rank=1) == [p.ack(), p.ready(1, 2)]
    return world, p


def test_a_chunk_is_ready_when_every_rank_has_written_its_part() -> None:
    """One ledger for all ranks (fault 2): a slot is the same number in every rank's region."""
    world, _ = two_ranks()
    assert world.core.counts.ready == 2


def test_the_same_ranks_write_twice_is_not_the_other_ranks() -> None:
    """A repeat completes nothing."""
    world = ReceiverWorld(ranks=2)
    p = world.connect()
    p.alloc(1, 1, keys(0), last=True)
    p.done(1, 0, 1, rank=1)
    assert p.done(1, 0, 1, rank=1) == [p.ack()]


def test_every_rank_claims_for_itself_and_the_last_release_frees() -> None:
    """The ranks of one engine are processes of their own."""
    world, p = two_ranks()
    assert world.claim("req-1", rank=0, claim=1) == [granted(p, 1, 0, 1)]
    assert refused(world.claim("req-1", rank=0, claim=2)) == [(1, 2, ErrorCode.CLAIMED)]
    assert world.release(claim=1) == []
    assert world.claim("req-1", rank=1, claim=3) == [granted(p, 1, 0, 1, claim=3)]
    assert len(world.release(claim=3)) == 1
    assert world.core.is_clean


def test_when_the_whole_engine_dies_every_ranks_claim_returns() -> None:
    """Its ranks are processes that die together; a restarted engine claims all of it anew."""
    world, p = two_ranks()
    world.claim("req-1", engine=1, rank=0)
    world.claim("req-1", engine=2, rank=1)
    assert world.feed(ev.EngineDied(1)) == []
    assert world.feed(ev.EngineDied(2)) == []
    assert world.claim("req-1", engine=3, rank=0) == [granted(p, 1, 0, 1, engine=3)]
    assert world.claim("req-1", engine=4, rank=1) == [granted(p, 1, 0, 1, engine=4)]
    world.feed(ev.EngineDied(3))
    assert len(world.release(engine=4)) == 1
    assert world.core.is_clean


def test_a_rank_that_never_comes_is_waited_for_no_longer_than_the_ttl() -> None:
    """The other ranks finish reading; then the room is free."""
    world, _ = two_ranks(ready_ttl_s=60.0)
    world.claim("req-1", rank=0)
    assert world.pass_time(60.0) == []
    assert refused(world.claim("req-1", rank=1, claim=2)) == [(1, 2, ErrorCode.CLAIMED)]
    assert len(world.release()) == 1
    assert world.core.is_clean


def test_a_rank_that_never_comes_does_not_hold_what_the_others_have_released() -> None:
    """Even when nobody reads any more."""
    world, _ = two_ranks(ready_ttl_s=60.0)
    world.claim("req-1", rank=0)
    world.release()
    assert world.core.counts.ready == 2
    assert world.pass_time(60.0) != []
    assert world.core.is_clean


def test_an_engine_that_holds_a_claim_for_too_long_is_cut_off_and_keeps_its_memory() -> None:
    """A hung engine must be seen; but it may still read, so its slots come back only when its process is dead."""
    world = ReceiverWorld(claim_ttl_s=30.0, lease_s=1000.0)
    world.connect().complete(1, keys(0, 1))
    world.claim("req-1", engine=5)
    assert world.pass_time(29.9) == []
    (cut,) = world.pass_time(0.1)
    assert isinstance(cut, ev.CutEngine)
    assert (cut.engine, "30 s" in cut.detail) == (5, True)
    assert world.reported(ReportName.CLAIM_OVERDUE)
    world.feed(ev.EngineClosed(5))
    assert world.core.counts.ready == 2
    world.feed(ev.EngineDied(5))
    assert [type(action) for action in world.claim("req-1", engine=6)] == [ev.GrantClaim]


def test_a_claim_released_in_time_is_never_overdue() -> None:
    """The deadline goes with the claim."""
    world = ReceiverWorld(claim_ttl_s=30.0, lease_s=1000.0)
    world.connect().complete(1, keys(0))
    world.claim("req-1")
    world.release()
    assert world.pass_time(100.0) == []
    assert world.core.is_clean


def test_an_engine_that_comes_late_learns_what_is_ready() -> None:
    """Announcements are pushed once; a decode engine that restarts must not wait for one that was made before."""
    world = ReceiverWorld()
    p = world.connect()
    p.complete(1, keys(0, 1))
    p.alloc(2, 1)
    assert world.core.ready() == [p.ready(1, 2)]
    world.claim("req-1")
    assert world.core.ready() == []
