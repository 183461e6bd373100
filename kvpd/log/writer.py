"""The process's one writer of lines: a bounded queue, and the thread that empties it into stderr.

Whatever stderr does, nobody who logs ever waits for it. A busy process's lines are gathered for a moment and written
together: a thread woken for each line would take the interpreter from the loop as often.
"""

from __future__ import annotations

import functools
import io
import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import BinaryIO, Final, Self

from kvpd.config import LogConfig
from kvpd.log.lines import Renderer, completed, render_console, render_json
from kvpd.log.repeats import Repeats

LEVELS: Final = {"debug": 10, "info": 20, "warning": 30, "error": 40}
FLUSH_TIMEOUT_S: Final = 1.0
BATCH_LINES_MAX: Final = 256


def start_logging(config: LogConfig, role: str, name: str, stream: BinaryIO | None = None) -> LogWriter:
    """Begin to write lines, of `role` and `name`, to `stream` (default: stderr), until the context is left."""
    return LogWriter(config, role, name, _sink(stream))


def current_writer() -> LogWriter | None:
    """The one that lines go to now."""
    return _writer


def writes_debug() -> bool:
    """Whether lines for who develops kvpd are written; asked before what they tell is gathered, where that costs."""
    return _writer is not None and _writer.level <= LEVELS["debug"]


def lines_dropped() -> int:
    """How many lines the process's writer has dropped; 0 while there is none."""
    writer = _writer
    return 0 if writer is None else writer.dropped


class LogWriter:
    """The process's one writer of lines: a context manager, whose end waits at most a second for what is queued."""

    def __init__(self, config: LogConfig, role: str, name: str, write: Callable[[bytes], None]) -> None:
        self.level = LEVELS[config.level]
        self.render: Renderer = render_json if config.format == "json" else render_console
        self.bound: Mapping[str, object] = {"service.name": "kvpd", "role": role, "service.node.name": name}
        self.repeats = Repeats()
        self._write = write
        self._depth_max = config.queue_depth_max
        self._gather_s = config.gather_s
        self._lines: deque[bytes] = deque()
        self._changed = threading.Condition()
        self._is_parked = False  # the thread waits for `_changed`
        self._stop = threading.Event()
        self._dropped = 0
        self._dropped_told = 0
        # A daemon thread: one that is stuck in a full pipe must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="kvpd-log", daemon=True)

    @property
    def dropped(self) -> int:
        """Lines that nobody will ever read."""
        return self._dropped

    def __enter__(self) -> Self:
        global _writer
        assert _writer is None, "one writer in a process"
        self._thread.start()
        _writer = self
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _writer
        _writer = None
        self._stop.set()
        self.wake()
        self._thread.join(FLUSH_TIMEOUT_S)

    def put(self, line: bytes) -> None:
        """Queue a line, or drop and count it."""
        with self._changed:
            if len(self._lines) >= self._depth_max or self._stop.is_set():
                self._dropped += 1
                return
            self._lines.append(line)
            if self._is_parked:
                self._is_parked = False
                self._changed.notify()

    def _own_line(self, event: str, fields: Mapping[str, object]) -> bytes:
        """A line about logging itself."""
        return self.render(completed({"event": event, **fields}, "warning", self.bound))

    def wake(self) -> None:
        """Have the writer look at its deadlines anew."""
        with self._changed:
            self._changed.notify()

    def _run(self) -> None:
        while True:
            batch, last = self._next_batch()
            batch += [self._own_line("log_lines_suppressed", fields) for fields in self.repeats.take(last)]
            dropped = self._dropped - self._dropped_told
            if dropped:
                batch.append(self._own_line("log_lines_dropped", {"count": dropped}))
            if batch and self._try_write(b"".join(batch)):
                self._dropped_told += dropped
            elif batch:
                with self._changed:
                    # The line about dropped lines is none of them.
                    self._dropped += len(batch) - (1 if dropped else 0)
            if last:
                return

    def _next_batch(self) -> tuple[list[bytes], bool]:
        """The lines to write next, and whether they are the last."""
        with self._changed:
            was_parked = not self._lines
            while not self._lines and not self._stop.is_set():
                deadline = self.repeats.deadline
                timeout = None if deadline is None else deadline - time.monotonic()
                if timeout is not None and timeout <= 0:
                    return [], False
                self._is_parked = True
                self._changed.wait(timeout)
                self._is_parked = False
        if was_parked:
            self._stop.wait(self._gather_s)  # for what is written right behind; the end cuts it short
        with self._changed:
            batch = [self._lines.popleft() for _ in range(min(len(self._lines), BATCH_LINES_MAX))]
            return batch, self._stop.is_set() and not self._lines

    def _try_write(self, data: bytes) -> bool:
        try:
            self._write(data)
        except (OSError, ValueError):
            # Nobody reads stderr any more; there is no other place to say so than the count.
            return False
        return True


_writer: LogWriter | None = None


def _sink(stream: BinaryIO | None) -> Callable[[bytes], None]:
    """How to write to `stream`. The descriptor itself, where there is one: a buffer's lock could be held for ever."""
    if stream is None:
        if sys.stderr is None:
            # Started with stderr closed: its number may by now be a socket's.
            return _refuse
        stream = sys.stderr.buffer
    try:
        descriptor = stream.fileno()
    except io.UnsupportedOperation:
        return functools.partial(_write_stream, stream)
    return functools.partial(_write_descriptor, descriptor)


def _refuse(data: bytes) -> None:
    raise OSError("stderr is closed")


def _write_stream(stream: BinaryIO, data: bytes) -> None:
    stream.write(data)
    stream.flush()


def _write_descriptor(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:
            # Somebody who shares stderr has made it non-blocking; only this thread waits.
            poll = select.poll()
            poll.register(descriptor, select.POLLOUT)
            poll.poll()
