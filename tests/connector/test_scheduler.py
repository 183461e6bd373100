"""The connector's scheduler half: from what vLLM asks and tells, to what the workers have to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest

from kvpd.errors import ErrorCode
from kvpd.integrations.vllm.keys import chunk_keys
from kvpd.integrations.vllm.metadata import Failure
from kvpd.integrations.vllm.scheduler import Scheduler

from .parts import LAYOUT, CachedRequests, NewRequest, incoming, outgoing


@attrs.define
class MemoryBoard:
    """A board without a receiver behind it."""

    ready: set[str] = attrs.Factory(set)
    failed: dict[str, Failure] = attrs.Factory(dict)
    discarded: list[tuple[str, bool]] = attrs.Factory(list)
    waits: int = 0

    def wait(self, seconds: float) -> None:
        self.waits += 1

    def is_ready(self, transfer_id: str) -> bool:
        return transfer_id in self.ready

    def failure(self, transfer_id: str) -> Failure | None:
        return self.failed.get(transfer_id)

    def forget(self, transfer_id: str) -> None:
        self.ready.discard(transfer_id)

    def discard(self, transfer_id: str, *, at_once: bool) -> None:
        self.discarded.append((transfer_id, at_once))


def producer() -> Scheduler:
    return Scheduler(LAYOUT, 30.0, None, is_producer=True)


def consumer(load_timeout_s: float = 30.0) -> tuple[Scheduler, MemoryBoard]:
    board = MemoryBoard()
    return Scheduler(LAYOUT, load_timeout_s, board, is_producer=False), board


def build(scheduler: Scheduler, *new: NewRequest, cached: CachedRequests | None = None, **tokens: int) -> Any:
    return scheduler.build(new, cached or CachedRequests(), tokens, ())


def test_a_request_opens_before_it_is_computed() -> None:
    """Admission overlaps with waiting and computing only if it is asked for at once."""
    scheduler = producer()
    scheduler.on_new_request(outgoing("a", 40, notify="127.0.0.1:9"))
    step = build(scheduler)
    assert [(job.transfer_id, job.total_chunks, job.notify) for job in step.opens] == [("t-a", 2, "127.0.0.1:9")]
    assert step.saves == []


def test_chunks_leave_as_they_become_complete() -> None:
    """Each once, with its own blocks, the last one with what the prompt still fills."""
    scheduler = producer()
    scheduler.on_new_request(outgoing("a", 70))
    first = build(scheduler, NewRequest("a", ([7, 8, 9],)), a=40)
    assert [[chunk.block_ids for chunk in save.chunks] for save in first.saves] == [[(7, 8)]]
    assert not first.saves[0].is_last
    second = build(scheduler, cached=CachedRequests(["a"], set(), [None], [40]), a=8)
    assert second.saves == []
    assert second.computing == ["a"]
    third = build(scheduler, cached=CachedRequests(["a"], set(), [([3, 4],)], [48]), a=22)
    assert [chunk.block_ids for chunk in third.saves[0].chunks] == [(9, 3), (4,)]
    assert third.saves[0].is_last
    assert [chunk.key for save in first.saves + third.saves for chunk in save.chunks] == chunk_keys(
        LAYOUT.digest, list(range(70)), 32, [None, None, []]
    )
    kept, params = scheduler.finished("a")
    assert kept
    assert params is not None
    assert params["transfer_id"] == "t-a"
    assert "error" not in params
    assert scheduler.finished("a") == (False, None)


def test_a_preempted_prompt_goes_on_where_it_was_sent() -> None:
    """Its blocks are others then, and what was sent needs not be sent again."""
    scheduler = producer()
    scheduler.on_new_request(outgoing("a", 64))
    build(scheduler, NewRequest("a", ([1, 2],)), a=32)
    step = scheduler.build((), CachedRequests(), {}, ["a", "stranger"])
    assert step.preempted == ["a"]
    again = build(scheduler, cached=CachedRequests(["a"], {"a"}, [([5, 6, 7, 8],)], [0]), a=64)
    assert [chunk.block_ids for chunk in again.saves[0].chunks] == [(7, 8)]


def test_blocks_of_a_request_that_sent_nothing_are_not_kept() -> None:
    """Nobody would ever report it as sent."""
    scheduler = producer()
    scheduler.on_new_request(outgoing("a", 64))
    kept, params = scheduler.finished("a")
    assert not kept
    assert params is not None


def test_a_refusal_before_computing_fails_as_a_load_would() -> None:
    """It is the one way in which vLLM lets a connector fail a request; told once, so that recomputing can follow."""
    scheduler = producer()
    scheduler.on_new_request(outgoing("a", 64))
    build(scheduler)
    scheduler.failed({"a": Failure(ErrorCode.QUEUE_FULL, "too many", 1.0)})
    assert scheduler.matched_tokens("a", 0) == (63, True)
    scheduler.allocated("a", [1, 2, 3, 4], 63)
    step = build(scheduler)
    assert step.loads[0].failure == Failure(ErrorCode.QUEUE_FULL, "too many", 1.0)
    assert scheduler.matched_tokens("a", 0) == (0, False)
    assert build(scheduler, NewRequest("a", ([1, 2, 3, 4],)), a=64).saves == []
    kept, params = scheduler.finished("a")
    assert not kept
    assert params is not None
    assert params["error"] == {"code": "queue_full", "detail": "too many", "retry_after_s": 1.0}


def test_a_refusal_that_is_known_when_the_prompt_is_computed_is_in_the_answer() -> None:
    """The proxy reads it there and waits for nobody's word. Chunks that were given are still being read: kept."""
    scheduler = producer()
    scheduler.on_new_request(outgoing("a", 70))
    build(scheduler, NewRequest("a", ([7, 8, 9, 3, 4],)), a=40)
    scheduler.failed({"a": Failure(ErrorCode.ADMISSION_TIMEOUT, "no room for 30 s", 2.0)})
    rest = build(scheduler, cached=CachedRequests(["a"], set(), [None], [40]), a=30)
    assert (rest.saves, rest.computing) == ([], [])
    kept, params = scheduler.finished("a")
    assert kept
    assert params is not None
    assert params["error"] == {"code": "admission_timeout", "detail": "no room for 30 s", "retry_after_s": 2.0}
    scheduler.failed({"a": Failure(ErrorCode.REVOKED, "said again")})  # nobody is left to be told
    scheduler.on_new_request(outgoing("a", 70))  # and its transfer's name is free
    assert len(build(scheduler).opens) == 1


