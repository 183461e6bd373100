"""Log lines: one JSON object each, on stderr, written by a thread of their own.

Logging never blocks its caller and never raises into it: a line is rendered where it is logged, put into a bounded
queue, and written by the writer thread. What finds the queue full, or stderr closed, is dropped and counted, and when
there is room again a `log_lines_dropped` line says how many. An rkey never gets into a line, whoever logs one.
"""

from __future__ import annotations

from kvpd.log.logger import Logger, get_logger
from kvpd.log.writer import LogWriter, lines_dropped, start_logging, writes_debug

__all__ = ["LogWriter", "Logger", "get_logger", "lines_dropped", "start_logging", "writes_debug"]
