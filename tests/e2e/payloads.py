"""What tests send and how they compare it: requests of random bytes, known by the hashes of their chunks."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Sequence

import attrs

from kvpd.client import ReceiverLink, SenderLink, Transfer

from .daemons import Daemon


@attrs.frozen
class Request:
    """A request's chunks, and the keys by which they are known."""

    req_id: str
    keys: tuple[bytes, ...]
    chunks: tuple[bytes, ...]

    @property
    def hashes(self) -> list[str]:
        """What must arrive."""
        return [sha256(chunk) for chunk in self.chunks]

    @property
    def nbytes(self) -> int:
        """The size of all chunks."""
        return sum(map(len, self.chunks))


def sha256(data: bytes | memoryview) -> str:
    """The hash of a chunk."""
    return hashlib.sha256(data).hexdigest()


def make_request(req_id: str, chunks: int, chunk_bytes: int = 65536, last_chunk_bytes: int | None = None) -> Request:
    """A request whose bytes and keys its label determines."""
    rng = random.Random(req_id)
    lengths = [chunk_bytes] * (chunks - 1) + [chunk_bytes if last_chunk_bytes is None else last_chunk_bytes]
    keys = tuple(f"{req_id[:32]}:{number}".encode() for number in range(chunks))
    return Request(req_id, keys, tuple(rng.randbytes(length) for length in lengths))


def stage(transfer: Transfer, request: Request, first: int, count: int) -> None:
    """Stage and fill `count` chunks from `first` on."""
    chunks = request.chunks[first : first + count]
    with transfer.stage(request.keys[first : first + count], last_chunk_bytes=len(chunks[-1])) as slots:
        for slot, chunk in zip(slots, chunks, strict=True):
            if slot is not None:
                slot[:] = chunk


def send(link: SenderLink, request: Request, receiver: str, *, batch: int | None = None) -> None:
    """Send a whole request, `batch` chunks at a time; it has landed when this returns."""
    total = len(request.chunks)
    with link.open(request.req_id, receiver=receiver, total_chunks=total) as transfer:
        for first in range(0, total, batch or total):
            stage(transfer, request, first, min(batch or total, total - first))


def receive(link: ReceiverLink, req_id: str, *, timeout: float = 20, sender_id: str | None = None) -> list[str]:
    """Claim a request, hash its chunks in place and release it."""
    with link.claim(req_id, timeout, sender_id=sender_id) as chunks:
        return [sha256(chunk.view) for chunk in chunks]


def move(request: Request, sender: Daemon, receiver: Daemon) -> None:
    """A request through both daemons, once they are ready: they work."""
    with sender.wait_ready().sender_link() as prefill, receiver.wait_ready().receiver_link() as decode:
        send(prefill, request, receiver.address)
        assert receive(decode, request.req_id) == request.hashes


def in_order(messages: Iterable[str], wanted: Sequence[str]) -> bool:
    """Whether `wanted` is a subsequence of `messages`."""
    rest = iter(messages)
    return all(message in rest for message in wanted)
