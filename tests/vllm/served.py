"""What tests ask of a stack of vLLM servers over HTTP, and what nobody may hold when nothing runs."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

import attrs
from vllm_app.asking import Asked, get, metric
from vllm_app.stack import Stack

COMPLETIONS: Final = "/v1/completions"
MODEL_NAME: Final = "tiny"
BOUND_S: Final = 90.0  # of every request, whatever happens to the stack
FREE_TIMEOUT_S: Final = 60.0
_ROUNDS: Final = 10
# What an engine holds for requests: a share of its blocks, and the requests themselves.
_ENGINE_HOLDS: Final = ("vllm:kv_cache_usage_perc", "vllm:num_requests_running", "vllm:num_requests_waiting")


@attrs.frozen
class Outcome:
    """What a client got: tokens, or an error as the OpenAI API words them."""

    tokens: list[int]
    status: int
    error: dict[str, Any] | None
    seconds: float

    @property
    def is_clean_error(self) -> bool:
        """Whether a client can tell what has happened: a status of an error or an error event, and a message."""
        return (
            self.error is not None and bool(self.error["message"]) and (self.status in {200, 429} or self.status >= 500)
        )


def body(prompt: Sequence[int], max_tokens: int = 12, **more: Any) -> dict[str, Any]:
    """A greedy completion of just so many tokens, which are named one by one in its answer."""
    return {
        "model": MODEL_NAME,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **more,
    }


class Site:
    """A stack with a single server beside it."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self._known: dict[tuple[tuple[int, ...], int], list[int]] = {}
        self._seed = 0

    # ------------------------------------------------------------------ asking

    def ask(
        self, prompt: Sequence[int], *, stream: bool = False, server: str = "proxy", max_tokens: int = 12
    ) -> Outcome:
        """One request, to its end."""
        began = time.monotonic()
        tokens: list[int] = []
        error = None
        with self.begin(prompt, stream=stream, server=server, max_tokens=max_tokens) as asked:
            status = asked.answer.status
            if status != 200:
                error = asked.read().json()["error"]
            elif stream:
                for event in asked.events():
                    error = event.get("error", error)
                    tokens += [token for choice in event.get("choices", ()) for token in choice["token_ids"]]
            else:
                tokens = asked.read().json()["choices"][0]["token_ids"]
        return Outcome(tokens, status, error, time.monotonic() - began)

    def begin(
        self, prompt: Sequence[int], *, stream: bool = False, server: str = "proxy", max_tokens: int = 12
    ) -> Asked:
        """A request that was sent; leave it to break it off."""
        asked = body(prompt, max_tokens, stream=stream)
        return Asked(self.stack.address(server), "POST", COMPLETIONS, asked, timeout_s=BOUND_S)

    def ask_all(self, prompts: Sequence[Sequence[int]], streams: Iterable[bool], pool: ThreadPoolExecutor) -> Futures:
        """All at once: each in a thread of `pool`, which has one for each."""
        return [pool.submit(self.ask, prompt, stream=stream) for prompt, stream in zip(prompts, streams, strict=True)]

    def single(self, prompts: Sequence[Sequence[int]], max_tokens: int = 12) -> list[list[int]]:
        """What the single server says, which is asked once for each prompt."""
        for prompt in prompts:
            key = (tuple(prompt), max_tokens)
            if key not in self._known:
                self._known[key] = self.ask(prompt, server="single", max_tokens=max_tokens).tokens
        return [self._known[tuple(prompt), max_tokens] for prompt in prompts]

    # ------------------------------------------------------------------ what is held

    def metric(self, server: str, name: str, **labels: str) -> float:
        """See `vllm_app.asking.metric`."""
        return metric(self.stack.address(server), name, **labels)

    def slots_taken(self) -> dict[str, float]:
        """Of both daemons: slots that are not free, by daemon."""
        names = {"receiver": "kvpd_slots", "sender": "kvpd_staging_slots"}
        total = {daemon: self.metric(daemon, name) for daemon, name in names.items()}
        free = {daemon: self.metric(daemon, name, state="free") for daemon, name in names.items()}
        assert all(total.values()), total
        return {daemon: total[daemon] - free[daemon] for daemon in names if total[daemon] != free[daemon]}

    def held(self) -> dict[str, float]:
        """Everything that somebody holds for a request, anywhere."""
        engines = {
            f"{engine} {name}": self.metric(engine, name) for engine in ("prefill", "decode") for name in _ENGINE_HOLDS
        }
        running = {"proxy": self.metric("proxy", "kvpd_requests_in_flight")}
        return {name: value for name, value in (engines | running).items() if value} | self.slots_taken()

    def check_clean(self, prompt: Sequence[int]) -> None:
        """The next request is served, and nothing stays taken."""
        assert self.ask(prompt).tokens == self.single([prompt])[0]
        self.stack.wait_until(lambda: not self.slots_taken(), "all slots to be free", FREE_TIMEOUT_S)
        # An engine counts its blocks when it steps, so it is given something to do.
        for _ in range(_ROUNDS):
            if not self.held():
                return
            assert self.ask(prompt).tokens == self.single([prompt])[0]
        raise AssertionError(f"still held: {self.held()}; the proxy says {get(self.stack.address('proxy'), '/status')}")


Futures = list[Future[Outcome]]
