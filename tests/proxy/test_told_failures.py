"""Transfers that fail, by their sender's own word: the client has its answer at once, and not when a time is over."""

from __future__ import annotations

import pytest
import trio

from kvpd.errors import ErrorCode

from .clients import Reply
from .engines import Behaviour, Call, answer, event
from .stacks import WITHIN_A_SECOND_S, Stack, generates, stack

MODES = ["sequential", "concurrent"]


def refused(s: Stack, code: ErrorCode, retry_after_s: float | None = None) -> Behaviour:
    """A prefill engine that computes for ever while its sender says that the transfer has ended."""

    async def behave(call: Call) -> None:
        s.sender.fail(call.transfer["transfer_id"], code, "both sides' words", retry_after_s)
        await call.hang()

    return behave


def loses(s: Stack, code: ErrorCode = ErrorCode.REVOKED) -> Behaviour:
    """A prefill engine whose KV cache is lost after it has answered."""

    async def behave(call: Call) -> None:
        await call.whole(answer("x"))
        s.sender.fail(call.transfer["transfer_id"], code, "it was lost on the way")

    return behave


async def waits(call: Call) -> None:
    await call.hang()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("code", "status", "retry_after_s"),
    [
        (ErrorCode.QUEUE_FULL, 429, 7.2),
        (ErrorCode.QUEUE_FULL, 429, None),
        (ErrorCode.ADMISSION_TIMEOUT, 503, 3.0),
        (ErrorCode.DRAINING, 503, None),
        (ErrorCode.TOO_LARGE, 413, None),
    ],
)
async def test_a_refusal_ends_its_prefill_and_is_told_at_once(
    mode: str, code: ErrorCode, status: int, retry_after_s: float | None
) -> None:
    """The prompt need not be computed for a KV cache that has no room, and nobody else is asked in vain."""
    async with stack(prefills=2, mode=mode) as s:
        for engine in s.prefills:
            engine.behave = refused(s, code, retry_after_s)
        s.decode.behave = waits
        reply = await s.ask({"prompt": "a"})
        (call,) = [call for engine in s.prefills for call in engine.calls]
        with trio.fail_after(WITHIN_A_SECOND_S):
            await call.closed.wait()
        assert s.metric(f'kvpd_transfers_total{{outcome="{code}"}}') == 1
        assert s.metric("kvpd_retries_total") == 0
        assert len(s.decode.calls) == (1 if mode == "concurrent" else 0)
    assert (reply.status, reply.error["code"]) == (status, str(code))
    assert "both sides' words" in reply.error["message"]
    wanted = None if status == 413 else {7.2: "8", 3.0: "3", None: "1"}[retry_after_s]
    assert reply.headers.get("retry-after") == wanted


@pytest.mark.parametrize("mode", MODES)
async def test_a_transfer_that_is_lost_after_prefill_has_answered_is_tried_again_at_once(mode: str) -> None:
    """On another prefill engine, with a transfer of its own; `transfer_timeout_s` is never waited for."""
    async with stack(prefills=2, mode=mode, policy="round_robin", transfer_timeout_s=3600.0) as s:
        s.prefills[0].behave = loses(s)

        async def behave(call: Call) -> None:
            is_first = call.transfer["transfer_id"] == s.prefills[0].calls[0].transfer["transfer_id"]
            await (waits(call) if is_first else generates(call))

        if mode == "concurrent":

            async def after_prefill(call: Call) -> None:
                await s.prefills[0].wait_calls(1)
                await behave(call)

            s.decode.behave = after_prefill
        assert (await s.ask({"prompt": "a"})).status == 200
        assert [len(engine.calls) for engine in s.prefills] == [1, 1]
        assert s.metric("kvpd_retries_total") == 1
        assert s.metric('kvpd_transfers_total{outcome="revoked"}') == 1


async def test_a_transfer_that_is_lost_again_is_an_error_that_says_why() -> None:
    """One second try, and then the client decides."""
    async with stack(prefills=3, transfer_timeout_s=3600.0) as s:
        for engine in s.prefills:
            engine.behave = loses(s, ErrorCode.NO_PROGRESS)
        reply = await s.ask({"prompt": "a"})
        assert sorted(len(engine.calls) for engine in s.prefills) == [0, 1, 1]
    assert (reply.status, reply.error["code"]) == (502, "no_progress")
    assert "it was lost on the way" in reply.error["message"]


async def test_what_is_lost_is_computed_by_decode_where_that_is_wanted() -> None:
    """As after a KV cache that never came."""
    async with stack(on_miss="recompute", transfer_timeout_s=3600.0) as s:
        s.prefill.behave = loses(s)
        reply = await s.ask({"prompt": "a"})
        assert s.metric('kvpd_recompute_total{reason="miss"}') == 1
    assert reply.status == 200


async def test_a_sender_that_has_lost_its_receiver_may_be_wrong_so_the_room_is_given_back() -> None:
    """The last acknowledgement may be all that was lost: then the KV cache lies there whole, and nobody reads it."""
    async with stack(transfer_timeout_s=3600.0) as s:
        s.prefill.behave = loses(s, ErrorCode.PEER_LOST)
        reply = await s.ask({"prompt": "a"})
        with trio.fail_after(WITHIN_A_SECOND_S):
            await s.decode.wait_calls(2)
        given_back = {call.transfer["transfer_id"] for call in s.decode.calls}
        assert given_back == {call.transfer["transfer_id"] for call in s.prefill.calls}
        assert all(call.json["max_tokens"] == 1 for call in s.decode.calls)
    assert (reply.status, reply.error["code"]) == (502, "peer_lost")


@pytest.mark.parametrize("mode", MODES)
async def test_a_failure_after_the_answer_has_begun_changes_nothing(mode: str) -> None:
    """The decode engine has its KV cache: what its sender lost after that was not needed."""
    async with stack(mode=mode) as s:
        told = trio.Event()

        async def behave(call: Call) -> None:
            await call.begin(200, "text/event-stream")
            await call.send(event("a"))
            await told.wait()
            await call.send(event("b"))
            await call.end()

        s.decode.behave = behave
        if mode == "concurrent":  # decode has found that it needs nothing, before anybody was told
            s.prefill.behave = lambda call: call.whole(answer("x"))
        replies: list[Reply] = []

        async def client() -> None:
            replies.append(await s.ask({"prompt": "a", "stream": True}))

        async with trio.open_nursery() as clients:
            clients.start_soon(client)
            call = await s.decode.wait_calls(1)
            await s.wait_metric("kvpd_first_byte_seconds_count", 1)
            s.sender.fail(call.transfer["transfer_id"], ErrorCode.PEER_LOST, transfer_no=99)
            for _ in range(1 if mode == "concurrent" else 2):  # in the other mode, first of the word that it is ready
                await s.sender.wait_ack()
            told.set()
        assert len(s.decode.calls) == 1
    assert replies[0].status == 200
    assert replies[0].body == event("a") + event("b")


async def test_a_failure_that_nobody_waits_for_is_acknowledged_and_no_more() -> None:
    """Every request whose client has left ends like this."""
    async with stack() as s:
        s.sender.fail("nobody waits for this", ErrorCode.CANCELLED)
        await s.sender.wait_ack()
        await s.wait_metric('kvpd_notifications_received_total{outcome="unknown"}', 1)
        assert (await s.ask({"prompt": "a"})).status == 200
