"""A client that reads HTTP strictly: what a framework would forgive is a failure here."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

import attrs
import h11
import orjson
import trio

DEADLINE_S: Final = 10.0


@attrs.frozen
class Reply:
    """A whole answer."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    pieces: tuple[bytes, ...] = ()

    @property
    def json(self) -> Any:
        """The body."""
        return orjson.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error in an OpenAI-style body."""
        assert self.headers["content-type"] == "application/json"
        error = self.json["error"]
        assert {"message", "type", "code"} <= set(error)
        assert isinstance(error, dict)
        return error


class Connection:
    """One connection to the proxy."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self._h11 = h11.Connection(h11.CLIENT)

    async def send(
        self,
        method: str,
        target: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """A request."""
        if self._h11.our_state is h11.DONE:
            self._h11.start_next_cycle()
        length = {} if body is None else {"content-length": str(len(body)), "content-type": "application/json"}
        every = {"host": "proxy", **length, **(headers or {})}
        request = h11.Request(method=method, target=target, headers=list(every.items()))
        data = (self._h11.send(request) or b"") + (self._h11.send(h11.Data(data=body)) or b"" if body else b"")
        await self.raw(data + (self._h11.send(h11.EndOfMessage()) or b""))

    async def head(self) -> tuple[int, dict[str, str]]:
        """The head of the answer, whatever came before it."""
        with trio.fail_after(DEADLINE_S):
            while isinstance(event := await self._next(), h11.InformationalResponse):
                pass
        assert isinstance(event, h11.Response), event
        names = [name for name, _ in event.headers]
        assert len(set(names)) == len(names), f"a header comes twice: {names}"
        return event.status_code, {name.decode(): value.decode() for name, value in event.headers}

    async def piece(self) -> bytes:
        """The next bytes of the body; none at its end. h11.RemoteProtocolError: it was cut off."""
        with trio.fail_after(DEADLINE_S):
            event = await self._next()
        return bytes(event.data) if isinstance(event, h11.Data) else b""

    async def reply(self) -> Reply:
        """The whole answer."""
        status, headers = await self.head()
        pieces = []
        while piece := await self.piece():
            pieces.append(piece)
        return Reply(status, headers, b"".join(pieces), tuple(pieces))

    async def reply_rest(self) -> bytes:
        """What is left of the body, once the head was read."""
        data = b""
        while piece := await self.piece():
            data += piece
        return data

    async def ask(
        self, method: str, target: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> Reply:
        """A request and its whole answer."""
        await self.send(method, target, body, headers)
        return await self.reply()

    async def raw(self, data: bytes) -> None:
        """Bytes that need not be HTTP. Where the proxy does not take them, there may be an answer all the same."""
        with contextlib.suppress(trio.BrokenResourceError):
            await self.stream.send_all(data)

    async def rest(self) -> bytes:
        """All bytes until the proxy closes the connection."""
        data = b""
        with trio.fail_after(DEADLINE_S):
            while more := await self.stream.receive_some(65536):
                data += more
        return data

    async def _next(self) -> Any:
        while (event := self._h11.next_event()) is h11.NEED_DATA:
            self._h11.receive_data(await self.stream.receive_some(65536))
        return event


@asynccontextmanager
async def connect(address: str) -> AsyncIterator[Connection]:
    """A new connection; leaving closes it."""
    connection = await connected(address)
    async with connection.stream:
        yield connection


async def connected(address: str) -> Connection:
    """The same, for who closes it by himself."""
    host, _, port = address.rpartition(":")
    return Connection(await trio.open_tcp_stream(host, int(port)))


async def ask(
    address: str, method: str, target: str, body: Any = None, headers: Mapping[str, str] | None = None
) -> Reply:
    """One request on a connection of its own; a body that is not bytes is sent as JSON."""
    data = body if body is None or isinstance(body, bytes) else orjson.dumps(body)
    async with connect(address) as connection:
        return await connection.ask(method, target, data, headers)


def events_of(body: bytes) -> list[dict[str, str]]:
    """A stream's events, by the rules of the HTML standard: each with its `event` and its `data`."""
    events: list[dict[str, str]] = []
    fields: dict[str, list[str]] = {}
    for line in body.decode().split("\n"):
        if line == "":
            if "data" in fields:
                events.append({name: "\n".join(values) for name, values in fields.items()})
            fields = {}
        elif not line.startswith(":"):
            name, _, value = line.partition(":")
            fields.setdefault(name, []).append(value.removeprefix(" "))
    assert not fields, f"the stream ends within an event: {fields}"
    return events
