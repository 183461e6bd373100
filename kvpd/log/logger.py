"""What modules log with: structlog's chain, from an event and its fields to a line in the writer's queue."""

from __future__ import annotations

import traceback
from typing import Any

import structlog

from kvpd.log.lines import Event, completed
from kvpd.log.writer import LEVELS, LogWriter, current_writer


class Logger(structlog.BoundLoggerBase):
    """What modules log with; bind fields with `bind`. Before `start_logging` and after its end it writes nothing.

    The event is a constant in the past tense, everything else a field. `rate_limited=True` is for events that a peer
    can cause at will: of those with the same event, level and `peer`, 20 a second are written and the rest counted.
    """

    def debug(self, event: str, **fields: Any) -> None:
        """For who develops kvpd."""
        self._write("debug", event, fields)

    def info(self, event: str, **fields: Any) -> None:
        """Something happened as it should."""
        self._write("info", event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        """Something failed, and kvpd has dealt with it."""
        self._write("warning", event, fields)

    def error(self, event: str, **fields: Any) -> None:
        """Something failed that a person must look at. `exc_info=exc` adds an exception's type, text and trace."""
        self._write("error", event, fields)

    def _write(self, level: str, event: str, fields: Event) -> None:
        writer = current_writer()
        if writer is not None and LEVELS[level] >= writer.level:
            self._proxy_to_logger(level, event, **fields)


def get_logger(**fields: Any) -> Logger:
    """A logger with `fields` bound."""
    logger: Logger = structlog.wrap_logger(
        _Queue(),
        processors=[_render],
        wrapper_class=Logger,
        context_class=dict,
        cache_logger_on_first_use=False,
        **fields,
    ).bind()
    return logger


class _Queue:
    """What structlog calls with a rendered line."""

    def _put(self, line: bytes) -> None:
        writer = current_writer()
        if writer is not None:
            writer.put(line)

    debug = info = warning = error = _put


def _render(_logger: object, method: str, event: Event) -> bytes:
    """A line of the event: one step of structlog's chain, because each costs as much again as what it does."""
    writer = current_writer()
    if writer is None:
        raise structlog.DropEvent
    if event.pop("rate_limited", False):
        _limit_repeats(writer, method, event)
    # An rkey is a bearer's right to write into our memory.
    for field in [field for field in event if "rkey" in field]:
        del event[field]
    if "exc_info" in event:
        _explain_exception(event)
    return writer.render(completed(event, method, writer.bound))


def _limit_repeats(writer: LogWriter, method: str, event: Event) -> None:
    starts = writer.repeats.deadline is None
    if not writer.repeats.admit(method, event["event"], str(event.get("peer", ""))):
        if starts:
            writer.wake()
        raise structlog.DropEvent


def _explain_exception(event: Event) -> None:
    exc = event.pop("exc_info")
    if isinstance(exc, BaseException):
        event["error.type"] = type(exc).__name__
        event["error.message"] = str(exc)
        event["error.stack_trace"] = "".join(traceback.format_exception(exc))
