"""The prefill side's worker half: chunks leave for the wire while the engine computes the next ones.

The engine's thread only ever puts jobs into queues and takes results out of memory. One thread opens transfers; each
transfer that has chunks gets a thread of its own, because staging waits, and no transfer may wait for another one of
the same engine: the room that one waits for may be held by the other. There are never more such threads than requests
whose blocks the engine keeps for them. A request's blocks are free when its transfer has read them, or never will.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
import time
from collections.abc import Iterable
from typing import Final

import attrs

from kvpd.client import SenderLink, Transfer
from kvpd.errors import ErrorCode, KvpdError, TransferCancelled, TransferError, TransferFailed
from kvpd.integrations.vllm.blocks import KvBlocks
from kvpd.integrations.vllm.links import CLOSED, LinkKeeper, spawn
from kvpd.integrations.vllm.metadata import ChunkSource, Failure, OpenJob, SaveJob, Step
from kvpd.integrations.vllm.stats import Tally

TOUCH_EVERY_S: Final = 5.0


@attrs.define
class _Chunk:
    """A chunk on its way out: its blocks, until it was staged or, before they are overwritten, was copied."""

    source: ChunkSource
    copy: memoryview | None = None
    is_staged: bool = False


@attrs.define
class _Batch:
    chunks: list[_Chunk]
    is_last: bool


class _Outgoing:
    """One request's transfer, shared by the engine's thread, the opener and its own thread."""

    def __init__(self, job: OpenJob) -> None:
        self.job = job
        self.transfer: Transfer | None = None
        self.batches: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()  # None: it was cancelled
        self.lock = threading.Lock()  # its chunks are read, or copied, by one thread at a time
        self.waiting: list[_Chunk] = []
        self.has_thread = False
        self.cancelled = False
        # The engine's thread's.
        self.was_fed = False  # the scheduler keeps its blocks until it is reported
        self.is_fed_up = False  # its last chunk was given
        self.is_finished = False  # the scheduler said so
        self.last_touch_s = time.monotonic()


class PrefillWorker:
    """See the module. `begin`, `preempt`, `submit` and `results` are the engine's thread's."""

    def __init__(self, link: LinkKeeper[SenderLink], tally: Tally, news: threading.Event | None = None) -> None:
        self._link = link
        self._tally = tally
        self._news = news or threading.Event()  # set when `results` or `take_failures` has something new to say
        self._blocks: KvBlocks | None = None
        self._outgoing: dict[str, _Outgoing] = {}
        self._unfed: dict[str, _Outgoing] = {}  # of those, the ones that have no chunk yet
        self._work: queue.SimpleQueue[tuple[str, _Outgoing] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # of the two below
        self._read: set[str] = set()  # requests whose blocks are read no more
        self._failures: dict[str, Failure] = {}
        self._thread = spawn("kvpd-prefill", self._run)

    def register(self, blocks: KvBlocks) -> None:
        """The engine's blocks, before the first step."""
        self._blocks = blocks

    # ------------------------------------------------------------------ the engine's thread

    def preempt(self, request_ids: Iterable[str]) -> None:
        """Before these requests' blocks are overwritten: copy what was not staged yet. Waits for one copy at most."""
        for request_id in request_ids:
            outgoing = self._outgoing.get(request_id)
            if outgoing is None:
                continue
            with outgoing.lock:
                for chunk in outgoing.waiting:
                    if chunk.copy is None and not chunk.is_staged:
                        chunk.copy = self._copy(chunk.source)

    def begin(self, step: Step) -> None:
        """Before the step runs: open the transfers of new requests, so that they are admitted while it computes."""
        for job in step.opens:
            outgoing = self._outgoing[job.request_id] = self._unfed[job.request_id] = _Outgoing(job)
            self._work.put(("open", outgoing))

    def submit(self, step: Step) -> None:
        """After the step has run: hand over what became complete."""
        for save in step.saves:
            self._feed(save)
        now = time.monotonic()
        for request_id in step.computing:
            computing = self._outgoing.get(request_id)
            if computing is not None and now - computing.last_touch_s > TOUCH_EVERY_S:
                computing.last_touch_s = now
                self._work.put(("touch", computing))

    def _feed(self, save: SaveJob) -> None:
        outgoing = self._outgoing[save.request_id]
        self._unfed.pop(save.request_id, None)
        outgoing.was_fed = True
        outgoing.is_fed_up = save.is_last
        outgoing.last_touch_s = time.monotonic()
        chunks = [_Chunk(source) for source in save.chunks]
        with outgoing.lock:
            outgoing.waiting = [chunk for chunk in outgoing.waiting if not chunk.is_staged] + chunks
        outgoing.batches.put(_Batch(chunks, save.is_last))
        self._work.put(("feed", outgoing))

    def results(self, finished: Iterable[str]) -> set[str]:
        """The finished requests, of this call or an earlier one, whose blocks are read no more."""
        for request_id in finished:
            outgoing = self._outgoing.get(request_id)
            if outgoing is None:
                continue
            outgoing.is_finished = True
            if not outgoing.is_fed_up:  # aborted: the rest of it will never come
                self._work.put(("cancel", outgoing))
            if not outgoing.was_fed:  # the scheduler kept nothing for it
                del self._outgoing[request_id]
                self._unfed.pop(request_id, None)
        with self._lock:
            sent = {request_id for request_id in self._read if self._outgoing[request_id].is_finished}
            self._read -= sent
            for request_id in sent:  # under the lock, or its thread could name it once more
                del self._outgoing[request_id]
        return sent

    def take_failures(self) -> dict[str, Failure]:
        """What ended without success since the last call, by request."""
        # A transfer without chunks has no thread that would be told of its refusal. One look into memory for each.
        for request_id, outgoing in list(self._unfed.items()):
            try:
                if outgoing.transfer is not None:
                    outgoing.transfer.check()
            except TransferError as exc:
                del self._unfed[request_id]
                self._failed(outgoing, exc)
                self._work.put(("cancel", outgoing))
        with self._lock:
            failures, self._failures = self._failures, {}
        return failures

    def close(self) -> None:
        """End every transfer. Their threads end by themselves."""
        self._link.close()
        for outgoing in self._outgoing.values():
            outgoing.cancelled = True
            outgoing.batches.put(None)
        self._work.put(None)

    # ------------------------------------------------------------------ the opener's thread

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            what, outgoing = item
            match what:
                case "open":
                    self._open(outgoing)
                case "feed":
                    if not outgoing.has_thread:
                        outgoing.has_thread = True
                        spawn(f"kvpd-send {outgoing.job.transfer_id}"[:64], functools.partial(self._send, outgoing))
                case "touch":
                    if outgoing.transfer is not None:
                        with contextlib.suppress(KvpdError):  # it has ended, and says so elsewhere
                            outgoing.transfer.touch()
                case _:
                    self._cancel(outgoing)

    def _open(self, outgoing: _Outgoing) -> None:
        job = outgoing.job
        if outgoing.cancelled:
            return
        try:
            outgoing.transfer = self._link.use(
                lambda link: link.open(
                    job.transfer_id, receiver=job.receiver, total_chunks=job.total_chunks, notify=job.notify
                )
            )
        except TransferError as exc:
            self._failed(outgoing, exc)
        except KvpdError as exc:
            self._failed(outgoing, TransferFailed(ErrorCode.PROTOCOL_ERROR, str(exc)))

    def _cancel(self, outgoing: _Outgoing) -> None:
        outgoing.cancelled = True
        transfer = outgoing.transfer
        if transfer is None:
            return
        transfer.cancel()  # wakes its thread
        if outgoing.has_thread:
            outgoing.batches.put(None)
        else:
            _leave(transfer)

    # ------------------------------------------------------------------ a transfer's own thread

    def _send(self, outgoing: _Outgoing) -> None:
        began = time.monotonic()
        try:
            if outgoing.transfer is None:
                return  # it could not be opened, which was said
            with outgoing.transfer as transfer:
                sent_bytes = self._stage_all(transfer, outgoing)
                self._is_read(outgoing)
        except TransferError as exc:
            self._failed(outgoing, exc)
        except KvpdError as exc:
            self._failed(outgoing, TransferFailed(ErrorCode.PROTOCOL_ERROR, str(exc)))
        else:
            self._tally.sent(sent_bytes, time.monotonic() - began)
        finally:
            self._is_read(outgoing)

    def _stage_all(self, transfer: Transfer, outgoing: _Outgoing) -> int:
        sent_bytes = 0
        while True:
            batch = outgoing.batches.get()
            if batch is None:
                raise TransferCancelled(ErrorCode.CANCELLED, CLOSED if outgoing.cancelled else "cancelled")
            sent_bytes += self._stage(transfer, outgoing, batch)
            if batch.is_last:
                return sent_bytes

    def _stage(self, transfer: Transfer, outgoing: _Outgoing, batch: _Batch) -> int:
        assert self._blocks is not None
        block_bytes = self._blocks.block_bytes
        keys = [chunk.source.key for chunk in batch.chunks]
        last_bytes = len(batch.chunks[-1].source.block_ids) * block_bytes
        sent_bytes = 0
        with transfer.stage(keys, last=batch.is_last, last_chunk_bytes=last_bytes) as slots:
            for slot, chunk in zip(slots, batch.chunks, strict=True):
                with outgoing.lock:
                    if slot is not None and chunk.copy is not None:
                        slot[:] = chunk.copy
                    elif slot is not None:
                        self._blocks.gather(chunk.source.block_ids, slot.view)
                    chunk.is_staged = True
                    chunk.copy = None
                if slot is not None:
                    sent_bytes += len(slot)
                else:
                    self._tally.deduplicated()
        return sent_bytes

    def _copy(self, source: ChunkSource) -> memoryview:
        assert self._blocks is not None
        copy = memoryview(bytearray(len(source.block_ids) * self._blocks.block_bytes))
        self._blocks.gather(source.block_ids, copy)
        return copy

    def _is_read(self, outgoing: _Outgoing) -> None:
        request_id = outgoing.job.request_id
        with outgoing.lock:
            outgoing.waiting = []
        with self._lock:
            if self._outgoing.get(request_id) is outgoing:
                self._read.add(request_id)
        self._news.set()

    def _failed(self, outgoing: _Outgoing, error: TransferError) -> None:
        if outgoing.cancelled:
            return  # as it was meant to
        self._tally.failed("send", error.code)
        with self._lock:
            self._failures[outgoing.job.request_id] = Failure.of(error)
        self._news.set()


def _leave(transfer: Transfer) -> None:
    """Leave a transfer that was never staged."""
    try:
        with transfer:
            raise TransferCancelled(ErrorCode.CANCELLED, "its request has ended")
    except TransferError:
        pass
