"""Engines that fail: the client gets the right answer from others, or a clean error soon, and never a hang."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from .clients import Reply
from .engines import DONE, Behaviour, Call, answer, event
from .stacks import WITHIN_A_SECOND_S, Stack, generates, stack

REFUSAL = b'{"error":{"message":"This model has 4096 tokens","type":"BadRequestError","code":400}}'


def refuses(status: int, body: bytes = REFUSAL, **headers: str) -> Behaviour:
    """An engine that says no."""
    return lambda call: call.whole(body, status, **headers)


def ended(code: str, detail: str = "", retry_after_s: float | None = None) -> Behaviour:
    """A prefill engine whose connector says that the KV cache did not leave."""
    error = {"code": code, "detail": detail, "retry_after_s": retry_after_s}
    return lambda call: call.whole(answer("x", kv_transfer_params={"error": error}))


async def hangs(call: Call) -> None:
    await call.hang()


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("is_stream", [False, True])
async def test_p16_an_engine_s_4xx_is_the_client_s_answer_after_one_try(side: str, is_stream: bool) -> None:
    """The engine says what was wrong; asked again, it says the same, and tries cost what a request costs."""
    async with stack(prefills=2, decodes=2) as s:
        engines = s.prefills if side == "prefill" else s.decodes
        for engine in engines:
            engine.behave = refuses(400, x_reason="long")
        reply = await s.ask({"prompt": "a", "stream": is_stream})
        assert sum(len(engine.calls) for engine in engines) == 1
        await s.wait_metric('kvpd_requests_total{outcome="refused"}', 1)
    assert (reply.status, reply.body) == (400, REFUSAL)
    assert reply.headers["content-type"] == "application/json"
    assert reply.headers["x-reason"] == "long"


@pytest.mark.parametrize("is_stream", [False, True])
async def test_p17_bad_requests_take_no_engine_out(is_stream: bool) -> None:
    """One client's mistakes must not be another's outage."""

    async def picky(call: Call) -> None:
        await (refuses(404)(call) if call.json.get("model") == "nope" else generates(call))

    async with stack() as s:
        s.decode.behave = picky
        for _ in range(20):
            assert (await s.ask({"prompt": "a", "model": "nope", "stream": is_stream})).status == 404
        assert all(engine["alive"] for engine in (await s.get("/status")).json["engines"])
        assert (await s.ask({"prompt": "a", "stream": is_stream})).status == 200


async def test_p20_strict_mode_answers_502_when_the_cache_does_not_arrive() -> None:
    """A proxy that silently has everything computed twice looks as if it worked."""
    async with stack(transfer_timeout_s=0.05) as s:
        s.prefill.behave = lambda call: call.whole(answer("x"))  # and no sender says anything
        replies = [await s.ask({"prompt": "a"}) for _ in range(10)]
        assert (await s.get("/status")).json["transfers"]["arrived_ratio"] == 0.0
        assert s.metric('kvpd_transfers_total{outcome="request_timeout"}') == 10
        assert s.metric('kvpd_recompute_total{reason="miss"}') == 0
        # What was abandoned is asked for and let go; nobody reads its answer.
        assert all(call.json["max_tokens"] == 1 for call in s.decode.calls)
    assert {(reply.status, reply.error["code"]) for reply in replies} == {(502, "transfer_lost")}


async def test_p20_p19_recomputing_is_a_choice_and_is_counted() -> None:
    """Where an answer matters more than speed; the counters and the share of transfers show that nothing moves."""
    async with stack(transfer_timeout_s=0.05, on_miss="recompute") as s:
        s.prefill.behave = lambda call: call.whole(answer("x"))
        replies = [await s.ask({"prompt": "a"}) for _ in range(3)]
        s.prefill.behave = refuses(500)
        replies.append(await s.ask({"prompt": "a"}))
        assert s.metric('kvpd_recompute_total{reason="miss"}') == 4
        answered = [call for call in s.decode.calls if not call.transfer]
        assert [call.json for call in answered] == [{"prompt": "a"}] * 4
    assert [reply.status for reply in replies] == [200] * 4


async def test_p21_a_frozen_engine_costs_only_the_requests_that_met_it() -> None:
    """A stopped process still accepts connections, and says nothing for ever."""
    async with stack(decodes=2, first_byte_timeout_s=1.5, probe_timeout_s=0.5) as s:
        frozen, healthy = s.decodes
        frozen.frozen = True
        replies: list[Reply] = []

        async def one() -> None:
            replies.append(await s.ask({"prompt": "a", "stream": True}))

        async with trio.open_nursery() as clients:
            for _ in range(50):
                clients.start_soon(one)
        assert [reply.status for reply in replies] == [200] * 50
        await s.wait_alive(frozen, False)
        calls = len(healthy.calls)
        assert (await s.ask({"prompt": "a"})).status == 200
        assert len(healthy.calls) == calls + 1
        frozen.frozen = False
        await s.wait_alive(frozen, True)


@pytest.mark.parametrize("mode", ["sequential", "concurrent"])
async def test_p28_a_client_that_leaves_ends_its_prefill_within_a_second(mode: str) -> None:
    """Otherwise the next request waits until a prompt is computed that nobody wants any more."""
    async with stack(mode=mode) as s:
        good, s.prefill.behave, s.decode.behave = s.prefill.behave, hangs, hangs
        async with s.connect() as client:
            await client.send("POST", "/v1/completions", b'{"prompt":"a"}')
            prefill = await s.prefill.wait_calls(1)
        with trio.fail_after(WITHIN_A_SECOND_S):
            await prefill.closed.wait()
        s.prefill.behave, s.decode.behave = good, generates
        assert (await s.ask({"prompt": "b"})).status == 200
        await s.wait_metric('kvpd_requests_total{outcome="client_cancelled"}', 1)


async def test_p28_a_client_that_leaves_ends_its_decode_within_a_second() -> None:
    """In the middle of its stream, and by closing without a word or by resetting the connection."""

    async def endless(call: Call) -> None:
        await call.begin(200, "text/event-stream")
        await call.send(event("a"))
        await call.hang()

    async with stack() as s:
        s.decode.behave = endless
        async with s.connect() as client:
            await client.send("POST", "/v1/completions", b'{"prompt":"a","stream":true}')
            await client.head()
            assert await client.piece() == event("a")
            decode = await s.decode.wait_calls(1)
        with trio.fail_after(WITHIN_A_SECOND_S):
            await decode.closed.wait()


async def test_p28_p29_a_transfer_that_nobody_waits_for_is_given_back() -> None:
    """Between the two engines nobody but the proxy knows of it, and its room would stay taken until it expires."""
    async with stack() as s:
        s.prefill.behave = lambda call: call.whole(answer("x"))  # the KV cache is still on its way
        async with s.connect() as client:
            await client.send("POST", "/v1/completions", b'{"prompt":"a","max_tokens":500,"stream":true}')
            prefill = await s.prefill.wait_calls(1)
            await s.wait_metric("kvpd_prefill_seconds_count", 1)
        with trio.fail_after(WITHIN_A_SECOND_S):
            release = await s.decode.wait_calls(1)
        assert release.transfer["transfer_id"] == prefill.transfer["transfer_id"]
        assert (release.json["max_tokens"], release.json["stream"]) == (1, False)
        assert s.metric("kvpd_abandoned_total") == 1


async def test_p30_prefill_that_fails_first_ends_the_waiting_decode() -> None:
    """Decode would wait for a KV cache that will never come, for as long as it is told to."""
    async with stack(mode="concurrent") as s:

        async def fails(call: Call) -> None:
            await s.decode.wait_calls(1)
            await call.whole(b'{"error":{"message":"out of memory"}}', 500)

        s.prefill.behave, s.decode.behave = fails, hangs
        reply = await s.ask({"prompt": "a"})
        with trio.fail_after(WITHIN_A_SECOND_S):
            await s.decode.calls[0].closed.wait()
    assert (reply.status, reply.json["error"]["message"]) == (500, "out of memory")


async def test_in_concurrent_mode_decode_is_asked_at_once_and_its_answer_is_enough() -> None:
    """What a connector that waits by itself is for."""
    async with stack(mode="concurrent") as s:

        async def after_decode(call: Call) -> None:
            await s.decode.wait_calls(1)
            await call.hang()

        s.prefill.behave = after_decode
        reply = await s.ask({"prompt": "a", "stream": True})
        assert reply.body.endswith(DONE)
        assert s.prefill.calls[0].transfer["transfer_id"] == s.decode.calls[0].transfer["transfer_id"]
        await s.wait_metric('kvpd_transfers_total{outcome="arrived"}', 1)


@pytest.mark.parametrize(
    ("behave", "settings", "status", "code"),
    [
        (lambda call: call.raw(b"\x15\x03\x01\x00\x02\x02\x46"), {}, 502, "engine_broken"),  # a TLS alert
        (lambda call: call.raw(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf"), {}, 502, "engine_broken"),
        (lambda call: call.raw(b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 20_000), {}, 502, "engine_broken"),
        (lambda call: call.stream.aclose(), {}, 502, "engine_broken"),
        (hangs, {"prefill_timeout_s": 0.1}, 504, "engine_timeout"),
    ],
)
async def test_p32_an_engine_that_fails_has_a_status_that_says_how(
    behave: Behaviour, settings: dict[str, Any], status: int, code: str
) -> None:
    """An operator, and a client's retry, act on the number."""
    async with stack(**settings) as s:
        s.prefill.behave = behave
        reply = await s.ask({"prompt": "a"})
    assert (reply.status, reply.error["code"]) == (status, code)
    assert s.prefill.url.removeprefix("http://") not in reply.error["message"]


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_p32_engines_that_are_not_there_are_503_with_retry_after(side: str) -> None:
    """They will be; 502 would say that something is broken."""
    async with stack(probe_interval_s=1000) as s:
        engine = s.prefill if side == "prefill" else s.decode
        await engine.stop()
        gone = await s.ask({"prompt": "a"})  # known to be alive until now
        await s.wait_alive(engine, False)
        known = await s.ask({"prompt": "a"})
        models = await s.get("/v1/models")
    assert (gone.status, gone.error["code"]) == (503, "engine_unreachable")
    assert (known.status, known.error["code"]) == (503, f"no_{side}_engine")
    assert {reply.headers["retry-after"] for reply in (gone, known)} == {"1"}
    assert models.status == (200 if side == "prefill" else 503)


