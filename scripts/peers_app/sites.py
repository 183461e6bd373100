"""A receiver and some senders of either system, with engines that do what a scenario says.

The senders are the systems' own, not the benchmark's words: LMCache's backend in its role of sender, and kvpd's daemon
with an engine attached to it. Both push their notifications to one proxy, which is this process.
"""

from __future__ import annotations

import abc
import contextlib
import itertools
import queue
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import zmq

import kvpd.client
from kvpd.errors import KvpdError
from peers_app.children import Child
from peers_app.daemons import Daemon
from peers_app.raw import Environment
from peers_app.receivers import CHUNK_BYTES, START_S, free_ports, start_lmcache

_ANSWER_S: Final = 30.0
_STAGING_CHUNKS: Final = 64
_PAYLOAD: Final = bytes(CHUNK_BYTES)


class Site(abc.ABC):
    """What a scenario can have done. Requests of one scenario have different names, unless it is about names."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy

    @abc.abstractmethod
    def send(self, sender: str, req_id: str, first: int, count: int, total: int) -> None:
        """A prefill engine hands a batch of a request over; the one that reaches `total` is the last."""

    @abc.abstractmethod
    def until_held(self, sender: str, req_id: str, within_s: float) -> bool:
        """Whether a batch of the request has its slots, in time."""

    @abc.abstractmethod
    def cancel(self, sender: str, req_id: str) -> None:
        """The prefill engine gives a request up."""

    @abc.abstractmethod
    def kill(self, sender: str) -> None:
        """SIGKILL."""

    @abc.abstractmethod
    def consume(self, sender: str, req_id: str, total: int) -> None:
        """The decode engine reads a request that was announced, and frees it."""

    def until_announced(self, req_id: str, within_s: float, times: int = 1) -> bool:
        """Whether the proxy is told that the request is whole, so many times, in time."""
        return self._proxy.until_announced(req_id, within_s, times)


class Proxy:
    """Where both systems' senders say that a request is whole."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._socket = context.socket(zmq.PULL)
        self.port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self._announced: list[str] = []

    def until_announced(self, req_id: str, within_s: float, times: int) -> bool:
        """See `Site.until_announced`."""
        deadline = time.monotonic() + within_s
        while self._announced.count(req_id) < times:
            remaining_ms = int((deadline - time.monotonic()) * 1000)
            if remaining_ms <= 0 or not self._socket.poll(remaining_ms):
                return False
            self._announced.append(msgspec.msgpack.decode(self._socket.recv())["req_id"])
        return True


