"""Requests of real traces as workloads draw them: when they came, and in how many chunks of which keys."""

from __future__ import annotations

import functools
from typing import Final

import attrs

from kvpd.traces import excerpt

_BLOCKS_PER_CHUNK: Final = 8  # of 512 tokens: a chunk of this many tokens keeps requests within tens of chunks
_TOKENS_PER_CHUNK: Final = 256


@attrs.frozen
class Arrival:
    """One request of a trace: when it came, and its chunks' keys where the trace knows them."""

    at: float  # seconds since the trace began
    chunks: int
    keys: tuple[bytes, ...] | None


@functools.cache
def mooncake_conversation() -> tuple[Arrival, ...]:
    """Conversations: long inputs, shared prefixes. A block's id stands for everything up to it, and so does a key."""
    arrivals = []
    for request in excerpt("mooncake"):
        ids = request.block_ids or ()
        ends = [min(end, len(ids)) for end in range(_BLOCKS_PER_CHUNK, len(ids) + _BLOCKS_PER_CHUNK, _BLOCKS_PER_CHUNK)]
        keys = tuple(f"block {ids[end - 1]}".encode() for end in ends)
        arrivals.append(Arrival(request.at, len(keys), keys))
    return tuple(arrivals)


@functools.cache
def azure_code() -> tuple[Arrival, ...]:
    """Code completion: many small inputs, in bursts."""
    return tuple(
        Arrival(request.at, -(-request.input_tokens // _TOKENS_PER_CHUNK), None) for request in excerpt("azure")
    )
