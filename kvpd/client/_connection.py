"""One attached connection, shared by all of an engine's threads.

Frames leave whole and in order, whoever sends them. One reader thread completes calls; it alone changes what a call
waits for, always under `lock`. However the connection ends, every waiting call learns of it. It ends when it has been
closed and the last transfer and claim has been left, or when the daemon is lost.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import weakref
from collections.abc import Callable
from typing import Final

import msgspec

from kvpd.client._attach import Attachment
from kvpd.client._places import Places
from kvpd.errors import ErrorCode, LocalProtocolError, RemoteProtocolError, TransferError
from kvpd.link import DaemonFrame, Frame, LinkError, encode_frame

JOIN_TIMEOUT_S: Final = 5.0
_RECEIVE_BYTES = 65536


class Connection:
    """See the module. `handle` is called in the reader thread, without the lock, for each frame."""

    def __init__(self, attachment: Attachment) -> None:
        self.lock = threading.Lock()
        self.info = attachment.attached
        self.region = attachment.region
        self.rank = attachment.rank
        self.slots_total = len(attachment.region) // attachment.attached.chunk_bytes
        self.path = attachment.path
        self.places = Places(attachment.rank, attachment.attached.chunk_bytes)
        self._attachment = attachment
        self._socket = attachment.socket
        self._sending = threading.Lock()
        self._pid = os.getpid()
        self._newest_number = 0
        self._lost: LinkError | None = None
        self._closing = False
        self._conditions: weakref.WeakSet[threading.Condition] = weakref.WeakSet()
        self._open: dict[int, object] = {}  # transfers and claims that have not been left, by number
        self._thread: threading.Thread | None = None

    # ------------------------------------------------------------------ calls

    @property
    def is_ours(self) -> bool:
        """Whether this is the process that attached. A forked child shares the socket, and must not use it."""
        return os.getpid() == self._pid

    @property
    def is_closing(self) -> bool:
        """Whether `close` was called."""
        return self._closing

    def check_process(self) -> None:
        """Whether a call may be made from here at all.

        Raises:
            LocalProtocolError: this is a forked child of the process that attached.
        """
        if not self.is_ours:
            raise LocalProtocolError(
                f"this link to {self.path} belongs to process {self._pid}; a forked process must connect by itself"
            )

    def check(self) -> None:
        """Whether a new call may be made.

        Raises:
            LocalProtocolError: the link was closed, or made by another process.
            TransferFailed: the daemon is lost.
        """
        self.check_process()
        if self._closing:
            raise LocalProtocolError(f"this link to {self.path} was closed")
        if self._lost is not None:
            raise self._lost.exception()

    def number(self) -> int:
        """A new number, for a transfer, a claim or a call."""
        with self.lock:
            self._newest_number += 1
            return self._newest_number

    def find(self, number: int) -> object | None:
        """With the lock held: the open transfer or claim of this number; None: it was left, and the frame is late.

        Raises:
            RemoteProtocolError: the number was never given.
        """
        if number > self._newest_number:
            raise RemoteProtocolError(f"a frame about number {number}, which was never given")
        return self._open.get(number)

    def send(self, frame: Frame, sent: list[int] | None = None) -> None:
        """Send a frame. `sent` collects the bytes that left, for who must know it when a call was interrupted.

        Raises:
            LocalProtocolError: it cannot be expressed, the link was closed, or made by another process.
            TransferFailed: the daemon is lost.
        """
        self.check()
        try:
            data = encode_frame(frame)
        except (ValueError, TypeError, OverflowError, msgspec.MsgspecError) as exc:
            raise LocalProtocolError(f"this {type(frame).__name__} cannot be sent: {exc}") from exc
        self._write(data, [] if sent is None else sent)

    def send_last(self, frame: Frame) -> None:
        """Send a frame that ends something: also while closing, and without a word where there is nobody to tell."""
        if not self.is_ours or self._lost is not None:
            return
        with contextlib.suppress(TransferError):  # whom it was for is gone, and holds nothing of ours any more
            self._write(encode_frame(frame), [])

    def _write(self, data: bytes, sent: list[int]) -> None:
        view = memoryview(data)
        with self._sending:
            try:
                while (done := sum(sent)) < len(view):
                    # One call from the interpreter's view, so that an interrupt (Ctrl-C) finds the count and the bytes
                    # that left in agreement.
                    sent.extend(map(self._socket.send, (view[done:],)))
            except OSError as exc:
                self.end(LinkError(ErrorCode.PEER_LOST, f"the daemon at {self.path} takes no more frames: {exc}"))
                assert self._lost is not None
                raise self._lost.exception() from exc
            except BaseException:
                if 0 < sum(sent) < len(view):  # nothing behind half a frame could be understood
                    self.end(LinkError(ErrorCode.CANCELLED, f"an interrupt cut a frame to the daemon at {self.path}"))
                raise

    # ------------------------------------------------------------------ waiting

    def condition(self) -> threading.Condition:
        """A condition under the lock, notified too when the connection ends."""
        condition = threading.Condition(self.lock)
        with self.lock:
            self._conditions.add(condition)
        return condition

    def wait(self, condition: threading.Condition, ready: Callable[[], bool], timeout_s: float | None) -> bool:
        """With the lock held: wait until `ready()`; False when `timeout_s` seconds (None: no limit) have passed.

        Raises:
            TransferError: the connection ended, and it is not ready.
        """
        limit = None if timeout_s is None else min(timeout_s, threading.TIMEOUT_MAX)
        condition.wait_for(lambda: ready() or self._lost is not None or self._closing, limit)
        if ready():
            return True
        if self._lost is not None:
            raise self._lost.exception()
        if self._closing:
            raise LinkError(ErrorCode.CANCELLED, f"this link to {self.path} was closed").exception()
        return False

    # ------------------------------------------------------------------ reading

    def start(self, handle: Callable[[DaemonFrame], None]) -> None:
        """Start the reader thread."""
        self._thread = threading.Thread(target=self._read, args=(handle,), name=f"kvpd link {self.path}", daemon=True)
        self._thread.start()

    def _read(self, handle: Callable[[DaemonFrame], None]) -> None:
        # What is left if the loop below ends by a bug of ours: whoever waits must not wait for ever.
        outcome = LinkError(ErrorCode.TRANSPORT_FAILED, f"the reader of the link to {self.path} has failed")
        try:
            for frame in self._attachment.early:
                handle(frame)
            while data := self._socket.recv(_RECEIVE_BYTES):
                for frame in self._attachment.reader.feed(data):
                    handle(frame)
            outcome = LinkError(ErrorCode.PEER_LOST, f"the daemon at {self.path} closed the connection")
        except OSError as exc:
            outcome = LinkError(ErrorCode.PEER_LOST, f"the connection to the daemon at {self.path} broke: {exc}")
        except RemoteProtocolError as exc:
            outcome = LinkError(ErrorCode.PROTOCOL_ERROR, f"the daemon at {self.path} makes no sense: {exc}"[:4096])
        except TransferError as exc:
            outcome = LinkError.of(exc)
        finally:
            self.end(outcome)

    # ------------------------------------------------------------------ the end

    def end(self, reason: LinkError) -> None:
        """The connection is over; the first reason stands."""
        with self.lock:
            if self._lost is None:
                self._lost = reason
            self._notify_all()
        with contextlib.suppress(OSError):  # it was down already
            # Not close: another thread may be using the descriptor. A forked child's copy does not keep it up either.
            self._socket.shutdown(socket.SHUT_RDWR)
        self.places.all_gone()

    def enter(self, number: int, what: object) -> None:
        """A transfer or a claim is open from now on."""
        with self.lock:
            self._open[number] = what

    def leave(self, number: int) -> None:
        """It was left, and its last frame was sent."""
        with self.lock:
            self._open.pop(number, None)
        self.places.left(number)
        self._finish()

    def close(self) -> None:
        """No new calls; waiting ones end. The connection itself lasts until every transfer and claim has been left.

        In a forked child only the child's copies are closed.
        """
        if not self.is_ours:
            self._socket.close()
            return
        with self.lock:
            self._closing = True
            self._notify_all()
        self._finish()

    def _finish(self) -> None:
        with self.lock:
            if not self._closing or self._open:
                return
        self.end(LinkError(ErrorCode.CANCELLED, f"this link to {self.path} was closed"))
        if self._thread is not None:
            self._thread.join(JOIN_TIMEOUT_S)
        with self._sending:
            self._socket.close()
        with contextlib.suppress(BufferError):  # an array of the engine's still refers to it: it goes with that array
            self.region.close()

    def _notify_all(self) -> None:
        for condition in self._conditions:
            condition.notify_all()
