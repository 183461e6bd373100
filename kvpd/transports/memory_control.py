"""Control channels within one process, under a virtual clock, with the faults of a network on demand.

They keep the contract of `kvpd/transports/base.py` and behave as ZMQ does where it leaves a choice: a client may be
made before its server, its messages wait for one, and it connects again by itself. Delivery takes no task: a message
bears the time at which it is due, and who receives waits until then. Every queue is bounded.
"""

from __future__ import annotations

import errno
import heapq
import itertools
import math
from collections import Counter, deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

import attrs
import trio

from kvpd.core.messages import MESSAGE_BYTES_MAX
from kvpd.transports.addresses import Address, parse_endpoint, parse_peer_endpoint

QUEUE_MESSAGES_MAX: Final = 2048
IDENTITY_BYTES_MAX: Final = 255
RECONNECT_S: Final = 0.05
_FIRST_PORT: Final = 40_000


@attrs.frozen(order=True)
class _Parcel:
    """A message on its way, over one client's connection."""

    due: float
    number: int  # what is due at once goes in the order of sending
    client: MemoryClient = attrs.field(order=False)
    message: bytes = attrs.field(order=False)


class _Inbox:
    """What is on its way to one end, the earliest due first."""

    def __init__(self) -> None:
        self._parcels: list[_Parcel] = []
        self._counts: Counter[MemoryClient] = Counter()
        self._changed: trio.Event | None = None  # set while a task waits
        self._closed = False

    def count(self, client: MemoryClient) -> int:
        """How many messages over this client's connection are here."""
        return self._counts[client]

    def put(self, parcel: _Parcel) -> None:
        heapq.heappush(self._parcels, parcel)
        self._counts[parcel.client] += 1
        self._wake()

    def lose_in_flight(self, client: MemoryClient) -> None:
        now = trio.current_time()
        self._parcels = [parcel for parcel in self._parcels if parcel.client is not client or parcel.due <= now]
        heapq.heapify(self._parcels)
        del self._counts[client]
        self._counts.update(parcel.client for parcel in self._parcels if parcel.client is client)

    def take_nowait(self) -> _Parcel:
        if self._closed:
            raise trio.ClosedResourceError
        if not self._parcels or self._parcels[0].due > trio.current_time():
            raise trio.WouldBlock
        parcel = heapq.heappop(self._parcels)
        self._counts[parcel.client] -= 1
        if not self._counts[parcel.client]:
            del self._counts[parcel.client]
        return parcel

    async def take(self) -> _Parcel:
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._changed is not None:
            raise trio.BusyResourceError("another task is receiving")
        while True:
            try:
                parcel = self.take_nowait()
            except trio.WouldBlock:
                await self._wait()
            else:
                # Taken: cancellation must not lose it any more.
                await trio.lowlevel.cancel_shielded_checkpoint()
                return parcel

    async def _wait(self) -> None:
        self._changed = trio.Event()
        due = self._parcels[0].due if self._parcels else math.inf
        try:
            with trio.move_on_at(due):
                await self._changed.wait()
        finally:
            self._changed = None

    def close(self) -> None:
        self._closed = True
        self._parcels.clear()
        self._counts.clear()
        self._wake()

    def _wake(self) -> None:
        if self._changed is not None:
            self._changed.set()


class MemoryServer:
    """See `ControlServer`."""

    def __init__(self, network: MemoryNetwork, address: str) -> None:
        self._network = network
        self._address = address
        self._inbox = _Inbox()
        self._clients: dict[bytes, MemoryClient] = {}
        self._closed = False

    @property
    def address(self) -> str:
        return self._address

    async def receive(self) -> tuple[bytes, bytes]:
        parcel = await self._inbox.take()
        return parcel.client.identity, parcel.message

    def receive_nowait(self) -> tuple[bytes, bytes]:
        parcel = self._inbox.take_nowait()
        return parcel.client.identity, parcel.message

    def send_nowait(self, peer: bytes, *messages: bytes) -> None:
        if self._closed:
            raise trio.ClosedResourceError
        client = self._clients.get(peer)
        if client is None or not client.is_connected:
            raise trio.BrokenResourceError("no such peer is connected")
        client.deliver(messages)

    def attach(self, client: MemoryClient) -> bool:
        """Take a client in, unless another bears its identity: a stranger must not get somebody's messages."""
        return self._clients.setdefault(client.identity, client) is client

    def detach(self, client: MemoryClient) -> None:
        del self._clients[client.identity]

    @property
    def inbox(self) -> _Inbox:
        return self._inbox

    def close(self) -> None:
        self._closed = True
        self._inbox.close()
        for client in [*self._clients.values()]:
            client.lose_server()
        self._clients.clear()


