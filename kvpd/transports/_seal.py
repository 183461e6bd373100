"""Worker addresses and rkeys as they travel: behind their kind and a checksum.

UCX reads both without checking them, and a wrong base address is written to. What is garbled, cut, swapped or from
another transport is refused here instead; an rkey fits only the region that it was made for. This is no protection
from malice: they are write capabilities, and must come from an authenticated peer.
"""

from __future__ import annotations

import struct
import zlib
from typing import Final

from kvpd.errors import TransportError

WORKER_ADDRESS_BYTES_MAX: Final = 16 << 10  # UCX's grows with the machine's network devices; one takes about 80 bytes
RKEY_BYTES_MAX: Final = 4 << 10

_WORKER_ADDRESS: Final = b"KVWA"
_RKEY: Final = b"KVRK"
_HEADER: Final = struct.Struct("<4sI")


def seal_worker_address(address: bytes) -> bytes:
    """What a sender is told."""
    return _seal(_WORKER_ADDRESS, address)


def unseal_worker_address(sealed: bytes) -> bytes:
    """What UCX is told. TransportError: `sealed` is none."""
    return _unseal(_WORKER_ADDRESS, sealed, WORKER_ADDRESS_BYTES_MAX)


def seal_rkey(rkey: bytes, base_address: int, length: int) -> bytes:
    """What a sender is told, together with the region's base address and length (bytes)."""
    return _seal(_RKEY, rkey, base_address, length)


def unseal_rkey(sealed: bytes, base_address: int, length: int) -> bytes:
    """What UCX is told. TransportError: `sealed` is none, or is another region's."""
    return _unseal(_RKEY, sealed, RKEY_BYTES_MAX, base_address, length)


def _seal(kind: bytes, payload: bytes, *numbers: int) -> bytes:
    return _HEADER.pack(kind, _checksum(payload, numbers)) + payload


def _unseal(kind: bytes, sealed: bytes, length_max: int, *numbers: int) -> bytes:
    if not _HEADER.size < len(sealed) <= length_max:
        raise TransportError(f"{kind.decode()}: {len(sealed)} bytes, not {_HEADER.size + 1} to {length_max}")
    found, checksum = _HEADER.unpack_from(sealed)
    payload = sealed[_HEADER.size :]
    if found != kind or checksum != _checksum(payload, numbers):
        raise TransportError(f"{kind.decode()}: these {len(sealed)} bytes are not what a kvpd with UCX sends")
    return payload


def _checksum(payload: bytes, numbers: tuple[int, ...]) -> int:
    return zlib.crc32(payload, zlib.crc32(repr(numbers).encode()))