@contextlib.contextmanager
def open_site(system: str, environment: Environment, chunks: int, senders: tuple[str, ...]) -> Iterator[Site]:
    """Everybody is up; the receiver has room for so many chunks."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        proxy = Proxy(context)
        with (
            _open_kvpd(proxy, chunks, senders)
            if system == "kvpd"
            else _open_lmcache(proxy, environment, chunks, senders)
        ) as site:
            yield site
    finally:
        context.destroy(linger=0)


# ------------------------------------------------------------------ LMCache


@contextlib.contextmanager
def _open_lmcache(proxy: Proxy, environment: Environment, chunks: int, senders: tuple[str, ...]) -> Iterator[Site]:
    init_port, alloc_port, *ports = free_ports(2 + 2 * len(senders))
    given = {"chunks": chunks, "init_port": init_port, "alloc_port": alloc_port, "proxy_port": proxy.port}
    theirs = {**given, "chunks": _STAGING_CHUNKS, "peer_init_port": init_port, "peer_alloc_port": alloc_port}
    with contextlib.ExitStack() as stack:
        receiver = stack.enter_context(start_lmcache("receiver", environment, given))
        children = {}
        for name, own_init, own_alloc in zip(senders, ports[::2], ports[1::2], strict=True):
            own = {**theirs, "init_port": own_init, "alloc_port": own_alloc}
            children[name] = stack.enter_context(start_lmcache("sender", environment, own))
        for child in (receiver, *children.values()):
            child.answer(START_S)
        yield LmcacheSite(proxy, receiver, children)


class LmcacheSite(Site):
    """See `Site`."""

    def __init__(self, proxy: Proxy, receiver: Child, senders: dict[str, Child]) -> None:
        super().__init__(proxy)
        self._receiver = receiver
        self._senders = senders
        self._landed: set[tuple[str, str]] = set()
        self._first_keys: dict[tuple[str, str], int] = {}

    def _key(self, sender: str, req_id: str) -> int:
        return self._first_keys.setdefault((sender, req_id), (len(self._first_keys) + 1) << 20)

    def _ask(self, sender: str, **words: Any) -> None:
        child = self._senders[sender]
        child.say(**words)
        while (answer := child.answer(_ANSWER_S)).get("landed"):
            self._landed.add((sender, answer["landed"]))

    def send(self, sender: str, req_id: str, first: int, count: int, total: int) -> None:
        key = self._key(sender, req_id) + first
        last = first + count == total
        self._ask(sender, do="submit", req_id=req_id, first_key=key, count=count, total=total, last=last)

    def until_held(self, sender: str, req_id: str, within_s: float) -> bool:
        if (sender, req_id) not in self._landed:
            answer = self._senders[sender].answer(within_s)
            self._landed.add((sender, answer["landed"]))
        return (sender, req_id) in self._landed

    def cancel(self, sender: str, req_id: str) -> None:
        self._ask(sender, do="cancel", req_id=req_id)

    def kill(self, sender: str) -> None:
        self._senders[sender].kill()

    def consume(self, sender: str, req_id: str, total: int) -> None:
        self._receiver.ask(_ANSWER_S, do="consume", first_key=self._key(sender, req_id), count=total)


# ------------------------------------------------------------------ kvpd


@contextlib.contextmanager
def _open_kvpd(proxy: Proxy, chunks: int, senders: tuple[str, ...]) -> Iterator[Site]:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-peers-")))
        buffers = {"chunk_bytes": CHUNK_BYTES, "buffer_size": chunks * CHUNK_BYTES, "control_address": "127.0.0.1:0"}
        staging = {
            "chunk_bytes": CHUNK_BYTES,
            "staging_size": _STAGING_CHUNKS * CHUNK_BYTES,
            "proxy_address": f"127.0.0.1:{proxy.port}",
            "notify": "push",
        }
        receiver = stack.enter_context(Daemon("receiver", folder, buffers))
        daemons = {name: stack.enter_context(Daemon("sender", folder, staging, name)) for name in senders}
        for daemon in (receiver, *daemons.values()):
            daemon.wait_ready()
        decode = stack.enter_context(kvpd.client.connect_receiver(receiver.socket))
        links = {
            name: stack.enter_context(kvpd.client.connect_sender(daemon.socket)) for name, daemon in daemons.items()
        }
        yield KvpdSite(proxy, receiver, decode, daemons, links)


class KvpdSite(Site):
    """See `Site`. The engines are threads of this process; a sender is killed without them."""

    def __init__(
        self,
        proxy: Proxy,
        receiver: Daemon,
        decode: kvpd.client.ReceiverLink,
        daemons: dict[str, Daemon],
        links: dict[str, kvpd.client.SenderLink],
    ) -> None:
        super().__init__(proxy)
        self._receiver = receiver
        self._decode = decode
        self._daemons = daemons
        self._links = links
        self._requests: dict[tuple[str, str], _Request] = {}

    def send(self, sender: str, req_id: str, first: int, count: int, total: int) -> None:
        request = self._requests.get((sender, req_id))
        if request is None:
            request = _Request(self._links[sender], self._receiver.address, req_id, total)
            self._requests[sender, req_id] = request
        request.batches.put(count)

    def until_held(self, sender: str, req_id: str, within_s: float) -> bool:
        return self._requests[sender, req_id].held.wait(within_s)

    def cancel(self, sender: str, req_id: str) -> None:
        self._links[sender].cancel(req_id)

    def kill(self, sender: str) -> None:
        self._daemons[sender].kill()

    def consume(self, sender: str, req_id: str, total: int) -> None:
        with self._decode.claim(req_id, timeout=_ANSWER_S, sender_id=sender) as chunks:
            assert len(chunks) == total


class _Request(threading.Thread):
    """A prefill engine's thread: it sends the batches that it is given, until they are all."""

    _keys = itertools.count()

    def __init__(self, link: kvpd.client.SenderLink, receiver: str, req_id: str, total: int) -> None:
        super().__init__(daemon=True)
        self.batches: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.held = threading.Event()
        self._transfer = link.open(req_id, receiver=receiver, total_chunks=total)
        self._total = total
        self.start()

    def run(self) -> None:
        # How it ends is not this thread's to tell: scenarios go by what the proxy hears.
        with contextlib.suppress(KvpdError), self._transfer as transfer:
            sent = 0
            while sent < self._total:
                count = self.batches.get()
                keys = [b"%d" % next(self._keys) for _ in range(count)]
                with transfer.stage(keys) as slots:
                    self.held.set()
                    for slot in slots:
                        assert slot is not None
                        slot[:] = _PAYLOAD
                sent += count
