"""One request and its answer on a client's connection.

An answer is begun once and ended once. Whatever the engine's framing was, the client gets the same bytes in a framing
that suits it, each piece as soon as it is there.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from email.utils import formatdate
from typing import Final, Protocol

import attrs
import h11

from kvpd.integrations.proxy.errors import Headers, ProxyError, Refused
from kvpd.integrations.proxy.sse import DONE, error_event, is_event_stream

_DONE_LINE: Final = b"data: " + DONE
_TAIL_BYTES: Final = 32  # room for that line and an empty one
# RFC 9110, 7.6.1: these are for the next hop alone.
_HOP_BY_HOP: Final = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)


class Sink(Protocol):
    """Where an answer goes."""

    @property
    def started(self) -> bool:
        """Whether the client may have seen any of it, so that there is no second try."""

    async def start(self, status: int, headers: Headers) -> None:
        """Send the head."""

    async def send(self, data: bytes) -> None:
        """Send a piece of the body."""

    async def finish(self) -> None:
        """The body is whole."""

    async def fail(self, error: ProxyError) -> None:
        """The body will never be whole: say so in the stream, or break it off."""


@attrs.frozen
class Request:
    """A request, read whole. Header names are lower case; `target` is what the client wrote, to the byte."""

    method: str
    target: bytes
    headers: Headers
    body: bytearray
    request_id: str

    @property
    def path(self) -> str:
        """Without the query."""
        return self.target.partition(b"?")[0].decode("ascii", "replace")

    @property
    def query(self) -> str:
        """Behind the question mark."""
        return self.target.partition(b"?")[2].decode("ascii", "replace")

    def forwarded(self) -> Headers:
        """The headers that an engine gets to see; length and id are set for each hop anew."""
        own = {b"host", b"content-length", b"expect", b"x-request-id"}
        return [(name, value) for name, value in end_to_end(self.headers) if name not in own]


def end_to_end(headers: Headers) -> Headers:
    """The headers that are not for one hop alone."""
    named = {
        name.strip().lower() for key, value in headers if key.lower() == b"connection" for name in value.split(b",")
    }
    return [(key, value) for key, value in headers if key.lower() not in _HOP_BY_HOP | named]


def header(headers: Headers, name: bytes) -> bytes | None:
    """The first value of a header."""
    return next((value for key, value in headers if key.lower() == name), None)


class Exchange:
    """The answer to one request, on its way to a client; see `Sink`.

    `whole` says that nothing is missing from it, `failed` that it ended badly after its beginning.
    """

    def __init__(self, request_id: str, method: str, send: Callable[[h11.Event], Awaitable[None]]) -> None:
        self.request_id = request_id
        self._has_body = method != "HEAD"
        self._send = send
        self._started = False
        self._is_event_stream = False
        self._tail = b""  # the last bytes of the body so far
        self._missing = -1  # bytes of a body whose length is known
        self.status = 0
        self.whole = False
        self.failed = False

    @property
    def started(self) -> bool:
        return self._started

    async def start(self, status: int, headers: Headers) -> None:
        assert not self._started, "an answer is begun once"
        self._started = True
        self.status = status
        kept = [(name, value) for name, value in end_to_end(headers) if name.lower() != b"x-request-id"]
        if header(kept, b"date") is None:  # RFC 9110, 6.6.1: every answer has one
            kept.append((b"date", formatdate(usegmt=True).encode("ascii")))
        self._is_event_stream = is_event_stream(header(kept, b"content-type"), header(kept, b"content-encoding"))
        self._missing = int(header(kept, b"content-length") or -1)
        await self._send(h11.Response(status_code=status, headers=[*kept, (b"x-request-id", self.request_id.encode())]))

    async def send(self, data: bytes) -> None:
        if self._has_body and data:
            self._tail = (self._tail + data[-_TAIL_BYTES:])[-_TAIL_BYTES:]
            self._missing -= len(data)
            # Before they leave: clients go when they have all bytes, or [DONE], and do not wait for HTTP's own end.
            self.whole = not self._missing or (self._is_event_stream and self._tail.rstrip().endswith(_DONE_LINE))
            await self._send(h11.Data(data=data))

    async def finish(self) -> None:
        self.whole = True  # before the last bytes leave: a client that has them may go
        await self._send(h11.EndOfMessage())

    async def fail(self, error: ProxyError) -> None:
        self.failed = True
        # Within an event, an error event would be taken for the rest of it: there only a broken connection is clear.
        if self._is_event_stream and (not self._tail or self._tail.endswith((b"\n\n", b"\r\n\r\n", b"\r\r"))):
            await self.send(error_event(error.body))
            await self.finish()

    async def answer(self, status: int, headers: Headers, body: bytes) -> None:
        """A whole answer."""
        length = (b"content-length", b"%d" % len(body))
        await self.start(status, [*(pair for pair in headers if pair[0].lower() != b"content-length"), length])
        await self.send(body)
        await self.finish()

    async def refuse(self, refused: Refused) -> None:
        """A refusal as a whole answer."""
        await self.answer(refused.status, refused.headers, refused.body)