@pytest.mark.parametrize(
    ("code", "status", "tries"),
    [
        ("queue_full", 429, 1),
        ("admission_timeout", 503, 1),
        ("draining", 503, 1),
        ("too_large", 413, 1),
        ("layout_mismatch", 502, 2),
        ("peer_lost", 502, 2),
        ("request_timeout", 504, 2),
        ("a_code_of_tomorrow", 502, 2),
    ],
)
async def test_p46_a_transfer_s_end_is_told_as_what_it_is(code: str, status: int, tries: int) -> None:
    """No room is for the client to wait out; what another engine might do better is tried there, once."""
    async with stack(prefills=3) as s:
        for engine in s.prefills:
            engine.behave = ended(code, "both sides' words", None if status in (413, 502, 504) else 7.2)
        reply = await s.ask({"prompt": "a"})
        assert sum(len(engine.calls) for engine in s.prefills) == tries
        assert max(len(engine.calls) for engine in s.prefills) == 1
        # What the sender has lost may be whole at its receiver: then it is asked for, to be given back.
        assert all(call.json["max_tokens"] == 1 for call in s.decode.calls)
        assert not s.decode.calls or code in {"peer_lost", "a_code_of_tomorrow"}
    assert reply.status == status
    assert "both sides' words" in reply.error["message"]
    assert reply.headers.get("retry-after") == (None if status in (413, 502, 504) else "8")


