"""Limits: what is too much is refused by name, what is ambiguous is refused at all, and nobody else notices."""

from __future__ import annotations

import resource
import socket

import orjson
import pytest
import trio

from kvpd.integrations.proxy.limits import DESCRIPTORS_RESERVED, LATE_CONNECTIONS_MAX, fitting

from .clients import Connection, connected
from .engines import SSE, Call, event
from .stacks import COMPLETIONS, WITHIN_A_SECOND_S, Stack, stack

MIB = 1 << 20
SMALL = b'{"prompt":"a"}'


def sized(nbytes: int) -> bytes:
    """A request of exactly so many bytes."""
    return b'{"prompt":"' + b"x" * (nbytes - 13) + b'"}'


def chunked(body: bytes, size: int, extension: bytes = b"") -> bytes:
    """A chunked body."""
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%x%s\r\n%s\r\n" % (len(piece), extension, piece) for piece in pieces) + b"0\r\n\r\n"


def head(*lines: bytes) -> bytes:
    """The head of a completion."""
    return b"\r\n".join([b"POST /v1/completions HTTP/1.1", b"Host: x", *lines, b"", b""])


async def test_p22_liveness_never_waits_for_engines() -> None:
    """An orchestrator that kills the proxy because an engine is gone makes one outage of two."""
    async with stack(probe_interval_s=0.01, probe_timeout_s=15, first_byte_timeout_s=15) as s:
        s.prefill.frozen = s.decode.frozen = True
        async with s.connect() as waiting:
            await waiting.send("POST", COMPLETIONS, SMALL)
            with trio.fail_after(WITHIN_A_SECOND_S):
                for page in ("/health", "/healthz", "/livez", "/status", "/metrics") * 4:
                    assert (await s.get(page)).status == 200


async def open_stream(s: Stack) -> Connection:
    client = await connected(s.proxy.address)
    await client.send("POST", COMPLETIONS, b'{"prompt":"a","stream":true}')
    return client


async def test_p23_above_its_limits_the_proxy_refuses_and_serves_on() -> None:
    """1,500 streams through 1,024 descriptors must end as 503 for some, not as a restart for all."""
    release = trio.Event()

    async def slow(call: Call) -> None:
        await call.begin(200, SSE)
        await call.send(event("a"))
        await release.wait()
        await call.send(event("b"))
        await call.end()

    async with stack(descriptors=160) as s:  # 16 requests and 32 connections fit
        s.decode.behave = slow
        streams = [await open_stream(s) for _ in range(16)]
        for client in streams:
            assert (await client.head())[0] == 200
        busy = [await s.ask(SMALL) for _ in range(3)]
        idle = [await connected(s.proxy.address) for _ in range(16)]
        for client in idle:
            assert (await client.ask("GET", "/health")).status == 200
        crowded = await s.ask(SMALL)
        probes = [(await s.get(page)).status for page in ("/health", "/readyz", "/metrics")]
        late = [await connected(s.proxy.address) for _ in range(40)]
        turned_away = await late[-1].reply()
        release.set()
        ends = [await client.reply_rest() for client in streams]
        for client in [*streams, *idle, *late]:
            await client.stream.aclose()
        await s.wait_metric_down("kvpd_connections", 0)
        assert (await s.ask(SMALL)).status == 200
    assert {(reply.status, reply.error["code"]) for reply in busy} == {(503, "too_many_requests")}
    assert (crowded.status, crowded.error["code"]) == (503, "too_many_connections")
    assert (turned_away.status, turned_away.json["error"]["type"]) == (503, "service_unavailable")
    assert {reply.headers["retry-after"] for reply in (*busy, crowded, turned_away)} == {"1"}
    assert probes == [200, 200, 200]
    assert ends == [event("a") + event("b")] * 16


@pytest.mark.parametrize("descriptors", [1, 100, 256, 1024, 4096, 65536])
def test_p23_requests_and_connections_fit_the_limit_on_open_files(descriptors: int) -> None:
    """A proxy that runs out of descriptors can neither answer a probe nor ask an engine."""
    requests, connections = fitting(512, 2048, descriptors)
    assert 1 <= requests <= 512
    assert 1 <= connections <= 2048
    if descriptors >= 100:
        assert requests * 2 + connections + LATE_CONNECTIONS_MAX + DESCRIPTORS_RESERVED <= descriptors
    assert fitting(512, 2048, resource.RLIM_INFINITY) == (512, 2048)


async def test_p25_connections_to_engines_are_used_again() -> None:
    """A connection for each request runs out of ports under load."""
    async with stack(probe_interval_s=1000) as s:

        async def client() -> None:
            for _ in range(25):
                assert (await s.ask({"prompt": "a", "max_tokens": 1})).status == 200

        async with trio.open_nursery() as clients:
            for _ in range(8):
                clients.start_soon(client)
        assert len(s.decode.calls) == 200
        assert len(s.prefill.ports) <= 8
        assert len(s.decode.ports) <= 8


async def test_p25_a_kept_connection_that_the_engine_has_closed_is_not_an_error() -> None:
    """Engines close idle connections after seconds, and a request may meet that moment."""

    async def closes(call: Call) -> None:
        await good(call)
        await call.stream.aclose()  # without having announced it

    async with stack() as s:
        good, s.decode.behave = s.decode.behave, closes
        for _ in range(10):
            assert (await s.ask({"prompt": "a"})).status == 200
        assert len(s.decode.calls) == 10


async def test_p25_a_kept_connection_that_closes_under_a_request_is_replaced_by_a_new_one() -> None:
    """The engine has taken nothing from it, so this is no second try."""
    used: set[int] = set()

    async def closes_when_used_again(call: Call) -> None:
        if call.port in used:
            await call.stream.aclose()
        else:
            used.add(call.port)
            await good(call)

    async with stack(probe_interval_s=1000) as s:
        good, s.prefill.behave = s.prefill.behave, closes_when_used_again
        for _ in range(3):
            assert (await s.ask({"prompt": "a"})).status == 200
        assert s.metric("kvpd_retries_total") == 0
        assert (len(used), len(s.prefill.calls)) == (3, 5)


@pytest.mark.parametrize(
    "body", [chunked(SMALL, 1), chunked(SMALL, 5, b";x=y"), chunked(SMALL, 5, b';q="a"')], ids=["1", "ext", "quoted"]
)
async def test_p26_a_chunked_body_reaches_engines_with_a_length(body: bytes) -> None:
    """A coding that is announced twice, or undone and still announced, is a request that never ends."""
    async with stack() as s, s.connect() as client:
        await client.raw(head(b"Transfer-Encoding: chunked", b"Connection: close") + body)
        assert (await client.rest()).startswith(b"HTTP/1.1 200 ")
        for call in (*s.prefill.calls, *s.decode.calls):
            assert "transfer-encoding" not in call.headers
            assert int(call.headers["content-length"]) == len(call.body)
            assert call.json["prompt"] == "a"


SMUGGLED = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.parametrize(
    "request_bytes",
    [
        head(b"Transfer-Encoding: chunked", b"Content-Length: 5") + b"0\r\n\r\n" + SMUGGLED,
        head(b"Content-Length: 5", b"Transfer-Encoding: chunked") + b"0\r\n\r\n" + SMUGGLED,
        head(b"Content-Length: 14", b"Content-Length: 15") + SMALL,
        head(b"Content-Length: +14") + SMALL,
        head(b"Transfer-Encoding: chunked").replace(b"1.1", b"1.0", 1) + chunked(SMALL, 5),
        head(b"Transfer-Encoding: chunked") + b"zz\r\n" + SMALL,
        head(b"Content-Length : 14") + SMALL,
        head(b"X: a\x00b") + SMALL,
        b"POST /v1/completions\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64),  # a TLS greeting
    ],
)
async def test_p26_what_can_be_read_in_two_ways_is_refused_and_ends_the_connection(request_bytes: bytes) -> None:
    """The engine might read it in the other way, and take its end for somebody else's request."""
    async with stack() as s, s.connect() as client:
        await client.raw(request_bytes)
        data = await client.rest()
        assert s.prefill.calls == s.decode.calls == []
    assert data.startswith(b"HTTP/1.1 400 ")
    assert data.count(b"HTTP/1.1 ") == 1
    assert b"connection: close" in data.lower()


