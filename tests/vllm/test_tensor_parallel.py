"""Engines whose heads are spread over two workers: one transfer for both, and the tokens of one such engine alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import IN_MAIN_ENVIRONMENT, PROMPTS, StackMaker, transfer_config
from e2e.daemons import Fleet
from engines import CHUNK_BYTES, Engine

RANKS = 2
SOME = PROMPTS[2:]  # from 17 tokens to four chunks


@pytest.fixture(scope="module")
def alone(hosts: tuple[Engine, Engine]) -> list[list[int]]:
    """What one engine of two workers answers by itself. (One worker rounds otherwise, and may choose otherwise.)"""
    engine = hosts[0].start(tensor_parallel_size=RANKS)
    return [answer.tokens for answer in engine.generate(SOME)]


def test_two_workers_on_each_side(alone: list[list[int]], make_stack: StackMaker) -> None:
    """Each worker's half of the heads comes from the worker of its rank, through windows of its own."""
    stack = make_stack(ranks=RANKS)
    answers = stack.serve(SOME)
    assert [answer.tokens for answer in answers] == alone
    loaded = stack.decode.do("metrics")["vllm:external_prefix_cache_hits"]
    assert loaded == sum(len(prompt) - 1 for prompt in SOME)
    assert len(stack.sender.said("transfer_done")) == len(stack.sender.said("transfer_joined")) == len(SOME)
    stack.check_clean()


def test_a_receiver_smaller_than_all_requests_and_chunked_prefill(
    alone: list[list[int]], make_stack: StackMaker
) -> None:
    """One ledger decides for both workers: neither waits for room that the other's request holds (entry 2)."""
    options = {"max_num_batched_tokens": 256, "enable_chunked_prefill": True}
    stack = make_stack(ranks=RANKS, receiver_slots=5, sender_slots=2, prefill_options=options)
    answers = [stack.serve([prompt])[0] for prompt in SOME]
    assert [answer.tokens for answer in answers] == alone
    stack.check_clean()


def test_an_abort_frees_both_workers_blocks(make_stack: StackMaker) -> None:
    """vLLM frees a request's blocks when both have said that they are done with it."""
    stack = make_stack(ranks=RANKS)
    (params,) = stack.outgoing(1)
    answer = stack.prefill.do("abort_after", prompt=PROMPTS[-1], params=params, steps=2)
    assert answer["blocks_in_use"] == 0
    stack.check_clean()


def test_a_daemon_of_other_ranks_stops_the_engine_at_its_start(hosts: tuple[Engine, Engine], tmp_path: Path) -> None:
    """Every request of it would wait for a rank that never comes."""
    with Fleet(tmp_path) as fleet:
        settings = {"chunk_bytes": CHUNK_BYTES, "staging_size": 4 * CHUNK_BYTES, "ranks": RANKS}
        sender = fleet.start("sender", "s", settings, prefix=IN_MAIN_ENVIRONMENT).wait_ready()
        with pytest.raises(RuntimeError, match="Set ranks = 1 for both daemons"):
            hosts[0].start(transfer_config("kv_producer", {"sender_socket": str(sender.socket)}))
