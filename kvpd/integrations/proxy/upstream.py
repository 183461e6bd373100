"""An engine's HTTP side: requests go out on kept connections, and whoever stops waiting closes the connection.

A connection is used again only after a whole answer. Closing it in the middle of one is how an engine learns that
nobody wants its work any more. Every wait has a deadline; what goes wrong is an `EngineFailed`.
"""

from __future__ import annotations

import select
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Final

import h11
import trio

from kvpd.integrations.proxy.errors import EngineBroken, EngineTooSlow, EngineUnreachable, Headers
from kvpd.integrations.proxy.exchange import header
from kvpd.integrations.proxy.limits import HEAD_BYTES_MAX, READ_BYTES
from kvpd.transports.addresses import parse_peer_address

# Shorter than the 5 s for which uvicorn, and so vLLM, keeps a connection: we leave first, and do not ask a closed one.
_KEPT_S: Final = 4.0
_SMALL_BODY_BYTES: Final = 64 << 10


class Answer:
    """An engine's answer: its head, and its body piece by piece."""

    def __init__(self, connection: _Connection, head: h11.Response) -> None:
        self._connection = connection
        self.status = head.status_code
        self.headers: Headers = list(head.headers.raw_items())

    @property
    def content_type(self) -> bytes | None:
        """Of its body."""
        return header(self.headers, b"content-type")

    async def piece(self, timeout_s: float) -> bytes:
        """The next bytes of the body as they come; none at its end.

        Raises:
            EngineFailed: there will be no more, or none came within `timeout_s` seconds.
        """
        with self._connection.deadline(timeout_s, "the next bytes of its answer"):
            while isinstance(event := await self._connection.next_event(), h11.Data):
                if event.data:
                    return bytes(event.data)
        return b""

    async def read(self, bytes_max: int, timeout_s: float) -> bytes:
        """The whole body.

        Raises:
            EngineFailed: it is longer than `bytes_max`, or not whole within `timeout_s` seconds.
        """
        pieces: list[bytes] = []
        total = 0
        with self._connection.deadline(timeout_s, "the whole of its answer"):
            while piece := await self.piece(timeout_s):
                total += len(piece)
                if total > bytes_max:
                    raise EngineBroken(f"{self._connection.url}: an answer of more than {bytes_max} bytes")
                pieces.append(piece)
        return b"".join(pieces)


class Upstream:
    """One engine's address and the connections kept to it."""

    def __init__(self, url: str, connect_timeout_s: float) -> None:
        self.url = url
        self._address = parse_peer_address(url.removeprefix("http://"))
        self._connect_timeout_s = connect_timeout_s
        self._kept: deque[tuple[float, _Connection]] = deque()  # the one used last at the right end
        self._is_closed = False
        self.connections_made = 0

    @asynccontextmanager
    async def ask(
        self,
        method: bytes,
        target: bytes,
        headers: Headers,
        body: bytes,
        *,
        timeout_s: float,
        when_sent: Callable[[], None] = lambda: None,
    ) -> AsyncIterator[Answer]:
        """Send a request; what this gives has the answer's head, which has come within `timeout_s` seconds.

        `when_sent` is called once the engine is bound to get all of the request, whatever happens after.

        Raises:
            EngineFailed: no answer, from here or from reading it.
        """
        own: Headers = [(b"host", str(self._address).encode("ascii")), (b"content-length", b"%d" % len(body))]
        request = h11.Request(method=method, target=target, headers=[*own, *headers])
        connection, head = await self._begin(request, body, timeout_s, when_sent)
        try:
            yield Answer(connection, head)
        finally:
            if connection.can_be_used_again() and not self._is_closed:
                self._keep(connection)
            else:
                connection.close()

    async def _begin(
        self, request: h11.Request, body: bytes, timeout_s: float, when_sent: Callable[[], None]
    ) -> tuple[_Connection, h11.Response]:
        while True:
            connection = self._take()
            is_fresh = connection is None
            if connection is None:
                connection = await self._connect()
            try:
                with connection.deadline(timeout_s, "the beginning of its answer"):
                    await connection.send(request, body)
                    when_sent()
                    return connection, await connection.head()
            except EngineBroken:
                connection.close()
                # A kept connection that the engine closed just now has taken nothing from us, so ask on another.
                if is_fresh or connection.has_spoken:
                    raise
            except BaseException:
                connection.close()
                raise

    async def _connect(self) -> _Connection:
        host, port = self._address.host, self._address.port
        try:
            with trio.fail_after(self._connect_timeout_s):
                stream = await trio.open_tcp_stream(host, port)
        except trio.TooSlowError as exc:
            raise EngineUnreachable(f"{self.url}: no connection within {self._connect_timeout_s:g} s") from exc
        except OSError as exc:
            raise EngineUnreachable(f"{self.url}: {exc}") from exc
        self.connections_made += 1
        return _Connection(stream, self.url)

    def _take(self) -> _Connection | None:
        self.prune()
        while self._kept:
            _, connection = self._kept.pop()
            if connection.is_quiet():
                return connection
            connection.close()
        return None

    def _keep(self, connection: _Connection) -> None:
        connection.rewind()
        self._kept.append((trio.current_time(), connection))
        self.prune()

    def prune(self) -> None:
        """Close what has not been used for long."""
        while self._kept and self._kept[0][0] + _KEPT_S < trio.current_time():
            self._kept.popleft()[1].close()

    def close(self) -> None:
        """Keep no connections any more; those in use are closed when their answers end."""
        self._is_closed = True
        while self._kept:
            self._kept.popleft()[1].close()


