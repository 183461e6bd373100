"""Which paths there are, what happens to a request's id and headers, and what the proxy tells of itself."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
import trio
from click.testing import CliRunner

from kvpd.cli import main

from .engines import Call
from .stacks import CHAT, COMPLETIONS, stack


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_the_client_s_id_and_authorization_reach_both_engines(side: str) -> None:
    """One id finds a request in all logs, and engines check keys themselves."""
    headers = {"x-request-id": "req-7", "authorization": "Bearer k", "x-trace": "t"}
    async with stack() as s:
        reply = await s.ask({"prompt": "a"}, headers=headers)
        (call,) = s.prefill.calls if side == "prefill" else s.decode.calls
    assert {name: call.headers[name] for name in headers} == headers
    assert reply.headers["x-request-id"] == "req-7"


async def test_every_answer_has_an_id_of_its_own_when_the_client_gave_none() -> None:
    """Refusals, too: they are what somebody will ask about."""
    async with stack() as s:
        replies = [await s.ask({"prompt": "a"}), await s.ask({"prompt": "a"}), await s.ask(b"{"), await s.get("/nope")]
        assert s.decode.calls[0].headers["x-request-id"] == replies[0].headers["x-request-id"]
    assert len({reply.headers["x-request-id"] for reply in replies}) == 4


async def test_an_engine_s_own_id_does_not_replace_the_client_s() -> None:
    """Two of them in one answer are none."""
    async with stack() as s:
        s.decode.behave = lambda call: call.whole(b"{}", x_request_id="another")
        reply = await s.ask({"prompt": "a"}, headers={"x-request-id": "mine"})
    assert reply.headers["x-request-id"] == "mine"


@pytest.mark.parametrize("given", ["0", "a b", "___prefill_addr_1.2.3.4:1___decode_addr_", "x" * 128])
async def test_p11_an_id_is_opaque(given: str) -> None:
    """It is a label; what joins the engines is a transfer id that the proxy draws."""
    async with stack() as s:
        reply = await s.ask({"prompt": "a"}, headers={"x-request-id": given})
        assert s.prefill.calls[0].transfer["transfer_id"] not in given
    assert (reply.status, reply.headers["x-request-id"]) == (200, given)


@pytest.mark.parametrize("given", [b"x" * 300, "é".encode(), b"a\tb"])
async def test_p11_an_id_that_could_harm_a_log_or_a_header_is_refused(given: bytes) -> None:
    """And it is not echoed."""
    async with stack() as s, s.connect() as client:
        await client.raw(b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX-Request-Id: " + given + b"\r\n\r\n")
        data = await client.rest()
        assert s.decode.calls == []
    assert data.startswith(b"HTTP/1.1 400 ")
    assert b"bad_request_id" in data
    assert given not in data


async def test_p11_a_header_cannot_be_smuggled_in_an_id() -> None:
    """What follows the line break is a header of the request, and of nothing else."""
    async with stack() as s, s.connect() as client:
        await client.raw(
            b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX-Request-Id: x\r\nSet-Cookie: y\r\nConnection: close\r\n\r\n"
        )
        data = await client.rest()
    assert b"set-cookie" not in data.lower()


async def test_headers_for_one_hop_alone_are_not_passed_on() -> None:
    """They speak of a connection that the engine does not have."""
    headers = {"connection": "keep-alive, x-mine", "x-mine": "1", "te": "trailers", "upgrade": "h2c", "x-yours": "2"}

    async def told(call: Call) -> None:
        await call.whole(b"{}", connection="x-engine", x_engine="1", keep_alive="timeout=5")

    async with stack() as s:
        s.decode.behave = told
        reply = await s.ask({"prompt": "a"}, headers=headers)
        got = s.decode.calls[0].headers
    assert not {"connection", "x-mine", "te", "upgrade"} & got.keys()
    assert got["x-yours"] == "2"
    assert not {"x-engine", "keep-alive"} & reply.headers.keys()


@pytest.mark.parametrize("path", [f"{COMPLETIONS}?timeout=30&x=%20", f"{CHAT}?a=%2F?b#c".split("#")[0]])
async def test_p31_a_query_is_passed_on_byte_for_byte(path: str) -> None:
    """An engine that misses one acts otherwise than it was told."""
    async with stack() as s:
        assert (await s.ask({"prompt": "a"}, path)).status == 200
        assert s.prefill.calls[0].target == s.decode.calls[0].target == path


async def test_p31_models_are_asked_for_with_the_client_s_query() -> None:
    """The decode engine answers: it is the one that clients talk to."""
    async with stack() as s:
        reply = await s.get("/v1/models?limit=3&x=%20")
        assert s.decode.calls[0].target == "/v1/models?limit=3&x=%20"
    assert reply.json["data"] == [{"id": "m"}]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/flush_cache?timeout=30", 404),
        ("POST", "/v1/embeddings", 404),
        ("POST", "/tokenize", 404),
        ("GET", "/", 404),
        ("GET", "/v1/completions/", 404),
        ("GET", COMPLETIONS, 405),
        ("OPTIONS", CHAT, 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/health", 405),
        ("PATCH", "/status", 405),
    ],
)
async def test_p36_p31_what_is_not_served_is_refused_and_no_engine_hears_of_it(
    method: str, path: str, status: int
) -> None:
    """Half of a protocol, or an admin's call that reaches one engine of many, is worse than none."""
    async with stack() as s:
        reply = await s.ask(b"{}", path, method=method)
        assert s.prefill.calls == s.decode.calls == []
    assert reply.status == status
    assert reply.error["code"] == ("not_found" if status == 404 else "method_not_allowed")
    assert ("allow" in reply.headers) == (status == 405)


