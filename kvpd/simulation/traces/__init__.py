"""Excerpts of public request traces: real sizes, real arrivals, real sharing of prefixes. See README.md beside this."""

from __future__ import annotations

import csv
import datetime
import functools
import json
from importlib import resources
from typing import Final

import attrs

_BLOCKS_PER_CHUNK: Final = 8  # of 512 tokens: a chunk of this many tokens keeps requests within tens of chunks
_TOKENS_PER_CHUNK: Final = 256


@attrs.frozen
class Arrival:
    """One request of a trace: when it came, and its chunks' keys where the trace knows them."""

    at: float  # seconds since the trace began
    chunks: int
    keys: tuple[bytes, ...] | None


def _read(name: str) -> str:
    return resources.files(__name__).joinpath(name).read_text()


@functools.cache
def mooncake_conversation() -> tuple[Arrival, ...]:
    """Conversations: long inputs, shared prefixes. A block's id stands for everything up to it, and so does a key."""
    arrivals = []
    for line in _read("mooncake_conversation.jsonl").splitlines():
        request = json.loads(line)
        ids = request["hash_ids"]
        ends = [min(end, len(ids)) for end in range(_BLOCKS_PER_CHUNK, len(ids) + _BLOCKS_PER_CHUNK, _BLOCKS_PER_CHUNK)]
        keys = tuple(f"block {ids[end - 1]}".encode() for end in ends)
        arrivals.append(Arrival(request["timestamp"] / 1000, len(keys), keys))
    return tuple(arrivals)


@functools.cache
def azure_code() -> tuple[Arrival, ...]:
    """Code completion: many small inputs, in bursts."""
    arrivals = []
    start = None
    for row in csv.DictReader(_read("azure_llm_2023_code.csv").splitlines()):
        moment = datetime.datetime.fromisoformat(row["TIMESTAMP"][:26])
        start = start or moment
        chunks = -(-int(row["ContextTokens"]) // _TOKENS_PER_CHUNK)
        arrivals.append(Arrival((moment - start).total_seconds(), chunks, None))
    return tuple(arrivals)