@pytest.mark.parametrize(("status", "retry_after"), [(429, "11"), (503, None)])
async def test_an_engine_that_asks_for_patience_is_passed_on_with_its_retry_after(
    status: int, retry_after: str | None
) -> None:
    """Clients wait as long as they are told, and a second where the engine did not say."""
    async with stack() as s:
        headers = {"retry_after": retry_after} if retry_after else {}
        s.prefill.behave = refuses(status, REFUSAL, **headers)
        reply = await s.ask({"prompt": "a"})
    assert (reply.status, reply.body) == (status, REFUSAL)
    assert reply.headers["retry-after"] == (retry_after or "1")


@pytest.mark.parametrize("behave", [refuses(500), refuses(503), hangs, lambda call: call.stream.aclose()])
async def test_a_prefill_that_fails_is_retried_once_on_another(behave: Behaviour) -> None:
    """The client has seen nothing, so a second try costs it only time."""
    async with stack(prefills=2, prefill_timeout_s=1.0, policy="round_robin") as s:
        s.prefills[0].behave = behave
        assert (await s.ask({"prompt": "a"})).status == 200
        assert s.metric("kvpd_retries_total") == 1
        assert len(s.prefills[1].calls) == 1


async def test_a_transfer_that_is_lost_is_retried_with_another_prefill_engine() -> None:
    """A sender may die between its engine's answer and its last put."""
    async with stack(prefills=2, transfer_timeout_s=1.0, policy="round_robin") as s:
        s.prefills[0].behave = lambda call: call.whole(answer("x"))
        assert (await s.ask({"prompt": "a"})).status == 200
        assert len(s.prefills[1].calls) == 1


