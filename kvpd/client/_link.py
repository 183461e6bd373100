"""What the links of both roles have in common: events, counters, cancelling by name, and the end."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from types import TracebackType
from typing import Final, Self

from kvpd.client._attach import Attachment
from kvpd.client._connection import Connection
from kvpd.errors import ErrorCode, LocalProtocolError, RemoteProtocolError, TransferCancelled, TransferFailed
from kvpd.link import CancelRequest, DaemonFrame, LinkError, Rejected, Stats, StatsRequest, TransferEvent

EVENTS_MAX: Final = 1024
REQ_ID_CHARS_MAX: Final = 512
STATS_TIMEOUT_S: Final = 5.0


class Link:
    """An engine's connection to its daemon. Threads may share it; forked processes may not. Leaving closes it."""

    def __init__(self, attachment: Attachment) -> None:
        self._connection = Connection(attachment)
        self._events: deque[TransferEvent] = deque()
        self._events_dropped = 0
        self._events_changed = self._connection.condition()
        self._stats: dict[int, dict[str, float] | None] = {}
        self._stats_changed = self._connection.condition()
        self._connection.start(self._handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    @property
    def name(self) -> str:
        """What the daemon calls itself."""
        return self._connection.info.name

    @property
    def chunk_bytes(self) -> int:
        """How many bytes a full chunk has."""
        return self._connection.info.chunk_bytes

    @property
    def chunk_tokens(self) -> int:
        """How many tokens a full chunk holds."""
        return self._connection.info.chunk_tokens

    @property
    def ranks(self) -> int:
        """How many ranks an engine of this daemon has: each of them must attach, and take part in every request."""
        return self._connection.info.ranks

    @property
    def layout(self) -> str:
        """What a chunk's bytes mean, in the words of the daemon's configuration; empty where it says nothing."""
        return self._connection.info.layout

    @property
    def events_dropped(self) -> int:
        """How many events were lost because nobody took them: the oldest beyond EVENTS_MAX."""
        return self._events_dropped

    def events(self, timeout: float | None = None) -> Iterator[TransferEvent]:
        """What became ready, failed or was released, oldest first, each to one caller.

        Ends when nothing has come for `timeout` seconds (0: only what is here; None: never), or the link was closed.

        Raises:
            TransferFailed: the daemon is lost; the events that came before have been given.
            LocalProtocolError: the timeout is impossible, or this is a forked child.
        """
        checked_timeout(timeout)
        while (event := self._next_event(timeout)) is not None:
            yield event

    def _next_event(self, timeout: float | None) -> TransferEvent | None:
        connection = self._connection
        connection.check_process()
        with connection.lock:
            try:
                if not connection.wait(self._events_changed, lambda: bool(self._events), timeout):
                    return None
            except TransferCancelled:  # the link was closed
                return None
            return self._events.popleft()

    def cancel(self, req_id: str) -> None:
        """End every transfer that bears this `req_id`, wherever it stands. From any thread; never raises."""
        if isinstance(req_id, str) and 1 <= len(req_id) <= REQ_ID_CHARS_MAX and not self._connection.is_closing:
            self._connection.send_last(CancelRequest(req_id))

    def stats(self) -> dict[str, float]:
        """The daemon's counters, named as on its /metrics page.

        Raises:
            TransferFailed: the daemon is lost, or has not answered within STATS_TIMEOUT_S.
        """
        connection = self._connection
        call = connection.number()
        with connection.lock:
            self._stats[call] = None
        try:
            connection.send(StatsRequest(call))
            with connection.lock:
                if not connection.wait(self._stats_changed, lambda: self._stats[call] is not None, STATS_TIMEOUT_S):
                    detail = f"the daemon at {connection.path} gave no counters within {STATS_TIMEOUT_S:g} s"
                    raise TransferFailed(ErrorCode.REQUEST_TIMEOUT, detail)
                values = self._stats[call]
        finally:
            with connection.lock:
                del self._stats[call]
        assert values is not None
        return values

    def close(self) -> None:
        """Make no more calls. Waiting ones end with TransferCancelled; the connection ends as soon as the last transfer
        and the last claim, which other threads may hold, have been left.
        """
        self._connection.close()

    # ------------------------------------------------------------------ the reader thread's side

    def _handle(self, frame: DaemonFrame) -> None:
        connection = self._connection
        match frame:
            case TransferEvent():
                with connection.lock:
                    if len(self._events) == EVENTS_MAX:
                        self._events.popleft()
                        self._events_dropped += 1
                    self._events.append(frame)
                    self._events_changed.notify()
            case Stats(call, values):
                with connection.lock:
                    connection.find(call)
                    if call in self._stats:  # else its caller has given up
                        self._stats[call] = values
                        self._stats_changed.notify_all()
            case Rejected(detail):
                raise LinkError(ErrorCode.PROTOCOL_ERROR, f"refused by {connection.path}: {detail}"[:4096]).exception()
            case _:
                self._handle_role(frame)

    def _handle_role(self, frame: DaemonFrame) -> None:
        raise RemoteProtocolError(f"{type(frame).__name__} is not for this role")


def checked_timeout(timeout: float | None) -> float | None:
    """A time limit in seconds, as callers may give it.

    Raises:
        LocalProtocolError: it is negative or no number.
    """
    if timeout is not None and (math.isnan(timeout) or timeout < 0):
        raise LocalProtocolError(f"a timeout of {timeout!r}: seconds, 0 or more, or None are allowed")
    return timeout


def checked_text(what: str, value: str) -> str:
    """A req_id or an address.

    Raises:
        LocalProtocolError: it is empty, too long or no text.
    """
    if not isinstance(value, str) or not 1 <= len(value) <= REQ_ID_CHARS_MAX:
        raise LocalProtocolError(f"{what} is a text of 1 to {REQ_ID_CHARS_MAX} characters, not {str(value)[:80]!r}")
    return value
