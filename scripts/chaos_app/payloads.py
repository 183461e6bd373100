"""What is sent: a request's label determines its chunks, and a chunk's key determines its bytes.

So whoever reads a chunk knows what it must hold, whoever wrote it, and whoever wrote over it.
"""

from __future__ import annotations

import hashlib
import random
from typing import Final

import attrs

CHUNK_BYTES: Final = 65536
_SHARED_FAMILIES: Final = 3
_SHARED_CHUNKS: Final = 6  # of a family, at most, begin a request


@attrs.frozen
class Request:
    """One request: its label, its chunks' keys, the length of the last chunk and how many are staged at a time."""

    req_id: str
    keys: tuple[bytes, ...]
    last_chunk_bytes: int
    batch: int

    def length(self, number: int) -> int:
        """Bytes of one chunk."""
        return self.last_chunk_bytes if number == len(self.keys) - 1 else CHUNK_BYTES


def request_of(req_id: str) -> Request:
    """The request of this label: mostly small, some large, some that begin with the same chunks as others."""
    rng = random.Random(req_id)
    chunks = rng.choice((1, 1, 2, 3, 4, 6, 8, 12, 24))
    shared = rng.randrange(min(chunks, _SHARED_CHUNKS)) if rng.random() < 0.4 else 0
    family = rng.randrange(_SHARED_FAMILIES)
    keys = [f"family {family}:{number}" if number < shared else f"{req_id}:{number}" for number in range(chunks)]
    last = rng.choice((CHUNK_BYTES, CHUNK_BYTES, rng.randrange(1, CHUNK_BYTES)))
    return Request(req_id, tuple(key.encode() for key in keys), last, rng.choice((chunks, chunks, 1 + chunks // 3)))


def content_of(key: bytes, length: int) -> bytes:
    """The bytes that a chunk of this key and length must hold."""
    return random.Random(key + b"/%d" % length).randbytes(length)


def hash_of(data: bytes | memoryview) -> bytes:
    """The hash by which what arrived is compared with what was sent."""
    return hashlib.blake2b(data, digest_size=16).digest()
