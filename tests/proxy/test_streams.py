"""Answers reach the client as the engine gave them: status, content type and every byte, as soon as it is there."""

from __future__ import annotations

import h11
import orjson
import pytest
import trio

from .clients import events_of
from .engines import DONE, SSE, Call, answer, event
from .stacks import CHAT, COMPLETIONS, stack


async def test_p14_a_stream_and_an_answer_have_the_engine_s_content_type() -> None:
    """A client that is told `application/json` of a stream parses `data: …` as JSON, and fails."""
    async with stack() as s:
        streamed = await s.ask({"prompt": "a", "stream": True})
        whole = await s.ask({"prompt": "a", "stream": False})
    assert streamed.headers["content-type"] == SSE
    assert [entry["data"] for entry in events_of(streamed.body)][-1] == "[DONE]"
    assert whole.headers["content-type"] == "application/json"
    assert whole.json["choices"][0]["text"] == "a"


async def test_p14_a_content_type_that_nobody_foresaw_is_passed_on_too() -> None:
    """It is the engine's to say what it sends."""

    async def odd(call: Call) -> None:
        await call.whole(b"\x00\x01", 207, "application/x-odd; v=1", x_engine="d0")

    async with stack() as s:
        s.decode.behave = odd
        reply = await s.ask({"prompt": "a"})
    assert (reply.status, reply.body) == (207, b"\x00\x01")
    assert reply.headers["content-type"] == "application/x-odd; v=1"
    assert reply.headers["x-engine"] == "d0"


@pytest.mark.parametrize("cut", [1, 7, 10_000])
async def test_p15_blank_lines_and_event_names_survive(cut: int) -> None:
    """Without its blank lines a stream has no events at all, and still looks like a success."""
    told = b"event: x\ndata: a\n\n: a comment\n\ndata: b\r\n\r\ndata: \xc3\xa9\n\n"

    async def stream(call: Call) -> None:
        await call.events(*(told[at : at + cut] for at in range(0, len(told), cut)))

    async with stack() as s:
        s.decode.behave = stream
        reply = await s.ask({"prompt": "a", "stream": True})
    assert reply.body == told


async def test_each_piece_of_a_stream_arrives_before_the_next_is_made() -> None:
    """A proxy that collects pieces turns a stream into an answer that comes late."""
    taken = trio.Event()

    async def stream(call: Call) -> None:
        nonlocal taken
        await call.begin(200, SSE)
        for number in range(5):
            taken = trio.Event()
            await call.send(event(str(number)))
            await taken.wait()  # the client has this one
        await call.end()

    async with stack() as s, s.connect() as client:
        s.decode.behave = stream
        await client.send("POST", COMPLETIONS, b'{"prompt":"a","stream":true}')
        await client.head()
        for number in range(5):
            assert await client.piece() == event(str(number))
            taken.set()
        assert await client.piece() == b""


async def test_p24_every_request_on_a_kept_connection_is_served_like_the_first() -> None:
    """A benchmark whose later requests all fail says nothing of the engines."""

    async def engine(call: Call) -> None:
        asked = call.json
        if asked.get("model") == "nope":
            await call.whole(b'{"error":{"message":"no such model"}}', 404)
        elif asked.get("stream"):
            await call.events(event("s"), DONE)
        else:
            await call.whole(answer("w"))

    bodies = [
        b'{"prompt":"a","stream":true}',
        b'{"prompt":"a"}',
        b'{"prompt":"a","model":"nope"}',
        b"{",
        b'{"prompt":"b"}',
    ]
    async with stack() as s:
        s.decode.behave = engine
        statuses: list[list[int]] = []

        async def one_client() -> None:
            async with s.connect() as client:
                replies = [await client.ask("POST", COMPLETIONS, bodies[number % 5]) for number in range(10)]
                statuses.append([reply.status for reply in replies])

        async with trio.open_nursery() as clients:
            for _ in range(8):
                clients.start_soon(one_client)
    assert statuses == [[200, 200, 404, 400, 200] * 2] * 8


