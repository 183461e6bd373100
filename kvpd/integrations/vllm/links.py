"""A connection to a daemon that is made when it is needed, and again after the daemon was lost.

Also how a thread of the connector starts: as a daemon thread, free of whatever CPU binding the engine gave the thread
that it was started from; an engine that computes on every core it was bound to would starve it.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from kvpd.client import Link
from kvpd.errors import ErrorCode, KvpdError, LocalProtocolError, TransferError, TransferFailed

L = TypeVar("L", bound=Link)
T = TypeVar("T")

CLOSED: Final = "the connector was shut down"


class LinkKeeper(Generic[L]):
    """One link. `use` is called from the connector's own threads only: it may wait for a connection."""

    def __init__(self, connect: Callable[[], L], check: Callable[[L], None]) -> None:
        self._connect = connect
        self._check = check  # raises LocalProtocolError: this daemon cannot serve this engine
        self._lock = threading.Lock()
        self._link: L | None = None
        self._closed = False

    def use(self, call: Callable[[L], T]) -> T:
        """Make a call that fails by TransferError only if the link is lost; then connect anew and try once more.

        Raises:
            TransferFailed: no daemon answers, or it is not fit for this engine.
        """
        link = self.link()
        try:
            return call(link)
        except TransferError:
            self.drop(link)
        except LocalProtocolError:
            if self.link() is link:  # else another thread closed it, having found it lost
                raise
        return call(self.link())

    def link(self) -> L:
        """The link as it is, or a new one.

        Raises:
            TransferFailed: no daemon answers, or it is not fit for this engine.
        """
        with self._lock:
            if self._closed:
                raise TransferFailed(ErrorCode.CANCELLED, CLOSED)
            if self._link is None:
                try:
                    self._link = self._connected()
                except KvpdError as exc:
                    raise TransferFailed(ErrorCode.PEER_LOST, str(exc)) from exc
            return self._link

    def _connected(self) -> L:
        link = self._connect()
        try:
            self._check(link)
        except BaseException:
            link.close()
            raise
        return link

    def drop(self, link: L) -> None:
        """This link was found lost."""
        with self._lock:
            if self._link is link:
                self._link = None
        link.close()

    def close(self) -> None:
        """No more links."""
        with self._lock:
            self._closed = True
            link, self._link = self._link, None
        if link is not None:
            link.close()


def spawn(name: str, work: Callable[[], None]) -> threading.Thread:
    """Run `work` in a thread that may use every CPU and does not keep the process alive."""

    def run() -> None:
        with contextlib.suppress(OSError):  # no CPU of the list is ours, or the platform forbids it: keep what there is
            os.sched_setaffinity(0, range(os.cpu_count() or 1))
        work()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread
