"""What the engines need of a model, whichever it is.

A model computes with one thread and in 32-bit floats: only then are its tokens the same in every process that is fed
the same chunks. Its cache is its own business; what crosses between processes are the arrays of `chunks`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from demo_app.chunks import Array, KvShape, Layers, spans


class Model(Protocol):
    """A decoder-only model that can be stopped after any token and resumed from its keys and values."""

    @property
    def shape(self) -> KvShape:
        """Of one token's keys and values."""

    @property
    def end_tokens(self) -> frozenset[int]:
        """Generation stops after any of these."""

    def new_cache(self) -> Any:
        """A cache of no tokens."""

    def cache_from(self, kv: Array) -> Any:
        """A cache of the tokens in `kv`: [layers, 2, kv_heads, tokens, head_dim]."""

    def layers_of(self, cache: Any) -> Layers:
        """The cache's arrays as they are now, without a copy; steps taken later do not change them."""

    def step(self, cache: Any, tokens: Sequence[int]) -> int:
        """Append `tokens` to the cache and name the likeliest next one."""


def load(name: str, directory: Path) -> Model:
    """The model called `name`; `directory` is where a trained one was prepared."""
    # Each model is imported where it is used: the tiny one must not wait for the real one's libraries.
    if name == "tiny":
        from demo_app.tiny import TinyLlama  # noqa: PLC0415

        return TinyLlama()
    from demo_app.smollm2 import SmolLM2  # noqa: PLC0415

    return SmolLM2(directory)


def generate(model: Model, cache: Any, first_token: int, count: int) -> list[int]:
    """At most `count` tokens, greedily, `first_token` included."""
    tokens = [first_token]
    while len(tokens) < count and tokens[-1] not in model.end_tokens:
        tokens.append(model.step(cache, tokens[-1:]))
    return tokens


def prefill(model: Model, cache: Any, tokens: Sequence[int]) -> int:
    """Fill the cache chunk by chunk, exactly as a prefill engine does, and return the first new token."""
    following = -1
    for start, stop in spans(len(tokens)):
        following = model.step(cache, tokens[start:stop])
    return following
