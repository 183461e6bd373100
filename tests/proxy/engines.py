"""Engines and senders that a test makes behave, or misbehave, exactly as it says.

They are written with h11 and sockets alone and share nothing with the proxy, so that a mistake of its cannot hide.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

import attrs
import h11
import orjson
import trio

from kvpd.core.messages import ErrorInfo, FailNotif, ProxyAck, ProxyNotif, decode, encode
from kvpd.errors import ErrorCode
from kvpd.transports.zmq import open_zmq_control

DEADLINE_S: Final = 10.0
SSE: Final = "text/event-stream; charset=utf-8"
JSON: Final = "application/json"
Behaviour = Callable[["Call"], Awaitable[None]]


def event(text: str, **more: Any) -> bytes:
    """One event of a completion's stream."""
    chunk = {"id": "cmpl-1", "object": "text_completion", "created": 7, "model": "m"}
    return b"data: " + orjson.dumps({**chunk, "choices": [{"index": 0, "text": text}], **more}) + b"\n\n"


def answer(text: str, **more: Any) -> bytes:
    """A whole completion."""
    choice = {"index": 0, "text": text, "finish_reason": "length"}
    usage = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
    whole = {"id": "cmpl-1", "object": "text_completion", "created": 7, "model": "m", "choices": [choice]}
    return orjson.dumps({**whole, "usage": usage, **more})


DONE: Final = b"data: [DONE]\n\n"


@attrs.define
class Call:
    """One request that an engine got, and the means to answer it."""

    stream: trio.SocketStream
    protocol: h11.Connection
    method: str
    target: str
    headers: dict[str, str]
    body: bytearray = attrs.field(repr=False)
    port: int  # of the proxy's side of the connection
    closed: trio.Event = attrs.field(factory=trio.Event)  # the proxy closed the connection before the answer was whole

    @property
    def json(self) -> Any:
        """The body."""
        return orjson.loads(self.body)

    @property
    def transfer(self) -> dict[str, Any]:
        """What it says about the transfer."""
        found = self.json.get("kv_transfer_params") or {}
        assert isinstance(found, dict)
        return found

    async def begin(self, status: int = 200, content_type: str = JSON, **headers: str) -> None:
        """The head of an answer without a length."""
        more = [(name.replace("_", "-"), value) for name, value in headers.items()]
        head = h11.Response(status_code=status, headers=[("content-type", content_type), *more])
        await self._send(head)

    async def send(self, data: bytes) -> None:
        """A piece of the body."""
        await self._send(h11.Data(data=data))

    async def end(self) -> None:
        """The body is whole."""
        await self._send(h11.EndOfMessage())

    async def whole(self, body: bytes, status: int = 200, content_type: str = JSON, **headers: str) -> None:
        """A whole answer, with its length."""
        await self.begin(status, content_type, content_length=str(len(body)), **headers)
        await self.send(body)
        await self.end()

    async def events(self, *events: bytes) -> None:
        """A whole stream."""
        await self.begin(200, SSE)
        for data in events:
            await self.send(data)
        await self.end()

    async def raw(self, data: bytes) -> None:
        """Bytes that need not be HTTP; the connection ends with them."""
        await self.stream.send_all(data)
        await self.stream.aclose()

    async def hang(self) -> None:
        """Nothing, until the proxy gives up."""
        await trio.sleep_forever()

    async def _send(self, event: h11.Event) -> None:
        await self.stream.send_all(self.protocol.send(event) or b"")


