"""Control channels over ZMQ: a ROUTER at the receiver, a DEALER at every sender.

Nothing that a peer sends or omits stops a channel: junk, odd frame counts, oversize messages and silent connections
end that connection at most, every queue is bounded, and closing never waits for a peer. A connection that breaks is
made again; what was on its way is lost.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Final

import attrs
import trio
import zmq

from kvpd.core.messages import MESSAGE_BYTES_MAX
from kvpd.transports.addresses import (
    Address,
    Endpoint,
    InprocAddress,
    parse_endpoint,
    parse_peer_endpoint,
    resolve,
)
from kvpd.transports.zmq_socket import Context, SocketStatistics, TrioSocket

IDENTITY_BYTES_MAX: Final = 255
LINGER_MS: Final = 900  # how long last replies may take to leave: less than the contract's second
TERM_TIMEOUT_S: Final = 1.5  # the linger, and some more for a busy machine
CONNECT_RESOLVE_TIMEOUT_S: Final = 2.0  # connecting goes on in the background, so its caller waits little


@attrs.frozen
class ZmqLimits:
    """Every bound of a control socket. The defaults are right; tests make them small."""

    # Per connection and direction. A burst of cancels for a full admission queue (1,024) must fit.
    queue_messages_max: int = 2048
    # A message just over the protocol's limit arrives and is refused by name; beyond this its connection is dropped.
    message_bytes_max: int = MESSAGE_BYTES_MAX + 4096
    handshake_ms: int = 5_000
    reconnect_ms: int = 50
    reconnect_max_ms: int = 1_000
    # A peer that vanished without a word: after `silence_s` without traffic the kernel asks whether it is there, and it
    # gives the connection up when nothing was acknowledged, or nothing read, for so long. The server does so before the
    # client, which announces the same identity again when it connects anew.
    silence_s: int = 2
    server_gives_up_ms: int = 6_000
    client_gives_up_ms: int = 8_000


class ZmqServer:
    """See `ControlServer`. A ZMQ message's first frame is the peer, every other one a message of ours."""

    def __init__(self, socket: TrioSocket, address: str) -> None:
        self._socket = socket
        self._address = address
        self._here: deque[tuple[bytes, bytes]] = deque()  # came together with the last one

    @property
    def address(self) -> str:
        return self._address

    async def receive(self) -> tuple[bytes, bytes]:
        if self._here:
            await trio.lowlevel.checkpoint()
            return self._here.popleft()
        return self._first(await self._socket.receive())

    def receive_nowait(self) -> tuple[bytes, bytes]:
        return self._here.popleft() if self._here else self._first(self._socket.receive_nowait())

    def _first(self, frames: list[bytes]) -> tuple[bytes, bytes]:
        peer = frames[0]
        self._here.extend((peer, message) for message in frames[2:])
        return peer, frames[1] if len(frames) > 1 else b""

    def send_nowait(self, peer: bytes, *messages: bytes) -> None:
        self._socket.send_nowait((peer, *messages))

    def statistics(self) -> SocketStatistics:
        """What its socket has done so far."""
        return self._socket.statistics()


class ZmqClient:
    """See `ControlClient`. Every frame of a ZMQ message is a message of ours."""

    def __init__(self, socket: TrioSocket) -> None:
        self._socket = socket
        self._here: deque[bytes] = deque()  # came together with the last one

    async def receive(self) -> bytes:
        if self._here:
            await trio.lowlevel.checkpoint()
            return self._here.popleft()
        return self._first(await self._socket.receive())

    def receive_nowait(self) -> bytes:
        return self._here.popleft() if self._here else self._first(self._socket.receive_nowait())

    def _first(self, frames: list[bytes]) -> bytes:
        self._here.extend(frames[1:])
        return frames[0]

    def send_nowait(self, *messages: bytes) -> None:
        self._socket.send_nowait(messages)

    def statistics(self) -> SocketStatistics:
        """What its socket has done so far."""
        return self._socket.statistics()


class ZmqPushClient:
    """Sends to whoever binds a PULL socket; there are no answers."""

    def __init__(self, socket: TrioSocket) -> None:
        self._socket = socket

    def send_nowait(self, *messages: bytes) -> None:
        """Queue messages, each for itself: who was not written for kvpd expects one frame.

        Raises:
            trio.WouldBlock: the queue is full.
        """
        for message in messages:
            self._socket.send_nowait((message,))


