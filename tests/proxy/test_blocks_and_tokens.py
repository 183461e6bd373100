"""What goes wrong between engines about blocks and tokens, as a proxy sees it: never a hang, never half an answer.

The engines here fail as those in the reports did; what kvpd's own connector does in the same places is tested with it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
import trio

from kvpd.errors import ErrorCode

from .engines import SSE, Call, answer, event
from .stacks import generates, stack


@pytest.mark.parametrize("mode", ["sequential", "concurrent"])
async def test_p41_a_prompt_of_which_nothing_is_sent_costs_a_bounded_wait(mode: str) -> None:
    """Shorter than a block, it leaves nothing to store, and an engine that forgets to say so would be waited for."""

    async def waits_for_its_cache(call: Call) -> None:
        await (call.hang() if call.transfer else generates(call))

    async with stack(mode=mode, transfer_timeout_s=0.05, answer_timeout_s=0.3, on_miss="recompute") as s:
        s.prefill.behave = lambda call: call.whole(answer("x"))  # and its sender has nothing to tell
        s.decode.behave = waits_for_its_cache
        reply = await s.ask({"prompt": "a"})
    assert reply.status == (200 if mode == "sequential" else 504)


async def test_p41_an_empty_prompt_is_the_engine_s_to_refuse() -> None:
    """It knows why; nothing was sent, and nothing is waited for."""
    refusal = b'{"error":{"message":"The decoder prompt cannot be empty","code":400}}'
    async with stack() as s:
        s.prefill.behave = lambda call: call.whole(refusal, 400)
        reply = await s.ask({"prompt": ""})
        assert s.decode.calls == []
    assert (reply.status, reply.body) == (400, refusal)


async def dies(call: Call) -> None:
    """The engine core has met an assertion: connections are cut."""
    await call.stream.aclose()


async def dies_in_its_answer(call: Call) -> None:
    """The same, behind the head of a stream and before its first event."""
    await call.begin(200, SSE)
    await call.stream.aclose()


@pytest.mark.parametrize("how", [dies, dies_in_its_answer])
async def test_p42_p43_p45_a_decode_engine_that_dies_of_a_request_is_a_second_try_elsewhere(
    how: Callable[[Call], Awaitable[None]],
) -> None:
    """Counts that turn negative, hits that cover a prompt, pools of other sizes: its core asserts, and is gone."""
    async with stack(decodes=2, policy="round_robin") as s:
        s.decodes[0].behave = how
        reply = await s.ask({"prompt": "a", "stream": True})
        assert len(s.decodes[1].calls) == 1
        ids = {call.transfer["transfer_id"] for engine in s.decodes for call in engine.calls}
        assert len(ids) == 2
    assert reply.status == 200
    assert reply.body.startswith(event("a-0"))


async def test_p42_p43_p45_one_that_dies_in_the_midst_of_an_answer_is_told_and_not_tried_again() -> None:
    """The client has seen tokens: others might follow them that do not fit."""
    async with stack(decodes=2) as s:

        async def dies_late(call: Call) -> None:
            await call.begin(200, SSE)
            await call.send(event("a"))
            await call.stream.aclose()

        for engine in s.decodes:
            engine.behave = dies_late
        reply = await s.ask({"prompt": "a", "stream": True})
        assert sum(len(engine.calls) for engine in s.decodes) == 1
    assert reply.body.startswith(event("a"))
    assert b'"error"' in reply.body
    assert reply.body.endswith(b"data: [DONE]\n\n")


async def test_p44_blocks_that_have_expired_are_computed_anew_for_the_second_turn() -> None:
    """Decode finds them gone. The first turn's transfer is never used again: each turn has its own."""

    async def forgets(call: Call) -> None:
        if len(s.decode.calls) == 2:
            await call.whole(b'{"error":{"message":"KV load failure"}}', 500)
        else:
            await generates(call)

    async with stack() as s:
        s.decode.behave = forgets
        turns = [await s.ask({"prompt": prompt}) for prompt in ("turn 1", "turn 1 and 2")]
        assert len(s.prefill.calls) == 3
        assert len({call.transfer["transfer_id"] for call in s.prefill.calls}) == 3
        assert s.metric("kvpd_retries_total") == 1
    assert [reply.status for reply in turns] == [200, 200]


@pytest.mark.parametrize("by", ["the sender's word", "the engine's answer"])
async def test_p46_p47_p48_engines_that_do_not_fit_are_an_error_with_both_layouts_at_once(by: str) -> None:
    """Other ranks, half of the layers, another dtype: refused when the sender greets, and no client hangs for it."""
    words = "the receiver has layout 'ranks=4;dtype=bfloat16', this sender 'ranks=1;dtype=fp8'"
    async with stack(transfer_timeout_s=3600.0) as s:

        async def does_not_fit(call: Call) -> None:
            if by == "the sender's word":
                s.sender.fail(call.transfer["transfer_id"], ErrorCode.LAYOUT_MISMATCH, words)
                await call.hang()
            error = {"code": "layout_mismatch", "detail": words, "retry_after_s": None}
            await call.whole(answer("x", kv_transfer_params={"error": error}))

        s.prefill.behave = does_not_fit
        with trio.fail_after(5):
            reply = await s.ask({"prompt": "a"})
        assert s.decode.calls == []
    assert (reply.status, reply.error["code"]) == (502, "layout_mismatch")
    assert words in reply.error["message"]
