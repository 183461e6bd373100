"""A worker that plays the decode engines of a replayed trace: whatever becomes ready is claimed, read and released."""

from __future__ import annotations

import threading
import time
from typing import Final

from kvpd.bench.replay import MARK_BYTES, DecodePlan, Received
from kvpd.bench.workers import serve
from kvpd.client import ReceiverLink, connect_receiver

_CLAIM_S: Final = 30.0  # of what is ready already
_READ_S: Final = 120.0  # for all that is still being read when the last request has been sent


class DecodeEngine:
    """One decode engine: a thread that hears what is ready, and one for each request that is being read."""

    def __init__(self) -> None:
        self._plan: DecodePlan
        self._link: ReceiverLink
        self._hearing: threading.Thread
        self._received: dict[str, Received] = {}
        self._wrong: list[str] = []
        self._changed = threading.Condition()

    def start(self, plan: DecodePlan) -> None:
        """Attach, and begin to hear: nothing that becomes ready from now on is missed."""
        self._plan = plan
        self._link = connect_receiver(plan.receiver)
        self._hearing = threading.Thread(target=self._hear)
        self._hearing.start()

    def _hear(self) -> None:
        for event in self._link.events():
            if event.state == "ready":
                arguments = event.req_id, event.sender_id, time.monotonic()
                threading.Thread(target=self._read, args=arguments).start()

    def _read(self, req_id: str, sender_id: str, ready_at: float) -> None:
        with self._link.claim(req_id, _CLAIM_S, sender_id=sender_id) as chunks:
            is_right = all(bytes(chunk.view[:MARK_BYTES]) == chunk.key for chunk in chunks)
            received = Received(req_id, ready_at, len(chunks), sum(len(chunk.view) for chunk in chunks))
            time.sleep(self._plan.read_s)
        with self._changed:
            self._received[req_id] = received
            if not is_right:
                self._wrong.append(req_id)
            self._changed.notify_all()

    def finish(self, sent: list[str]) -> list[Received]:
        """Once these requests have been read, what was.

        Raises:
            ValueError: not all of them came, or some held other bytes than their own.
        """
        with self._changed:
            everything = self._changed.wait_for(lambda: self._received.keys() >= set(sent), _READ_S)
        self._link.close()
        self._hearing.join()
        if self._wrong or not everything:
            raise ValueError(f"not read: {set(sent) - self._received.keys()}; wrong bytes: {self._wrong}")
        return list(self._received.values())


if __name__ == "__main__":
    decode = DecodeEngine()
    serve({"start": decode.start, "finish": decode.finish})
