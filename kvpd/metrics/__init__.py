"""What kvpd tells of itself in numbers: metrics, health, and the small HTTP server that answers for both.

Telling never harms serving: a recorder takes any number and raises nothing, and the server's threads only read.
"""

from __future__ import annotations

from kvpd.metrics.health import Health
from kvpd.metrics.proxy import ProxyMetrics
from kvpd.metrics.recorders import Metrics, ReceiverMetrics, SenderMetrics
from kvpd.metrics.server import MetricsServer, exposition

__all__ = ["Health", "Metrics", "MetricsServer", "ProxyMetrics", "ReceiverMetrics", "SenderMetrics", "exposition"]
