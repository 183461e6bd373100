"""The engines: which there are, which of them answer, how loaded they are, and which ones a request gets.

An engine is chosen only while it is alive. It is alive from a probe that it answered until a probe that it did not
answer, or until a request found it gone. What a client did wrong, and what an engine says to that, never counts.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import attrs
import trio

from kvpd.config import ProxyConfig
from kvpd.config.values import RECEIVER_MARK
from kvpd.integrations.proxy.errors import EngineFailed
from kvpd.integrations.proxy.limits import HEAD_BYTES_MAX
from kvpd.integrations.proxy.upstream import Upstream
from kvpd.log import get_logger
from kvpd.metrics import Health, ProxyMetrics
from kvpd.metrics.proxy import EngineKind

log = get_logger()

_KINDS: Final[tuple[EngineKind, ...]] = ("prefill", "decode")
_FIRST_PAUSE_S: Final = 0.25  # between two questions to an engine that is dead; doubled each time


@attrs.define(eq=False)
class Engine:
    """One engine. `receiver` is the control address of the receiver on a decode engine's host."""

    kind: EngineKind
    url: str
    receiver: str
    upstream: Upstream
    alive: bool = False
    detail: str = "not asked yet"
    requests: int = 0
    tokens: int = 0
    chosen_no: int = 0  # the number of the choice that it was chosen by last
    asked: trio.Event = attrs.field(factory=trio.Event)  # set once it has been probed
    doubted: trio.Event = attrs.field(factory=trio.Event)
    watching: trio.CancelScope = attrs.field(factory=trio.CancelScope)

    @contextmanager
    def load(self, tokens: int) -> Iterator[None]:
        """A request of so many tokens runs there."""
        self.requests += 1
        self.tokens += tokens
        try:
            yield
        finally:
            self.requests -= 1
            self.tokens -= tokens


class Engines:
    """All engines of both kinds."""

    def __init__(self, config: ProxyConfig, nursery: trio.Nursery, metrics: ProxyMetrics, health: Health) -> None:
        self._config = config
        self._nursery = nursery
        self._metrics = metrics
        self._health = health
        self._engines: dict[EngineKind, dict[str, Engine]] = {kind: {} for kind in _KINDS}
        self._choices = 0
        self.update(config.prefill, config.decode)

    # ------------------------------------------------------------------ membership

    def update(self, prefill: Sequence[str], decode: Sequence[str]) -> tuple[list[str], list[str]]:
        """Have exactly these engines: which were added, and which removed. What runs at a removed one goes on."""
        added: list[str] = []
        removed: list[str] = []
        wanted: dict[EngineKind, Sequence[str]] = {"prefill": prefill, "decode": decode}
        for kind, entries in wanted.items():
            present = self._engines[kind]
            for entry in [entry for entry in present if entry not in entries]:
                engine = present.pop(entry)
                engine.alive = False
                engine.watching.cancel()
                removed.append(entry)
            for entry in [entry for entry in entries if entry not in present]:
                url, _, receiver = entry.partition(RECEIVER_MARK)
                engine = Engine(kind, url, receiver, Upstream(url, self._config.connect_timeout_s))
                present[entry] = engine
                self._nursery.start_soon(self._watch, engine)
                added.append(entry)
        self._show()
        return added, removed

    def all(self) -> list[Engine]:
        """Every engine."""
        return [engine for kind in _KINDS for engine in self._engines[kind].values()]

    def alive(self, kind: EngineKind) -> list[Engine]:
        """Those of a kind that answer."""
        return [engine for engine in self._engines[kind].values() if engine.alive]

    async def wait_asked(self) -> None:
        """Until each has been asked once whether it is alive; bounded by the probes' own deadlines."""
        for engine in self.all():
            await engine.asked.wait()

    # ------------------------------------------------------------------ choice

    def choose(
        self, kind: EngineKind, prefix: bytes = b"", excluded: Collection[Engine] = (), avoided: Collection[Engine] = ()
    ) -> Engine | None:
        """An engine for a prompt whose beginning has the digest `prefix`; an avoided one only if there is no other.

        None: none is alive and not excluded.
        """
        candidates = [engine for engine in self.alive(kind) if engine not in excluded]
        if not candidates:
            return None
        candidates = [engine for engine in candidates if engine not in avoided] or candidates
        if self._config.policy == "sticky":
            # Rendezvous hashing: an engine that comes or goes moves only the prompts that it wins or held.
            chosen = max(candidates, key=lambda engine: _score(prefix, engine.url))
        elif self._config.policy == "round_robin":
            chosen = min(candidates, key=lambda engine: engine.chosen_no)
        else:
            chosen = min(candidates, key=lambda engine: (engine.tokens, engine.requests, engine.chosen_no))
        self._choices += 1
        chosen.chosen_no = self._choices
        return chosen

    # ------------------------------------------------------------------ health

    def doubt(self, engine: Engine, reason: EngineFailed) -> None:
        """A request found it gone: no others go there until it has answered a probe, which is sent at once."""
        self._judge(engine, str(reason))
        engine.doubted.set()

    async def _watch(self, engine: Engine) -> None:
        try:
            with engine.watching:
                await self._probe_again_and_again(engine)
        finally:
            engine.asked.set()
            engine.upstream.close()

    async def _probe_again_and_again(self, engine: Engine) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            engine.doubted = trio.Event()
            self._judge(engine, await self._probe(engine))
            engine.asked.set()
            engine.upstream.prune()
            with trio.move_on_after(self._config.probe_interval_s if engine.alive else pause_s):
                await engine.doubted.wait()
            pause_s = _FIRST_PAUSE_S if engine.alive else min(2 * pause_s, self._config.probe_backoff_max_s)

    async def _probe(self, engine: Engine) -> str:
        """Ask for /health: what is wrong, or nothing."""
        timeout_s = self._config.probe_timeout_s
        try:
            async with engine.upstream.ask(b"GET", b"/health", [], b"", timeout_s=timeout_s) as answer:
                await answer.read(HEAD_BYTES_MAX, timeout_s)
        except EngineFailed as exc:
            return str(exc)
        return "" if answer.status == 200 else f"/health answered {answer.status}"

    def _judge(self, engine: Engine, problem: str) -> None:
        was_alive, engine.alive = engine.alive, not problem
        first = not engine.asked.is_set()
        engine.detail = problem or "answers"
        if problem and (was_alive or first):
            log.warning("engine_down", peer=engine.url, kind=engine.kind, detail=problem, rate_limited=True)
        elif not problem and not was_alive:
            log.info("engine_up", peer=engine.url, kind=engine.kind)
        self._show()

    def _show(self) -> None:
        for kind in _KINDS:
            total, alive = len(self._engines[kind]), len(self.alive(kind))
            self._metrics.engines_alive(kind, alive)
            is_needed = kind == "decode" or not self._config.decode_only_fallback
            self._health.set_condition(f"{kind} engines", alive > 0 or not is_needed, f"{alive} of {total} answer")


def _score(prefix: bytes, url: str) -> bytes:
    return hashlib.blake2b(url.encode(), key=prefix, digest_size=16).digest()


def estimated_tokens(nbytes: int) -> int:
    """How many tokens a text of so many bytes may have; only comparisons are made with it."""
    return math.ceil(nbytes / 4)