class _Connection:
    """One connection to an engine."""

    def __init__(self, stream: trio.SocketStream, url: str) -> None:
        self.url = url
        self._stream = stream
        self._h11 = h11.Connection(h11.CLIENT, max_incomplete_event_size=HEAD_BYTES_MAX)
        self.has_spoken = False  # in answer to the request of now

    @contextmanager
    def deadline(self, timeout_s: float, what: str) -> Iterator[None]:
        """Translate lateness."""
        with trio.move_on_after(timeout_s) as scope:
            yield
        if scope.cancelled_caught:
            raise EngineTooSlow(f"{self.url}: {what} did not come within {timeout_s:g} s")

    async def send(self, request: h11.Request, body: bytes) -> None:
        """Send a request."""
        head = self._h11.send(request) or b""
        tail = (self._h11.send(h11.Data(data=body)) or b"") + (self._h11.send(h11.EndOfMessage()) or b"")
        try:
            if len(tail) <= _SMALL_BODY_BYTES:
                await self._stream.send_all(head + tail)
            else:
                await self._stream.send_all(head)
                await self._stream.send_all(tail)
        except trio.BrokenResourceError:
            pass  # it may have answered before it closed the connection

    async def head(self) -> h11.Response:
        """The head of the answer.

        Raises:
            EngineBroken: something else came, or nothing.
        """
        while isinstance(event := await self.next_event(), h11.InformationalResponse):
            pass
        if not isinstance(event, h11.Response):
            raise EngineBroken(f"{self.url}: {event!r} instead of an answer")
        return event

    async def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """What the engine says next.

        Raises:
            EngineBroken: nothing that is HTTP.
        """
        try:
            while (event := self._h11.next_event()) is h11.NEED_DATA:
                data = await self._stream.receive_some(READ_BYTES)
                self.has_spoken = self.has_spoken or bool(data)
                self._h11.receive_data(data)
        except (h11.RemoteProtocolError, trio.BrokenResourceError) as exc:
            raise EngineBroken(f"{self.url}: {exc}") from exc
        return event

    def can_be_used_again(self) -> bool:
        """Whether the answer is whole and the engine lets the connection live."""
        return self._h11.our_state is h11.DONE and self._h11.their_state is h11.DONE

    def rewind(self) -> None:
        """Make ready for the next request."""
        self._h11.start_next_cycle()
        self.has_spoken = False

    def is_quiet(self) -> bool:
        """Whether nothing has arrived since: neither bytes nor the connection's end."""
        poll = select.poll()
        poll.register(self._stream.socket.fileno(), select.POLLIN)
        return not poll.poll(0)

    def close(self) -> None:
        """Now."""
        self._stream.socket.close()
