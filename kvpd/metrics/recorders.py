"""The metrics of each role, recorded by calls that cannot fail.

Names are `kvpd_<subject>_<unit>[_total]` in base units. A label's values come from an enumeration, or are bounded in
number with the rest counted as `other`; a request's id or a client's text is never one. A sample that is no number,
not finite or negative is dropped and counted in `kvpd_samples_dropped_total`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from kvpd.errors import ErrorCode
from kvpd.log import lines_dropped
from kvpd.version import VERSION

SLOT_STATES: Final = ("free", "reserved", "writing", "ready", "quarantined")
LABEL_VALUES_MAX: Final = 32
OTHER: Final = "other"

_FAST_S: Final = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_WAIT_S: Final = (1e-3, 5e-3, 0.01, 0.05, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Tally:
    """A number that only grows."""

    def __init__(self, child: Counter, refused: Counter) -> None:
        self._child = child
        self._refused = refused

    def inc(self, amount: float = 1) -> None:
        """Add to it."""
        if _usable(amount):
            self._child.inc(amount)
        else:
            self._refused.inc()


class Level:
    """A number that rises and falls."""

    def __init__(self, child: Gauge, refused: Counter) -> None:
        self._child = child
        self._refused = refused

    def set(self, value: float) -> None:
        """Its value now."""
        if _usable(value):
            self._child.set(value)
        else:
            self._refused.inc()


class Spread:
    """How samples are distributed, in seconds."""

    def __init__(self, child: Histogram, refused: Counter) -> None:
        self._child = child
        self._refused = refused

    def observe(self, seconds: float) -> None:
        """One sample."""
        if _usable(seconds):
            self._child.observe(seconds)
        else:
            self._refused.inc()


class Tallies:
    """One tally per value of a label: those known beforehand, and others until there are LABEL_VALUES_MAX."""

    def __init__(self, family: Counter, refused: Counter, known: Iterable[str]) -> None:
        self._family = family
        self._refused = refused
        self._children = {value: Tally(family.labels(value), refused) for value in known}
        self._other = Tally(family.labels(OTHER), refused)
        self._room = LABEL_VALUES_MAX

    def inc(self, value: str, amount: float = 1) -> None:
        """Add to the tally of `value`."""
        child = self._children.get(value)
        if child is None:
            child = self._other
            if self._room:
                self._room -= 1
                child = self._children[str(value)] = Tally(self._family.labels(value), self._refused)
        child.inc(amount)


class Metrics:
    """What every role tells; its registry is its own, so that a program may have several."""

    def __init__(
        self,
        role: str,
        *,
        version: str | None = None,
        transport: str = "",
        log_lines_dropped: Callable[[], int] = lines_dropped,
    ) -> None:
        self.registry = CollectorRegistry()
        self._own: list[Collector] = []
        self._refresh: Callable[[], None] = lambda: None
        self._refused = Counter("kvpd_samples_dropped", "Samples that were no usable number.", registry=self.registry)
        self._own.append(self._refused)
        build = Gauge("kvpd_build_info", "What runs here.", ["version", "role", "transport"], registry=self.registry)
        build.labels(version or VERSION, role, transport).set(1)
        self._messages_dropped = self._tallies(
            "kvpd_messages_dropped", "Messages that were not acted on.", "reason", ("malformed",)
        )
        callback = _LogLinesDropped(log_lines_dropped)
        self.registry.register(callback)
        self._own.append(callback)
        ProcessCollector(registry=self.registry)

    def message_dropped(self, reason: str, count: int = 1) -> None:
        """Messages that counted for nothing; `reason` is a word of the program's, never the peer's."""
        self._messages_dropped.inc(reason, count)

    def before_reading(self, refresh: Callable[[], None]) -> None:
        """Have `refresh` set the levels whenever somebody reads, maybe in another thread than the one that records."""
        self._refresh = refresh

    def refresh(self) -> None:
        """Have the levels set to what they are now; whoever reads the registry calls it first."""
        self._refresh()

    def snapshot(self) -> dict[str, float]:
        """All values but the histograms' buckets and the process's own, by the name that /metrics gives them."""
        self.refresh()
        return dict(self._samples())

    def _samples(self) -> Iterator[tuple[str, float]]:
        for collector in self._own:
            for metric in collector.collect():
                for sample in metric.samples:
                    if not sample.name.endswith(("_created", "_bucket")):
                        labels = ",".join(f'{name}="{value}"' for name, value in sample.labels.items())
                        yield f"{sample.name}{{{labels}}}" if labels else sample.name, sample.value

    def _tally(self, name: str, meaning: str) -> Tally:
        counter = Counter(name, meaning, registry=self.registry)
        self._own.append(counter)
        return Tally(counter, self._refused)

    def _tallies(self, name: str, meaning: str, label: str, known: Iterable[str]) -> Tallies:
        counter = Counter(name, meaning, [label], registry=self.registry)
        self._own.append(counter)
        return Tallies(counter, self._refused, [str(value) for value in known])

    def _level(self, name: str, meaning: str) -> Level:
        gauge = Gauge(name, meaning, registry=self.registry)
        self._own.append(gauge)
        return Level(gauge, self._refused)

    def _levels(self, name: str, meaning: str, label: str, known: Iterable[str]) -> dict[str, Level]:
        gauge = Gauge(name, meaning, [label], registry=self.registry)
        self._own.append(gauge)
        return {value: Level(gauge.labels(value), self._refused) for value in known}

    def _spread(self, name: str, meaning: str, buckets: tuple[float, ...]) -> Spread:
        histogram = Histogram(name, meaning, buckets=buckets, registry=self.registry)
        self._own.append(histogram)
        return Spread(histogram, self._refused)


class TransferMetrics(Metrics):
    """What both sides of a transfer tell."""

    def __init__(
        self,
        role: str,
        *,
        version: str | None = None,
        transport: str = "",
        log_lines_dropped: Callable[[], int] = lines_dropped,
    ) -> None:
        super().__init__(role, version=version, transport=transport, log_lines_dropped=log_lines_dropped)
        self._peers_rejected = self._tallies(
            "kvpd_peers_rejected",
            "Peers refused.",
            "reason",
            (ErrorCode.LAYOUT_MISMATCH, ErrorCode.PROTOCOL_VERSION, ErrorCode.PROTOCOL_ERROR),
        )
        self.sessions = self._level("kvpd_sessions", "Sessions open with peers.")
        self.engines = self._level("kvpd_engines", "Engines attached.")

    def peer_rejected(self, reason: str) -> None:
        """A peer was refused; `reason` as for `message_dropped`."""
        self._peers_rejected.inc(reason)


class ReceiverMetrics(TransferMetrics):
    """What a receiver tells."""

    def __init__(
        self,
        *,
        version: str | None = None,
        transport: str = "",
        log_lines_dropped: Callable[[], int] = lines_dropped,
    ) -> None:
        super().__init__("receiver", version=version, transport=transport, log_lines_dropped=log_lines_dropped)
        self._slots = self._levels("kvpd_slots", "Slots of the buffer, by state.", "state", SLOT_STATES)
        self.queue_depth = self._level("kvpd_queued_transfers", "Transfers that wait for admission.")
        self._admissions = self._tally("kvpd_admissions", "Transfers admitted.")
        self._admission_wait = self._spread(
            "kvpd_admission_wait_seconds", "From a transfer's first request to its admission.", _WAIT_S
        )
        self._rejections = self._tallies("kvpd_rejections", "Transfers given no room, by code.", "code", ErrorCode)
        self._revocations = self._tallies(
            "kvpd_revocations", "Transfers rolled back by the receiver, by reason.", "reason", ErrorCode
        )
        self.batches = self._tally("kvpd_batches", "Batches placed.")
        self.completed = self._tally("kvpd_transfers_completed", "Transfers whose every chunk has landed.")
        self.claimed = self._tally("kvpd_transfers_claimed", "Transfers taken by an engine.")
        self.released = self._tally("kvpd_transfers_released", "Transfers given back by an engine.")

    def admitted(self, wait_s: float) -> None:
        """A transfer got its room after `wait_s` seconds."""
        self._admissions.inc()
        self._admission_wait.observe(wait_s)

    def rejected(self, code: str) -> None:
        """A transfer got no room."""
        self._rejections.inc(code)

    def revoked(self, reason: str) -> None:
        """A transfer was rolled back."""
        self._revocations.inc(reason)

    def slots(self, counts: Mapping[str, int]) -> None:
        """How many slots are in each state now; a state that is not named has none."""
        for state, level in self._slots.items():
            level.set(counts.get(state, 0))


class SenderMetrics(TransferMetrics):
    """What a sender tells."""

    def __init__(
        self,
        *,
        version: str | None = None,
        transport: str = "",
        log_lines_dropped: Callable[[], int] = lines_dropped,
    ) -> None:
        super().__init__("sender", version=version, transport=transport, log_lines_dropped=log_lines_dropped)
        self.opened = self._tally("kvpd_transfers_opened", "Transfers that engines opened.")
        self.done = self._tally("kvpd_transfers_done", "Transfers that landed whole.")
        self._failed = self._tallies("kvpd_transfers_failed", "Transfers that did not, by code.", "code", ErrorCode)
        self.batches = self._tally("kvpd_batches", "Batches put.")
        self._put_seconds = self._spread("kvpd_put_seconds", "From posting a batch to its flush.", _FAST_S)
        self._put_bytes = self._tally("kvpd_put_bytes", "Bytes that were put.")
        self._filled_bytes = self._tally(
            "kvpd_filled_bytes", "Bytes that engines wrote into receivers' slots in place."
        )
        self._staging_wait = self._spread(
            "kvpd_staging_wait_seconds", "From a batch's answer to its staging slots.", _WAIT_S
        )
        self._staging = self._levels(
            "kvpd_staging_slots", "Slots of the staging buffer, by state.", "state", ("free", "used")
        )
        self.in_flight_bytes = self._level("kvpd_in_flight_bytes", "Bytes posted and not yet ended.")
        self._notifications = self._tallies(
            "kvpd_notifications",
            "Notifications to proxies, by outcome.",
            "outcome",
            ("sent", "acknowledged", "dropped"),
        )

    def put(self, seconds: float, nbytes: int) -> None:
        """A batch's puts have ended well."""
        self.batches.inc()
        self._put_seconds.observe(seconds)
        self._put_bytes.inc(nbytes)

    def filled(self, nbytes: int) -> None:
        """An engine has filled a batch in place."""
        self.batches.inc()
        self._filled_bytes.inc(nbytes)

    def staging_wait(self, seconds: float) -> None:
        """A batch got its staging slots."""
        self._staging_wait.observe(seconds)

    def staging(self, *, free: int, total: int) -> None:
        """How many staging slots nobody uses now."""
        self._staging["free"].set(free)
        self._staging["used"].set(total - free)

    def failed(self, code: str) -> None:
        """A transfer ended without success."""
        self._failed.inc(code)

    def notified(self, outcome: str) -> None:
        """A notification was sent, acknowledged or dropped."""
        self._notifications.inc(outcome)


class _LogLinesDropped(Collector):
    """A counter whose value is asked for when somebody reads it."""

    def __init__(self, count: Callable[[], int]) -> None:
        self._count = count

    def collect(self) -> Iterable[Metric]:
        return [CounterMetricFamily("kvpd_log_lines_dropped", "Log lines nobody will read.", value=self._count())]


def _usable(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value >= 0
