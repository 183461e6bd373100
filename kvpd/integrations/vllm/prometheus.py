"""The connector's counts as vLLM's statistics: its periodic log line, and `vllm:kvpd_…` on its /metrics."""

from __future__ import annotations

from typing import Any, cast

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

from kvpd.integrations.vllm.stats import LISTS, SAMPLES_MAX, empty, summary

_SECONDS = [0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0]


class KvpdStats(KVConnectorStats):  # type: ignore[misc]
    """See vLLM: one interval's counts."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data or empty())

    def reset(self) -> None:
        """See vLLM."""
        self.data = empty()

    def aggregate(self, other: KVConnectorStats) -> KvpdStats:
        """See vLLM."""
        for name in LISTS:
            self.data[name] = (self.data[name] + cast("KvpdStats", other).data[name])[:SAMPLES_MAX]
        return self

    def reduce(self) -> dict[str, int | float]:
        """See vLLM."""
        return summary(self.data)

    def is_empty(self) -> bool:
        """See vLLM."""
        return not any(self.data.values())


class KvpdPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """See vLLM."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine)

        def counter(name: str, documentation: str) -> Any:
            metric = self._counter_cls(name=f"vllm:kvpd_{name}", documentation=documentation, labelnames=labelnames)
            return create_metric_per_engine(metric, per_engine)

        def histogram(name: str, documentation: str) -> Any:
            metric = self._histogram_cls(
                name=f"vllm:kvpd_{name}", documentation=documentation, labelnames=labelnames, buckets=_SECONDS
            )
            return create_metric_per_engine(metric, per_engine)

        self._counters = {
            "sent_bytes": counter("sent_bytes", "KV bytes put to receivers"),
            "received_bytes": counter("received_bytes", "KV bytes loaded into blocks"),
            "deduplicated": counter("deduplicated_chunks", "chunks that the receiver had already"),
        }
        self._histograms = {
            "sent_seconds": histogram("send_seconds", "from a transfer's first chunk until it has landed"),
            "received_seconds": histogram("load_seconds", "from a load's start until its blocks are written"),
        }
        self._failures = {
            "send": counter("failed_sends", "transfers out of this engine that failed"),
            "load": counter("failed_loads", "loads into this engine that failed"),
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """See vLLM."""
        for name, metric in self._counters.items():
            metric[engine_idx].inc(sum(transfer_stats_data[name]))
        for name, metric in self._histograms.items():
            for seconds in transfer_stats_data[name]:
                metric[engine_idx].observe(seconds)
        for way, _code in transfer_stats_data["failures"]:
            self._failures[way][engine_idx].inc()
