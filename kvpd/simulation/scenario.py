"""A scenario: everything that a run is made of, as data, so that a failing one can be printed, replayed and shrunk."""

from __future__ import annotations

import enum

import attrs

from kvpd.core.messages import Verify


class Style(enum.StrEnum):
    """How an engine stages its batches."""

    STEADY = "steady"  # the next batch when this one is filled
    EARLY = "early"  # the next batch is asked for while this one is being filled
    EAGER = "eager"  # all of them at once, before admission
    NEVER = "never"  # it opens and does no more


class Misuse(enum.StrEnum):
    """What an engine does wrong."""

    NONE = "none"
    OVERFLOW = "overflow"
    UNDERFLOW = "underflow"
    BAD_LENGTH = "bad_length"
    BAD_PIECE = "bad_piece"
    NO_TOTAL = "no_total"


class CancelBy(enum.StrEnum):
    """Who ends a request early, and how."""

    NOBODY = "nobody"
    TRANSFER = "transfer"  # the engine cancels the transfer
    LABEL = "label"  # the engine cancels every transfer of the req_id
    LEAVING = "leaving"  # the engine leaves by an exception
    DECODE = "decode"  # the decode engine cancels


@attrs.frozen
class Claim:
    """A decode engine wants the request."""

    engine: int
    at: float | None  # None: when the proxy has been told
    timeout_s: float
    read_s: float
    names_sender: bool = True


@attrs.frozen
class Request:
    """One request, from the prefill engine to the decode engine."""

    req_id: str
    at: float
    sender: int
    receiver: int
    engine: int
    keys: tuple[bytes, ...]
    last_chunk_bytes: int
    batches: tuple[int, ...]  # chunks of each
    style: Style = Style.STEADY
    compute_s: float = 0.1  # before each batch
    fill_s: float = 0.01  # of a piece
    touch_s: float | None = None  # how often it says that it still computes
    misuse: Misuse = Misuse.NONE
    cancel_by: CancelBy = CancelBy.NOBODY
    cancel_after_s: float = 0.0
    leave_s: float = 0.01  # from the end of the transfer until the engine lets go
    claims: tuple[Claim, ...] = ()
    proxy: int | None = None
    rank_skew_s: float = 0.0  # how much later each rank opens than the one before; negative: the last one comes first


class FaultKind(enum.StrEnum):
    """Everything that goes wrong."""

    DISCONNECT = "disconnect"
    DUPLICATION = "duplication"
    CONGESTION = "congestion"
    PARTITION = "partition"
    PARTITION_TO_RECEIVER = "partition_to_receiver"
    PARTITION_TO_SENDER = "partition_to_sender"
    PUT_SLOW = "put_slow"
    PUT_STALL = "put_stall"
    PUT_FAILURE = "put_failure"
    PUT_CORRUPTION = "put_corruption"  # only where chunks are verified: elsewhere nobody could know
    ENDPOINT_BROKEN = "endpoint_broken"
    ENDPOINT_REFUSED = "endpoint_refused"
    WORKER_REFUSED = "worker_refused"
    SENDER_CRASH = "sender_crash"
    SENDER_PAUSE = "sender_pause"
    SENDER_DRAIN = "sender_drain"
    RECEIVER_CRASH = "receiver_crash"
    RECEIVER_PAUSE = "receiver_pause"
    RECEIVER_DRAIN = "receiver_drain"
    HOST_SUSPEND = "host_suspend"  # every clock of the host jumps
    PREFILL_CRASH = "prefill_crash"
    PREFILL_PAUSE = "prefill_pause"
    PREFILL_HANG_UP = "prefill_hang_up"
    DECODE_CRASH = "decode_crash"
    DECODE_PAUSE = "decode_pause"
    DECODE_HANG_UP = "decode_hang_up"
    PROXY_CRASH = "proxy_crash"
    PROXY_SILENCE = "proxy_silence"
    ROGUE = "rogue"  # a peer that breaks every rule


# What a run over the real service knows.
SERVICE_KINDS = frozenset(
    {
        FaultKind.DISCONNECT,
        FaultKind.PARTITION,
        FaultKind.PUT_STALL,
        FaultKind.PUT_FAILURE,
        FaultKind.SENDER_CRASH,
        FaultKind.SENDER_DRAIN,
        FaultKind.RECEIVER_CRASH,
        FaultKind.RECEIVER_DRAIN,
        FaultKind.PREFILL_CRASH,
        FaultKind.DECODE_CRASH,
        FaultKind.PROXY_SILENCE,
    }
)

# What follows from faults and from what is asked, and must be seen to follow.
CONSEQUENCES = (
    "late_landing",
    "cut_off",
    "stuck_put",
    "prefill_cancel",
    "decode_cancel",
    "claim_overdue",
    "deduplication",
    "late_filling",
)


@attrs.frozen
class Fault:
    """One thing that goes wrong, with the `target`th of its kind, for `duration_s`."""

    kind: FaultKind
    at: float
    target: int
    duration_s: float


@attrs.frozen
class Limits:
    """The settings of both sides. Times in seconds."""

    lease_s: float = 10.0
    put_deadline_s: float = 4.0
    allocation_timeout_s: float = 30.0
    progress_timeout_s: float = 20.0
    ready_ttl_s: float = 40.0
    claim_grace_s: float = 5.0
    claim_ttl_s: float = 0.0
    bypass_max: int = 0
    verify: Verify = "off"
    request_timeout_s: float = 90.0
    notify_give_up_s: float = 60.0
    queue_depth_max: int = 1024
    sessions_max: int = 64
    claims_max: int = 1024
    outcomes_max: int = 4096
    transfers_max: int = 1024
    peers_max: int = 64
    stages_max: int = 64
    notifications_max: int = 1024
    proxies_max: int = 16


@attrs.frozen
class Scenario:
    """One run: who there is, what they want, and what goes wrong meanwhile."""

    workload: str
    seed: int
    hosts: int
    sender_hosts: tuple[int, ...]  # by sender, its host
    receiver_hosts: tuple[int, ...]
    slots: tuple[int, ...]  # by receiver
    staging_slots: tuple[int, ...]  # by sender
    chunk_bytes: int
    put_s: float
    put_window: int
    latency_s: float
    limits: Limits
    requests: tuple[Request, ...]
    faults: tuple[Fault, ...]
    prefill_engines: int = 2  # of each sender
    decode_engines: int = 2  # of each receiver
    proxies: int = 2
    ranks: int = 1  # of each engine, every one in a process of its own
    in_place: bool = False  # engines fill slots of receivers on their own host themselves
    all_arrive: bool = False  # nothing goes wrong that cannot be put right, and time is ample

    @property
    def ends_at(self) -> float:
        """When the last request has begun and the last fault is over; from then on all must come to rest."""
        begun = max((request.at for request in self.requests), default=0.0)
        return max([begun] + [fault.at + fault.duration_s for fault in self.faults])
