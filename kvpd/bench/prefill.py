"""A worker: a prefill engine that sends requests as fast as a number of open ones allows.

One thread opens and fills; another waits for the ends, in the order of opening. A request counts as open until it has
ended here and the decode engine has given one back, so that neither engine runs away from the other.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import deque

import attrs

from kvpd.bench.payload import Load, Payload, put_stamps
from kvpd.bench.workers import serve
from kvpd.client import SenderLink, Staging, Transfer, connect_sender


@attrs.frozen(kw_only=True)
class AttachPrefill:
    """Whom to attach to, where requests go, and a FIFO that gets a byte for each that the decode engine gave back."""

    socket: str
    receiver: str
    released: str


@attrs.frozen(kw_only=True)
class Sent:
    """When it happened, in seconds of CLOCK_MONOTONIC, which all processes share."""

    began_at: float
    opened_at: tuple[float, ...]  # by request
    ended_at: float


class PrefillEngine:
    """One link, one load at a time."""

    _link: SenderLink
    _payload: Payload
    _receiver: str

    def attach(self, where: AttachPrefill) -> None:
        """Connect."""
        self._link = connect_sender(where.socket)
        self._payload = Payload(self._link.chunk_bytes)
        self._receiver = where.receiver
        # Not blocking until the decode engine has opened it too: only one of the two is attached at a time.
        self._released = os.open(where.released, os.O_RDONLY | os.O_NONBLOCK)
        os.set_blocking(self._released, True)

    def close(self) -> None:
        """Leave the daemon."""
        self._link.close()
        os.close(self._released)

    def run(self, load: Load) -> Sent:
        """Send it all, and wait until the last has ended."""
        began_at = time.monotonic()
        opened_at: list[float] = []
        room = threading.Semaphore(load.depth)
        ending: queue.SimpleQueue[Transfer | None] = queue.SimpleQueue()
        ender = threading.Thread(target=self._end_all, args=(ending, room), daemon=True)
        ender.start()
        staged: deque[tuple[int, Transfer, Staging]] = deque()
        while len(opened_at) < load.requests or staged:
            # Ask for more while that is allowed, and fill what was asked for first when it is not.
            if len(opened_at) < load.requests and room.acquire(blocking=not staged):
                number = len(opened_at)
                opened_at.append(time.monotonic())
                transfer = self._link.open(load.req_id(number), receiver=self._receiver, total_chunks=load.chunks)
                staged.append((number, transfer.__enter__(), transfer.stage(load.keys(number))))
            else:
                number, transfer, staging = staged.popleft()
                self._fill(load, number, staging)
                ending.put(transfer)
        ending.put(None)
        ender.join()
        return Sent(began_at=began_at, opened_at=tuple(opened_at), ended_at=time.monotonic())

    def _fill(self, load: Load, number: int, staging: Staging) -> None:
        with staging as slots:
            for chunk, slot in enumerate(slots):
                assert slot is not None, "no key comes twice"
                if load.mode != "in_place":
                    slot[:] = self._payload.chunk(number, chunk)
                put_stamps(slot.view, load.stamp(number, chunk))

    def _end_all(self, ending: queue.SimpleQueue[Transfer | None], room: threading.Semaphore) -> None:
        while (transfer := ending.get()) is not None:
            transfer.__exit__(None, None, None)
            if not os.read(self._released, 1):
                raise EOFError("the decode engine has gone")
            room.release()


if __name__ == "__main__":
    engine = PrefillEngine()
    serve({"attach": engine.attach, "run": engine.run})
