"""Workloads: what is asked of the simulated world, drawn from one seed. Some are real, most are unkind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from typing import Final

import attrs

from kvpd.simulation import arrivals
from kvpd.simulation.drawing import CHUNK_BYTES, Draw
from kvpd.simulation.scenario import FaultKind, Limits, Misuse, Scenario, Style


def _anything(draw: Draw) -> None:
    """A bit of everything."""
    random = draw.random
    draw.senders, draw.receivers, draw.hosts = random.randint(1, 4), random.randint(1, 3), random.randint(1, 4)
    draw.slots, draw.staging_slots = random.choice((4, 8, 16, 40)), random.choice((1, 2, 5, 12))
    draw.faults = random.choice((0, 4, 8, 16))
    draw.limits = Limits(
        verify=random.choice(("off", "off", "crc32c")),
        bypass_max=random.choice((0, 0, 3)),
        claim_ttl_s=random.choice((0.0, 0.0, 3.0)),
    )
    for _ in range(random.randint(5, 50)):
        size = random.choice((1, 2, 3, random.randint(1, draw.slots), draw.slots))
        changes = draw.cancel() if random.random() < 0.15 else {}
        if random.random() < 0.1:
            changes["claims"] = (draw.claim(), draw.claim())
        if random.random() < 0.1:
            changes["claims"] = ()
        draw.request(draw.keys(size), **changes)
    # Second attempts, while the first may still run: one label, two transfers.
    for request in random.sample(draw.requests, k=min(3, len(draw.requests))):
        at = request.at + random.choice((0.0, 0.5, 5.0))
        draw.requests.append(attrs.evolve(request, at=at, sender=random.randrange(draw.senders)))


def _whole_buffer(draw: Draw) -> None:
    """Everybody wants the whole buffer, at once."""
    draw.senders = draw.random.randint(2, 4)
    for _ in range(draw.random.randint(6, 15)):
        draw.request(draw.keys(draw.slots), at=draw.random.uniform(0.0, 1.0), claims=(draw.claim(at=None),))


def _cancel_storm(draw: Draw) -> None:
    """Everything is cancelled, in every state, nearly at once."""
    moment = draw.random.uniform(1.0, 4.0)
    for _ in range(draw.random.randint(30, 80)):
        at = draw.random.uniform(0.0, moment)
        changes = draw.cancel() | {"cancel_after_s": moment - at + draw.random.uniform(0.0, 0.01)}
        draw.request(draw.keys(draw.random.randint(1, 8)), at=at, **changes)
    draw.faults = draw.random.choice((0, 2, 6))


def _huge_among_small(draw: Draw) -> None:
    """A request or three want everything while hundreds want little: they must not starve."""
    draw.slots = 24
    draw.limits = Limits(bypass_max=draw.random.choice((0, 5)))
    for _ in range(draw.random.choice((1, 3))):
        draw.request(draw.keys(draw.slots), at=2.0)
    for _ in range(draw.random.randint(100, 250)):
        draw.request(
            draw.keys(1), at=draw.random.uniform(0.0, 8.0), batches=(1,), claims=(draw.claim(at=None, read_s=0.05),)
        )
    draw.faults = draw.random.choice((0, 3))


def _hot_prefixes(draw: Draw) -> None:
    """Requests share prefixes with each other, written, being written, revoked and read."""
    draw.senders = draw.random.randint(2, 4)
    prefixes = [tuple(f"prefix-{p}/{i}".encode() for i in range(draw.random.randint(1, 6))) for p in range(3)]
    for _ in range(draw.random.randint(15, 50)):
        prefix = draw.random.choice(prefixes)
        tail = draw.keys(draw.random.randint(0, 4))
        changes: dict[str, object] = draw.cancel() if draw.random.random() < 0.2 else {}
        if not tail:
            changes["last_chunk_bytes"] = draw.random.choice((CHUNK_BYTES, CHUNK_BYTES, 7))
        draw.request(prefix + tail, **changes)


def _never_staging(draw: Draw) -> None:
    """Engines take room and do nothing with it, while others wait."""
    draw.faults = 3
    draw.limits = attrs.evolve(
        draw.limits, request_timeout_s=120.0, allocation_timeout_s=draw.random.choice((8.0, 60.0))
    )
    for _ in range(draw.random.randint(10, 25)):
        idle = draw.random.random() < 0.4
        touch_s = draw.random.choice((None, None, 4.0)) if idle else None
        size = draw.random.randint(2, draw.slots)
        fill_s = draw.random.choice((0.01, 0.01, 50.0))
        draw.request(draw.keys(size), style=Style.NEVER if idle else Style.STEADY, touch_s=touch_s, fill_s=fill_s)


def _careless_engines(draw: Draw) -> None:
    """Engines break the rules of the interface."""
    for _ in range(draw.random.randint(10, 40)):
        size = draw.random.randint(2, 8)
        draw.request(draw.keys(size), misuse=draw.random.choice(tuple(Misuse)), claims=(draw.claim(at=None),))
    for _ in range(3):
        draw.request(draw.keys(draw.slots + 1))  # can never fit


def _tight_limits(draw: Draw) -> None:
    """Every table is small and full."""
    draw.senders, draw.receivers = 4, 2
    draw.limits = Limits(
        queue_depth_max=4,
        sessions_max=3,
        claims_max=3,
        outcomes_max=3,
        transfers_max=6,
        peers_max=1,
        stages_max=2,
        notifications_max=2,
        proxies_max=1,
        notify_give_up_s=4.0,
    )
    for _ in range(draw.random.randint(20, 50)):
        draw.request(draw.keys(draw.random.randint(1, 8)), at=draw.random.uniform(0.0, 6.0))


def _deaf_proxies(draw: Draw) -> None:
    """Proxies are down or deaf, and no transfer may mind."""
    draw.kinds = (FaultKind.PROXY_CRASH, FaultKind.PROXY_SILENCE)
    draw.limits = Limits(
        notifications_max=draw.random.choice((2, 100)), notify_give_up_s=draw.random.choice((3.0, 60.0))
    )
    for _ in range(draw.random.randint(10, 60)):
        draw.request(draw.keys(draw.random.randint(1, 3)), proxy=draw.random.choice((None, 1)))


def _one_host(draw: Draw) -> None:
    """Everybody shares a machine: only a process's death fences what its kernel writes."""
    draw.hosts = 1
    draw.senders = 3
    draw.put_s = 0.2
    draw.faults = 14
    draw.kinds = (
        FaultKind.SENDER_PAUSE,
        FaultKind.SENDER_PAUSE,
        FaultKind.SENDER_CRASH,
        FaultKind.PUT_STALL,
        FaultKind.PUT_STALL,
        FaultKind.PUT_SLOW,
        FaultKind.PUT_FAILURE,
        FaultKind.PARTITION,
        FaultKind.PREFILL_CRASH,
        FaultKind.DECODE_CRASH,
    )
    for _ in range(draw.random.randint(10, 30)):
        draw.request(draw.keys(draw.random.randint(1, 8)))


