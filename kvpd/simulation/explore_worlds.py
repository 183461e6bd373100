"""The worlds that are searched: each small enough to be exhausted, together they meet every kind of fault.

`grow-1` to `grow-3` show how a search grows with the number of requests. In the pairs every two faults meet around one
request, in any order and at any moment. The others put one subject each into a small world.
"""

from __future__ import annotations

from itertools import combinations_with_replacement
from typing import Final

import attrs

from kvpd.simulation.explore_state import FAULTS, Request, WorldConfig


def request(sender: int, number: int, *batches: int, label: str | None = None, keys: str | None = None) -> Request:
    """A request of batches of so many chunks; its label and its keys are its own, unless they are named here.

    `keys`: a letter each; a capital stands for a key of its own.
    """
    own = [f"s{sender}.{number}.{at}" for at in range(sum(batches))]
    names = [key if key.islower() else mine for key, mine in zip(keys or "X" * len(own), own, strict=True)]
    encoded = [name.encode() for name in names]
    cut = [tuple(encoded[sum(batches[:at]) : sum(batches[: at + 1])]) for at in range(len(batches))]
    return Request(sender, label or f"s{sender}.{number}", tuple(cut))


def _world(name: str, about: str, *requests: Request, **options: object) -> WorldConfig:
    fields = {key: value for key, value in options.items() if key not in FAULTS}
    budget = {key: value for key, value in options.items() if key in FAULTS}
    return WorldConfig(name, requests, budget=budget, about=about, **fields)  # type: ignore[arg-type]


def of_two_ranks(*requests: Request) -> tuple[Request, ...]:
    """Each request twice: once for each rank of its engine."""
    return tuple(attrs.evolve(one, rank=rank) for rank in range(2) for one in requests)


_THREE = (request(0, 0, 2), request(1, 0, 2), request(0, 1, 2))
_TWO_SMALL = (request(0, 0, 1), request(1, 0, 1))
_UNEVEN = (request(0, 0, 2), request(1, 0, 1))
_BATCHES = (request(0, 0, 1, 1), request(1, 0, 1))
_SHARED_KEY = (request(0, 0, 2, keys="kX"), request(1, 0, 2, keys="kX"))
_SAME_CHUNK = (request(0, 0, 1, keys="k"), request(1, 0, 1, keys="k"))
_SHARED_LABEL = (request(0, 0, 1, label="q"), request(1, 0, 1, label="q"))
_QUEUE = (request(0, 0, 1), request(0, 1, 2), request(1, 0, 1))