class ZmqControl:
    """Makes control channels in one ZMQ context; see `ControlTransport` and `open_zmq_control`."""

    def __init__(self, context: Context, limits: ZmqLimits | None = None) -> None:
        self._context = context
        self._limits = limits or ZmqLimits()

    @asynccontextmanager
    async def serve(self, address: str) -> AsyncIterator[ZmqServer]:
        """Bind a ROUTER. When the context has been left, the address is free again.

        Raises:
            ValueError: `address` is no address.
            OSError: it cannot be resolved or bound; the text names it.
        """
        endpoint = parse_endpoint(address)
        if isinstance(endpoint, Address):
            endpoint = await resolve(endpoint)
        with _translated(f"cannot bind {address}"):
            raw = self._raw_socket(zmq.ROUTER, endpoint)
            # Without it a ROUTER drops silently what is for a peer that is gone or full.
            raw.setsockopt(zmq.ROUTER_MANDATORY, 1)
            # A stranger that announces somebody's identity must not get his messages.
            raw.setsockopt(zmq.ROUTER_HANDOVER, 0)
            try:
                raw.bind(endpoint.url)
            except zmq.ZMQError:
                raw.close(0)
                raise
        bound = raw.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(bound, bytes)
        socket = TrioSocket(raw)
        linger_ms = 0
        try:
            yield ZmqServer(socket, bound.rstrip(b"\0").decode())
            linger_ms = LINGER_MS
        finally:
            if isinstance(endpoint, InprocAddress):
                raw.unbind(endpoint.url)
                socket.close(linger_ms)
            else:
                await socket.aclose_listener(linger_ms)

    @asynccontextmanager
    async def connect(self, address: str, identity: bytes) -> AsyncIterator[ZmqClient]:
        """Connect a DEALER, in the background; it connects again by itself whenever the connection breaks.

        Raises:
            ValueError: `address` or `identity` is none.
            OSError: there is no socket to be had.
        """
        if not 1 <= len(identity) <= IDENTITY_BYTES_MAX or identity.startswith(b"\0"):
            raise ValueError(
                f"{identity!r} is no identity: 1 to {IDENTITY_BYTES_MAX} bytes are, the first of them not zero"
            )
        async with self._connected(zmq.DEALER, address, identity) as socket:
            yield ZmqClient(socket)

    @asynccontextmanager
    async def connect_push(self, address: str) -> AsyncIterator[ZmqPushClient]:
        """Connect a PUSH socket, in the background: for proxies that bind PULL.

        Raises:
            ValueError: `address` is no address.
            OSError: there is no socket to be had.
        """
        async with self._connected(zmq.PUSH, address, b"") as socket:
            yield ZmqPushClient(socket)

    @asynccontextmanager
    async def _connected(self, kind: int, address: str, identity: bytes) -> AsyncIterator[TrioSocket]:
        endpoint = parse_peer_endpoint(address)
        family = await _family_of(endpoint)
        with _translated(f"cannot connect to {address}"):
            raw = self._raw_socket(kind, family)
            if identity:
                raw.setsockopt(zmq.IDENTITY, identity)
            try:
                # The name, not what it means today: libzmq asks anew whenever it connects, and finds a peer that moved.
                raw.connect(endpoint.url)
            except zmq.ZMQError:
                raw.close(0)
                raise
        socket = TrioSocket(raw)
        linger_ms = 0
        try:
            yield socket
            linger_ms = LINGER_MS
        finally:
            socket.close(linger_ms)

    def _raw_socket(self, kind: int, endpoint: Endpoint) -> zmq.Socket[bytes]:
        limits = self._limits
        socket = self._context.socket(kind)
        # With it on, libzmq looks for IPv6 addresses first and shows IPv4 ones as mapped.
        socket.setsockopt(zmq.IPV6, int(isinstance(endpoint, Address) and endpoint.is_ipv6))
        socket.setsockopt(zmq.SNDHWM, limits.queue_messages_max)
        socket.setsockopt(zmq.RCVHWM, limits.queue_messages_max)
        socket.setsockopt(zmq.MAXMSGSIZE, limits.message_bytes_max)
        socket.setsockopt(zmq.HANDSHAKE_IVL, limits.handshake_ms)
        socket.setsockopt(zmq.RECONNECT_IVL, limits.reconnect_ms)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, limits.reconnect_max_ms)
        # Not by libzmq's heartbeats: where a queue is full and its peer resets the connection, libzmq aborts the
        # process at the next one. These cost no thread a wake-up, either.
        socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, limits.silence_s)
        socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 1)
        gives_up_ms = limits.server_gives_up_ms if kind == zmq.ROUTER else limits.client_gives_up_ms
        socket.setsockopt(zmq.TCP_MAXRT, gives_up_ms)  # Linux: TCP_USER_TIMEOUT, which also bounds the keepalive
        return socket


@asynccontextmanager
async def open_zmq_control(limits: ZmqLimits | None = None) -> AsyncIterator[ZmqControl]:
    """Control channels in a ZMQ context of their own. Leave the channels first.

    Leaving waits until last messages have left, TERM_TIMEOUT_S at most.
    """
    context: Context = zmq.Context()
    try:
        yield ZmqControl(context, limits)
    finally:
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(_terminate, context)


def _terminate(context: Context) -> None:
    """End a context, in real time whatever the loop's clock is.

    The sockets' linger should bound it; but libzmq has been seen to wait for ever for a connection whose peer had
    stopped reading, and closing must not. What still waits then is left to itself, and does not keep the process alive.
    """
    ending = threading.Thread(target=context.term, name="kvpd zmq term", daemon=True)
    ending.start()
    ending.join(TERM_TIMEOUT_S)


async def _family_of(endpoint: Endpoint) -> Endpoint:
    """An endpoint of the family to connect by. A name that cannot be resolved now may be so later: IPv4 is supposed."""
    if isinstance(endpoint, InprocAddress) or endpoint.is_literal:
        return endpoint
    with trio.move_on_after(CONNECT_RESOLVE_TIMEOUT_S):
        try:
            return await resolve(endpoint)
        except OSError:
            pass
    return endpoint


@contextmanager
def _translated(what: str) -> Iterator[None]:
    try:
        yield
    except zmq.ZMQError as exc:
        raise OSError(exc.errno, f"{what}: {exc.strerror}") from exc
