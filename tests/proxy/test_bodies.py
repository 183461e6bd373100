"""What each engine is asked: the client's own words for decode, the same prompt and one token for prefill."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
import trio

from .clients import events_of
from .engines import DONE, SSE, Call, answer, event
from .stacks import CHAT, RECEIVER, stack

HELLO = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": HELLO, "max_completion_tokens": 256, "min_tokens": 32}),
        (CHAT, {"messages": HELLO, "max_completion_tokens": 256, "max_tokens": 200, "n": 2}),
        ("/v1/completions", {"prompt": "a", "max_tokens": 99, "min_tokens": 5, "best_of": 3, "logprobs": 2}),
        ("/v1/completions", {"prompt": "a", "stop": ["x"], "ignore_eos": True, "response_format": {"type": "text"}}),
        ("/v1/completions", {"prompt": "a", "stream": True, "stream_options": {"include_usage": True}}),
    ],
)
async def test_p18_prefill_generates_one_token_and_decode_gets_the_client_s_request(
    path: str, body: dict[str, Any]
) -> None:
    """A prefill engine that generates the whole answer is a second, slower, decode engine."""
    async with stack() as s:
        reply = await s.ask(body, path)
        assert reply.status == 200
        (prefill,), (decode,) = s.prefill.calls, s.decode.calls
    asked = prefill.json
    assert (asked["max_tokens"], asked["stream"]) == (1, False)
    assert asked.get("max_completion_tokens", 1) == 1
    assert ("max_completion_tokens" in asked) == (path == CHAT)
    assert not {"stream_options", "min_tokens", "n", "best_of", "logprobs"} & asked.keys()
    kept = {"prompt", "messages", "stop", "ignore_eos", "response_format"} & body.keys()
    assert {key: asked[key] for key in kept} == {key: body[key] for key in kept}
    transfer = decode.json.pop("kv_transfer_params")
    assert {key: value for key, value in decode.json.items() if key != "kv_transfer_params"} == body
    assert transfer["transfer_id"] == prefill.transfer["transfer_id"]


async def test_both_engines_are_told_of_the_same_fresh_transfer() -> None:
    """It is all that joins the two; the receiver and the proxy's own address are for the sender."""
    async with stack() as s:
        await s.ask({"prompt": "a"})
        await s.ask({"prompt": "a"})
        first, second = (call.transfer for call in s.prefill.calls)
        assert first["receiver"] == RECEIVER
        assert first["notify"] == s.proxy.notify_address
        assert (first["do_remote_decode"], first["do_remote_prefill"]) == (True, False)
        assert first["transfer_id"] != second["transfer_id"]
        told = s.decode.calls[0].transfer
    assert told == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": first["transfer_id"],
        "blocks": 3,  # what the prefill engine's connector said
    }


async def test_decode_is_asked_only_when_prefill_has_answered_and_the_cache_is_complete() -> None:
    """Asked sooner, it would wait with a place in its batch taken; asked on one of the two, it might read nothing."""
    notified, answered = trio.Event(), trio.Event()

    async def prefill(call: Call) -> None:
        await notified.wait()
        s.sender.send(call.transfer["transfer_id"])
        await s.sender.wait_ack()
        assert s.decode.calls == []
        answered.set()
        await call.whole(answer("x"))

    async with stack() as s:
        s.prefill.behave = prefill
        async with trio.open_nursery() as clients:
            clients.start_soon(s.ask, {"prompt": "a"})
            await s.prefill.wait_calls(1)
            notified.set()
            await answered.wait()
            await s.decode.wait_calls(1)
        async with trio.open_nursery() as clients:
            s.prefill.behave = lambda call: call.whole(answer("x"))
            clients.start_soon(s.ask, {"prompt": "b"})
            second = await s.prefill.wait_calls(2)
            await s.wait_metric("kvpd_prefill_seconds_count", 2)
            assert len(s.decode.calls) == 1
            s.sender.send(second.transfer["transfer_id"])
            await s.decode.wait_calls(2)


async def test_p19_prefill_that_checks_its_requests_accepts_every_one() -> None:
    """A prefill engine that refuses every request, unheard, is a decode engine that computes everything itself."""
    async with stack() as s:
        body = {"prompt": "a", "stream": True, "stream_options": {"include_usage": True}}
        assert (await s.ask(body)).status == 200
        assert (await s.get("/status")).json["transfers"]["arrived_ratio"] == 1.0


