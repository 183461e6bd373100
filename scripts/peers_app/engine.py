"""The two engines of kvpd's own job, each a process: `python -m peers_app.engine prefill|decode SOCKET`.

With `copies` the prefill engine copies each chunk from its own memory into its slot and the decode engine copies it
out; without, both leave the bytes where they are: the slots hold the pattern already, and only the stamps are new.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

import attrs
import numpy as np

import kvpd.client
from kvpd.client import Chunk, ReceiverLink, SenderLink, Slot
from peers_app.commands import Commands, Words
from peers_app.memory import Buffer, Bytes, check_stamp, is_equal_between_stamps, pattern, stamp
from peers_app.pipeline import Job

_CLAIM_S = 60.0


@attrs.frozen
class KvpdJob:
    """A job, and how kvpd's engines do it; `first` numbers its first request, so that no two runs share a name."""

    job: Job
    copies: bool
    first: int
    receiver: str = ""

    def keys(self, number: int) -> list[bytes]:
        """Every chunk's own: nothing is deduplicated."""
        return [b"%d-%d" % (number, chunk) for chunk in range(self.job.chunks)]


class Prefill:
    """The prefill engine: as many threads as there are requests under way."""

    def __init__(self, link: SenderLink) -> None:
        self._link = link
        self._memory = Buffer(0x1000)

    def run(self, what: KvpdJob) -> Words:
        """Send all; when it began."""
        job = what.job
        self._memory = Buffer(job.depth * job.chunks * job.chunk_bytes)
        self._memory.fill()
        numbers = iter(range(what.first, what.first + job.requests))
        taking = threading.Lock()

        def take() -> int | None:
            with taking:
                return next(numbers, None)

        def work(worker: int) -> None:
            while (number := take()) is not None:
                self._send(what, worker, number)

        began = time.monotonic()
        _in_threads(job.depth, work)
        return {"began": began}

    def _send(self, what: KvpdJob, worker: int, number: int) -> None:
        job = what.job
        with (
            self._link.open(str(number), receiver=what.receiver, total_chunks=job.chunks, timeout=_CLAIM_S) as transfer,
            transfer.stage(what.keys(number), last=True) as slots,
        ):
            for position, slot in enumerate(slots):
                assert slot is not None, "nothing of this was sent before"
                self._fill(what, slot, worker * job.chunks + position, number)

    def _fill(self, what: KvpdJob, slot: Slot, local: int, number: int) -> None:
        if what.copies:
            chunk = self._memory.chunk(local, what.job.chunk_bytes)
            stamp(chunk, number)
            slot[:] = chunk
        else:
            stamp(slot.view, number)


class Decode:
    """The decode engine: claims in order of number, as many threads as there are requests under way."""

    def __init__(self, link: ReceiverLink) -> None:
        self._link = link
        self._equal = True

    def run(self, what: KvpdJob) -> Words:
        """Claim all; when the last one was read, and whether all held what they must."""
        job = what.job
        self._equal = True
        memory = Buffer(job.depth * job.chunks * job.chunk_bytes)
        expected = pattern(memory.length)
        ended = [0.0] * job.depth

        def work(worker: int) -> None:
            for number in range(what.first + worker, what.first + job.requests, job.depth):
                with self._link.claim(str(number), timeout=_CLAIM_S) as chunks:
                    for position, chunk in enumerate(chunks):
                        self._take(what, chunk, memory, worker * job.chunks + position, number)
                    ended[worker] = time.monotonic()

        _in_threads(job.depth, work)
        if what.copies:
            self._equal = all(
                self._is_some_chunk(memory.chunk(slot, job.chunk_bytes), expected, job)
                for slot in range(job.depth * job.chunks)
            )
        return {"ended": max(ended), "equal": self._equal}

    def _take(self, what: KvpdJob, chunk: Chunk, memory: Buffer, local: int, number: int) -> None:
        check_stamp(chunk.view, number)
        if what.copies:
            np.copyto(memory.chunk(local, what.job.chunk_bytes), np.frombuffer(chunk.view, np.uint8))

    @staticmethod
    def _is_some_chunk(chunk: Bytes, expected: Bytes, job: Job) -> bool:
        size = job.chunk_bytes
        return any(
            is_equal_between_stamps(chunk, expected[slot * size : (slot + 1) * size])
            for slot in range(job.depth * job.chunks)
        )


def _in_threads(count: int, work: Callable[[int], None]) -> None:
    """Run `work(n)` in so many threads; raises what one of them raised."""
    failures: list[BaseException] = []

    def guarded(worker: int) -> None:
        try:
            work(worker)
        except BaseException as exc:  # noqa: BLE001  raised again below, where it ends the process
            failures.append(exc)

    threads = [threading.Thread(target=guarded, args=(worker,)) for worker in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def main() -> None:
    """Attach, and do jobs until the conductor ends the conversation."""
    role, path = sys.argv[1:3]
    commands = Commands()
    engine: Prefill | Decode
    engine = (
        Prefill(kvpd.client.connect_sender(path)) if role == "prefill" else Decode(kvpd.client.connect_receiver(path))
    )
    commands.reply(attached=True)
    while True:
        words = commands.next()
        what = KvpdJob(Job(**words.pop("job")), **words)
        commands.reply(**engine.run(what))


if __name__ == "__main__":
    main()
