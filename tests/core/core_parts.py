"""What every test of the cores shares: names, sizes, keys. The cores themselves are in two modules beside this one."""

from __future__ import annotations

from kvpd.core.messages import ErrorInfo, HostIdentity, Region
from kvpd.errors import ErrorCode, TransferError

CHUNK = 64  # bytes
RECEIVER_INCARNATION = 7000
SENDER_INCARNATION = 3000
OWN_HOST = HostIdentity("boot-1", "pidns-1", 1, 1)


def regions(total_chunks: int, *, chunk_bytes: int = CHUNK, ranks: int = 1) -> tuple[Region, ...]:
    """Each rank's region that just holds the chunks."""
    length = total_chunks * chunk_bytes
    return tuple(Region(rank, b"worker", 4096 + rank * length, length, b"rkey") for rank in range(ranks))


def keys(*names: int | str) -> tuple[bytes, ...]:
    """Chunk keys by name."""
    return tuple(f"key-{name}".encode() for name in names)


def code_of(error: TransferError | ErrorInfo | None) -> ErrorCode | None:
    """Why it failed, or None."""
    return None if error is None else error.code