async def test_p34_a_second_try_sends_the_client_s_own_words_again() -> None:
    """A body that was changed in place is another body the second time."""
    content = [{"type": "text", "text": "hi"}]
    body = orjson.dumps({"messages": [{"role": "user", "content": content}], "seed": 12345678901234567890})
    async with stack(prefills=2) as s:
        failed: list[Call] = []
        good = s.prefill.behave

        async def once(call: Call) -> None:
            if failed:
                await good(call)
            else:
                failed.append(call)
                await call.whole(b"{}", 500)

        for engine in s.prefills:
            engine.behave = once
        reply = await s.ask(body, CHAT)
        assert reply.status == 200
        first, second = (call for engine in s.prefills for call in engine.calls)
        told = s.decode.calls[0].json
    assert first.json["messages"] == second.json["messages"] == told["messages"]
    assert told["messages"][0]["content"] == content
    assert first.transfer["transfer_id"] != second.transfer["transfer_id"]
    assert b'"seed":12345678901234567890' in first.body
    assert s.metric("kvpd_retries_total") == 1


async def test_values_are_passed_on_as_the_bytes_that_they_were() -> None:
    """A number that was decoded and encoded again may be another number."""
    async with stack() as s:
        await s.ask(b'{ "prompt" : "a\\u00e9" , "temperature": 0.10, "seed": 123456789012345678901234567890 }')
        for call in (*s.prefill.calls, *s.decode.calls):
            for part in (b'"prompt":"a\\u00e9"', b'"temperature":0.10', b'"seed":123456789012345678901234567890'):
                assert part in call.body


async def test_p36_chat_goes_to_chat_with_all_that_belongs_to_it() -> None:
    """Tools and templates are lost where chat is turned into plain completion."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    body = {"messages": HELLO, "tools": tools, "logprobs": True, "top_logprobs": 2}
    async with stack() as s:
        assert (await s.ask(body, CHAT)).status == 200
        (prefill,), (decode,) = s.prefill.calls, s.decode.calls
    assert prefill.target == decode.target == CHAT
    assert prefill.json["tools"] == tools  # they are part of the prompt
    assert {key: decode.json[key] for key in body} == body


async def choices(call: Call) -> None:
    """A decode engine with as many choices as are asked for, under an id of its own."""
    asked = call.json
    texts = [f"{asked['prompt']}/{number}" for number in range(asked.get("n", 1))]
    own = f"cmpl-{call.headers['x-request-id']}"
    if not asked.get("stream"):
        told = [{"index": number, "text": text} for number, text in enumerate(texts)]
        await call.whole(answer("", choices=told, id=own))
        return
    await call.begin(200, SSE)
    for number, text in enumerate(texts):
        await call.send(event("", id=own, choices=[{"index": number, "text": text}]))
    if (asked.get("stream_options") or {}).get("include_usage"):
        await call.send(event("", id=own, choices=[], usage={"prompt_tokens": 3, "total_tokens": 4}))
    await call.send(DONE)
    await call.end()


@pytest.mark.parametrize("prompts", [["a", "b", "b"], [[1, 2], [3], [3]], ["x" * 300, "y" * 300, "é"]])
async def test_p37_each_prompt_of_a_list_has_its_own_transfer(prompts: list[Any]) -> None:
    """Two requests that share a transfer read each other's KV cache, or none."""
    async with stack(prefills=2, decodes=2) as s:
        for engine in s.decodes:
            engine.behave = choices
        reply = await s.ask({"prompt": prompts, "n": 2})
        prefilled = [call for engine in s.prefills for call in engine.calls]
        decoded = [call for engine in s.decodes for call in engine.calls]
    assert len({call.transfer["transfer_id"] for call in prefilled}) == 3
    assert {call.transfer["transfer_id"] for call in prefilled} == {call.transfer["transfer_id"] for call in decoded}
    told = [(choice["index"], choice["text"]) for choice in reply.json["choices"]]
    assert told == [(2 * at + number, f"{prompt}/{number}") for at, prompt in enumerate(prompts) for number in (0, 1)]
    assert reply.json["usage"] == {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12}