@pytest.mark.parametrize(
    "request_bytes", [head(b"Transfer-Encoding: chunked") + b"5\r\n{", head(b"Content-Length: 14") + b"{"]
)
async def test_p26_a_body_that_ends_early_is_refused(request_bytes: bytes) -> None:
    """Half a prompt is another prompt."""
    async with stack() as s, s.connect() as client:
        await client.raw(request_bytes)
        await client.stream.send_eof()
        data = await client.rest()
        assert s.prefill.calls == []
    assert data.startswith(b"HTTP/1.1 400 ")


async def test_a_coding_that_is_unknown_is_refused() -> None:
    """It is not guessed."""
    async with stack() as s, s.connect() as client:
        await client.raw(head(b"Transfer-Encoding: gzip, chunked"))
        assert (await client.rest()).startswith(b"HTTP/1.1 501 ")


@pytest.mark.parametrize(
    ("nbytes", "status"), [(19 * MIB // 10, 200), (21 * MIB // 10, 200), (44 * MIB, 200), (46 * MIB, 413)]
)
async def test_p27_long_prompts_are_taken_up_to_a_limit_that_is_named(nbytes: int, status: int) -> None:
    """Frameworks' own limits of 2 or 5 MB refuse long contexts and images."""
    async with stack() as s:
        s.decode.behave = lambda call: call.whole(b"%d" % len(call.body))
        reply = await s.ask(sized(nbytes))
        assert reply.status == status
        assert len(s.prefill.calls) == (status == 200)
    if status == 200:
        assert nbytes < int(reply.body) < nbytes + 300
    else:
        assert "45 MiB" in reply.error["message"]


async def test_p12_a_prompt_of_millions_of_token_ids_passes_whole() -> None:
    """One limit, at the edge: nothing behind it has a smaller one."""
    ids = b",".join(b"%d" % number for number in range(100_000, 1_100_000))
    async with stack() as s:
        s.decode.behave = lambda call: call.whole(b"%d" % call.body.count(b","))
        reply = await s.ask(b'{"prompt":[' + ids + b"]}")
        assert (len(s.prefill.calls), len(s.decode.calls)) == (1, 1)
    assert int(reply.body) > 999_999


async def test_p27_a_chunked_body_is_limited_as_it_comes() -> None:
    """It does not say beforehand how long it will be."""
    async with stack(body_bytes_max=1000, body_memory_max=1000) as s, s.connect() as client:
        await client.raw(head(b"Transfer-Encoding: chunked") + chunked(sized(1001), 100))
        data = await client.rest()
        assert data.startswith(b"HTTP/1.1 413 ")
        assert (await s.ask(sized(1000))).status == 200


async def test_p27_a_slow_upload_has_a_deadline() -> None:
    """A body that trickles in holds its memory for as long as it likes."""
    async with stack(body_timeout_s=0.2) as s, s.connect() as client:
        await client.raw(head(b"Content-Length: 14") + b"{")
        data = await client.rest()
    assert data.startswith(b"HTTP/1.1 408 ")
    assert b"0.2 s" in data


@pytest.mark.parametrize("sent", [b"", b"POST /v1/comp"])
async def test_a_request_that_does_not_come_has_a_deadline(sent: bytes) -> None:
    """A connection that says nothing takes the place of one that would."""
    async with stack(header_timeout_s=0.2) as s, s.connect() as client:
        await client.raw(sent)
        assert (await client.rest()).startswith(b"HTTP/1.1 408 " if sent else b"")


async def test_p27_a_client_that_waits_for_100_continue_gets_it() -> None:
    """curl waits a second for it before it sends a long body."""
    async with stack() as s, s.connect() as client:
        await client.raw(head(b"Content-Length: 14", b"Expect: 100-continue"))
        with trio.fail_after(5):
            assert (await client.stream.receive_some(100)).startswith(b"HTTP/1.1 100 ")
        await client.raw(SMALL)
        assert (await client.head())[0] == 200
        assert "expect" not in s.prefill.calls[0].headers


async def test_p27_a_client_that_waits_is_told_at_once_that_its_body_is_too_long() -> None:
    """So that it need not send it."""
    async with stack() as s, s.connect() as client:
        await client.raw(head(b"Content-Length: 99999999", b"Expect: 100-continue"))
        assert (await client.rest()).startswith(b"HTTP/1.1 413 ")


async def test_p27_all_bodies_together_have_a_limit() -> None:
    """Memory is bounded by what is configured, not by how many clients there are."""
    async with stack(body_bytes_max=MIB, body_memory_max=MIB) as s:
        s.prefill.behave = lambda call: call.hang()
        async with s.connect() as first:
            await first.send("POST", COMPLETIONS, sized(MIB - 5))
            await s.prefill.wait_calls(1)
            reply = await s.ask(sized(1000))
    assert (reply.status, reply.error["code"]) == (503, "too_many_bodies")
    assert reply.headers["retry-after"] == "1"


async def test_headers_are_limited_in_number_and_in_size() -> None:
    """Each is a line of memory that an engine gets, too."""
    async with stack() as s:
        many = await s.ask(SMALL, headers={f"x-{number}": "y" for number in range(100)})
        enough = await s.ask(SMALL, headers={f"x-{number}": "y" for number in range(90)})
        async with s.connect() as client:
            await client.raw(b"GET / HTTP/1.1\r\n" + b"x: " + b"y" * (1 << 17))
            data = await client.rest()
    assert (many.status, many.error["code"]) == (431, "too_many_headers")
    assert enough.status == 200
    assert data.startswith(b"HTTP/1.1 431 ")


async def test_a_client_that_does_not_read_is_let_go() -> None:
    """Its stream would hold an engine's place for ever."""

    async def floods(call: Call) -> None:
        await call.begin(200, SSE)
        while True:
            await call.send(event("x" * 100_000))

    async with stack(stall_timeout_s=0.2) as s, s.connect() as client:
        s.decode.behave = floods
        client.stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await client.send("POST", COMPLETIONS, orjson.dumps({"prompt": "a", "stream": True}))
        decode = await s.decode.wait_calls(1)
        with trio.fail_after(10):
            await decode.closed.wait()
        await s.wait_metric('kvpd_requests_total{outcome="client_cancelled"}', 1)


async def test_requests_sent_ahead_are_answered_in_order() -> None:
    """Pipelining is rare, and it must not be mistaken for a client that leaves."""
    async with stack() as s, s.connect() as client:
        one = head(b"Content-Length: 14") + SMALL
        await client.raw(one * 3 + head(b"Connection: close", b"Content-Length: 14") + SMALL)
        assert (await client.rest()).count(b"HTTP/1.1 200 ") == 4


async def test_a_client_that_sends_on_and_on_instead_of_reading_is_cut_off() -> None:
    """What it sends ahead is held in memory."""
    async with stack() as s, s.connect() as client:
        s.prefill.behave = lambda call: call.hang()
        await client.raw(head(b"Content-Length: 14") + SMALL)
        prefill = await s.prefill.wait_calls(1)
        await client.raw(b"x" * 200_000)
        with trio.fail_after(5):
            await prefill.closed.wait()
