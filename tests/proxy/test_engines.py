"""Which engine a request gets, and how the proxy learns which engines there are."""

from __future__ import annotations

import attrs
import trio

from kvpd.config import ProxyConfig

from .engines import Call, Engine
from .stacks import RECEIVER, Stack, computes, generates, stack


async def asked_by_prompt(s: Stack, prompts: list[str]) -> list[list[str]]:
    """Which prompts each prefill engine got, asked one after the other."""
    for prompt in prompts:
        assert (await s.ask({"prompt": prompt})).status == 200
    return [[call.json["prompt"] for call in engine.calls] for engine in s.prefills]


async def test_the_engine_with_the_fewest_tokens_in_flight_is_chosen() -> None:
    """A long prompt counts for what it is, not for one request."""
    release = trio.Event()

    async def slow(call: Call) -> None:
        if len(call.json["prompt"]) > 100:
            await release.wait()
        await computes(s.sender)(call)

    async with stack(prefills=2) as s:
        for engine in s.prefills:
            engine.behave = slow
        async with trio.open_nursery() as clients:
            clients.start_soon(s.ask, {"prompt": "x" * 10_000})
            long = await s.prefills[0].wait_calls(1)
            assert [len(calls) for calls in await asked_by_prompt(s, ["a"] * 5)] == [1, 5]
            release.set()
        assert len(long.json["prompt"]) == 10_000


async def test_equal_engines_take_turns() -> None:
    """The first of a list must not get everything while all are idle."""
    async with stack(prefills=3) as s:
        assert await asked_by_prompt(s, list("abcdef")) == [["a", "d"], ["b", "e"], ["c", "f"]]


async def test_round_robin_takes_turns_whatever_the_load() -> None:
    """For engines behind balancers of their own."""
    async with stack(prefills=2, policy="round_robin") as s:
        assert await asked_by_prompt(s, ["a" * 9000, "b", "c", "d"]) == [["a" * 9000, "c"], ["b", "d"]]


async def test_sticky_sends_equal_beginnings_to_the_same_engine_and_moves_few_when_one_dies() -> None:
    """That is where the prefix cache is."""
    prompts = [f"{number}" * 3000 for number in range(10, 40)]
    async with stack(prefills=3, policy="sticky", probe_interval_s=1000) as s:
        first = await asked_by_prompt(s, prompts)
        assert all(len(mine) > 2 for mine in first)
        again = await asked_by_prompt(s, [prompt + " and more" for prompt in prompts])
        assert [sorted(prompt[:3000] for prompt in mine) for mine in again] == [
            sorted([*(prompt[:3000] for prompt in mine)] * 2) for mine in first
        ]
        await s.prefills[0].stop()
        await s.ask({"prompt": first[0][0]})
        await s.wait_alive(s.prefills[0], False)
        for engine in s.prefills:
            engine.calls.clear()
        after = await asked_by_prompt(s, prompts)
        for number in (1, 2):
            assert set(first[number]) <= set(after[number])


async def test_p55_an_engine_that_comes_back_at_its_address_is_used_at_once() -> None:
    """No stale connection, and nothing to do by hand."""
    async with stack() as s:
        assert (await s.ask({"prompt": "a"})).status == 200
        await s.prefill.stop()
        await s.wait_alive(s.prefill, False)
        await s.nursery.start(s.prefill.run)
        await s.wait_alive(s.prefill, True)
        assert (await s.ask({"prompt": "a"})).status == 200


async def test_p55_an_engine_that_a_request_found_gone_is_asked_again_at_once_and_again() -> None:
    """However rarely engines that live are asked: one that came back must not wait for its turn."""
    async with stack(probe_interval_s=1000) as s:
        await s.prefill.stop()
        assert (await s.ask({"prompt": "a"})).status == 503
        await s.nursery.start(s.prefill.run)
        await s.wait_alive(s.prefill, True)
        assert (await s.ask({"prompt": "a"})).status == 200


async def test_p54_engines_that_live_serve_while_others_are_dead() -> None:
    """Half a fleet is half a service."""
    async with stack(prefills=2, decodes=2) as s:
        await s.prefills[0].stop()
        await s.decodes[1].stop()
        replies = [await s.ask({"prompt": "a"}) for _ in range(6)]
    assert [reply.status for reply in replies] == [200] * 6


async def test_an_engine_that_says_it_is_not_healthy_gets_no_requests() -> None:
    """It answers /health with 503 while it loads its model, or sleeps."""
    async with stack(decodes=2) as s:
        s.decodes[0].health = 503
        await s.wait_alive(s.decodes[0], False)
        for _ in range(4):
            assert (await s.ask({"prompt": "a"})).status == 200
        assert (len(s.decodes[0].calls), len(s.decodes[1].calls)) == (0, 4)
        (first, _) = [engine for engine in (await s.get("/status")).json["engines"] if engine["kind"] == "decode"]
        assert first["detail"] == "/health answered 503"


async def test_engines_come_and_go_while_the_proxy_runs() -> None:
    """What SIGHUP does: requests that run at a removed engine are finished there."""
    release = trio.Event()

    async def slow(call: Call) -> None:
        await release.wait()
        await generates(call)

    async with stack() as s:
        s.decode.behave = slow
        new = Engine("decode-new", generates)
        await s.nursery.start(new.run)
        async with trio.open_nursery() as clients:
            clients.start_soon(s.ask, {"prompt": "a"})
            await s.decode.wait_calls(1)
            config: ProxyConfig = attrs.evolve(s.config, decode=(f"{new.url}+{RECEIVER}",))
            assert s.proxy.reload(config) == ([f"{new.url}+{RECEIVER}"], [f"{s.decode.url}+{RECEIVER}"])
            await s.wait_alive(new, True)
            assert (await s.ask({"prompt": "b"})).status == 200
            assert (len(s.decode.calls), len(new.calls)) == (1, 1)
            release.set()
        assert s.proxy.reload(config) == ([], [])
