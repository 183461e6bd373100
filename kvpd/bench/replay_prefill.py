"""A worker that plays the prefill engines of a replayed trace: a thread for each request that is on its way.

A request is opened when it comes, and its batches are staged as they would have been computed. Every chunk begins with
its key.
"""

from __future__ import annotations

import threading
import time
from typing import Final

from kvpd.bench.replay import PlannedRequest, PrefillPlan, Sent
from kvpd.bench.workers import serve
from kvpd.client import SenderLink, Slot, connect_sender
from kvpd.errors import TransferError

_STACK_BYTES: Final = 256 << 10  # thousands of them may wait at once


class _Prefill:
    """All requests of one plan."""

    def __init__(self, plan: PrefillPlan, link: SenderLink) -> None:
        self._plan = plan
        self._link = link
        self.sent: list[Sent] = []
        self._pattern = bytearray(link.chunk_bytes)
        self._pattern_lock = threading.Lock()

    def run(self) -> None:
        """Until every request has ended."""
        threads = []
        for request in self._plan.requests:
            _sleep_until(self._plan.begin_at + request.at_s)
            thread = threading.Thread(target=self._send, args=(request,), name=request.req_id)
            thread.start()
            threads.append(thread)
        for thread in threads:
            thread.join()

    def _send(self, request: PlannedRequest) -> None:
        opened_at = time.monotonic()
        code: str | None = None
        try:
            self._move(request)
        except TransferError as exc:
            code = exc.code.value
        self.sent.append(Sent(request.req_id, opened_at, code))

    def _move(self, request: PlannedRequest) -> None:
        plan, keys = self._plan, request.keys
        with self._link.open(request.req_id, receiver=plan.receiver, total_chunks=len(keys)) as transfer:
            computed_at = time.monotonic()
            for first in range(0, len(keys), plan.batch_chunks):
                batch = keys[first : first + plan.batch_chunks]
                computed_at += len(batch) * plan.chunk_s
                _sleep_until(computed_at)
                is_last = first + len(batch) == len(keys)
                length = request.last_chunk_bytes if is_last else None
                with transfer.stage(batch, last=is_last, last_chunk_bytes=length) as slots:
                    for slot, key in zip(slots, batch, strict=True):
                        if slot is not None:
                            self._fill(slot, key)

    def _fill(self, slot: Slot, key: bytes) -> None:
        with self._pattern_lock:
            self._pattern[: len(key)] = key
            with memoryview(self._pattern) as whole:
                slot[:] = whole[: len(slot)]


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))


def _replay(plan: PrefillPlan) -> list[Sent]:
    threading.stack_size(_STACK_BYTES)
    with connect_sender(plan.sender) as link:
        prefill = _Prefill(plan, link)
        prefill.run()
    return prefill.sent


if __name__ == "__main__":
    serve({"replay": _replay})
