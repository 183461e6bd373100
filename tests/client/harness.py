"""A daemon that a test scripts, frame by frame, over a real Unix socket; and what engines do with it."""

from __future__ import annotations

import itertools
import mmap
import os
import socket
from typing import TypeVar

try:
    import torch
except ImportError:  # its tests are for those who have it
    torch = None

from kvpd import client
from kvpd.link import (
    LINK_VERSION,
    Attach,
    Attached,
    AttachWriter,
    DaemonFrame,
    EngineFrame,
    EngineFrameReader,
    RegionInfo,
    encode_frame,
)

DEADLINE_S = 10.0
CHUNK_BYTES = 64
SLOTS = 8
F = TypeVar("F", bound=EngineFrame)
_names = itertools.count()


class Peer:
    """The daemon's end of one connection, and its buffer."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.memory = os.memfd_create("test", os.MFD_CLOEXEC)
        os.ftruncate(self.memory, CHUNK_BYTES * SLOTS)
        self.buffer = mmap.mmap(self.memory, CHUNK_BYTES * SLOTS)
        self._reader = EngineFrameReader()
        self._frames: list[EngineFrame] = []

    def next(self) -> EngineFrame | None:
        """The engine's next frame; None at the end."""
        while not self._frames:
            data = self.connection.recv(65536)
            if not data:
                return None
            self._frames += self._reader.feed(data)
        return self._frames.pop(0)

    def expect(self, kind: type[F]) -> F:
        """The engine's next frame, which is of this kind."""
        frame = self.next()
        assert isinstance(frame, kind), f"{frame} where {kind.__name__} was expected"
        return frame

    def send(self, *frames: DaemonFrame) -> None:
        self.connection.sendall(b"".join(encode_frame(frame) for frame in frames))

    def greet(self, *behind: DaemonFrame) -> Attach:
        """Answer Attach as a daemon with one region does; `behind` comes in the same breath."""
        attach = self.expect(Attach)
        self._attached(attach.rank, CHUNK_BYTES, behind)
        return attach

    def greet_writer(self, chunk_bytes: int = CHUNK_BYTES) -> AttachWriter:
        """Answer AttachWriter as a receiver that shares its memory does."""
        attach = self.expect(AttachWriter)
        self._attached(attach.rank, chunk_bytes, ())
        return attach

    def _attached(self, rank: int, chunk_bytes: int, behind: tuple[DaemonFrame, ...]) -> None:
        attached = Attached(LINK_VERSION, "test", chunk_bytes, 256, (RegionInfo(rank, CHUNK_BYTES * SLOTS),))
        data = b"".join(encode_frame(frame) for frame in (attached, *behind))
        socket.send_fds(self.connection, [data], [self.memory])

    def slot(self, index: int, length: int = CHUNK_BYTES) -> bytes:
        return self.buffer[index * CHUNK_BYTES : index * CHUNK_BYTES + length]

    def close(self) -> None:
        self.connection.close()
        self.buffer.close()
        os.close(self.memory)


def chunk(number: int, length: int = CHUNK_BYTES) -> bytes:
    return bytes([number + 1]) * length


def keys(count: int) -> list[bytes]:
    return [b"key-%d" % number for number in range(count)]


def until_end(peer: Peer) -> None:
    """Read whatever the engine still says."""
    while peer.next() is not None:
        pass


def fill(slots: client.Staging, *, first: int = 0) -> None:
    """Write chunk n, n counting from `first`, into each slot that wants one."""
    for number, slot in enumerate(slots, first):
        if slot is not None:
            slot[:] = chunk(number, len(slot))


def fill_some(slots: client.Staging, count: int) -> None:
    """Write the first `count` slots and look at no more."""
    for slot in itertools.islice(slots, count):
        assert slot is not None
        slot[:] = chunk(0)


def send_one(link: client.SenderLink, *, req_id: str = "r", timeout: float | None = None) -> None:
    """A request of one chunk."""
    with link.open(req_id, receiver="d:1", total_chunks=1, timeout=timeout) as transfer:
        stage_and_fill(transfer, 1)


def stage_and_fill(transfer: client.Transfer, count: int) -> None:
    with transfer.stage(keys(count)) as slots:
        fill(slots)


def claim_and_leave(link: client.ReceiverLink, timeout: float) -> None:
    with link.claim("r", timeout):
        pass


GOOD = Attached(LINK_VERSION, "test", CHUNK_BYTES, 256, (RegionInfo(0, CHUNK_BYTES * SLOTS),))
