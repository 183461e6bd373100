"""How a KV cache becomes chunks, and chunks a KV cache.

A chunk is a run of CHUNK_TOKENS tokens, only the last one of a prompt may be shorter. Its bytes are a contiguous
array [layers, 2, kv_heads, tokens, head_dim] of 32-bit floats, keys before values; its name is a hash of every token
up to its end, so two chunks with one name hold the same bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import attrs
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]
Layers = Sequence[tuple[Array, Array]]  # each layer's keys and values, [kv_heads, tokens, head_dim]

CHUNK_TOKENS: Final = 256
_FLOAT_BYTES = 4


@attrs.frozen
class KvShape:
    """What one token's keys and values look like in a model."""

    layers: int
    kv_heads: int
    head_dim: int

    def bytes_of(self, tokens: int) -> int:
        """How long a chunk of `tokens` tokens is."""
        return self.layers * 2 * self.kv_heads * tokens * self.head_dim * _FLOAT_BYTES

    @property
    def chunk_bytes(self) -> int:
        """How long a full chunk is."""
        return self.bytes_of(CHUNK_TOKENS)

    def array_of(self, data: memoryview, tokens: int) -> Array:
        """The chunk of `tokens` tokens that begins at `data`, in place."""
        flat: Array = np.frombuffer(data[: self.bytes_of(tokens)], dtype=np.float32)
        return flat.reshape(self.layers, 2, self.kv_heads, tokens, self.head_dim)

    def empty(self, tokens: int) -> Array:
        """Room for the whole cache of a prompt, chunk-shaped."""
        return np.empty((self.layers, 2, self.kv_heads, tokens, self.head_dim), dtype=np.float32)


def spans(tokens: int) -> list[tuple[int, int]]:
    """Where each chunk of a prompt begins and ends."""
    return list(pairwise([*range(0, tokens, CHUNK_TOKENS), tokens]))


def keys(tokens: Sequence[int]) -> list[bytes]:
    """Each chunk's name: 32 bytes that depend on all tokens up to its end."""
    names: list[bytes] = []
    name = b""
    for start, stop in spans(len(tokens)):
        name = hashlib.sha256(name + np.asarray(tokens[start:stop], dtype="<u4").tobytes()).digest()
        names.append(name)
    return names


def pack(layers: Layers, span: tuple[int, int], slot: memoryview, shape: KvShape) -> None:
    """Write the tokens of `span` from a cache into a slot."""
    start, stop = span
    chunk = shape.array_of(slot, stop - start)
    for place, (layer_keys, layer_values) in zip(chunk, layers, strict=True):
        place[0] = layer_keys[:, start:stop]
        place[1] = layer_values[:, start:stop]


def unpack(view: memoryview, span: tuple[int, int], into: Array, shape: KvShape) -> None:
    """Write a chunk's tokens to their place in a prompt's whole cache."""
    start, stop = span
    into[:, :, :, start:stop] = shape.array_of(view, stop - start)
