"""A client's connection: request after request, each read whole before it is answered.

A request that could be read in two ways is refused and ends the connection. While one is answered, the connection is
watched: when the client closes it, the work on its answer is cancelled at once. Whoever sends slowly, too much or
nothing at all is told so, and cut off.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Awaitable, Callable
from typing import Final

import attrs
import h11
import trio

from kvpd.config import ProxyConfig
from kvpd.integrations.proxy.errors import ClientGone, ProxyError, Refused
from kvpd.integrations.proxy.exchange import Exchange, Request, header
from kvpd.integrations.proxy.limits import (
    HEAD_BYTES_MAX,
    LATE_LINGER_S,
    LINGER_BYTES_MAX,
    LINGER_S,
    PIPELINED_BYTES_MAX,
    READ_BYTES,
    REQUEST_ID_CHARS_MAX,
    RETRY_AFTER_S,
    Budget,
    Share,
)

_PRINTABLE: Final = re.compile(rb"[\x20-\x7e]+")

Handler = Callable[[Request, Exchange], Awaitable[None]]


@attrs.frozen
class Hooks:
    """What a connection asks of the server that it belongs to."""

    handle: Handler
    budget: Budget
    is_draining: Callable[[], bool]
    client_cancelled: Callable[[], None]


class ClientConnection:
    """One connection, from its first byte to its end; `only_paths` are all that it may ask for, where there are any."""

    def __init__(
        self,
        stream: trio.SocketStream,
        config: ProxyConfig,
        hooks: Hooks,
        *,
        only_paths: frozenset[str] | None = None,
    ) -> None:
        self._stream = stream
        self._config = config
        self._hooks = hooks
        self._only_paths = only_paths
        self._h11 = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_BYTES_MAX)
        self._has_begun = False
        self._is_last = only_paths is not None  # whether there is to be no further request on it
        self._gone = False
        self._exchange = Exchange("", "GET", self._send)  # the one of now
        self._idle = trio.CancelScope()  # while nothing but the next request is waited for

    def end_if_idle(self) -> None:
        """There is to be no further request: close, unless one is being answered."""
        self._idle.cancel()

    async def run(self) -> None:
        """Answer until either side has had enough."""
        try:
            while await self._serve_one():
                self._h11.start_next_cycle()
            await self._close()
        except (ClientGone, trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        finally:
            await trio.aclose_forcefully(self._stream)

    async def _serve_one(self) -> bool:
        """One request. Whether there may be another."""
        self._exchange = Exchange(uuid.uuid4().hex, "GET", self._send)
        try:
            with self._hooks.budget.hold() as share:
                request = await self._read_request(share)
                if request is None:
                    return False
                await self._answer(request, self._exchange)
        except (ProxyError, h11.RemoteProtocolError) as exc:
            await self._refuse(self._exchange, exc)
            return False
        return self._exchange.whole and self._h11.our_state is h11.DONE and self._h11.their_state is h11.DONE

    async def _read_request(self, share: Share) -> Request | None:
        """The next request, whole; None when there is none.

        Raises:
            ProxyError, h11.RemoteProtocolError: it will not be answered otherwise.
        """
        head = await self._read_head()
        if head is None:
            return None
        method = head.method.decode("ascii")
        # Even a refusal of its id must have the form that its method demands.
        self._exchange = Exchange(self._exchange.request_id, method, self._send)
        request_id = _request_id(head, self._exchange.request_id)
        self._exchange = Exchange(request_id, method, self._send)
        self._judge(head)
        return Request(method, head.target, list(head.headers), await self._read_body(head, share), request_id)

    # ------------------------------------------------------------------ reading

    async def _read_head(self) -> h11.Request | None:
        """The next request's line and headers; None when there is none."""
        if not await self._wait_for_first_byte():
            return None
        with trio.move_on_after(self._config.header_timeout_s) as scope:
            event = await self._next_event()
        if scope.cancelled_caught:
            raise _late("its headers", self._config.header_timeout_s)
        if isinstance(event, h11.ConnectionClosed):
            return None
        assert isinstance(event, h11.Request)
        return event

    async def _wait_for_first_byte(self) -> bool:
        """Until a request begins. False: the client is gone, or has nothing more to ask."""
        timeout_s = self._config.idle_timeout_s if self._has_begun else self._config.header_timeout_s
        self._has_begun = True
        if self._h11.trailing_data[0]:
            return True
        with trio.move_on_after(timeout_s) as self._idle:
            if self._hooks.is_draining():
                return False
            await self._receive()
            return True
        return False

    def _judge(self, head: h11.Request) -> None:
        """Refuse what is not worth reading further."""
        config, headers = self._config, head.headers
        if len(headers) > config.header_count_max:
            raise ProxyError(431, "too_many_headers", f"at most {config.header_count_max} headers are taken")
        path = head.target.partition(b"?")[0].decode("ascii")
        if self._only_paths is not None and path not in self._only_paths:
            raise ProxyError(503, "too_many_connections", "too many connections are open", retry_after_s=RETRY_AFTER_S)
        coding, length = header(list(headers), b"transfer-encoding"), header(list(headers), b"content-length")
        # RFC 9112, 6.1: a request that has both, or a coding in HTTP/1.0, is how requests are smuggled.
        if coding is not None and (length is not None or head.http_version < b"1.1"):
            raise ProxyError(400, "ambiguous_length", "Transfer-Encoding goes neither with Content-Length nor HTTP/1.0")
        if length is not None and int(length) > config.body_bytes_max:
            raise self._too_large()

    def _too_large(self) -> ProxyError:
        limit = self._config.body_bytes_max
        return ProxyError(413, "body_too_large", f"a request's body may have {limit} bytes ({limit / (1 << 20):g} MiB)")

    async def _read_body(self, head: h11.Request, share: Share) -> bytearray:
        if self._h11.they_are_waiting_for_100_continue:
            await self._send(h11.InformationalResponse(status_code=100, headers=[]))
        body = bytearray()
        with trio.move_on_after(self._config.body_timeout_s) as scope:
            while isinstance(event := await self._next_event(), h11.Data):
                body += event.data
                if len(body) > self._config.body_bytes_max:
                    raise self._too_large()
                if len(body) > share.held and not share.grow(len(body) - share.held):
                    raise ProxyError(
                        503, "too_many_bodies", "too many large requests are held", retry_after_s=RETRY_AFTER_S
                    )
        if scope.cancelled_caught:
            raise _late("its body", self._config.body_timeout_s)
        return body

    async def _next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        while (event := self._h11.next_event()) is h11.NEED_DATA:
            await self._receive()
        return event

    async def _receive(self) -> bool:
        """More of what the client says. False: nothing more will come."""
        data = await self._stream.receive_some(READ_BYTES)
        self._h11.receive_data(data)
        return bool(data)

    # ------------------------------------------------------------------ answering

    async def _answer(self, request: Request, exchange: Exchange) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch, nursery.cancel_scope)
            try:
                try:
                    await self._hooks.handle(request, exchange)
                except Refused as refused:
                    await exchange.refuse(refused)
            except ClientGone:
                self._gone = True
            nursery.cancel_scope.cancel()
        if self._gone and not exchange.whole:
            self._hooks.client_cancelled()

    async def _watch(self, answering: trio.CancelScope) -> None:
        """Cancel the answer when its client closes the connection, or sends on and on instead of reading."""
        try:
            while await self._receive() and len(self._h11.trailing_data[0]) <= PIPELINED_BYTES_MAX:
                pass
        except trio.BrokenResourceError:
            pass
        self._gone = True
        answering.cancel()

    async def _refuse(self, exchange: Exchange, exc: ProxyError | h11.RemoteProtocolError) -> None:
        """Answer what cannot be read, if HTTP still allows an answer; the connection ends with it."""
        if isinstance(exc, h11.RemoteProtocolError):
            exc = ProxyError(exc.error_status_hint, "malformed_request", f"not understood: {exc}")
        if self._h11.our_state in {h11.IDLE, h11.SEND_RESPONSE}:
            self._is_last = True
            await exchange.refuse(exc)
            await self._linger()

    async def _send(self, event: h11.Event) -> None:
        if isinstance(event, h11.Response) and (self._is_last or self._hooks.is_draining()):
            event = h11.Response(
                status_code=event.status_code,
                reason=event.reason,
                headers=[*event.headers.raw_items(), (b"connection", b"close")],
            )
        data = self._h11.send(event)
        if not data:
            return
        with trio.move_on_after(self._config.stall_timeout_s) as scope:
            try:
                await self._stream.send_all(data)
            except trio.BrokenResourceError as exc:
                raise ClientGone("the connection is broken") from exc
        if scope.cancelled_caught:
            raise ClientGone("it does not read")

    # ------------------------------------------------------------------ closing

    async def _close(self) -> None:
        if self._h11.our_state is not h11.ERROR:
            await self._stream.send_eof()

    async def _linger(self) -> None:
        """Read on a little: closing on unread bytes would reset the connection, and take the answer away."""
        taken = 0
        with trio.move_on_after(LINGER_S if self._only_paths is None else LATE_LINGER_S):
            await self._stream.send_eof()
            while taken < LINGER_BYTES_MAX and (data := await self._stream.receive_some(READ_BYTES)):
                taken += len(data)


def _late(what: str, timeout_s: float) -> ProxyError:
    return ProxyError(408, "request_timeout", f"the request did not send {what} within {timeout_s:g} s")


def _request_id(head: h11.Request, fresh: str) -> str:
    """The client's own id, which means nothing here, or a fresh one."""
    given = header(list(head.headers), b"x-request-id")
    if not given:
        return fresh
    if len(given) > REQUEST_ID_CHARS_MAX or _PRINTABLE.fullmatch(given) is None:
        raise ProxyError(
            400, "bad_request_id", f"X-Request-Id must be at most {REQUEST_ID_CHARS_MAX} printable ASCII characters"
        )
    return given.decode("ascii")
