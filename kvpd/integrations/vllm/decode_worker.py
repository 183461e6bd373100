"""The decode side's worker half: what has arrived is claimed, checked, scattered into the engine's blocks, released.

The engine's thread hands over jobs and takes results out of memory; each load has a thread of its own. Every load is
reported as received, whatever became of it, because the engine keeps its blocks until then; one that failed is reported
as failed as well. Chunks whose keys are not exactly the expected ones are never written into a block.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Final

from kvpd.client import Claim, ReceiverLink
from kvpd.errors import ErrorCode, KvpdError, TransferError, TransferFailed
from kvpd.integrations.vllm.blocks import KvBlocks
from kvpd.integrations.vllm.keys import HASH_BYTES, Chunking
from kvpd.integrations.vllm.layout import Layout
from kvpd.integrations.vllm.links import LinkKeeper, spawn
from kvpd.integrations.vllm.log import engine_log
from kvpd.integrations.vllm.metadata import LoadJob
from kvpd.integrations.vllm.stats import Tally

CLAIM_TIMEOUT_S: Final = 1.0  # it was complete: either it still is, or it has gone meanwhile and will not come


class DecodeWorker:
    """See the module. `submit` and `results` are the engine's thread's.

    An engine that only prefills has one without a link: it loads nothing, and only fails.
    """

    def __init__(
        self,
        link: LinkKeeper[ReceiverLink] | None,
        layout: Layout,
        tally: Tally,
        news: threading.Event | None = None,
    ) -> None:
        self._link = link
        self._layout = layout
        self._chunking = Chunking(layout.block_tokens, layout.chunk_tokens)
        self._tally = tally
        self._news = news or threading.Event()  # set when `results` has something new to say
        self._blocks: KvBlocks | None = None
        self._lock = threading.Lock()  # of the two below
        self._received: set[str] = set()
        self._failed: set[str] = set()

    def register(self, blocks: KvBlocks) -> None:
        """The engine's blocks, before the first step."""
        self._blocks = blocks

    def submit(self, jobs: Iterable[LoadJob]) -> None:
        """Begin to load; what is known to have failed already, fails at once."""
        for job in jobs:
            if job.failure is not None:
                self._note_failure(job, job.failure.exception())
                with self._lock:
                    self._received.add(job.request_id)
                    self._failed.add(job.request_id)
                continue
            spawn(f"kvpd-load {job.transfer_id}"[:64], functools.partial(self._run, job))

    def results(self) -> tuple[set[str], set[str]]:
        """Requests whose load has ended since the last call, and those of them whose load failed."""
        with self._lock:
            received, self._received = self._received, set()
            failed, self._failed = self._failed, set()
        return received, failed

    def close(self) -> None:
        """Make no more claims; waiting ones end."""
        if self._link is not None:
            self._link.close()

    # ------------------------------------------------------------------ a load's own thread

    def _run(self, job: LoadJob) -> None:
        failed = True
        try:
            self._load(job)
            failed = False
        except KvpdError as exc:
            self._note_failure(job, exc)
        finally:
            with self._lock:
                self._received.add(job.request_id)
                if failed:
                    self._failed.add(job.request_id)
            self._news.set()

    def _note_failure(self, job: LoadJob, error: KvpdError) -> None:
        self._tally.failed("load", error.code if isinstance(error, TransferError) else ErrorCode.PROTOCOL_ERROR)
        engine_log.error("load_failed", request=job.request_id, transfer=job.transfer_id, detail=str(error))

    def _load(self, job: LoadJob) -> None:
        assert self._link is not None
        began = time.monotonic()
        with self._link.use(lambda link: link.claim(job.transfer_id, CLAIM_TIMEOUT_S)) as chunks:
            refusal = refused_keys(self._layout, [chunk.key for chunk in chunks], job.keys)
            if refusal is not None:
                raise TransferFailed(ErrorCode.LAYOUT_MISMATCH, refusal)
            length = self._scatter(job, chunks)
        self._tally.received(length, time.monotonic() - began)

    def _scatter(self, job: LoadJob, chunks: Claim) -> int:
        assert self._blocks is not None
        length = 0
        per_chunk = self._chunking.blocks_per_chunk
        end = job.first_block + len(job.block_ids)
        for number, chunk in enumerate(chunks):
            count, rest = divmod(len(chunk.view), self._blocks.block_bytes)
            start = number * per_chunk
            first, last = max(start, job.first_block), min(start + count, end)
            if rest or not count or (start + count < end and count != per_chunk):
                detail = f"chunk {number} of {len(chunks)} has {len(chunk.view)} bytes"
                raise TransferFailed(ErrorCode.LAYOUT_MISMATCH, detail)
            if first < last:
                ids = job.block_ids[first - job.first_block : last - job.first_block]
                self._blocks.scatter(chunk.view, count, first - start, ids)
                length += len(ids) * self._blocks.block_bytes
        return length


def refused_keys(layout: Layout, keys: Sequence[bytes], expected: Sequence[bytes]) -> str | None:
    """Why these chunks are not what was expected; None: they are."""
    if list(keys) == list(expected):
        return None
    for key in keys:
        difference = layout.digest_difference(key[:-HASH_BYTES])
        if difference is not None:
            return difference
    if len(keys) != len(expected):
        return f"{len(keys)} chunks came, and this prompt has {len(expected)}"
    number = next(n for n, (key, wanted) in enumerate(zip(keys, expected, strict=True)) if key != wanted)
    return f"chunk {number} of {len(keys)} was computed from other tokens, or with another adapter, salt or image"