def _in_place(draw: Draw) -> None:
    """Engines fill the receivers' slots themselves, and die, stop, hang up and outlive their senders meanwhile."""
    draw.in_place = True
    draw.hosts = draw.random.choice((1, 1, 2))
    draw.senders, draw.receivers = 3, draw.random.randint(1, 2)
    draw.ranks = draw.random.choice((1, 1, 2))
    draw.slots, draw.staging_slots = draw.random.choice((6, 12)), draw.random.choice((1, 4))
    draw.faults = 14
    draw.kinds = (
        FaultKind.SENDER_CRASH,
        FaultKind.SENDER_CRASH,
        FaultKind.SENDER_PAUSE,
        FaultKind.SENDER_DRAIN,
        FaultKind.RECEIVER_CRASH,
        FaultKind.RECEIVER_PAUSE,
        FaultKind.PARTITION,
        FaultKind.ENDPOINT_BROKEN,
        FaultKind.PREFILL_CRASH,
        FaultKind.PREFILL_PAUSE,
        FaultKind.PREFILL_PAUSE,
        FaultKind.PREFILL_HANG_UP,
        FaultKind.PREFILL_HANG_UP,
        FaultKind.DECODE_CRASH,
    )
    for _ in range(draw.random.randint(15, 40)):
        changes = draw.cancel() if draw.random.random() < 0.3 else {}
        changes |= {
            "fill_s": draw.random.choice((0.001, 0.2, 1.0, 5.0)),
            "leave_s": draw.random.choice((0.01, 3.0, 8.0)),
        }
        draw.request(draw.keys(draw.random.randint(1, 6)), **changes)


def _slow_wire(draw: Draw) -> None:
    """Puts take longer than anybody is willing to wait."""
    draw.put_s = draw.random.choice((0.3, 1.5))
    draw.kinds = (
        FaultKind.PUT_STALL,
        FaultKind.PUT_SLOW,
        FaultKind.PUT_FAILURE,
        FaultKind.SENDER_PAUSE,
        FaultKind.RECEIVER_PAUSE,
        FaultKind.HOST_SUSPEND,
        FaultKind.PARTITION_TO_SENDER,
        FaultKind.PARTITION_TO_RECEIVER,
        FaultKind.ENDPOINT_BROKEN,
    )
    for _ in range(draw.random.randint(10, 30)):
        draw.request(draw.keys(draw.random.randint(1, 8)), **(draw.cancel() if draw.random.random() < 0.3 else {}))


