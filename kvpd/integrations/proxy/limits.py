"""The proxy's bounds that no configuration names, and the two that are counted over all requests."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import attrs

RETRY_AFTER_S: Final = 1.0  # what a client is told when nothing better is known
HEAD_BYTES_MAX: Final = 64 << 10  # of one request's or answer's line and headers
READ_BYTES: Final = 64 << 10
PIPELINED_BYTES_MAX: Final = 64 << 10  # what a client may send ahead while it is answered
REQUEST_ID_CHARS_MAX: Final = 128
PROMPTS_MAX: Final = 256  # in one request
KEPT_ANSWER_BYTES_MAX: Final = 64 << 20  # of an answer that is read whole: a prefill engine's, a merged one, an error
EVENT_BYTES_MAX: Final = 4 << 20  # of one event in a stream that is merged
LATE_CONNECTIONS_MAX: Final = 32  # beyond connections_max, and only for probes
LINGER_S: Final = 5.0  # how long a client that was refused may go on sending before it is cut off
LATE_LINGER_S: Final = 0.5  # on a connection beyond connections_max: its place is a probe's
LINGER_BYTES_MAX: Final = 64 << 20
ABANDON_S: Final = 1.0
ABANDONED_MAX: Final = 64  # at once
DESCRIPTORS_RESERVED: Final = 64  # for the log, ZMQ, the metrics server and probes
DESCRIPTORS_PER_REQUEST: Final = 3  # its client, and a connection kept to an engine of each kind


@attrs.define
class Budget:
    """Bytes that all requests' bodies together may take."""

    bytes_max: int
    held: int = 0

    @contextmanager
    def hold(self) -> Iterator[Share]:
        """One body's share, given back at the end."""
        share = Share(self)
        try:
            yield share
        finally:
            self.held -= share.held


@attrs.define
class Share:
    """What one body takes of a budget."""

    budget: Budget
    held: int = 0

    def grow(self, nbytes: int) -> bool:
        """Take more, or nothing: whether there was room."""
        if self.budget.held + nbytes > self.budget.bytes_max:
            return False
        self.budget.held += nbytes
        self.held += nbytes
        return True


def fitting(requests_max: int, connections_max: int, descriptors: int) -> tuple[int, int]:
    """Requests and connections that fit a process's limit of open files, so that it never meets that limit."""
    if descriptors == resource.RLIM_INFINITY:
        return requests_max, connections_max
    room = max(1, descriptors - DESCRIPTORS_RESERVED - LATE_CONNECTIONS_MAX)
    requests = max(1, min(requests_max, room // (DESCRIPTORS_PER_REQUEST + 1)))
    connections = max(1, min(connections_max, room - (DESCRIPTORS_PER_REQUEST - 1) * requests))
    return requests, connections
