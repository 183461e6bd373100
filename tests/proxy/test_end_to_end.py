"""Engines with real daemons between them: a prompt's bytes go all the way, or nothing of it is left behind."""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import attrs
import orjson
import pytest
import trio
from e2e.daemons import Daemon, Fleet

from kvpd.client import ReceiverLink, SenderLink
from kvpd.config import ProxyConfig
from kvpd.errors import AdmissionRefused, TransferError
from kvpd.integrations.proxy.server import Proxy, open_proxy
from kvpd.metrics import Health, ProxyMetrics

from .clients import Reply, ask, connect, events_of
from .engines import DEADLINE_S, DONE, SSE, Call, Engine, answer, event
from .stacks import COMPLETIONS

CHUNK: Final = 65536
SLOTS: Final = 16


def chunks_of(prompt: str) -> list[bytes]:
    """A prompt's "KV cache": one chunk for every letter, and bytes that belong to this prompt alone."""
    seeds = [hashlib.sha256(f"{prompt}/{number}".encode()).digest() for number in range(len(prompt))]
    return [seed * (CHUNK // len(seed)) for seed in seeds]


def digest_of(prompt: str) -> str:
    """What a decode engine answers that has got the right bytes."""
    return hashlib.sha256(b"".join(chunks_of(prompt))).hexdigest()


class PrefillEngine:
    """Computes a prompt's chunks and sends them through its daemon, as a connector would."""

    def __init__(self, link: SenderLink) -> None:
        self.link = link
        self._threads = trio.CapacityLimiter(100)

    async def behave(self, call: Call) -> None:
        """Answer at once, and send on: the proxy waits for the sender's word."""
        told = call.transfer
        try:
            send = partial(self.send, call.json["prompt"], told)
            await trio.to_thread.run_sync(send, abandon_on_cancel=True, limiter=self._threads)
        except TransferError as exc:
            error = {"code": exc.code, "detail": exc.detail, "retry_after_s": exc.retry_after_s}
            await call.whole(answer("", kv_transfer_params={"error": error}))
        except trio.Cancelled:
            self.link.cancel(told["transfer_id"])
            raise
        else:
            await call.whole(answer("x", kv_transfer_params={"chunks": len(call.json["prompt"])}))

    def send(self, prompt: str, told: dict[str, Any]) -> None:
        """All chunks of a prompt, in a thread."""
        chunks = chunks_of(prompt)
        keys = [hashlib.sha256(chunk).digest() for chunk in chunks]
        where: dict[str, Any] = {"receiver": told["receiver"], "notify": told["notify"]}
        with (
            self.link.open(told["transfer_id"], total_chunks=len(chunks), **where) as transfer,
            transfer.stage(keys, last=True) as slots,
        ):
            for slot, chunk in zip(slots, chunks, strict=True):
                if slot is not None:
                    slot[:] = chunk


class DecodeEngine:
    """Claims a prompt's chunks and answers with their digest. What becomes complete and is not wanted is cancelled."""

    def __init__(self, link: ReceiverLink) -> None:
        self.link = link
        self._unwanted: set[str] = set()
        self._threads = trio.CapacityLimiter(100)

    def watch(self) -> None:
        """In a thread, until the link is closed: a transfer may become complete after its request was dropped."""
        for told in self.link.events():
            if told.state == "ready" and told.req_id in self._unwanted:
                self.link.cancel(told.req_id)

    async def behave(self, call: Call) -> None:
        """Stream the digest, or answer with it."""
        transfer_id = call.transfer["transfer_id"]
        try:
            digest = await trio.to_thread.run_sync(
                self._claim, transfer_id, abandon_on_cancel=True, limiter=self._threads
            )
        except TransferError as exc:
            await call.whole(orjson.dumps({"error": {"message": str(exc)}}), 500)
            return
        except trio.Cancelled:
            self._unwanted.add(transfer_id)
            self.link.cancel(transfer_id)
            raise
        if not call.json.get("stream"):
            await call.whole(answer(digest))
            return
        await call.begin(200, SSE)
        for letter in digest:
            await call.send(event(letter))
        await call.send(DONE)
        await call.end()

    def _claim(self, transfer_id: str) -> str:
        with self.link.claim(transfer_id, timeout=DEADLINE_S) as chunks:
            return hashlib.sha256(b"".join(chunk.view for chunk in chunks)).hexdigest()


@attrs.frozen
class Daemons:
    """A sender and a receiver with 16 slots, and the engines' links to them."""

    receiver: Daemon
    sender: Daemon
    prefill: SenderLink
    decode: DecodeEngine

    def check_quiet(self) -> None:
        """Nothing of any request is left."""
        self.receiver.wait_quiet()
        assert self.receiver.slots() == {"free": SLOTS}


@pytest.fixture(scope="module")
def daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemons]:
    """Started once, because each takes a second."""
    with Fleet(tmp_path_factory.mktemp("daemons")) as fleet:
        receiver = fleet.receiver("r", slots=SLOTS, chunk_bytes=CHUNK, lease_s=4, put_deadline_s=1.5)
        sender = fleet.sender("s", slots=6, chunk_bytes=CHUNK)
        receiver.wait_ready()
        sender.wait_ready()
        with receiver.receiver_link() as link, sender.sender_link() as prefill:
            decode = DecodeEngine(link)
            watching = threading.Thread(target=decode.watch)
            watching.start()
            yield Daemons(receiver, sender, prefill, decode)
        watching.join(DEADLINE_S)
        assert not watching.is_alive()


@asynccontextmanager
async def whole_stack(daemons: Daemons, **settings: Any) -> AsyncIterator[tuple[Proxy, Engine, Engine]]:
    """A proxy, and one engine of each kind at its daemon."""
    prefill = Engine("prefill", PrefillEngine(daemons.prefill).behave)
    decode = Engine("decode", daemons.decode.behave)
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            await nursery.start(prefill.run)
            await nursery.start(decode.run)
            lists = {"prefill": (prefill.url,), "decode": (f"{decode.url}+{daemons.receiver.address}",)}
            addresses = {"address": "127.0.0.1:0", "notify_address": "127.0.0.1:0"}
            config = ProxyConfig(**{**addresses, **lists, **settings})
            health = Health()
            health.mark_ready()
            async with open_proxy(config, metrics=ProxyMetrics(), health=health, descriptors=4096) as proxy:
                yield proxy, prefill, decode
                assert await proxy.drain(DEADLINE_S)
            nursery.cancel_scope.cancel()


def text_of(reply: Reply) -> str:
    """What was generated, streamed or not."""
    if "json" in reply.headers["content-type"]:
        return str(reply.json["choices"][0]["text"])
    chunks = [orjson.loads(entry["data"]) for entry in events_of(reply.body)[:-1]]
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)


