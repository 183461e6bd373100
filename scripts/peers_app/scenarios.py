"""Situations that a service of this kind must survive, as short stories that both systems are put through.

Each story ends with what a user would see: requests that are announced, or are not, within a limit. Nothing is known
beforehand: the outcome is what happened in this run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

import attrs
import zmq

from peers_app.children import ChildFailed
from peers_app.raw import Environment
from peers_app.receivers import open_receiver
from peers_app.sites import Site, open_site
from peers_app.sizes import Sizes
from peers_app.wire import Clock, Peer, connect

_STEP_S: Final = 20.0  # for a step that cannot but succeed
# For a message between two processes of this host to have been taken. Only the order of a story's steps depends on it.
_SETTLE_S: Final = 0.5
_NEVER_S: Final = 3.0  # how long something that must not happen is waited for
_GRANT_MS: Final = 200  # how long a small request that may have to queue is waited for


@attrs.frozen
class Outcome:
    """How a story ended: well or not, and in what words."""

    ok: bool
    text: str


@attrs.frozen
class Story:
    """What it is about, and how it is played: on a system, with processes of its own.

    `fault` is its number among the faults that docs/RELIABILITY.md says are impossible.
    """

    fault: int
    name: str
    question: str
    play: Callable[[str, Environment, Sizes], Outcome]


def _reached(site: Site, sender: str, req_id: str) -> None:
    if not site.until_held(sender, req_id, _STEP_S):
        raise ChildFailed(f"{req_id} gets no room in an empty buffer")


def _timed(site: Site, req_id: str, limit_s: float, good: str, bad: str) -> Outcome:
    began = time.monotonic()
    if site.until_announced(req_id, limit_s):
        return Outcome(True, f"{good} after {(time.monotonic() - began) * 1000:,.0f} ms")
    return Outcome(False, f"{bad} within {limit_s:g} s")


def one_sender_two_requests(site: Site, limit_s: float) -> Outcome:
    """C holds 6 of 10 and is half sent; A, of 5, waits for room; then comes C's last batch."""
    site.send("one", "C", 0, 3, 6)
    _reached(site, "one", "C")
    site.send("one", "A", 0, 5, 5)
    time.sleep(_SETTLE_S)
    site.send("one", "C", 3, 3, 6)
    if not site.until_announced("C", limit_s):
        return Outcome(False, f"deadlock: neither completes within {limit_s:g} s")
    site.consume("one", "C", 6)
    return _timed(site, "A", limit_s, "both complete, the second one", "the first completes, the second does not")


def dead_sender(site: Site, limit_s: float) -> Outcome:
    """A sender that holds 8 of 10 is killed; another one's request of 8 waits."""
    site.send("one", "H", 0, 4, 8)
    _reached(site, "one", "H")
    site.kill("one")
    site.send("two", "A", 0, 8, 8)
    return _timed(site, "A", limit_s, "the room is free again", "the dead sender's room is not given back")


def one_name_twice(site: Site, limit_s: float) -> Outcome:
    """Two senders use one req_id; both wait, both are served, both are read. Then somebody asks for all 8 chunks."""
    site.send("one", "H", 0, 4, 8)
    _reached(site, "one", "H")
    for sender in ("two", "three"):
        site.send(sender, "same", 0, 4, 4)
    time.sleep(_SETTLE_S)
    site.send("one", "H", 4, 4, 8)
    if not site.until_announced("H", _STEP_S):
        raise ChildFailed("the request that holds the room does not complete")
    site.consume("one", "H", 8)
    if not site.until_announced("same", limit_s, times=2):
        return Outcome(False, f"not both of them complete within {limit_s:g} s")
    for sender in ("two", "three"):
        site.consume(sender, "same", 4)
    site.send("one", "W", 0, 8, 8)
    return _timed(site, "W", limit_s, "nothing is lost: all 8 chunks are given", "leak: 8 free chunks are not given")


