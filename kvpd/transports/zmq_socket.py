"""A ZMQ socket under trio: lossless, and nothing polls.

One pump task per socket waits on the socket's descriptor, which is an edge: libzmq signals it when something changed
and falls silent until it has been asked. Any call into libzmq may take that edge for itself, so every call here
re-checks the other direction. A message leaves libzmq only in the same step that hands it to its task, so
cancellation never loses one. Nothing blocks: a full queue, an absent peer and a closed socket are exceptions.
"""

from __future__ import annotations

import errno
import itertools
from collections.abc import Sequence
from typing import Final

import attrs
import outcome
import trio
import zmq

Context = zmq.Context[zmq.Socket[bytes]]

RELEASE_TIMEOUT_S: Final = 1.0
_LAST: Final = int(zmq.DONTWAIT)
_MORE: Final = int(zmq.DONTWAIT | zmq.SNDMORE)
_monitor_numbers = itertools.count()


@attrs.frozen
class SocketStatistics:
    """Counters of one socket."""

    wakeups: int  # of the pump
    received: int
    sent: int


class TrioSocket:
    """One ZMQ socket that belongs to one trio run. It is closed by `close` or `aclose`, and nothing else."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        socket.setsockopt(zmq.LINGER, 0)
        self._socket = socket
        self._descriptor = int(socket.getsockopt(zmq.FD))
        self._receiver: trio.lowlevel.Task | None = None
        self._closed = False
        self._wakeups = self._received = self._sent = 0
        # A system task: it must outlive the cancellation of its user, whose shielded clean-up still waits for replies,
        # and it ends when the socket is closed. If it fails, that is our own bug and the process should die.
        trio.lowlevel.spawn_system_task(self._pump, name="kvpd zmq pump")

    def statistics(self) -> SocketStatistics:
        """What it has done so far."""
        return SocketStatistics(wakeups=self._wakeups, received=self._received, sent=self._sent)

    # ------------------------------------------------------------------ sending

    def send_nowait(self, frames: Sequence[bytes]) -> None:
        """Give a message to libzmq.

        Raises:
            trio.WouldBlock: no queue has room for it.
            trio.BrokenResourceError: it is for a peer that is not connected.
            trio.ClosedResourceError: the socket was closed.
        """
        self._check_open()
        try:
            try:
                self._send(frames)
            except zmq.Again:
                # libzmq looks for freed room only now and then, to save time; asking for EVENTS makes it look.
                self._socket.getsockopt(zmq.EVENTS)
                self._send(frames)
        except zmq.Again:
            raise trio.WouldBlock from None
        except zmq.ContextTerminated:
            raise trio.ClosedResourceError from None
        except zmq.ZMQError as exc:
            if exc.errno != errno.EHOSTUNREACH:
                raise
            raise trio.BrokenResourceError("no such peer is connected") from None
        finally:
            self._hand_over()
        self._sent += 1

    def _send(self, frames: Sequence[bytes]) -> None:
        # Not send_multipart, which computes with pyzmq's flags, an enumeration, for each frame.
        for frame in frames[:-1]:
            self._socket.send(frame, _MORE)
        self._socket.send(frames[-1], _LAST)

    # ------------------------------------------------------------------ receiving

    def receive_nowait(self) -> list[bytes]:
        """The next message's frames.

        Raises:
            trio.WouldBlock: nothing is here, or another task waits for it.
            trio.ClosedResourceError: the socket was closed.
        """
        self._check_open()
        if self._receiver is not None:
            raise trio.WouldBlock
        return self._take()

    async def receive(self) -> list[bytes]:
        """The next message's frames. One task at a time; a cancelled call has taken nothing.

        Raises:
            trio.ClosedResourceError: the socket was closed.
            trio.BusyResourceError: another task is waiting already.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        self._check_open()
        if self._receiver is not None:
            raise trio.BusyResourceError("another task is receiving")
        try:
            frames = self._take()
        except trio.WouldBlock:
            return await self._park()
        await trio.lowlevel.cancel_shielded_checkpoint()
        return frames

    async def _park(self) -> list[bytes]:
        # No await between finding nothing and this: what arrives from now on wakes the pump.
        self._receiver = trio.lowlevel.current_task()

        def abort(_: object) -> trio.lowlevel.Abort:
            self._receiver = None
            return trio.lowlevel.Abort.SUCCEEDED

        frames: list[bytes] = await trio.lowlevel.wait_task_rescheduled(abort)
        return frames

    def _take(self) -> list[bytes]:
        try:
            frames = self._socket.recv_multipart(zmq.DONTWAIT)
        except zmq.Again:
            raise trio.WouldBlock from None
        except zmq.ContextTerminated:
            raise trio.ClosedResourceError from None
        self._received += 1
        return frames

    def _has_message(self) -> bool:
        """Whether there is one, or else the socket is past use, which taking it will tell."""
        try:
            return bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)
        except zmq.ContextTerminated:
            return True

    def _hand_over(self) -> None:
        """Give the task that waits its message, if there is one by now."""
        # Asking is cheaper than the exception for nothing; it looks for new messages, and takes the edge.
        if self._receiver is None or not self._has_message():
            return
        try:
            frames = self._take()
        except trio.WouldBlock:
            return
        except trio.ClosedResourceError as exc:
            self._wake(outcome.Error(exc))
        else:
            self._wake(outcome.Value(frames))

    def _wake(self, result: outcome.Outcome[list[bytes]]) -> None:
        assert self._receiver is not None
        receiver, self._receiver = self._receiver, None
        trio.lowlevel.reschedule(receiver, result)

    # ------------------------------------------------------------------ lifetime

    async def _pump(self) -> None:
        # Closed before its first turn, or since it woke up, it must not touch a descriptor that may be another's.
        while not self._closed:
            try:
                await trio.lowlevel.wait_readable(self._descriptor)
                self._check_open()
                self._wakeups += 1
                if self._receiver is None:
                    # Takes the edge: without this a descriptor that nobody reads from would spin the loop.
                    self._socket.getsockopt(zmq.EVENTS)
            except (trio.ClosedResourceError, zmq.ContextTerminated):
                # libzmq destroys nothing before the socket is closed, so this closes what its owner forgot.
                self.close()
                return
            self._hand_over()

    def _check_open(self) -> None:
        if self._closed:
            raise trio.ClosedResourceError

    def close(self, linger_ms: int = 0) -> None:
        """Close, without waiting: what is queued has `linger_ms` to leave, in the background. Idempotent."""
        if self._closed:
            return
        self._closed = True
        # Before libzmq closes the descriptor, so that the pump never waits on a number that has a new owner.
        trio.lowlevel.notify_closing(self._descriptor)
        if self._receiver is not None:
            self._wake(outcome.Error(trio.ClosedResourceError("the socket was closed")))
        self._socket.close(linger_ms)

    async def aclose_listener(self, linger_ms: int = 0) -> None:
        """Close a socket bound to TCP, and wait until its address is free again: milliseconds, a second at most.

        libzmq tells a monitor by a send that blocks for good if the monitor is not there to hear it, whichever of its
        threads that stops: so it is asked for the one event that is waited for, and a monitor that has not heard it is
        left open until the context ends.
        """
        if self._closed:
            return
        url = f"inproc://kvpd-monitor-{next(_monitor_numbers)}"
        self._socket.monitor(url, zmq.EVENT_CLOSED)
        raw = self._socket.context.socket(zmq.PAIR)
        raw.connect(url)
        monitor = TrioSocket(raw)
        self.close(linger_ms)
        with trio.move_on_after(RELEASE_TIMEOUT_S, shield=True):
            await monitor.receive()
            monitor.close()