@pytest.mark.parametrize("transfer_id", [None, "", 7, ["t"], "x" * 513])
def test_nonsense_in_the_parameters_is_answered_and_sends_nothing(transfer_id: object) -> None:
    """They come from outside; a scheduler that dies of them takes all requests along."""
    scheduler = producer()
    scheduler.on_new_request(outgoing("a", 10, transfer_id=transfer_id))
    assert build(scheduler).opens == []
    _, params = scheduler.finished("a")
    assert params is not None
    assert params["error"]["code"] == "protocol_error"
    decode, board = consumer()
    decode.on_new_request(incoming("a", 10, transfer_id=transfer_id))
    decode.finished("a")
    assert build(decode).loads == []
    assert len(board.discarded) <= 1


def test_decode_waits_without_blocks_and_loads_once() -> None:
    """A request that waits for its KV must not hold blocks that a running one needs."""
    scheduler, board = consumer()
    scheduler.on_new_request(incoming("a", 40))
    assert scheduler.matched_tokens("a", 0) == (None, False)
    board.ready.add("t-a")
    assert scheduler.matched_tokens("a", 0) == (39, True)
    scheduler.allocated("a", [4, 5, 6], 39)
    (job,) = build(scheduler).loads
    assert (job.first_block, job.block_ids, job.failure) == (0, (4, 5, 6), None)
    scheduler.allocated("a", [4, 5, 6], 0)
    assert scheduler.matched_tokens("a", 0) == (0, False)
    assert build(scheduler).loads == []
    assert scheduler.finished("a") == (False, None)
    assert board.discarded == []


def test_a_step_with_nothing_to_do_but_wait_waits_for_the_receivers_word() -> None:
    """vLLM steps as fast as it can while a request waits for its KV; that takes a CPU from who computes it."""
    scheduler, board = consumer()
    scheduler.on_new_request(incoming("a", 40))
    assert build(scheduler).is_idle  # the step before it computed, and its tokens may still be on their way
    assert board.waits == 0
    assert not build(scheduler).is_idle  # waited for here, and so no more in a worker
    assert board.waits == 1
    assert not build(scheduler, b=1).is_idle
    assert board.waits == 1


