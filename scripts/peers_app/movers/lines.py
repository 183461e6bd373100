"""Words between two processes over a TCP connection, a line each: for systems that have no messages of their own."""

from __future__ import annotations

import select
import socket

from peers_app.memory import Buffer
from peers_app.movers.base import Address, End


class LineEnd(End):
    """An end that tells and hears over a connection; nothing is heard before there is one."""

    def __init__(self, buffer: Buffer) -> None:
        super().__init__(buffer)
        self._line: socket.socket | None = None
        self._pending = b""

    def tell(self, words: bytes) -> None:
        assert self._line is not None
        self._line.setblocking(True)
        self._line.sendall(words + b"\n")

    def heard(self) -> list[bytes]:
        if self._line is None:
            return []
        self._line.setblocking(False)
        try:
            while data := self._line.recv(65536):
                self._pending += data
        except BlockingIOError:
            pass
        *lines, self._pending = self._pending.split(b"\n")
        return lines

    def wait(self, commands: int) -> None:
        watched: list[socket.socket | int] = [commands, *self.watched()]
        select.select(watched, [], [])

    def watched(self) -> list[socket.socket]:
        """The sockets that end a wait when something comes."""
        return [] if self._line is None else [self._line]

    def dial(self, port: int) -> None:
        """Connect to the other end's listener."""
        self._line = _without_delay(socket.create_connection(("127.0.0.1", port)))


class ListeningEnd(LineEnd):
    """The end that is connected to, once."""

    def __init__(self, buffer: Buffer) -> None:
        super().__init__(buffer)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: Address = {"port": self._listener.getsockname()[1]}

    def watched(self) -> list[socket.socket]:
        return [self._listener] if self._line is None else super().watched()

    def heard(self) -> list[bytes]:
        if self._line is None and select.select([self._listener], [], [], 0)[0]:
            self._line = _without_delay(self._listener.accept()[0])
        return super().heard()


def _without_delay(connection: socket.socket) -> socket.socket:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection
