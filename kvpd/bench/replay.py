"""A trace as a replay: which chunks each request has, how large they are here, and when it comes.

Bytes are shrunk by `scale_bytes` and time by `speed`, so that a cluster's hours and terabytes pass on one machine in a
minute. What is a duration here is one of this machine; times the speed, it is one of the trace.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Final

import attrs
import msgspec

from kvpd.traces import BLOCK_TOKENS, Request

CHUNK_BYTES_LEAST: Final = 64  # what tells a chunk from any other fits
MARK_BYTES: Final = 16  # every chunk begins with its key, so that its reader can tell it


class PlannedRequest(msgspec.Struct, frozen=True):
    """One request. Chunks are full but for the last, which has `last_chunk_bytes`."""

    req_id: str
    at_s: float  # since the replay began, in this machine's time
    keys: list[bytes]
    last_chunk_bytes: int


class PrefillPlan(msgspec.Struct, frozen=True):
    """What the prefill engine gets."""

    sender: str  # socket
    receiver: str  # address
    requests: list[PlannedRequest]
    batch_chunks: int  # computed together
    chunk_s: float  # computing one chunk takes, in this machine's time
    begin_at: float  # CLOCK_MONOTONIC


class DecodePlan(msgspec.Struct, frozen=True):
    """What the decode engine gets."""

    receiver: str  # socket
    read_s: float  # from a claim to its release, in this machine's time


class Sent(msgspec.Struct, frozen=True):
    """How a request ended for the prefill engine; `code` is None where it went well."""

    req_id: str
    opened_at: float  # CLOCK_MONOTONIC
    code: str | None


class Received(msgspec.Struct, frozen=True):
    """A request that the decode engine was told is ready, and read."""

    req_id: str
    ready_at: float  # CLOCK_MONOTONIC
    chunks: int
    nbytes: int


@attrs.frozen(kw_only=True)
class Scale:
    """How a replay differs from its trace."""

    scale_bytes: int
    speed: float
    chunk_bytes: int  # here
    slots: int


def scale(
    requests: Sequence[Request],
    *,
    chunk_bytes: int,
    chunk_tokens: int,
    buffer_bytes: int,
    memory_bytes: int,
    moved_bytes: int,
    scale_bytes: int | None,
    speed: float | None,
    seconds: float,
) -> Scale:
    """What was asked for; and where nothing was, what fits: the memory, the bytes to be moved, the seconds.

    Raises:
        ValueError: the buffer holds no chunk, or a chunk would shrink to nothing.
    """
    slots = buffer_bytes // chunk_bytes
    if slots < 1:
        raise ValueError(f"a buffer of {buffer_bytes} bytes holds no chunk of {chunk_bytes}")
    if scale_bytes is None:
        chunks = sum(math.ceil(request.input_tokens / chunk_tokens) for request in requests)
        needed = max(slots * chunk_bytes / memory_bytes, chunks * chunk_bytes / moved_bytes)
        largest = max(1, chunk_bytes // CHUNK_BYTES_LEAST)
        scale_bytes = min(1 << max(0, math.ceil(math.log2(needed))), largest)
    shrunk = chunk_bytes // scale_bytes
    if shrunk < CHUNK_BYTES_LEAST:
        raise ValueError(f"chunks of {chunk_bytes} bytes, shrunk {scale_bytes} times, are below {CHUNK_BYTES_LEAST}")
    if speed is None:
        speed = max(1.0, requests[-1].at / seconds)
    return Scale(scale_bytes=scale_bytes, speed=speed, chunk_bytes=shrunk, slots=slots)


def plan(requests: Sequence[Request], scale: Scale, chunk_tokens: int) -> list[PlannedRequest]:
    """Every request, in the order of its arrival."""
    planned = []
    for number, request in enumerate(requests):
        chunks = math.ceil(request.input_tokens / chunk_tokens)
        last_tokens = request.input_tokens - (chunks - 1) * chunk_tokens
        last_bytes = max(CHUNK_BYTES_LEAST, scale.chunk_bytes * last_tokens // chunk_tokens)
        planned.append(
            PlannedRequest(
                f"request-{number}", request.at / scale.speed, _keys(number, request, chunks, chunk_tokens), last_bytes
            )
        )
    return planned


def _keys(number: int, request: Request, chunks: int, chunk_tokens: int) -> list[bytes]:
    """A key stands for everything up to its chunk's end. Where the trace says nothing of that, nothing is shared."""
    keys = []
    for chunk in range(chunks):
        end = min((chunk + 1) * chunk_tokens, request.input_tokens)
        if request.block_ids is None:
            name = f"request {number}, to token {end}"
        else:
            block = (end - 1) // BLOCK_TOKENS
            name = f"block {request.block_ids[block]}, to token {end - block * BLOCK_TOKENS} of it"
        keys.append(hashlib.blake2b(name.encode(), digest_size=MARK_BYTES).digest())
    return keys
