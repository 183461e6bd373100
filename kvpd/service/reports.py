"""What the cores report, as log lines and metrics: the name is the event, the fields are the fields."""

from __future__ import annotations

from typing import Final, Protocol

import attrs

from kvpd.core.events import Report, ReportName
from kvpd.core.pool import PoolCounts
from kvpd.log import Logger, get_logger, writes_debug
from kvpd.metrics import ReceiverMetrics, SenderMetrics

# Everything else is information: an operator reads these first.
_WARNINGS: Final = frozenset(
    {
        ReportName.TRANSFER_REFUSED,
        ReportName.TRANSFER_EXPIRED,
        ReportName.TRANSFER_REVOKED,
        ReportName.TRANSFER_FAILED,
        ReportName.CLAIM_REFUSED,
        ReportName.CLAIM_RETURNED,
        ReportName.CLAIM_OVERDUE,
        ReportName.PROXY_NOTIFICATION_DROPPED,
        ReportName.SESSION_ENDED,
        ReportName.PEER_REJECTED,
        ReportName.MESSAGE_REFUSED,
    }
)
# A request has any number of batches; what is known of it by default does not grow with them.
_DEBUG: Final = frozenset(
    {
        ReportName.BATCH_ALLOCATED,
        ReportName.CHUNKS_WRITTEN,
        ReportName.BATCH_STAGED,
        ReportName.PIECE_WRITTEN,
        ReportName.PIECE_FILLED,
    }
)


def _is_detail(report: Report) -> bool:
    """Whether it is for who develops kvpd. Of a queue only those need to hear who wait in it."""
    return report.name in _DEBUG or (report.name is ReportName.TRANSFER_QUEUED and not report.fields["waits"])


def _write(logger: Logger, report: Report) -> None:
    is_debug = _is_detail(report)
    if is_debug and not writes_debug():
        return
    fields: dict[str, object] = {}
    if report.transfer is not None:
        fields["transfer"] = str(report.transfer)
    if report.req_id is not None:
        fields["req_id"] = report.req_id
    if report.peer is not None:
        fields["peer"] = report.peer
    if report.name in _WARNINGS:
        logger.warning(report.name, rate_limited=True, **fields, **report.fields)
    elif is_debug:
        logger.debug(report.name, **fields, **report.fields)
    else:
        logger.info(report.name, **fields, **report.fields)


class ReceiverLevels(Protocol):
    """What a receiver's gauges show."""

    @property
    def counts(self) -> PoolCounts: ...

    @property
    def queue_depth(self) -> int: ...

    @property
    def session_count(self) -> int: ...


class ReceiverReports:
    """A receiver's reports."""

    def __init__(self, metrics: ReceiverMetrics) -> None:
        self._metrics = metrics
        self._log = get_logger()
        self._levels: tuple[PoolCounts, int, int] | None = None
        metrics.before_reading(self._show_levels)

    def tell(self, report: Report) -> None:
        """One report, to the log and to the metrics."""
        _write(self._log, report)
        metrics, fields = self._metrics, report.fields
        match report.name:
            case ReportName.TRANSFER_ADMITTED:
                metrics.admitted(float(fields["queued_s"]))
            case ReportName.TRANSFER_REFUSED:
                metrics.rejected(str(fields["code"]))
            case ReportName.TRANSFER_REVOKED:
                metrics.revoked(str(fields["reason"]))
            case ReportName.TRANSFER_EXPIRED:
                metrics.revoked("ready_expired")
            case ReportName.BATCH_ALLOCATED:
                metrics.batches.inc()
            case ReportName.TRANSFER_COMPLETED:
                metrics.completed.inc()
            case ReportName.TRANSFER_CLAIMED:
                metrics.claimed.inc()
            case ReportName.TRANSFER_RELEASED:
                metrics.released.inc()
            case ReportName.PEER_REJECTED:
                metrics.peer_rejected("protocol_error")
            case ReportName.MESSAGE_REFUSED:
                metrics.peer_rejected(str(fields["code"]))
            case _:
                pass

    def levels(self, core: ReceiverLevels) -> None:
        """Where the gauges stand after a step; shown to who asks, who must not see half of the next one."""
        self._levels = core.counts, core.queue_depth, core.session_count

    def _show_levels(self) -> None:
        if self._levels is not None:
            counts, queue_depth, sessions = self._levels
            self._metrics.slots(attrs.asdict(counts))
            self._metrics.queue_depth.set(queue_depth)
            self._metrics.sessions.set(sessions)


class SenderReports:
    """A sender's reports."""

    def __init__(self, metrics: SenderMetrics) -> None:
        self._metrics = metrics
        self._log = get_logger()

    def tell(self, report: Report) -> None:
        """One report, to the log and to the metrics."""
        _write(self._log, report)
        metrics, fields = self._metrics, report.fields
        match report.name:
            case ReportName.TRANSFER_OPENED:
                metrics.opened.inc()
            case ReportName.BATCH_STAGED:
                metrics.staging_wait(float(fields["waited_s"]))
            case ReportName.PIECE_WRITTEN:
                metrics.put(float(fields["seconds"]), int(fields["bytes"]))
            case ReportName.PIECE_FILLED:
                metrics.filled(int(fields["bytes"]))
            case ReportName.TRANSFER_DONE:
                metrics.done.inc()
            case ReportName.TRANSFER_FAILED | ReportName.TRANSFER_CANCELLED:
                metrics.failed(str(fields["code"]))
            case ReportName.PROXY_NOTIFIED | ReportName.PROXY_TOLD_OF_FAILURE:
                metrics.notified("sent")
            case ReportName.PROXY_NOTIFICATION_DROPPED:
                metrics.notified("dropped")
            case ReportName.PEER_REJECTED:
                metrics.peer_rejected("protocol_error")
            case _:
                pass
