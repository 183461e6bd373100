"""The two engines of kvpd's own job, each a process: `python -m peers_app.engine prefill|decode SOCKET`.

With `copies` the prefill engine copies each chunk from its own memory into its slot and the decode engine copies it
out; without, both leave the bytes where they are: the slots hold the pattern already, and only the stamps are new.
Stamps are checked always, contents by `check` and `compare`, outside of what is timed.
"""

from __future__ import annotations

import mmap
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
    compare: bool = False  # chunks that are read in place, with what they must hold; never while the clock runs

    def keys(self, number: int) -> list[bytes]:
        """Every chunk's own: nothing is deduplicated."""
        return [b"%d-%d" % (number, chunk) for chunk in range(self.job.chunks)]

    def numbers(self, worker: int) -> range:
        """The requests that a thread of either engine takes, one after another."""
        return range(self.first + worker, self.first + self.job.requests, self.job.depth)


class Engine:
    """What both have: memory of their own for the requests under way, made once for one size."""

    def __init__(self) -> None:
        self.memory = Buffer(mmap.PAGESIZE)
        self._chunk_bytes = mmap.PAGESIZE

    def prepare(self, job: Job) -> None:
        """See to the memory. A run of the same size that follows finds it there, and touched."""
        self._chunk_bytes = job.chunk_bytes
        length = job.depth * job.chunks * job.chunk_bytes
        if self.memory.length != length:
            self.memory = Buffer(length)
            self.memory.fill()


class Prefill(Engine):
    """The prefill engine: as many threads as there are requests under way."""

    def __init__(self, link: SenderLink) -> None:
        super().__init__()
        self._link = link

    def run(self, what: KvpdJob) -> Words:
        """Send all; when it began."""
        self.prepare(what.job)

        def work(worker: int) -> None:
            for number in what.numbers(worker):
                self._send(what, worker, number)

        began = time.monotonic()
        _in_threads(what.job.depth, work)
        return {"began": began}

    def _send(self, what: KvpdJob, worker: int, number: int) -> None:
        chunks = what.job.chunks
        with (
            self._link.open(str(number), receiver=what.receiver, total_chunks=chunks, timeout=_CLAIM_S) as transfer,
            transfer.stage(what.keys(number), last=True) as slots,
        ):
            for position, slot in enumerate(slots):
                assert slot is not None, "nothing of this was sent before"
                self._fill(what, slot, worker * chunks + position, number)

    def _fill(self, what: KvpdJob, slot: Slot, local: int, number: int) -> None:
        if what.copies:
            chunk = self.memory.chunk(local, what.job.chunk_bytes)
            stamp(chunk, number)
            slot[:] = chunk
        else:
            stamp(slot.view, number)


class Decode(Engine):
    """The decode engine: as many threads as there are requests under way, each for the same ones as prefill's."""

    def __init__(self, link: ReceiverLink) -> None:
        super().__init__()
        self._link = link

    def run(self, what: KvpdJob) -> Words:
        """Claim all; when the last one was read, and whether what was compared was right."""
        self.prepare(what.job)
        ended = [0.0] * what.job.depth
        wrong: list[int] = []

        def work(worker: int) -> None:
            for number in what.numbers(worker):
                with self._link.claim(str(number), timeout=_CLAIM_S) as chunks:
                    for position, chunk in enumerate(chunks):
                        self._take(what, chunk, worker * what.job.chunks + position, number)
                    ended[worker] = time.monotonic()
                    if what.compare:
                        wrong.extend(number for chunk in chunks if not self._is_of_the_pattern(chunk.view, what.job))

        _in_threads(what.job.depth, work)
        return {"ended": max(ended), "equal": not wrong}

    def _take(self, what: KvpdJob, chunk: Chunk, local: int, number: int) -> None:
        check_stamp(chunk.view, number)
        if what.copies:
            np.copyto(self.memory.chunk(local, what.job.chunk_bytes), np.frombuffer(chunk.view, np.uint8))

    def check(self) -> Words:
        """Whether its own memory holds what the prefill engine has in the same places; it holds nothing after."""
        equal = all(
            is_equal_between_stamps(self.memory.chunk(slot, self._chunk_bytes), self._expected(slot))
            for slot in range(self.memory.length // self._chunk_bytes)
        )
        self.memory.poison()
        return {"equal": equal}

    def _expected(self, slot: int) -> Bytes:
        return pattern(self.memory.length)[slot * self._chunk_bytes : (slot + 1) * self._chunk_bytes]

    def _is_of_the_pattern(self, chunk: memoryview, job: Job) -> bool:
        return any(is_equal_between_stamps(chunk, self._expected(slot)) for slot in range(job.depth * job.chunks))


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
        if words.pop("do") == "check":
            assert isinstance(engine, Decode)
            commands.reply(**engine.check())
        else:
            commands.reply(**engine.run(KvpdJob(Job(**words.pop("job")), **words)))


if __name__ == "__main__":
    main()
