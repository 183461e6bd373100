"""A plain copy through a TCP connection: what the kernel alone can do.

Each chunk is preceded by its slot and length, and a notice follows behind the bytes that it is about. The sink receives
straight into the slot. A write has landed when the sink has said so.
"""

from __future__ import annotations

import select
import socket
import struct
from typing import Any, Final

from peers_app.memory import Buffer
from peers_app.movers.base import Address, Chunks, End, Sink, Source
from peers_app.movers.lines import LineEnd, ListeningEnd

_HEADER = struct.Struct("<qq")  # a slot and a chunk's length; or _NOTICE and the length of a notice
_NOTICE: Final = -1
_LANDED: Final = b"landed"


class SocketSource(LineEnd, Source):
    """See `Source`."""

    has_notice = True

    def connect(self, address: Address) -> None:
        self.dial(address["port"])
        self._data = socket.create_connection(("127.0.0.1", address["data_port"]))

    def begin(self, chunks: Chunks, notice: bytes = b"") -> Any:
        size = chunks.chunk_bytes
        for local, remote in zip(chunks.local, chunks.remote, strict=True):
            self._data.sendall(_HEADER.pack(remote, size))
            self._data.sendall(memoryview(self.buffer.map)[local * size : (local + 1) * size])
        if notice:
            self._data.sendall(_HEADER.pack(_NOTICE, len(notice)) + notice)

    def is_done(self, write: Any) -> bool:
        return True  # the kernel has it; a stream needs no more care

    def run(self, count: int, chunk_bytes: int, in_flight: int) -> None:
        super().run(count, chunk_bytes, in_flight)
        self._data.sendall(_HEADER.pack(_NOTICE, len(_LANDED)) + _LANDED)
        while _LANDED not in self.heard():
            select.select(self.watched(), [], [])


class SocketSink(ListeningEnd, Sink):
    """See `Sink`."""

    def __init__(self, buffer: Buffer) -> None:
        super().__init__(buffer)
        self._data_listener = socket.create_server(("127.0.0.1", 0))
        self.address |= {"data_port": self._data_listener.getsockname()[1]}
        self._data: socket.socket | None = None
        self._notices: list[bytes] = []

    def watched(self) -> list[socket.socket]:
        return [*super().watched(), self._data or self._data_listener]

    def heard(self) -> list[bytes]:
        said = super().heard()  # first, so that the line is there to answer on: it was dialled first
        if self._data is None and select.select([self._data_listener], [], [], 0)[0]:
            self._data = self._data_listener.accept()[0]
        while self._data is not None and select.select([self._data], [], [], 0)[0]:
            if not self._take_frame(self._data):
                self._data.close()
                self._data = None
        notices, self._notices = self._notices, []
        return said + notices

    def _take_frame(self, data: socket.socket) -> bool:
        header = bytearray(_HEADER.size)
        if not _receive(data, memoryview(header)):
            return False
        slot, length = _HEADER.unpack(header)
        if slot != _NOTICE:
            return _receive(data, memoryview(self.buffer.map)[slot * length : (slot + 1) * length])
        notice = bytearray(length)
        _receive(data, memoryview(notice))
        if notice == _LANDED:
            self.tell(_LANDED)
        else:
            self._notices.append(bytes(notice))
        return True


def _receive(connection: socket.socket, view: memoryview) -> bool:
    """Fill `view`; False at the end of the stream."""
    while view:
        length = connection.recv_into(view)
        if not length:
            return False
        view = view[length:]
    return True


def make_end(system: str, role: str, tls: str, buffer: Buffer) -> End:
    """See `peers_app.mover`."""
    return SocketSource(buffer) if role == "source" else SocketSink(buffer)
