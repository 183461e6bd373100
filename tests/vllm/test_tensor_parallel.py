"""Engines whose heads are spread over two workers: one transfer for both, and the tokens of an engine of one worker."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import IN_MAIN_ENVIRONMENT, PROMPTS, Single, StackMaker, transfer_config
from e2e.daemons import Fleet
from engines import CHUNK_BYTES, Engine, together

RANKS = 2


def test_two_workers_on_each_side(make_stack: StackMaker, single: Single) -> None:
    """Each worker's half of the heads goes to the worker of its rank, and one ledger decides for both (entry 2).

    The receiver holds less than all prompts, and chunks leave while the next ones are computed. Starting four workers
    takes a while, so all of it is one test.
    """
    options = {"max_num_batched_tokens": 256, "enable_chunked_prefill": True}
    stack = make_stack(ranks=RANKS, receiver_slots=5, sender_slots=2, prefill_options=options)
    params = stack.outgoing(len(PROMPTS))
    into = [{"do_remote_prefill": True, "transfer_id": one["transfer_id"]} for one in params]
    _, answers = together(
        lambda: stack.prefill.generate(PROMPTS, params, 1),
        lambda: stack.decode.generate(PROMPTS, into),
    )
    assert [answer.tokens for answer in answers] == single.tokens(PROMPTS)
    loaded = stack.decode.do("metrics")["vllm:external_prefix_cache_hits"]
    assert loaded == sum(len(prompt) - 1 for prompt in PROMPTS)  # all but each prompt's last token
    stack.check_clean()
    assert len(stack.sender.said("transfer_joined")) == len(stack.sender.said("transfer_done")) == len(PROMPTS)
    # vLLM frees an aborted request's blocks when both workers have said that they are done with them.
    (to_abort,) = stack.outgoing(1)
    aborted = stack.prefill.do("abort_after", prompt=PROMPTS[-1], params=to_abort, steps=2)
    assert aborted["blocks_in_use"] == 0
    stack.check_clean()


def test_a_daemon_of_other_ranks_stops_the_engine_at_its_start(hosts: tuple[Engine, Engine], tmp_path: Path) -> None:
    """Every request of it would wait for a rank that never comes."""
    with Fleet(tmp_path) as fleet:
        settings = {"chunk_bytes": CHUNK_BYTES, "staging_size": 4 * CHUNK_BYTES, "ranks": RANKS}
        sender = fleet.start("sender", "s", settings, prefix=IN_MAIN_ENVIRONMENT).wait_ready()
        with pytest.raises(RuntimeError, match="Set ranks = 1 for both daemons"):
            hosts[0].start(transfer_config("kv_producer", {"sender_socket": str(sender.socket)}))