def test_a_step_waits_for_no_word_while_a_load_is_to_be_reported() -> None:
    """Whoever has their KV must not wait for those who have not."""
    scheduler, board = consumer()
    for name in ("a", "b"):
        scheduler.on_new_request(incoming(name, 40))
    build(scheduler)
    board.ready.add("t-a")
    assert scheduler.matched_tokens("a", 0) == (39, True)
    scheduler.allocated("a", [0, 1, 2], 39)
    assert [job.request_id for job in build(scheduler).loads] == ["a"]
    assert build(scheduler).is_idle
    assert board.waits == 0
    scheduler.received(["a"])
    build(scheduler)
    assert board.waits == 1
    scheduler.finished("b")
    assert build(scheduler).is_idle  # for nobody's sake
    assert board.waits == 1


def test_p42_only_what_is_missing_is_loaded() -> None:
    """Reported and loaded are the same tokens, and the last one is always computed here."""
    scheduler, board = consumer()
    scheduler.on_new_request(incoming("a", 64))
    board.ready.add("t-a")
    assert scheduler.matched_tokens("a", 32) == (31, True)
    scheduler.allocated("a", [1, 2, 3, 4], 31)
    (job,) = build(scheduler).loads
    assert (job.first_block, job.block_ids) == (2, (3, 4))


@pytest.mark.parametrize(("tokens", "computed"), [(1, 0), (33, 32), (40, 48)])
def test_p41_p43_where_nothing_is_missing_the_transfer_lands_and_is_freed(tokens: int, computed: int) -> None:
    """Its sender may finish in peace, and nobody waits for what is not needed."""
    scheduler, board = consumer()
    scheduler.on_new_request(incoming("a", tokens))
    assert scheduler.matched_tokens("a", computed) == (0, False)
    scheduler.allocated("a", [1, 2, 3], 0)
    assert board.discarded == [("t-a", False)]
    assert scheduler.finished("a") == (False, None)


def test_an_abort_frees_at_once_and_only_once() -> None:
    """A front end whose client has gone submits the same parameters again, to abort them too."""
    scheduler, board = consumer()
    for name in ("a", "again"):
        request = incoming("a", 40)
        request.request_id = name
        scheduler.on_new_request(request)
    assert scheduler.matched_tokens("again", 0) == (0, False)  # another choice of the same request: computed here
    scheduler.finished("again")
    assert board.discarded == []
    scheduler.finished("a")
    scheduler.finished("a")
    assert board.discarded == [("t-a", True)]


@pytest.mark.parametrize(
    ("spoil", "code"),
    [
        (lambda board: board.failed.update({"t-a": Failure(ErrorCode.REVOKED, "gone")}), ErrorCode.REVOKED),
        (lambda board: None, ErrorCode.CLAIM_TIMEOUT),
    ],
    ids=["failed", "late"],
)
def test_what_will_not_come_is_a_failed_load(spoil: Callable[[MemoryBoard], None], code: ErrorCode) -> None:
    """vLLM then does what its kv_load_failure_policy says; it has no timeout of its own."""
    scheduler, board = consumer(load_timeout_s=0.0)
    scheduler.on_new_request(incoming("a", 40))
    spoil(board)
    assert scheduler.matched_tokens("a", 0) == (39, True)
    scheduler.allocated("a", [1, 2, 3], 39)
    (job,) = build(scheduler).loads
    assert job.failure is not None
    assert job.failure.code is code
    assert board.discarded == [("t-a", True)]


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"layout": attrs.evolve(LAYOUT, isa="amx").text}, "isa is vec here and amx there"),
        ({"layout": "nonsense"}, "no fingerprint"),
        ({"num_tokens": 41}, "computed 41 tokens, and this prompt has 40"),
        ({"error": {"code": "too_large", "detail": "9 chunks"}}, "9 chunks"),
        ({"error": {"code": "unheard_of"}}, "prefill engine"),
        ({"error": {"code": ["x"]}}, "prefill engine"),
    ],
)
def test_what_the_prefill_engine_says_against_it_is_believed(params: dict[str, Any], words: str) -> None:
    """Nothing is waited for that cannot come, and nothing is read that does not fit."""
    scheduler, _ = consumer()
    scheduler.on_new_request(incoming("a", 40, **params))
    assert scheduler.matched_tokens("a", 0) == (39, True)
    scheduler.allocated("a", [1, 2, 3], 39)
    (job,) = build(scheduler).loads
    assert job.failure is not None
    assert words in job.failure.detail
