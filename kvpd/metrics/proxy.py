"""What a proxy tells of the requests that pass through it, and of the engines behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal

from kvpd.errors import ErrorCode
from kvpd.log import lines_dropped
from kvpd.metrics.recorders import Metrics

# How a request ended: what the client got, or that it did not wait for it.
OUTCOMES: Final = ("answered", "refused", "failed", "client_cancelled")
NOTIFICATIONS: Final = ("matched", "repeated", "unknown")
_LATENCY_S: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)

EngineKind = Literal["prefill", "decode"]


class ProxyMetrics(Metrics):
    """What a proxy tells."""

    def __init__(
        self, *, version: str | None = None, transport: str = "", log_lines_dropped: Callable[[], int] = lines_dropped
    ) -> None:
        super().__init__("proxy", version=version, transport=transport, log_lines_dropped=log_lines_dropped)
        self._requests = self._tallies("kvpd_requests", "Completions asked for, by outcome.", "outcome", OUTCOMES)
        self.in_flight = self._level("kvpd_requests_in_flight", "Completions being worked on.")
        self.connections = self._level("kvpd_connections", "Clients' connections.")
        self._engines_alive = self._levels(
            "kvpd_engines_alive", "Engines that answer, by kind.", "kind", ("prefill", "decode")
        )
        self._transfers = self._tallies(
            "kvpd_transfers", "KV caches asked for, by outcome.", "outcome", ("arrived", *ErrorCode)
        )
        self._recomputed = self._tallies(
            "kvpd_recompute",
            "Prompts computed by the decode engine instead, by reason.",
            "reason",
            ("miss", "no_prefill"),
        )
        self.retries = self._tally("kvpd_retries", "Requests tried a second time.")
        self.abandoned = self._tally("kvpd_abandoned", "Transfers given back because nobody waits for them.")
        self._notifications = self._tallies(
            "kvpd_notifications_received", "Notifications from senders, by outcome.", "outcome", NOTIFICATIONS
        )
        self.prefill = self._spread("kvpd_prefill_seconds", "From asking a prefill engine to its answer.", _LATENCY_S)
        self.transfer = self._spread(
            "kvpd_transfer_wait_seconds", "From that answer to the word that the KV cache is complete.", _LATENCY_S
        )
        self.first_byte = self._spread(
            "kvpd_first_byte_seconds", "From a request to the first bytes of its answer.", _LATENCY_S
        )
        self._arrived = 0
        self._asked = 0

    def request_ended(self, outcome: str) -> None:
        """A completion has ended; one of OUTCOMES."""
        self._requests.inc(outcome)

    def transfer_ended(self, outcome: str) -> None:
        """A KV cache has `arrived`, or has not, by error code."""
        self._asked += 1
        self._arrived += outcome == "arrived"
        self._transfers.inc(outcome)

    @property
    def transfer_ratio(self) -> float | None:
        """Of the KV caches asked for, the share that arrived; None before the first."""
        return self._arrived / self._asked if self._asked else None

    def recomputed(self, reason: str) -> None:
        """A decode engine was asked to compute the prompt itself: `miss` or `no_prefill`."""
        self._recomputed.inc(reason)

    def notification(self, outcome: str) -> None:
        """A sender's notification came; one of NOTIFICATIONS."""
        self._notifications.inc(outcome)

    def engines_alive(self, kind: EngineKind, count: int) -> None:
        """How many engines of a kind answer now."""
        self._engines_alive[kind].set(count)