async def test_p37_p35_streams_of_several_prompts_are_one_stream_with_one_id() -> None:
    """The client asked once and must get one answer, with one sum and one end."""
    async with stack() as s:
        s.decode.behave = choices
        body = {"prompt": ["a", "b"], "n": 2, "stream": True, "stream_options": {"include_usage": True}}
        reply = await s.ask(body)
    assert reply.headers["content-type"] == SSE
    *events, usage, done = [entry["data"] for entry in events_of(reply.body)]
    chunks = [orjson.loads(data) for data in events]
    assert len({chunk["id"] for chunk in [*chunks, orjson.loads(usage)]}) == 1
    told = sorted((chunk["choices"][0]["index"], chunk["choices"][0]["text"]) for chunk in chunks)
    assert told == [(0, "a/0"), (1, "a/1"), (2, "b/0"), (3, "b/1")]
    assert orjson.loads(usage)["usage"] == {"prompt_tokens": 6, "total_tokens": 8}
    assert done == "[DONE]"


async def test_p37_a_refusal_of_one_prompt_is_the_answer_to_all() -> None:
    """The others must not go on for nobody."""

    async def picky(call: Call) -> None:
        if call.json["prompt"] == "":
            await s.prefill.wait_calls(2)
            await call.whole(b'{"error":{"message":"an empty prompt"}}', 400)
        else:
            await call.hang()

    async with stack() as s:
        s.prefill.behave = picky
        reply = await s.ask({"prompt": ["a", ""]})
        (hanging,) = [call for call in s.prefill.calls if call.json["prompt"] == "a"]
        await hanging.closed.wait()
    assert (reply.status, reply.json["error"]["message"]) == (400, "an empty prompt")


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"prompt": []}, "empty_prompt"),
        ({"prompt": ["a"] * 257}, "too_many_prompts"),
        ({"prompt": "a", "kv_transfer_params": {"transfer_id": "another's"}}, "not_for_clients"),
        ({"prompt": "a", "stream": "yes"}, "invalid_value"),
        (b"[1]", "invalid_json"),
        (b'{"prompt": "a"', "invalid_json"),
        (b'{"prompt": "a", "kv_transfer_params\\u0073": 1, "kv_transfer_param\\u0073": 1}', "not_for_clients"),
        (b"[" * 100_000, "invalid_json"),
        (b"", "invalid_json"),
    ],
)
async def test_p37_what_cannot_be_served_is_refused_without_asking_an_engine(body: Any, code: str) -> None:
    """Above all a client must not choose whose KV cache it reads."""
    async with stack() as s:
        reply = await s.ask(body)
        assert s.prefill.calls == s.decode.calls == []
    assert (reply.status, reply.error["code"]) == (400, code)


@pytest.mark.parametrize("more", [{"echo": True, "logprobs": 3}, {"prompt_logprobs": 1}, {"prompt_logprobs": 0}])
async def test_p38_p39_logprobs_of_the_prompt_are_refused_by_name(more: dict[str, Any]) -> None:
    """Decode has no hidden states of a prompt: it would crash, or leave them out of an answer that looks whole."""
    async with stack() as s:
        reply = await s.ask({"prompt": "a", "max_tokens": 5, **more})
        assert s.decode.calls == []
        assert (await s.ask({"prompt": "a"})).status == 200
    assert (reply.status, reply.error["code"]) == (400, "unsupported_in_disaggregated_mode")
    assert next(reversed(more)) in reply.error["message"]


@pytest.mark.parametrize("more", [{"logprobs": 0}, {"echo": True}, {"echo": True, "logprobs": None}])
async def test_p38_logprobs_of_the_answer_alone_are_decode_s_affair(more: dict[str, Any]) -> None:
    """What works must not be refused along with what does not."""
    async with stack() as s:
        assert (await s.ask({"prompt": "a", **more})).status == 200
        assert {key: s.decode.calls[0].json[key] for key in more} == more


async def test_p40_top_logprobs_never_reach_a_prefill_engine() -> None:
    """It has crashed on them; its one token is thrown away."""

    async def crashes(call: Call) -> None:
        if {"logprobs", "top_logprobs"} & call.json.keys():
            await call.stream.aclose()
        else:
            await good(call)

    async with stack() as s:
        good, s.prefill.behave = s.prefill.behave, crashes
        body = {"messages": HELLO, "logprobs": True, "top_logprobs": 5, "max_tokens": 8}
        replies: list[int] = []

        async def one(asked: dict[str, Any]) -> None:
            replies.append((await s.ask(asked, CHAT)).status)

        async with trio.open_nursery() as clients:
            for asked in (body, {"messages": HELLO}, body):
                clients.start_soon(one, asked)
    assert replies == [200, 200, 200]