_SUBJECTS = [
    _world("grow-1", "3 slots, 2 of staging: one request of 2 chunks, a cancel", *_THREE[:1], cancel=1),
    _world("grow-2", "the same with 2 senders, a request each", *_THREE[:2], cancel=1),
    _world("grow-3", "the same with 2 senders and 3 requests", *_THREE, cancel=1),
    _world("queue", "3 requests wait for 2 slots", *_QUEUE, slots=2),
    _world("queue-cancel", "the same with a cancel", *_QUEUE, slots=2, cancel=1, is_large=True),
    _world("batches", "2 batches, asked for at any time; a cancel", *_BATCHES, slots=2, stages_late=True, cancel=1),
    _world(
        "first-batch",
        "2 batches, the first with the open; a cancel",
        *_BATCHES,
        slots=2,
        opens_with_batch=True,
        cancel=1,
    ),
    _world("again", "a cancel, and it opens again", *_BATCHES, cancel=1, retry=1, is_large=True),
    _world(
        "staging",
        "2 requests of one sender, each larger than its staging; a cancel",
        *(request(0, 0, 2), request(0, 1, 2)),
        staging_slots=1,
        cancel=1,
    ),
    _world(
        "shared-key",
        "equal senders have a key in common; either side cancels",
        *_SHARED_KEY,
        is_symmetric=True,
        cancel=1,
        cancel_claim=1,
    ),
    _world("same-chunk", "the very same chunk from both; a cancel", *_SAME_CHUNK, slots=2, is_symmetric=True, cancel=1),
    _world(
        "shared-label",
        "equal senders use one label; an early claim, a dead reader",
        *_SHARED_LABEL,
        slots=2,
        is_symmetric=True,
        early=1,
        decode_dies=1,
    ),
    _world(
        "ranks",
        "2 ranks of an engine, 2 batches that each asks for at any time; a cancel",
        *of_two_ranks(request(0, 0, 1, 1)),
        slots=2,
        staging_slots=1,
        stages_late=True,
        cancel=1,
    ),
    _world(
        "ranks-two",
        "2 ranks of an engine have 2 requests, one slot of staging each, and room for one request",
        *of_two_ranks(request(0, 0, 1), request(0, 1, 1)),
        slots=1,
        staging_slots=1,
    ),
    _world("ranks-cut-off", "2 ranks; puts cut off", *of_two_ranks(request(0, 0, 1)), slots=1, cancel=1, force=1),
    _world("cut-off", "puts cut off, over a network", *_UNEVEN, slots=2, cancel=1, force=1, fail=1),
    _world("cut-off-here", "puts cut off, on one host", *_UNEVEN, slots=2, same_host=True, cancel=1, force=1, fail=1),
    _world(
        "crash", "a sender is killed; a cancel", *_TWO_SMALL, slots=1, is_symmetric=True, cancel=1, sender_restarts=1
    ),
    _world("crash-here", "the same on one host", *_UNEVEN, slots=2, same_host=True, cancel=1, sender_restarts=1),
    _world(
        "in-place",
        "an engine fills the receiver's slots itself; a cancel, a deadline that passes early",
        *_UNEVEN[:1],
        slots=2,
        same_host=True,
        in_place=True,
        cancel=1,
        slow=1,
    ),
    _world(
        "in-place-crash",
        "the same, the sender is killed while its engine fills, and another one wants the slots",
        *_TWO_SMALL,
        slots=1,
        same_host=True,
        in_place=True,
        cancel=1,
        sender_restarts=1,
    ),
    _world(
        "in-place-lost",
        "a session is lost while an engine fills, and the next one must not free what it writes",
        *(request(0, 0, 1), request(0, 1, 1)),
        slots=1,
        same_host=True,
        in_place=True,
        patient=frozenset({"connect"}),
        slow=2,
    ),
    _world(
        "in-place-ranks",
        "2 ranks fill the same slot in their windows; a cancel, an engine dies",
        *of_two_ranks(request(0, 0, 1)),
        slots=1,
        same_host=True,
        in_place=True,
        cancel=1,
        prefill_dies=1,
    ),
    _world(
        "receiver", "the receiver is killed; a request opens again", *_UNEVEN, slots=2, receiver_restarts=1, retry=1
    ),
    _world("loss", "a connection breaks; a cancel", *_TWO_SMALL, slots=1, is_symmetric=True, loss=1, cancel=1),
    _world("twice", "messages come twice", *_TWO_SMALL, slots=1, is_symmetric=True, repeat=2, is_large=True),
    _world("slow", "deadlines pass early", *_TWO_SMALL, slots=1, is_symmetric=True, slow=2, is_large=True),
    _world(
        "slow-again",
        "deadlines pass early, a sender that has lost its session has another request",
        *(request(0, 0, 1), request(0, 1, 1)),
        slots=1,
        slow=2,
    ),
    _world("checksums", "chunks are verified; a cancel", *_TWO_SMALL, slots=1, verifies=True, corrupt=1, cancel=1),
    _world(
        "stalled",
        "an engine stands still with its room held, until it is given up",
        *_TWO_SMALL,
        slots=1,
        stalled=frozenset({0}),
        loss=1,
    ),
    _world(
        "proxy",
        "2 requests of one sender; the proxy is told",
        *_QUEUE[:2],
        has_proxy=True,
        loss=1,
        repeat=1,
        is_large=True,
    ),
]
_PAIRS = [
    _world(
        f"{first}+{second}",
        "every two faults around one request",
        request(0, 0, 1, 1),
        slots=2,
        has_proxy=True,
        verifies="corrupt" in (first, second),
        **({first: 2} if first == second else {first: 1, second: 1}),
    )
    for first, second in combinations_with_replacement(FAULTS, 2)
]

WORLDS: Final = {world.name: world for world in [*_SUBJECTS, *_PAIRS]}
GROWTH: Final = ("grow-1", "grow-2", "grow-3")
