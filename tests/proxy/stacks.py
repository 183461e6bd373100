"""A proxy and the engines behind it, in one process, over real sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

import attrs
import trio

from kvpd.config import ProxyConfig
from kvpd.integrations.proxy.server import Proxy, open_proxy
from kvpd.metrics import Health, ProxyMetrics

from .clients import Connection, Reply, ask, connect
from .engines import DEADLINE_S, DONE, Behaviour, Call, Engine, Sender, answer, event

RECEIVER: Final = "10.9.9.9:7300"  # a decode engine's receiver: only its name is passed on
TEST_DEADLINE_S: Final = 20.0
WITHIN_A_SECOND_S: Final = 5.0  # a second, and what a machine that others use may add
COMPLETIONS: Final = "/v1/completions"
CHAT: Final = "/v1/chat/completions"
_QUICK: Final[dict[str, Any]] = {
    "address": "127.0.0.1:0",
    "notify_address": "127.0.0.1:0",
    "connect_timeout_s": 5.0,
    "probe_interval_s": 0.1,
    "probe_timeout_s": 5.0,
    "probe_backoff_max_s": 0.2,
    "stall_timeout_s": 5.0,
}


@attrs.define
class Stack:
    """Everything of one test. `behaviours` of engines may be changed at any time."""

    proxy: Proxy
    prefills: list[Engine]
    decodes: list[Engine]
    sender: Sender
    nursery: trio.Nursery
    config: ProxyConfig

    @property
    def prefill(self) -> Engine:
        """The only one, or the first."""
        return self.prefills[0]

    @property
    def decode(self) -> Engine:
        """The only one, or the first."""
        return self.decodes[0]

    async def ask(
        self, body: Any, path: str = COMPLETIONS, headers: Mapping[str, str] | None = None, method: str = "POST"
    ) -> Reply:
        """One request on a connection of its own."""
        return await ask(self.proxy.address, method, path, body, headers)

    async def get(self, path: str) -> Reply:
        """One of the proxy's pages."""
        return await ask(self.proxy.address, "GET", path)

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Connection]:
        """A connection to it."""
        async with connect(self.proxy.address) as connection:
            yield connection

    def metric(self, name: str) -> float:
        """A metric's value, by the name that /metrics gives it."""
        return self.proxy.metrics.snapshot()[name]

    async def wait_metric(self, name: str, value: float) -> None:
        """Until a metric has reached a value."""
        await wait_until(lambda: self.metric(name) >= value)

    async def wait_metric_down(self, name: str, value: float) -> None:
        """Until a metric has fallen to a value."""
        await wait_until(lambda: self.metric(name) <= value)

    async def wait_alive(self, engine: Engine, alive: bool) -> None:
        """Until the proxy holds an engine for alive, or not."""
        (known,) = [known for known in self.proxy.engines.all() if known.url == engine.url]
        await wait_until(lambda: known.alive == alive)


class _AfterEachStep(trio.abc.Instrument):
    """Looks whenever any task has done something, which is when anything can have changed."""

    def __init__(self, holds: Callable[[], bool]) -> None:
        self._holds = holds
        self.held = trio.Event()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        """Trio calls it."""
        if not self.held.is_set() and self._holds():
            self.held.set()


async def wait_until(holds: Callable[[], bool]) -> None:
    """Until something holds that tells nobody when it begins to; with a deadline."""
    watch = _AfterEachStep(holds)
    trio.lowlevel.add_instrument(watch)
    try:
        with trio.fail_after(DEADLINE_S):
            await watch.held.wait()
    finally:
        trio.lowlevel.remove_instrument(watch)


def computes(sender: Sender) -> Behaviour:
    """A prefill engine whose KV cache arrives, and that checks requests as vLLM does."""

    async def behave(call: Call) -> None:
        asked = call.json
        if not asked.get("stream") and asked.get("stream_options"):
            await call.whole(b'{"error":{"message":"stream_options need stream"}}', 400)
            return
        if call.transfer:
            sender.send(call.transfer["transfer_id"])
        await call.whole(answer("x", kv_transfer_params={"blocks": 3}))

    return behave


async def generates(call: Call) -> None:
    """A decode engine that answers with the prompt's own words."""
    if call.target.startswith("/v1/models"):
        await call.whole(b'{"object":"list","data":[{"id":"m"}]}')
        return
    text = str(call.json.get("prompt", "chat"))
    if call.json.get("stream"):
        await call.events(*(event(f"{text}-{number}") for number in range(3)), DONE)
    else:
        await call.whole(answer(text))


@asynccontextmanager
async def stack(
    *, prefills: int = 1, decodes: int = 1, descriptors: int = 65536, **settings: Any
) -> AsyncIterator[Stack]:
    """A proxy before so many engines. The test has a deadline, and leaves every table empty."""
    sender = Sender()
    left = [Engine(f"prefill-{number}", computes(sender)) for number in range(prefills)]
    right = [Engine(f"decode-{number}", generates) for number in range(decodes)]
    with trio.fail_after(TEST_DEADLINE_S):
        async with trio.open_nursery() as nursery:
            for engine in [*left, *right]:
                await nursery.start(engine.run)
            lists = {"prefill": tuple(e.url for e in left), "decode": tuple(f"{e.url}+{RECEIVER}" for e in right)}
            config = ProxyConfig(**{**_QUICK, **lists, **settings})
            health = Health()
            async with (
                open_proxy(config, metrics=ProxyMetrics(), health=health, descriptors=descriptors) as proxy,
                sender.connected(proxy.notify_address),
            ):
                health.mark_ready()
                yield Stack(proxy, left, right, sender, nursery, config)
                assert await proxy.drain(DEADLINE_S)
                _check_quiet(proxy)
            nursery.cancel_scope.cancel()


def _check_quiet(proxy: Proxy) -> None:
    status = proxy.app.status()
    assert status["requests"]["running"] == 0
    assert status["transfers"]["waited_for"] == 0
    assert all(engine["requests"] == engine["tokens"] == 0 for engine in status["engines"])
    assert proxy.connection_count == 0