def error_first(code: int) -> Behaviour:
    """A decode engine that could not load the KV cache: what vLLM does, in a stream and without one."""

    async def behave(call: Call) -> None:
        if call.json.get("stream"):
            await call.events(b'data: {"error":{"message":"KV load failure","code":500}}\n\n', DONE)
        else:
            await call.whole(b'{"error":{"message":"KV load failure"}}', code)

    return behave


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("is_lasting", [False, True])
async def test_a_cache_that_decode_did_not_get_is_tried_again_whole(is_stream: bool, is_lasting: bool) -> None:
    """As an error event, too, as long as it is the first: the client has seen nothing yet."""
    async with stack() as s:

        async def behave(call: Call) -> None:
            await (error_first(500)(call) if is_lasting or len(s.decode.calls) == 1 else generates(call))

        s.decode.behave = behave
        reply = await s.ask({"prompt": "a", "stream": is_stream})
        assert (len(s.prefill.calls), len(s.decode.calls)) == (2, 2)
        assert len({call.transfer["transfer_id"] for call in s.prefill.calls}) == 2
    assert (reply.status == 200) == (not is_lasting)
    assert b"KV load failure" not in reply.body or not is_stream


async def test_a_second_try_goes_to_other_engines_where_there_are_any() -> None:
    """Also where nobody is to blame for sure: the same pair may well fail in the same way."""
    async with stack(prefills=2, decodes=2, policy="sticky") as s:
        for engine in s.decodes:
            engine.behave = error_first(500)
        assert (await s.ask({"prompt": "a"})).status == 500
        assert [len(engine.calls) for engine in (*s.prefills, *s.decodes)] == [1, 1, 1, 1]


async def decode_alone(s: Stack) -> None:
    reply = await s.ask({"prompt": "a", "max_tokens": 9})
    assert reply.status == 200
    assert s.decode.calls[-1].json == {"prompt": "a", "max_tokens": 9}
    assert s.metric('kvpd_recompute_total{reason="no_prefill"}') == 1


async def test_decode_alone_serves_when_no_prefill_engine_is_alive_if_that_is_wanted() -> None:
    """An outage of all prefill engines need not be one of the service."""
    async with stack(decode_only_fallback=True) as s:
        await s.prefill.stop()
        await s.wait_alive(s.prefill, False)
        assert (await s.get("/readyz")).status == 200
        await decode_alone(s)


async def test_decode_alone_serves_where_there_never_was_a_prefill_engine() -> None:
    """How one begins with a single engine."""
    async with stack(prefills=0, decode_only_fallback=True) as s:
        await decode_alone(s)


@pytest.mark.parametrize(
    "body", [b"no json", b"[]", b'{"kv_transfer_params":3}', b'{"kv_transfer_params":{"error":1}}']
)
async def test_a_prefill_answer_that_is_none_is_a_broken_engine(body: bytes) -> None:
    """Whatever it meant, the KV cache cannot be counted on."""
    async with stack() as s:
        s.prefill.behave = lambda call: call.whole(body)
        reply = await s.ask({"prompt": "a"})
    assert (reply.status, reply.error["code"]) == (502, "engine_broken")
