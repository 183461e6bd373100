"""What kvpd and LMCache's PD backend both do without moving a byte: grant room, wake who waits, let many wait.

One driver for both, over the receivers' real control ports, in turns.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, Final

import attrs
import zmq

from peers_app.figures import percentile
from peers_app.raw import Environment
from peers_app.receivers import Receiver, open_receiver
from peers_app.sizes import Sizes
from peers_app.wire import Peer, WireFailed, connect

KEYS: Final = 8  # of an allocation
_WAITER_CHUNKS: Final = 8  # a waiter wants the whole of a buffer of so many
_REST_S: Final = 0.02  # between two wake-ups, so that each is measured by itself
_WAKE_MS: Final = 20_000
_SETTLE_S: Final = 2.0  # for a receiver to take in what was sent

Figures = dict[str, float]


@contextlib.contextmanager
def _open_context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        yield context
    finally:
        context.destroy(linger=0)


@contextlib.contextmanager
def _open_peer(system: str, environment: Environment, chunks: int) -> Iterator[tuple[Receiver, Peer]]:
    with (
        open_receiver(system, environment, chunks) as receiver,
        _open_context() as context,
        connect(system, context, receiver.terms) as peer,
    ):
        yield receiver, peer


# ------------------------------------------------------------------ allocations


def measure_allocations(system: str, environment: Environment, sizes: Sizes) -> Figures:
    """Round trips of an allocation of KEYS chunks, one at a time and many at once; room for all of them is there."""
    count, outstanding = sizes.alloc_requests, sizes.alloc_outstanding
    chunks = (count + outstanding) * KEYS
    with _open_peer(system, environment, chunks) as (receiver, peer):
        _allocate(peer, 0, outstanding, 1)  # warms both sides up
        _cancel_all(peer, 0, outstanding)
        alone = max(count // 4, 1)
        trips = _allocate(peer, outstanding, alone, 1)
        _cancel_all(peer, outstanding, alone)
        first = outstanding + alone
        cpu_s = receiver.process.cpu_s()
        began = time.perf_counter()
        _allocate(peer, first, count, outstanding)
        seconds = time.perf_counter() - began
        cpu_s = receiver.process.cpu_s() - cpu_s
    return {
        "alone_p50_us": percentile(trips, 0.5) * 1e6,
        "alone_p99_us": percentile(trips, 0.99) * 1e6,
        "rate_per_s": count / seconds,
        "receiver_cpu_us": cpu_s / count * 1e6,
    }


def _allocate(peer: Peer, first: int, count: int, outstanding: int) -> list[float]:
    """Seconds from each request's being sent to as many answers' being here; exact where one is outstanding."""
    numbers = iter(range(first, first + count))
    sent: deque[float] = deque()
    trips = []

    def ask(at_most: int) -> None:
        some = list(itertools.islice(numbers, at_most))
        sent.extend([time.perf_counter()] * len(some))
        peer.open(*some, chunks=KEYS)

    ask(outstanding)
    while sent:
        answers = peer.receive_together()
        for answer in answers:
            _expect("granted", answer)
            trips.append(time.perf_counter() - sent.popleft())
        ask(len(answers))
    return trips


def _cancel_all(peer: Peer, first: int, count: int) -> None:
    for number in range(first, first + count):
        peer.cancel(number)
        _expect("cancelled", peer.receive())


def _expect(kind: str, answer: str) -> None:
    if answer != kind:
        raise WireFailed(f"{answer} instead of {kind}")


# ------------------------------------------------------------------ wake-ups


def measure_wake_ups(system: str, environment: Environment, sizes: Sizes) -> Figures:
    """From the message that frees the room to the answer that the next in line gets, with so many waiting.

    Every waiter is a sender of its own: one sender of LMCache's can have only one request wait at a receiver.
    """
    with contextlib.ExitStack() as stack:
        receiver = stack.enter_context(open_receiver(system, environment, _WAITER_CHUNKS))
        context = stack.enter_context(_open_context())
        peers = [stack.enter_context(connect(system, context, receiver.terms)) for _ in range(sizes.waiters + 1)]
        return _WakeUps(peers).run(sizes.wake_ups)


@attrs.define
class _WakeUps:
    """The peers, whose turn it is, and a poller over all of them."""

    peers: list[Peer]
    _requests: dict[Peer, int] = attrs.field(factory=dict)

    def run(self, count: int) -> Figures:
        poller = zmq.Poller()
        by_socket = {peer.socket: peer for peer in self.peers}
        for peer in self.peers:
            poller.register(peer.socket, zmq.POLLIN)
        holder = self.peers[0]
        self._ask(holder)
        _expect("granted", holder.receive())
        for peer in self.peers[1:]:
            self._ask(peer)
        waits = []
        for number in range(count):
            # One after the other, as senders of their own would: all at once they would be measured too.
            self.peers[number % len(self.peers)].keep_alive()
            time.sleep(_REST_S)
            began = time.perf_counter()
            holder.cancel(self._requests[holder])
            next_holder, granted_at = self._next_granted(poller, by_socket, holder)
            waits.append(granted_at - began)
            self._ask(holder)
            holder = next_holder
        return {"p50_us": percentile(waits, 0.5) * 1e6, "p99_us": percentile(waits, 0.99) * 1e6}

    def _ask(self, peer: Peer) -> None:
        self._requests[peer] = self._requests.get(peer, 0) + 1
        peer.open(self._requests[peer], chunks=_WAITER_CHUNKS)

    def _next_granted(self, poller: zmq.Poller, by_socket: dict[Any, Peer], cancelling: Peer) -> tuple[Peer, float]:
        """Whoever is granted next, and when. The one that cancelled hears of it too, before or after."""
        granted: tuple[Peer, float] | None = None
        heard = False
        while granted is None or not heard:
            events = poller.poll(_WAKE_MS)
            if not events:
                raise WireFailed("nobody is woken")
            for one, _ in events:
                for kind in by_socket[one].receive_together():
                    if kind == "granted":
                        granted = by_socket[one], time.perf_counter()
                    else:
                        assert by_socket[one] is cancelling
                        heard = True
        return granted


# ------------------------------------------------------------------ waiting


def measure_waiting(system: str, environment: Environment, sizes: Sizes, waiters: int) -> Figures:
    """CPU that a receiver burns, as a share of a core, while so many requests wait and nothing happens."""
    with _open_peer(system, environment, _WAITER_CHUNKS) as (receiver, peer):
        peer.open(1, chunks=_WAITER_CHUNKS)
        _expect("granted", peer.receive())
        for number in range(2, waiters + 2):
            peer.open(number, chunks=_WAITER_CHUNKS)
        time.sleep(_SETTLE_S)
        peer.keep_alive()
        cpu_s = receiver.process.cpu_s()
        began = time.monotonic()
        time.sleep(sizes.idle_s)
        share = (receiver.process.cpu_s() - cpu_s) / (time.monotonic() - began)
    return {"cpu_share": share}