@pytest.mark.parametrize("mode", ["sequential", "concurrent"])
async def test_every_prompt_s_bytes_arrive_through_real_daemons(mode: str, daemons: Daemons) -> None:
    """More of them than the receiver holds at once, one as large as all it has: each waits for its room."""
    prompts = [f"{number}" + "x" * length for number, length in enumerate((0, 1, 4, 9, 14, 7, 3, 2, 11, 15))]
    texts: dict[str, str] = {}

    async with whole_stack(daemons, mode=mode) as (proxy, _, _):

        async def one(prompt: str) -> None:
            body = {"prompt": prompt, "stream": len(prompt) % 2 == 0}
            texts[prompt] = text_of(await ask(proxy.address, "POST", COMPLETIONS, body))

        async with trio.open_nursery() as clients:
            for prompt in prompts:
                clients.start_soon(one, prompt)
    assert texts == {prompt: digest_of(prompt) for prompt in prompts}
    daemons.check_quiet()


@pytest.mark.parametrize("mode", ["sequential", "concurrent"])
async def test_p29_clients_that_leave_at_any_moment_leave_no_slot_taken(mode: str, daemons: Daemons) -> None:
    """A cancel may meet admission, staging, a put, the wait for the sender's word, the claim, or the answer."""
    rng = random.Random(29)
    async with whole_stack(daemons, mode=mode) as (proxy, _, _):

        async def leaves(number: int) -> None:
            async with connect(proxy.address) as client:
                prompt = f"{number}".ljust(rng.randrange(3, SLOTS), "y")
                await client.send("POST", COMPLETIONS, orjson.dumps({"prompt": prompt, "stream": True}))
                with trio.move_on_after(rng.uniform(0, 0.1)):
                    await client.stream.receive_some(1)

        async with trio.open_nursery() as clients:
            for number in range(50):
                clients.start_soon(leaves, number)
        for number in range(10):
            prompt = f"{number}-after".ljust(SLOTS, "z")
            reply = await ask(proxy.address, "POST", COMPLETIONS, {"prompt": prompt})
            assert text_of(reply) == digest_of(prompt)
    daemons.check_quiet()