class Engine:
    """A server that answers /health and /v1/models, and everything else as `behave` does."""

    def __init__(self, name: str, behave: Behaviour) -> None:
        self.name = name
        self.behave = behave
        self.health = 200
        self.frozen = False  # accepts connections and does nothing else, as a stopped process
        self.calls: list[Call] = []
        self.ports: set[int] = set()  # of the proxy's connections so far
        self.port = 0
        self._changed = trio.Event()
        self._serving = trio.CancelScope()
        self._stopped = trio.Event()

    @property
    def url(self) -> str:
        """Where it is."""
        return f"http://127.0.0.1:{self.port}"

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve, on the same port as before if it has served before."""
        (listener,) = await trio.open_tcp_listeners(self.port, host="127.0.0.1")
        self.port = listener.socket.getsockname()[1]
        self._stopped = trio.Event()
        with trio.CancelScope() as self._serving:
            async with trio.open_nursery() as nursery:
                await nursery.start(trio.serve_listeners, self._serve, [listener])
                task_status.started()
        await trio.aclose_forcefully(listener)
        self._stopped.set()

    async def stop(self) -> None:
        """As by SIGKILL: every connection is closed, and no new ones are taken."""
        self._serving.cancel()
        await self._stopped.wait()

    async def wait_calls(self, count: int) -> Call:
        """The `count`-th call, once it is there."""
        with trio.fail_after(DEADLINE_S):
            while len(self.calls) < count:
                await self._changed.wait()
        return self.calls[count - 1]

    async def _serve(self, stream: trio.SocketStream) -> None:
        async with stream:
            if self.frozen:
                await trio.sleep_forever()
            connection = h11.Connection(h11.SERVER)
            try:
                while await self._serve_one(stream, connection):
                    connection.start_next_cycle()
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                pass

    async def _serve_one(self, stream: trio.SocketStream, connection: h11.Connection) -> bool:
        head = await _next(stream, connection)
        if not isinstance(head, h11.Request):
            return False
        body = bytearray()
        while isinstance(event := await _next(stream, connection), h11.Data):
            body += event.data
        headers = {name.decode(): value.decode() for name, value in head.headers}
        port = stream.socket.getpeername()[1]
        call = Call(stream, connection, head.method.decode(), head.target.decode(), headers, body, port)
        if self.frozen:
            await trio.sleep_forever()
        if call.target == "/health":
            await call.whole(b"", self.health)
        else:
            self.ports.add(port)
            self.calls.append(call)
            changed, self._changed = self._changed, trio.Event()
            changed.set()
            await self._answer(call)
        return connection.our_state is h11.DONE and connection.their_state is h11.DONE

    async def _answer(self, call: Call) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch, call, nursery.cancel_scope)
            try:
                await self.behave(call)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                call.closed.set()
            nursery.cancel_scope.cancel()

    async def _watch(self, call: Call, scope: trio.CancelScope) -> None:
        """What uvicorn does: the client's going away ends the work."""
        try:
            data = await call.stream.receive_some(65536)
        except trio.BrokenResourceError:
            data = b""
        except trio.ClosedResourceError:
            return
        if data:  # the next request: this one's answer has been read whole
            call.protocol.receive_data(data)
            return
        call.closed.set()
        scope.cancel()


async def _next(stream: trio.SocketStream, connection: h11.Connection) -> Any:
    while (event := connection.next_event()) is h11.NEED_DATA:
        connection.receive_data(await stream.receive_some(65536))
    return event


class Sender:
    """A kvpd sender, as far as a proxy sees one."""

    def __init__(self, name: str = "sender-0", incarnation: int = 7) -> None:
        self.name = name
        self.incarnation = incarnation
        self.acks: list[ProxyAck] = []
        self._numbers = 0
        self._client: Any = None

    @asynccontextmanager
    async def connected(self, address: str) -> AsyncIterator[Sender]:
        """With a channel to the proxy."""
        async with (
            open_zmq_control() as control,
            control.connect(address, f"{self.name}/{self.incarnation}".encode()) as client,
        ):
            self._client = client
            yield self

    def send(self, req_id: str, transfer_no: int | None = None) -> ProxyNotif:
        """Notify, without waiting for the answer."""
        self._numbers += 1
        number = self._numbers if transfer_no is None else transfer_no
        notif = ProxyNotif(req_id, self._numbers, "receiver-0", self.name, self.incarnation, number)
        self._client.send_nowait(encode(notif))
        return notif

    def fail(
        self,
        req_id: str,
        code: ErrorCode,
        detail: str = "",
        retry_after_s: float | None = None,
        transfer_no: int | None = None,
    ) -> FailNotif:
        """Say that a transfer has ended without success, without waiting for the answer."""
        self._numbers += 1
        number = self._numbers if transfer_no is None else transfer_no
        error = ErrorInfo(code, detail, retry_after_s)
        notif = FailNotif(req_id, self._numbers, "10.9.9.9:7300", self.name, self.incarnation, number, error)
        self._client.send_nowait(encode(notif))
        return notif

    def send_junk(self, frame: bytes) -> None:
        """Something else."""
        self._client.send_nowait(frame)

    async def wait_ack(self) -> ProxyAck:
        """The next acknowledgement."""
        with trio.fail_after(DEADLINE_S):
            ack = decode(await self._client.receive())
        assert isinstance(ack, ProxyAck)
        return ack