class MemoryClient:
    """See `ControlClient`."""

    def __init__(self, network: MemoryNetwork, url: str, identity: bytes) -> None:
        self.url = url
        self.identity = identity
        self.partitioned = False
        self._network = network
        self._delay_s = network.delay_s
        self._inbox = _Inbox()
        self._waiting: deque[bytes] = deque()  # for a server
        self._server: MemoryServer | None = None
        self._connected_at = math.inf
        self._due_up = self._due_down = -math.inf  # of the newest message each way: none overtakes it
        self._closed = False

    # ------------------------------------------------------------------ the contract

    async def receive(self) -> bytes:
        return (await self._inbox.take()).message

    def receive_nowait(self) -> bytes:
        return self._inbox.take_nowait().message

    def send_nowait(self, *messages: bytes) -> None:
        if self._closed:
            raise trio.ClosedResourceError
        queued = len(self._waiting) if self._server is None else self._server.inbox.count(self)
        if queued >= self._network.queue_messages_max:
            raise trio.WouldBlock
        if self._server is None:
            self._waiting.extend(messages)
            return
        for message in messages:
            self._send_to(self._server, message)

    # ------------------------------------------------------------------ the network's side

    @property
    def is_connected(self) -> bool:
        return self._connected_at <= trio.current_time()

    def set_delay(self, delay_s: float) -> None:
        self._delay_s = delay_s

    def find_server(self, server: MemoryServer) -> None:
        """Connect to `server`, if this client has none and it takes this client in."""
        if self._server is not None or self._closed or not server.attach(self):
            return
        self._server = server
        self._connected_at = trio.current_time()
        while self._waiting:
            self._send_to(server, self._waiting.popleft())

    def lose_server(self) -> None:
        """The server is gone, and with it what was on its way from there."""
        self._inbox.lose_in_flight(self)
        self._server = None
        self._connected_at = math.inf

    def disconnect(self) -> None:
        """The connection breaks: what is on its way is lost, and in a while there is a new one."""
        self._inbox.lose_in_flight(self)
        if self._server is not None:
            self._server.inbox.lose_in_flight(self)
            self._connected_at = trio.current_time() + RECONNECT_S

    def deliver(self, messages: Sequence[bytes]) -> None:
        """Messages from the server."""
        if self._inbox.count(self) >= self._network.queue_messages_max:
            raise trio.WouldBlock
        if self.partitioned:
            return
        for message in messages:
            if len(message) > self._network.message_bytes_max:
                self.disconnect()
                return
            self._due_down = max(trio.current_time() + self._delay_s, self._due_down)
            self._inbox.put(_Parcel(self._due_down, self._network.next_number(), self, message))

    def close(self) -> None:
        self._closed = True
        self._inbox.close()
        if self._server is not None:
            self._server.detach(self)

    def _send_to(self, server: MemoryServer, message: bytes) -> None:
        if self.partitioned:
            return
        if len(message) > self._network.message_bytes_max:
            self.disconnect()
            return
        self._due_up = max(max(trio.current_time(), self._connected_at) + self._delay_s, self._due_up)
        server.inbox.put(_Parcel(self._due_up, self._network.next_number(), self, message))


class MemoryNetwork:
    """A network of its own: see `ControlTransport`. `delay_s` is one way, in the clock's seconds."""

    def __init__(
        self,
        *,
        delay_s: float = 0.0,
        queue_messages_max: int = QUEUE_MESSAGES_MAX,
        message_bytes_max: int = MESSAGE_BYTES_MAX,
    ) -> None:
        self.delay_s = delay_s
        self.queue_messages_max = queue_messages_max
        self.message_bytes_max = message_bytes_max
        self._servers: dict[str, MemoryServer] = {}
        self._clients: list[MemoryClient] = []
        self._ports = itertools.count(_FIRST_PORT)
        self._numbers = itertools.count()

    @asynccontextmanager
    async def serve(self, address: str) -> AsyncIterator[MemoryServer]:
        """See `ControlTransport.serve`."""
        endpoint = parse_endpoint(address)
        if isinstance(endpoint, Address) and endpoint.port == 0:
            endpoint = attrs.evolve(endpoint, port=next(self._ports))
        if endpoint.url in self._servers:
            raise OSError(errno.EADDRINUSE, f"cannot bind {address}: address already in use")
        server = self._servers[endpoint.url] = MemoryServer(self, endpoint.url)
        self._connect_waiting(endpoint.url)
        try:
            yield server
        finally:
            del self._servers[endpoint.url]
            server.close()

    @asynccontextmanager
    async def connect(self, address: str, identity: bytes) -> AsyncIterator[MemoryClient]:
        """See `ControlTransport.connect`."""
        if not 1 <= len(identity) <= IDENTITY_BYTES_MAX or identity.startswith(b"\0"):
            raise ValueError(f"{identity!r} is no identity: 1 to {IDENTITY_BYTES_MAX} bytes are, not starting with 0")
        client = MemoryClient(self, parse_peer_endpoint(address).url, identity)
        self._clients.append(client)
        self._connect_waiting(client.url)
        try:
            yield client
        finally:
            self._clients.remove(client)
            client.close()
            self._connect_waiting(client.url)

    # ------------------------------------------------------------------ faults

    def set_delay(self, identity: bytes, delay_s: float) -> None:
        """From now on this client's messages take so long, one way. None overtakes an earlier one."""
        for client in self._named(identity):
            client.set_delay(delay_s)

    def disconnect(self, identity: bytes) -> None:
        """Break this client's connection: what is on its way is lost; it has a new one RECONNECT_S later."""
        for client in self._named(identity):
            client.disconnect()

    def partition(self, identity: bytes | None = None) -> None:
        """Lose what is sent from and to this client, or every client, until `heal`; nobody is told."""
        for client in self._named(identity):
            client.partitioned = True

    def heal(self, identity: bytes | None = None) -> None:
        """End a partition."""
        for client in self._named(identity):
            client.partitioned = False

    # ------------------------------------------------------------------ inside

    def next_number(self) -> int:
        """Numbers parcels in the order of sending."""
        return next(self._numbers)

    def _named(self, identity: bytes | None) -> list[MemoryClient]:
        return [client for client in self._clients if identity is None or client.identity == identity]

    def _connect_waiting(self, url: str) -> None:
        server = self._servers.get(url)
        for client in self._clients:
            if server is not None and client.url == url:
                client.find_server(server)