async def test_p35_all_events_of_a_stream_come_from_the_decode_engine() -> None:
    """Clients tell answers apart by their id; one that changes within an answer is two answers."""
    async with stack() as s:
        reply = await s.ask({"prompt": "a", "stream": True})
    chunks = [orjson.loads(entry["data"]) for entry in events_of(reply.body)[:-1]]
    assert len(chunks) == 3
    assert {(chunk["id"], chunk["model"], chunk["created"]) for chunk in chunks} == {("cmpl-1", "m", 7)}


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_goes_with_all_of_its_answer_was_answered(stream: bool) -> None:
    """OpenAI's own client closes at [DONE], others after Content-Length bytes: none waits for HTTP's own end."""
    last = DONE if stream else b"}"

    async def lingers(call: Call) -> None:
        await call.begin(200, SSE if stream else "application/json", **({} if stream else {"content_length": "2"}))
        await call.send(event("a") if stream else b"{")
        await call.send(last)
        await call.hang()

    async with stack() as s:
        s.decode.behave = lingers
        async with s.connect() as client:
            await client.send("POST", COMPLETIONS, orjson.dumps({"prompt": "a", "stream": stream}))
            assert (await client.head())[0] == 200
            got = b""
            while not got.endswith(last):
                got += await client.piece()
        await s.wait_metric('kvpd_requests_total{outcome="answered"}', 1)
        assert s.metric('kvpd_requests_total{outcome="client_cancelled"}') == 0


async def test_a_stream_that_breaks_off_between_events_ends_with_an_error_event() -> None:
    """Without it the client would take what it has for the whole answer."""

    async def breaks(call: Call) -> None:
        await call.begin(200, SSE)
        await call.send(event("a"))
        await call.stream.aclose()

    async with stack() as s:
        s.decode.behave = breaks
        reply = await s.ask({"prompt": "a", "stream": True})
        await s.wait_metric('kvpd_requests_total{outcome="failed"}', 1)
        assert len(s.decode.calls) == 1
    events = events_of(reply.body)
    assert orjson.loads(events[0]["data"])["choices"][0]["text"] == "a"
    assert orjson.loads(events[1]["data"])["error"]["code"] == "engine_broken"
    assert events[2]["data"] == "[DONE]"


@pytest.mark.parametrize("content_type", [SSE, "application/json"])
async def test_an_answer_that_breaks_off_in_its_middle_is_cut_off_for_the_client_too(content_type: str) -> None:
    """Half an event followed by an error event would be one event, and half a JSON is none."""

    async def breaks(call: Call) -> None:
        await call.begin(200, content_type)
        await call.send(b'data: {"choi')
        await call.stream.aclose()

    async with stack() as s, s.connect() as client:
        s.decode.behave = breaks
        await client.send("POST", COMPLETIONS, b'{"prompt":"a","stream":true}')
        await client.head()
        assert await client.piece() == b'data: {"choi'
        with pytest.raises(h11.RemoteProtocolError):
            await client.piece()


async def test_a_stream_that_stalls_ends_with_an_error_event() -> None:
    """A client must not wait for ever for an engine that has stopped."""

    async def stalls(call: Call) -> None:
        await call.begin(200, SSE)
        await call.send(event("a"))
        await call.hang()

    async with stack(stall_timeout_s=0.2) as s:
        s.decode.behave = stalls
        reply = await s.ask({"prompt": "a", "stream": True})
    assert orjson.loads(events_of(reply.body)[1]["data"])["error"]["code"] == "engine_timeout"


async def test_a_chat_s_stream_passes_through_byte_for_byte() -> None:
    """Chat is what most clients use."""
    told = b'data: {"choices":[{"delta":{"content":"h\\u00e9"}}],"n":1.50}\n\n'

    async def stream(call: Call) -> None:
        assert call.target == CHAT
        await call.events(told, DONE)

    async with stack() as s:
        s.decode.behave = stream
        reply = await s.ask({"messages": [{"role": "user", "content": "hi"}], "stream": True}, CHAT)
        assert s.prefill.calls[0].target == CHAT
    assert reply.body == told + DONE


async def test_an_http_1_0_client_gets_the_same_bytes() -> None:
    """Old health checkers and shell scripts speak it; it knows no chunks, so the connection's end is the body's."""
    body = b'{"prompt":"a","stream":true}'
    async with stack() as s, s.connect() as client:
        await client.raw(b"POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        data = await client.rest()
    head, _, rest = data.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert rest == b"".join(event(f"a-{number}") for number in range(3)) + DONE