async def test_p46_a_prompt_that_is_too_large_for_the_receiver_is_told_so_at_once(daemons: Daemons) -> None:
    """With both numbers, from the receiver's own mouth, and without a second try."""
    async with whole_stack(daemons) as (proxy, prefill, decode):
        reply = await ask(proxy.address, "POST", COMPLETIONS, {"prompt": "x" * (SLOTS + 1)})
        assert (len(prefill.calls), len(decode.calls)) == (1, 0)
    assert (reply.status, reply.error["code"]) == (413, "too_large")
    assert str(SLOTS + 1) in reply.error["message"]
    daemons.check_quiet()


async def test_an_engine_that_says_nothing_of_a_refusal_costs_no_wait(daemons: Daemons) -> None:
    """It has answered before it knew: the sender's daemon tells the proxy, which would wait for a minute else."""
    engine = PrefillEngine(daemons.prefill)
    async with whole_stack(daemons) as (proxy, prefill, decode):

        async def answers_first(call: Call) -> None:
            await call.whole(answer("x"))
            send = partial(engine.send, "x" * (SLOTS + 1), call.transfer)
            with pytest.raises(AdmissionRefused):
                await trio.to_thread.run_sync(send)

        prefill.behave = answers_first
        with trio.fail_after(DEADLINE_S):
            reply = await ask(proxy.address, "POST", COMPLETIONS, {"prompt": "x"})
        assert (len(prefill.calls), len(decode.calls)) == (1, 0)
    assert (reply.status, reply.error["code"]) == (413, "too_large")
    assert str(SLOTS + 1) in reply.error["message"]
    daemons.check_quiet()


async def test_a_killed_sender_is_a_clean_error_and_its_successor_serves(daemons: Daemons, tmp_path: Path) -> None:
    """The receiver's other half lives on, and no slot stays taken by the dead one."""
    with Fleet(tmp_path) as fleet:
        first = fleet.sender("victim", slots=6, chunk_bytes=CHUNK)
        first.wait_ready()
        with first.sender_link() as link:
            async with whole_stack(attrs.evolve(daemons, sender=first, prefill=link)) as (proxy, prefill, _):
                prompt = "killed".ljust(9, "k")
                assert text_of(await ask(proxy.address, "POST", COMPLETIONS, {"prompt": prompt})) == digest_of(prompt)
                await trio.to_thread.run_sync(first.kill)
                lost = await ask(proxy.address, "POST", COMPLETIONS, {"prompt": prompt})
                second = fleet.sender("successor", slots=6, chunk_bytes=CHUNK)
                await trio.to_thread.run_sync(second.wait_ready)
                with second.sender_link() as link_anew:
                    prefill.behave = PrefillEngine(link_anew).behave
                    again = await ask(proxy.address, "POST", COMPLETIONS, {"prompt": prompt})
                    assert text_of(again) == digest_of(prompt)
    assert (lost.status, lost.error["code"]) == (502, "peer_lost")
    daemons.check_quiet()
