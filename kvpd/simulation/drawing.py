"""A scenario in the making: what is drawn for it unless a workload says otherwise."""

from __future__ import annotations

from random import Random
from typing import Final

import attrs

from kvpd.simulation.scenario import CancelBy, Claim, Fault, FaultKind, Limits, Request, Scenario, Style

CHUNK_BYTES: Final = 64
_LONG_S: Final = 13.0  # longer than a lease


@attrs.define
class Draw:
    """A scenario in the making. Every choice comes from `random`."""

    workload: str
    seed: int
    random: Random
    hosts: int = 2
    senders: int = 2
    receivers: int = 1
    slots: int = 16
    staging_slots: int = 6
    span_s: float = 30.0  # in which requests begin and faults strike
    fault_max_s: float = 2 * _LONG_S
    faults: int = 8
    kinds: tuple[FaultKind, ...] = tuple(FaultKind)
    limits: Limits = attrs.field(factory=Limits)
    put_s: float = 0.005
    ranks: int = 1
    in_place: bool = False
    all_arrive: bool = False
    requests: list[Request] = attrs.field(factory=list)

    def request(self, keys: tuple[bytes, ...], **changes: object) -> None:
        """One more request, of these chunks, ordinary but for the changes."""
        random, number = self.random, len(self.requests)
        sender = random.randrange(self.senders)
        fields: dict[str, object] = {
            "req_id": f"request-{number}",
            "at": random.uniform(0.0, self.span_s),
            "sender": sender,
            "receiver": random.randrange(self.receivers),
            "engine": random.randrange(2),
            "keys": keys,
            "last_chunk_bytes": random.choice((CHUNK_BYTES, CHUNK_BYTES, random.randint(1, CHUNK_BYTES))),
            "batches": self.batches(len(keys)),
            "style": random.choice((Style.STEADY, Style.STEADY, Style.EARLY, Style.EAGER)),
            "compute_s": random.choice((0.0, 0.01, 0.1, 1.0)),
            "fill_s": random.choice((0.0, 0.001, 0.02, 0.2)),
            "touch_s": random.choice((None, None, None, 5.0)),
            "leave_s": random.choice((0.0, 0.01, 2.0)),
            "claims": (self.claim(),),
            "proxy": random.choice((None, None, 1)),
        }
        self.requests.append(Request(**(fields | changes)))  # type: ignore[arg-type]

    def keys(self, count: int) -> tuple[bytes, ...]:
        """Chunks that nobody else has."""
        number = len(self.requests)
        return tuple(f"{number}/{position}".encode() for position in range(count))

    def batches(self, chunks: int) -> tuple[int, ...]:
        """How a prompt is computed: at once, in equal steps, or in steps of all sizes."""
        step = self.random.choice((chunks, 1, 2, 3, max(1, chunks // 2)))
        sizes = [step] * (chunks // step)
        return tuple(sizes + ([chunks % step] if chunks % step else []))

    def claim(self, **changes: object) -> Claim:
        """How it is read."""
        random = self.random
        fields: dict[str, object] = {
            "engine": random.randrange(2),
            "at": random.choice((None, None, None, random.uniform(0.0, self.span_s))),
            "timeout_s": random.choice((1.0, 20.0, 60.0)),
            "read_s": random.choice((0.0, 0.05, 0.5, 0.5, 8.0)),
            "names_sender": random.random() < 0.8,
        }
        return Claim(**(fields | changes))  # type: ignore[arg-type]

    def cancel(self) -> dict[str, object]:
        """Who cancels it, and when."""
        who = self.random.choice((CancelBy.TRANSFER, CancelBy.LABEL, CancelBy.LEAVING, CancelBy.DECODE))
        return {"cancel_by": who, "cancel_after_s": self.random.choice((0.0, 0.001, 0.05, 0.5, 5.0))}

    def fault(self) -> Fault:
        """One thing that goes wrong."""
        random = self.random
        duration = random.choice(
            (random.uniform(0.05, 1.0), random.uniform(1.0, 6.0), random.uniform(6.0, _LONG_S * 2))
        )
        duration = min(duration, self.fault_max_s)
        return Fault(random.choice(self.kinds), random.uniform(0.1, self.span_s), random.randrange(1 << 16), duration)

    def scenario(self) -> Scenario:
        """The whole of it."""
        random = self.random
        faults = tuple(sorted((self.fault() for _ in range(self.faults)), key=lambda fault: fault.at))
        return Scenario(
            workload=self.workload,
            seed=self.seed,
            hosts=self.hosts,
            sender_hosts=tuple(random.randrange(self.hosts) for _ in range(self.senders)),
            receiver_hosts=tuple(random.randrange(self.hosts) for _ in range(self.receivers)),
            slots=(self.slots,) * self.receivers,
            staging_slots=(self.staging_slots,) * self.senders,
            chunk_bytes=CHUNK_BYTES,
            put_s=self.put_s,
            put_window=random.choice((1, 4, 64)),
            latency_s=random.choice((0.0002, 0.005, 0.05)),
            limits=self.limits,
            requests=tuple(sorted(self.requests, key=lambda request: request.at)),
            faults=faults,
            ranks=self.ranks,
            in_place=self.in_place,
            all_arrive=self.all_arrive,
        )