def cancelled_while_waiting(site: Site, limit_s: float) -> Outcome:
    """A waits for room and is cancelled; the room is freed. Then somebody asks for all 8 chunks."""
    site.send("one", "H", 0, 4, 8)
    _reached(site, "one", "H")
    site.send("two", "A", 0, 4, 4)
    time.sleep(_SETTLE_S)
    site.cancel("two", "A")
    time.sleep(_SETTLE_S)
    site.send("one", "H", 4, 4, 8)
    if not site.until_announced("H", _STEP_S):
        raise ChildFailed("the request that holds the room does not complete")
    site.consume("one", "H", 8)
    announced = site.until_announced("A", _NEVER_S)
    site.send("one", "W", 0, 8, 8)
    after = _timed(site, "W", limit_s, "all 8 chunks are given", "leak: its chunks are not given back")
    heard = "announced although cancelled" if announced else "never heard of again"
    return Outcome(after.ok and not announced, f"{heard}; {after.text}")


Act = Callable[[Site, float], Outcome]


def _staged(act: Act, chunks: int, senders: tuple[str, ...]) -> Callable[[str, Environment, Sizes], Outcome]:
    """Play `act` on a site with so many chunks of room and these senders."""

    def play(system: str, environment: Environment, sizes: Sizes) -> Outcome:
        with open_site(system, environment, chunks, senders) as site:
            return act(site, sizes.scenario_s)

    return play


def _play_starvation(system: str, environment: Environment, sizes: Sizes) -> Outcome:
    """Small requests, each asked for before the one before it ends, after a large one has begun to wait."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        with open_receiver(system, environment, 10) as receiver:
            peers = [connect(system, context, receiver.terms) for _ in range(3)]
            return _starve(peers, sizes.small_requests)
    finally:
        context.destroy(linger=0)


def _starve(peers: Sequence[Peer], small_requests: int) -> Outcome:
    large, *small = peers
    small[0].open(1, chunks=4)
    small[0].receive()
    large.open(1, chunks=10)
    time.sleep(_SETTLE_S)
    clock = Clock()
    overtook = 0
    began = time.monotonic()
    for number in range(1, small_requests + 1):
        clock.keep(list(peers))
        now, following = small[(number + 1) % 2], small[number % 2]
        following.open(number + 1, chunks=4)
        overtook += _is_granted(following)
        now.cancel(number)
        now.receive()
        if _is_granted(large):
            return Outcome(True, f"when the room was free; {overtook} small ones overtook it")
    seconds = time.monotonic() - began
    return Outcome(False, f"not at all: {overtook} small ones overtook it in {seconds:.1f} s")


def _is_granted(peer: Peer) -> bool:
    """Whether its request was granted by now, or in a moment."""
    while peer.socket.poll(_GRANT_MS):
        for kind in peer.receive_together():
            return kind == "granted"
    return False


STORIES: Final = (
    Story(
        1,
        "one sender, two requests",
        "C holds 6 of 10 chunks and is half sent, A waits for 5, then comes the rest of C; do both complete?",
        _staged(one_sender_two_requests, 10, ("one",)),
    ),
    Story(
        6,
        "a sender dies",
        "it held 8 of 10 chunks; is another's request of 8 admitted?",
        _staged(dead_sender, 10, ("one", "two")),
    ),
    Story(
        7,
        "one req_id from two proxies",
        "both are admitted, sent and read; can the whole buffer be given after that?",
        _staged(one_name_twice, 8, ("one", "two", "three")),
    ),
    Story(
        8,
        "cancelled while waiting",
        "it must not be announced; can the whole buffer be given after that?",
        _staged(cancelled_while_waiting, 8, ("one", "two")),
    ),
    Story(
        17,
        "small requests overtake a large one",
        "it waits for all 10 chunks while ones of 4 keep coming; when is it admitted?",
        _play_starvation,
    ),
)