def _corrupting_wire(draw: Draw) -> None:
    """Bytes change on their way, and checksums tell."""
    draw.limits = Limits(verify="crc32c")
    draw.kinds = (FaultKind.PUT_CORRUPTION, FaultKind.PUT_CORRUPTION, FaultKind.PUT_FAILURE, FaultKind.DISCONNECT)
    for _ in range(draw.random.randint(10, 30)):
        draw.request(draw.keys(draw.random.randint(1, 8)))


def _from_trace(draw: Draw, requests: tuple[arrivals.Arrival, ...], span_s: float) -> None:
    """A stretch of a real trace, in less time than it took."""
    count = draw.random.randint(20, 60)
    start = draw.random.randrange(len(requests) - count)
    some = requests[start : start + count]
    scale = span_s / max(some[-1].at - some[0].at, 1e-3)
    draw.span_s, draw.slots, draw.staging_slots = span_s, 40, 12
    for arrival in some:
        at = (arrival.at - some[0].at) * scale
        keys = arrival.keys or draw.keys(arrival.chunks)
        draw.request(keys[: draw.slots], at=at)


def _mooncake(draw: Draw) -> None:
    """Conversations from Mooncake's trace."""
    _from_trace(draw, arrivals.mooncake_conversation(), 30.0)


def _azure_code(draw: Draw) -> None:
    """Code completions from Azure's trace."""
    _from_trace(draw, arrivals.azure_code(), 20.0)


def _lossy(draw: Draw) -> None:
    """Messages are lost, for moments only: everything is said again, and everything arrives."""
    _calm(draw)
    draw.faults, draw.fault_max_s = 20, 1.0
    draw.limits = attrs.evolve(draw.limits, lease_s=60.0)  # a session outlives them all
    draw.kinds = (FaultKind.CONGESTION, FaultKind.DISCONNECT, FaultKind.DUPLICATION)


def _two_ranks(draw: Draw) -> None:
    """Engines of two ranks or three, which open each request at different moments, and die one without the other."""
    _anything(draw)
    draw.ranks = draw.random.choice((2, 2, 3))
    draw.requests = [
        attrs.evolve(request, rank_skew_s=draw.random.choice((0.0, 0.0, 0.001, 0.5, -0.5, 5.0)))
        for request in draw.requests
    ]


def _calm_ranks(draw: Draw) -> None:
    """Nothing goes wrong, and two ranks take many requests in different orders: everything arrives."""
    _calm(draw)
    draw.ranks = 2
    draw.requests = [
        attrs.evolve(request, rank_skew_s=draw.random.choice((0.0, 0.2, -0.2, 3.0, -3.0))) for request in draw.requests
    ]


def _calm(draw: Draw) -> None:
    """Nothing goes wrong: then everything arrives, however little room there is."""
    draw.faults = 0
    draw.all_arrive = True
    draw.senders = draw.random.randint(1, 4)
    draw.slots, draw.staging_slots = draw.random.choice((3, 10)), draw.random.choice((1, 3))
    draw.limits = Limits(
        allocation_timeout_s=900.0, request_timeout_s=900.0, progress_timeout_s=60.0, ready_ttl_s=300.0
    )
    for _ in range(draw.random.randint(10, 40)):
        claim = draw.claim(at=None, read_s=0.1, timeout_s=60.0, names_sender=True)
        draw.request(draw.keys(draw.random.randint(1, draw.slots)), compute_s=0.1, claims=(claim,))


WORKLOADS: Final[Mapping[str, Callable[[Draw], None]]] = {
    "anything": _anything,
    "whole-buffer": _whole_buffer,
    "cancel-storm": _cancel_storm,
    "huge-among-small": _huge_among_small,
    "hot-prefixes": _hot_prefixes,
    "never-staging": _never_staging,
    "careless-engines": _careless_engines,
    "tight-limits": _tight_limits,
    "deaf-proxies": _deaf_proxies,
    "one-host": _one_host,
    "slow-wire": _slow_wire,
    "corrupting-wire": _corrupting_wire,
    "calm": _calm,
    "lossy": _lossy,
    "mooncake": _mooncake,
    "azure-code": _azure_code,
    "two-ranks": _two_ranks,
    "calm-ranks": _calm_ranks,
    "in-place": _in_place,
}


def draw(seed: int, workload: str | None = None) -> Scenario:
    """The scenario of this seed; of this workload, or of the one whose turn it is.

    Raises:
        KeyError: there is no such workload.
    """
    name = workload or list(WORKLOADS)[seed % len(WORKLOADS)]
    making = Draw(name, seed, Random(f"{seed}/{name}"))  # noqa: S311  chance, not secrets
    WORKLOADS[name](making)
    return making.scenario()
