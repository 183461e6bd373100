"""A daemon that a test scripts, frame by frame, over a real Unix socket; and what engines do with it."""

from __future__ import annotations

import itertools
import mmap
import os
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypeVar

from kvpd import client
from kvpd.link import (
    LINK_VERSION,
    Attach,
    Attached,
    AttachWriter,
    DaemonFrame,
    EngineFrame,
    EngineFrameReader,
    Open,
    RegionInfo,
    Stage,
    Staged,
    encode_frame,
)

DEADLINE_S = 10.0
CHUNK_BYTES = 64
SLOTS = 8
F = TypeVar("F", bound=EngineFrame)
names = itertools.count()


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
        """The engine's next frame; None at the end, whoever has ended it."""
        while not self._frames:
            data = b"" if self.connection.fileno() < 0 else self.connection.recv(65536)
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

    def stage(self, *slots: int) -> int:
        """The engine opens a transfer and is given these slots for its first batch, all of it: the transfer."""
        transfer = self.expect(Open).transfer
        self.expect(Stage)
        self.send(Staged(transfer, 0, 0, 0, slots, True))
        return transfer

    def hang_up(self) -> None:
        """As a daemon that dies does."""
        self.connection.close()

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


Script = Callable[[Peer], None]
Daemon = Callable[..., AbstractContextManager[Path]]
Prefill = Callable[..., AbstractContextManager[client.SenderLink]]
Decode = Callable[..., AbstractContextManager[client.ReceiverLink]]


def says_nothing(peer: Peer) -> None:
    """A daemon that lets its engine talk."""


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
