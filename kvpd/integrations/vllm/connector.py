"""`KvpdConnector`: vLLM's interface on one side, the scheduler's and the workers' halves on the other.

It is thin on purpose: it translates vLLM's words and knows its types; what happens is decided in `scheduler`, done in
`prefill_worker` and `decode_worker`, and everything about transfers lives in the daemons.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar, cast

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

import kvpd.client
from kvpd.client import Link, ReceiverLink, SenderLink
from kvpd.errors import LocalProtocolError, TransferFailed
from kvpd.integrations.vllm.board import Board
from kvpd.integrations.vllm.decode_worker import DecodeWorker
from kvpd.integrations.vllm.engine import blocks_of, layout_of, rank_of_worker, refuse_unsupported
from kvpd.integrations.vllm.layout import Layout
from kvpd.integrations.vllm.links import LinkKeeper
from kvpd.integrations.vllm.log import engine_log
from kvpd.integrations.vllm.metadata import Failure, Step
from kvpd.integrations.vllm.prefill_worker import PrefillWorker
from kvpd.integrations.vllm.prometheus import KvpdPromMetrics, KvpdStats
from kvpd.integrations.vllm.scheduler import Scheduler
from kvpd.integrations.vllm.settings import Settings
from kvpd.integrations.vllm.stats import Tally
from kvpd.link import GROUP_CHARS_MAX

L = TypeVar("L", bound=Link)
IDLE_PAUSE_S: Final = 0.001  # at most, of a step that computes nothing; a result ends it at once


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """Scheduler to workers."""

    step: Step = field(default_factory=Step)


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Workers to scheduler."""

    failures: dict[str, Failure] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        """See vLLM: one for all workers."""
        return WorkerReport({**self.failures, **cast("WorkerReport", other).failures})


class KvpdConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """See docs/VLLM.md. One instance in the scheduler, one in each worker."""

    _cache_hit_source = CacheHitSource.P2P

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = self._kv_transfer_config
        is_producer, is_consumer = transfer.is_kv_producer, transfer.is_kv_consumer
        settings = Settings.read(transfer.kv_connector_extra_config, is_producer=is_producer, is_consumer=is_consumer)
        refuse_unsupported(vllm_config, kv_cache_config)
        self._layout = layout_of(vllm_config, kv_cache_config, settings)
        self._scheduler: Scheduler | None = None
        self._prefill: PrefillWorker | None = None
        self._decode: DecodeWorker | None = None
        self._board: Board | None = None
        self._tally = Tally()
        self._news = threading.Event()
        self._keepers: list[LinkKeeper[Any]] = []
        if role == KVConnectorRole.SCHEDULER:
            engine_log.info("started", layout=self._layout.text)
            self._board = Board(self._receiver_link(settings)) if is_consumer else None
            self._scheduler = Scheduler(self._layout, settings.load_timeout_s, self._board, is_producer=is_producer)
            return
        rank = rank_of_worker()
        if is_producer:
            self._prefill = PrefillWorker(self._sender_link(settings, rank), self._tally, self._news)
        receiver = self._receiver_link(settings, rank) if is_consumer else None
        self._decode = DecodeWorker(receiver, self._layout, self._tally, self._news)

    def _sender_link(self, settings: Settings, rank: int) -> LinkKeeper[SenderLink]:
        path, timeout = settings.sender_socket, settings.connect_timeout_s
        # vLLM draws an id for each engine, and hands it to all of its workers.
        group = str(self._kv_transfer_config.engine_id)[-GROUP_CHARS_MAX:]
        return self._keeper(lambda: kvpd.client.connect_sender(path, rank, group=group, timeout=timeout))

    def _receiver_link(self, settings: Settings, rank: int = 0) -> LinkKeeper[ReceiverLink]:
        path, timeout = settings.receiver_socket, settings.connect_timeout_s
        return self._keeper(lambda: kvpd.client.connect_receiver(path, rank, timeout=timeout))

    def _keeper(self, connect: Callable[[], L]) -> LinkKeeper[L]:
        keeper = LinkKeeper(connect, lambda link: check_daemon(link, self._layout))
        self._keepers.append(keeper)
        return keeper

    # ------------------------------------------------------------------ the scheduler's side

    def on_new_request(self, request: Any) -> None:
        """See vLLM."""
        assert self._scheduler is not None
        self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """See vLLM."""
        assert self._scheduler is not None
        return self._scheduler.matched_tokens(request.request_id, num_computed_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """See vLLM: a transfer brings the request's own blocks."""
        return tuple(range(len(self._kv_cache_config.kv_cache_groups)))

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """See vLLM."""
        assert self._scheduler is not None
        self._scheduler.allocated(request.request_id, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        """See vLLM."""
        assert self._scheduler is not None
        return StepMetadata(
            self._scheduler.build(
                scheduler_output.scheduled_new_reqs,
                scheduler_output.scheduled_cached_reqs,
                scheduler_output.num_scheduled_tokens,
                scheduler_output.preempted_req_ids or (),
            )
        )

    def update_connector_output(self, connector_output: Any) -> None:
        """See vLLM."""
        assert self._scheduler is not None
        self._scheduler.received(connector_output.finished_recving or ())
        report = connector_output.kv_connector_worker_meta
        if report is not None:
            self._scheduler.failed(report.failures)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See vLLM."""
        assert self._scheduler is not None
        return self._scheduler.finished(request.request_id)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """See vLLM."""
        return self.request_finished_all_groups(request, (block_ids,))

    # ------------------------------------------------------------------ the worker's side

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """See vLLM. Also the moment to find out that a daemon does not fit: the engine must not start then."""
        blocks = blocks_of(kv_caches.values(), self._kv_cache_config.num_blocks)
        if blocks.block_bytes != self._layout.block_bytes:
            raise ValueError(
                f"a block has {blocks.block_bytes} bytes, and vLLM had announced {self._layout.block_bytes}"
            )
        for half in (self._prefill, self._decode):
            if half is not None:
                half.register(blocks)
        for keeper in self._keepers:
            try:
                keeper.link()
            except TransferFailed as exc:
                if isinstance(exc.__cause__, LocalProtocolError):
                    raise ValueError(exc.detail) from exc
                engine_log.warning("daemon_not_reached", detail=exc.detail)

    def bind_connector_metadata(self, connector_metadata: StepMetadata) -> None:
        """See vLLM: called before the step runs, whether or not it computes anything."""
        super().bind_connector_metadata(connector_metadata)
        if self._prefill is not None:
            self._prefill.begin(connector_metadata.step)

    def handle_preemptions(self, kv_connector_metadata: StepMetadata) -> None:
        """See vLLM."""
        if self._prefill is not None:
            self._prefill.preempt(kv_connector_metadata.step.preempted)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """See vLLM."""
        if self._decode is not None:
            self._decode.submit(self._step().loads)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """See vLLM: loads are over before their request is computed."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """See vLLM: chunks are all layers, so there is nothing to begin before the step has ended."""

    def wait_for_save(self) -> None:
        """See vLLM."""
        if self._prefill is not None:
            self._prefill.submit(self._step())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """See vLLM."""
        if self._step().is_idle:
            # vLLM steps as fast as it can while requests wait for their KV, or finished ones for their last put: that
            # takes a whole CPU, and the engine that they wait for may be computing on it.
            self._news.wait(IDLE_PAUSE_S)
        self._news.clear()
        sent = self._prefill.results(finished_req_ids) if self._prefill is not None else set()
        received, failed = self._decode.results() if self._decode is not None else (set(), set())
        return KVConnectorTransferResults(sent, received, failed)

    def build_connector_worker_meta(self) -> WorkerReport | None:
        """See vLLM."""
        failures = self._prefill.take_failures() if self._prefill is not None else {}
        return WorkerReport(failures) if failures else None

    def shutdown(self) -> None:
        """See vLLM."""
        for half in (self._prefill, self._decode, self._board):
            if half is not None:
                half.close()

    def _step(self) -> Step:
        return cast("StepMetadata", self._get_connector_metadata()).step

    # ------------------------------------------------------------------ statistics

    def get_kv_connector_stats(self) -> KvpdStats | None:
        """See vLLM."""
        data = self._tally.take()
        return None if data is None else KvpdStats(data)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvpdStats:
        """See vLLM."""
        return KvpdStats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KvpdPromMetrics:
        """See vLLM."""
        return KvpdPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def check_daemon(link: Link, layout: Layout) -> None:
    """Whether a daemon's chunks are this engine's.

    Raises:
        LocalProtocolError: they are not.
    """
    if link.layout and link.layout != layout.text:
        raise LocalProtocolError(
            f"kvpd's daemon {link.name} is configured with layout = {link.layout!r}, and this engine's is "
            f"{layout.text!r}"
        )
    if link.ranks != layout.ranks:
        raise LocalProtocolError(
            f"kvpd's daemon {link.name} has ranks = {link.ranks}, and this engine's tensor_parallel_size is "
            f"{layout.ranks}. Set ranks = {layout.ranks} for both daemons"
        )
    needed = layout.chunk_tokens // layout.block_tokens * layout.block_bytes
    if link.chunk_bytes != needed:
        raise LocalProtocolError(
            f"kvpd's daemon {link.name} has chunk_bytes = {link.chunk_bytes}, and this engine needs {needed}: "
            f"{layout.chunk_tokens} tokens (chunk_tokens) in blocks of {layout.block_tokens} tokens and "
            f"{layout.block_bytes} bytes a rank. Set chunk_bytes = {needed} for both daemons"
        )
