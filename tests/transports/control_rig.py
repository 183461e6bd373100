"""Both ends of a control channel, whichever it is: what the contract tests run on, and ZMQ programs of others."""

from __future__ import annotations

import os
import socket as stdlib_socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import attrs
import trio
import trio.testing
import zmq

from kvpd.transports.base import ControlClient, ControlServer, ControlTransport
from kvpd.transports.zmq import ZmqLimits
from kvpd.transports.zmq_socket import Context

DEADLINE_S = 20.0
QUEUE_MESSAGES_MAX = 8


@attrs.frozen
class Kind:
    """One implementation under test."""

    name: str
    transport: ControlTransport
    address: str

    @property
    def reconnects(self) -> bool:
        """ZMQ does not reconnect within a process, because there nothing can break."""
        return self.name != "inproc"


def make_limits() -> ZmqLimits:
    return ZmqLimits(queue_messages_max=QUEUE_MESSAGES_MAX, handshake_ms=300, reconnect_ms=10, reconnect_max_ms=50)


@asynccontextmanager
async def pair(kind: Kind, identity: bytes = b"a") -> AsyncIterator[tuple[ControlServer, ControlClient]]:
    """A server and a client that have greeted each other."""
    with trio.fail_after(DEADLINE_S):
        async with kind.transport.serve(kind.address) as server, kind.transport.connect(server.address, identity) as c:
            await greet(server, c, identity)
            yield server, c


async def greet(server: ControlServer, client: ControlClient, identity: bytes) -> None:
    client.send_nowait(b"hello")
    assert await server.receive() == (identity, b"hello")
    server.send_nowait(identity, b"welcome")
    assert await client.receive() == b"welcome"


def fill(send: Callable[[], None]) -> int:
    """Send until the queue is full: how many fitted."""
    for sent in range(10_000):
        try:
            send()
        except trio.WouldBlock:
            return sent
    raise AssertionError("a queue without a bound")


async def until_unknown(server: ControlServer, peer: bytes) -> None:
    """Until the server has noticed that the peer is gone."""
    while True:
        try:
            server.send_nowait(peer, b"?")
        except trio.WouldBlock:
            pass
        except trio.BrokenResourceError:
            return
        await trio.sleep(0.0005)


def free_port() -> int:
    with stdlib_socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


@asynccontextmanager
async def raw_zmq(kind: int, url: str, identity: bytes = b"") -> AsyncIterator[zmq.Socket[bytes]]:
    """Somebody else's ZMQ program."""
    context: Context = zmq.Context()
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 1000)
    if identity:
        socket.setsockopt(zmq.IDENTITY, identity)
    socket.connect(url)
    try:
        yield socket
    finally:
        socket.close()
        await trio.to_thread.run_sync(context.term)