@pytest.mark.parametrize("path", ["/health", "/readyz", "/metrics", "/status", "/v1/models", "/nope", COMPLETIONS])
async def test_p36_head_has_the_answer_s_head_and_no_body(path: str) -> None:
    """A body where none may be is the beginning of the next answer."""
    async with stack() as s, s.connect() as client:
        await client.send("HEAD", path)
        status, headers = await client.head()
        assert await client.piece() == b""
        assert (await client.ask("GET", "/health")).body == b"ok\n"
    assert status == {"/nope": 404, COMPLETIONS: 405}.get(path, 200)
    assert int(headers["content-length"]) > 0


async def test_metrics_and_status_tell_what_happened() -> None:
    """One curl answers whether KV caches move at all."""
    async with stack(prefills=2) as s:
        assert (await s.get("/status")).json["transfers"]["arrived_ratio"] is None
        await s.ask({"prompt": "a"})
        text = (await s.get("/metrics")).body.decode()
        status = (await s.get("/status")).json
    assert 'kvpd_transfers_total{outcome="arrived"} 1.0' in text
    assert 'kvpd_engines_alive{kind="prefill"} 2.0' in text
    assert status["transfers"]["arrived_ratio"] == 1.0
    assert [(engine["kind"], engine["alive"]) for engine in status["engines"]] == [
        ("prefill", True),
        ("prefill", True),
        ("decode", True),
    ]
    assert (status["mode"], status["policy"], status["on_miss"]) == ("sequential", "least_tokens", "fail")


async def test_p68_readiness_says_what_is_missing_and_every_order_of_starting_ends_ready() -> None:
    """Proxy first, then decode, then prefill: nobody restarts anything by hand."""
    async with stack() as s:
        await s.prefill.stop()
        await s.decode.stop()
        for engine in (s.prefill, s.decode):
            await s.wait_alive(engine, False)
        nothing = await s.get("/readyz")
        await s.nursery.start(s.decode.run)
        await s.wait_alive(s.decode, True)
        half = await s.get("/readyz")
        await s.nursery.start(s.prefill.run)
        await s.wait_alive(s.prefill, True)
        assert (await s.get("/readyz")).status == 200
        assert (await s.ask({"prompt": "a"})).status == 200
    assert (nothing.status, half.status) == (503, 503)
    assert nothing.body == b"[-] decode engines: 0 of 1 answer\n[-] prefill engines: 0 of 1 answer\nnot ready\n"
    assert half.body == b"[-] prefill engines: 0 of 1 answer\nnot ready\n"


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("mode", "concurrent", "concurrent"),
        ("policy", "sticky", "sticky"),
        ("on_miss", "recompute", "recompute"),
        ("decode_only_fallback", "true", True),
        ("prefill", "http://a:1, http://b:2", ["http://a:1", "http://b:2"]),
        ("decode", "http://a:1+r:7300", ["http://a:1+r:7300"]),
        ("body_bytes_max", "2MiB", 2 << 20),
    ],
)
def test_p33_every_flag_shows_in_the_configuration_in_force(key: str, text: str, value: object) -> None:
    """A flag that is accepted and does nothing starts another program than was asked for."""
    clean: dict[str, str | None] = {name: None for name in os.environ if name.startswith("KVPD_")}
    shown = CliRunner(env=clean).invoke(main, ["config", "show", "--json", "--set", f"proxy.{key}={text}"])
    assert json.loads(shown.stdout)[f"proxy.{key}"] == {"value": value, "source": "--set"}
    wrong = CliRunner(env=clean).invoke(main, ["config", "show", "--set", f"proxy.{key}s={text}"])
    assert wrong.exit_code == 2


@pytest.mark.parametrize("settings", [{"mode": "concurrent"}, {"policy": "round_robin"}, {"on_miss": "recompute"}])
async def test_p33_status_shows_what_the_proxy_really_does(settings: dict[str, Any]) -> None:
    """The configuration as it was read, by the process that runs."""
    async with stack(**settings) as s:
        status = (await s.get("/status")).json
    assert {key: status[key] for key in settings} == settings


async def test_a_request_that_was_begun_is_finished_by_a_drain_and_no_other_is_taken() -> None:
    """A rolling restart that drops streams is an outage of its own."""
    release = trio.Event()

    async def slow(call: Call) -> None:
        await release.wait()
        await call.whole(b"{}")

    async with stack() as s, s.connect() as idle, s.connect() as client:
        s.decode.behave = slow
        assert (await idle.ask("GET", "/health")).status == 200
        await client.send("POST", COMPLETIONS, b'{"prompt":"a"}')
        await s.decode.wait_calls(1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(s.proxy.drain, 10)
            assert await idle.rest() == b""
            with pytest.raises(OSError, match="connect"):
                await s.get("/health")
            release.set()
            reply = await client.reply()
            assert await client.rest() == b""
    assert (reply.status, reply.body) == (200, b"{}")
    assert reply.headers["connection"] == "close"
