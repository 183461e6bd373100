"""A tiny Llama of random weights: nothing is downloaded or converted, and a step takes a millisecond.

The weights come from a fixed seed, so every process has the same model. They are large enough for the attention to be
sharp: a chunk that is missing from the cache changes the tokens that follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it

from demo_app.chunks import Array, KvShape, Layers
from demo_app.model import TINY_SHAPE, TINY_VOCABULARY

_HEADS = 4
_HIDDEN = _HEADS * TINY_SHAPE.head_dim
_INNER = 2 * _HIDDEN
_ROPE_BASE = 10_000.0
_SEED = 20
_SPREAD = 0.2


class TinyLlama:
    """Rotary positions, grouped queries, gated units and root-mean-square norms, as in Llama."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        source = torch.Generator().manual_seed(_SEED)

        def draw(rows: int, columns: int) -> Any:
            return torch.randn(rows, columns, generator=source) * _SPREAD

        kv_width = TINY_SHAPE.kv_heads * TINY_SHAPE.head_dim
        self._embedding = draw(TINY_VOCABULARY, _HIDDEN)
        self._head = draw(TINY_VOCABULARY, _HIDDEN)
        self._layers = [
            {
                "query": draw(_HIDDEN, _HIDDEN),
                "key": draw(kv_width, _HIDDEN),
                "value": draw(kv_width, _HIDDEN),
                "output": draw(_HIDDEN, _HIDDEN),
                "gate": draw(_INNER, _HIDDEN),
                "up": draw(_INNER, _HIDDEN),
                "down": draw(_HIDDEN, _INNER),
            }
            for _ in range(TINY_SHAPE.layers)
        ]
        self._rates = _ROPE_BASE ** (-torch.arange(0, TINY_SHAPE.head_dim, 2) / TINY_SHAPE.head_dim)

    @property
    def shape(self) -> KvShape:
        """Of one token's keys and values."""
        return TINY_SHAPE

    @property
    def end_tokens(self) -> frozenset[int]:
        """None: random weights have nothing to finish."""
        return frozenset()

    def new_cache(self) -> list[tuple[Any, Any]]:
        """Each layer's keys and values, [kv_heads, tokens, head_dim]."""
        empty = torch.empty(TINY_SHAPE.kv_heads, 0, TINY_SHAPE.head_dim)
        return [(empty, empty)] * TINY_SHAPE.layers

    def cache_from(self, kv: Array) -> list[tuple[Any, Any]]:
        """A cache of the tokens in `kv`."""
        whole = torch.from_numpy(kv)
        return [(whole[layer, 0], whole[layer, 1]) for layer in range(TINY_SHAPE.layers)]

    def layers_of(self, cache: Any) -> Layers:
        """The cache's arrays; a step makes new ones."""
        return [(layer_keys.numpy(), layer_values.numpy()) for layer_keys, layer_values in cache]

    def step(self, cache: Any, tokens: Sequence[int]) -> int:
        """Append `tokens` to the cache and name the likeliest next one."""
        with torch.inference_mode():
            past = cache[0][0].shape[1]
            rotation = self._rotation(past, len(tokens))
            # Query i may see everything cached before this step, and the step's own tokens up to itself.
            visible = torch.ones(len(tokens), past + len(tokens), dtype=torch.bool).tril(diagonal=past)
            hidden = self._embedding[torch.tensor(tokens)]
            for number, weights in enumerate(self._layers):
                mixed, cache[number] = self._attend(weights, _norm(hidden), cache[number], rotation, visible)
                hidden = hidden + mixed
                inner = _norm(hidden)
                gated = F.silu(inner @ weights["gate"].T) * (inner @ weights["up"].T)
                hidden = hidden + gated @ weights["down"].T
            return int((self._head @ _norm(hidden[-1])).argmax())

    def _rotation(self, past: int, count: int) -> tuple[Any, Any]:
        angles = torch.outer(torch.arange(past, past + count).float(), self._rates)
        return angles.cos(), angles.sin()

    def _attend(
        self, weights: dict[str, Any], hidden: Any, layer: tuple[Any, Any], rotation: tuple[Any, Any], visible: Any
    ) -> tuple[Any, tuple[Any, Any]]:
        queries = _rotate(_split(hidden @ weights["query"].T, _HEADS), rotation)
        fresh_keys = _rotate(_split(hidden @ weights["key"].T, TINY_SHAPE.kv_heads), rotation)
        fresh_values = _split(hidden @ weights["value"].T, TINY_SHAPE.kv_heads)
        all_keys = torch.cat([layer[0], fresh_keys], dim=1)
        all_values = torch.cat([layer[1], fresh_values], dim=1)
        shared = _HEADS // TINY_SHAPE.kv_heads
        mixed = F.scaled_dot_product_attention(
            queries,
            all_keys.repeat_interleave(shared, dim=0),
            all_values.repeat_interleave(shared, dim=0),
            attn_mask=visible,
        )
        return mixed.transpose(0, 1).flatten(1) @ weights["output"].T, (all_keys, all_values)


def _norm(hidden: Any) -> Any:
    return hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + 1e-6)


def _split(flat: Any, heads: int) -> Any:
    return flat.unflatten(-1, (heads, TINY_SHAPE.head_dim)).transpose(0, 1)


def _rotate(heads: Any, rotation: tuple[Any, Any]) -> Any:
    cosines, sines = rotation
    left, right = heads.chunk(2, dim=-1)
    return torch.cat([left * cosines - right * sines, right * cosines + left * sines], dim=-1)
