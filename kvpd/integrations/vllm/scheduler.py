"""The connector's half in vLLM's scheduler: which requests go out, which come in, and which blocks are theirs.

Every hook answers from memory, and at once; only a step that has nothing to compute waits for word of what it needs,
a few milliseconds at most. What a request asks for is read once, when the scheduler first sees it; a transfer is
used at most once, by one request; whatever a request leaves unused is freed, however it ends.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, Final, Protocol

import attrs

from kvpd.errors import ErrorCode
from kvpd.integrations.vllm.keys import Chunking, chunk_keys
from kvpd.integrations.vllm.layout import Layout
from kvpd.integrations.vllm.log import engine_log
from kvpd.integrations.vllm.metadata import ChunkSource, Failure, LoadJob, OpenJob, SaveJob, Step

# How long a step may wait for the receiver's word where there is nothing else to do; a request that comes to the engine
# meanwhile waits for as long.
WAIT_S: Final = 0.005


class RequestView(Protocol):
    """What is used of vLLM's Request."""

    @property
    def request_id(self) -> str: ...

    @property
    def kv_transfer_params(self) -> dict[str, Any] | None: ...

    @property
    def prompt_token_ids(self) -> list[int] | None: ...

    @property
    def num_prompt_tokens(self) -> int: ...

    @property
    def lora_request(self) -> Any: ...

    @property
    def cache_salt(self) -> str | None: ...

    @property
    def mm_features(self) -> Sequence[Any]: ...


class Readiness(Protocol):
    """What is used of a Board."""

    def is_ready(self, transfer_id: str) -> bool: ...

    def failure(self, transfer_id: str) -> Failure | None: ...

    def wait(self, seconds: float) -> None: ...

    def forget(self, transfer_id: str) -> None: ...

    def discard(self, transfer_id: str, *, at_once: bool) -> None: ...


@attrs.define
class Outgoing:
    """Prefill: a request whose KV goes to a receiver."""

    transfer_id: str
    keys: list[bytes]
    prompt_tokens: int
    block_ids: list[int] = attrs.Factory(list)
    chunks_given: int = 0
    failure: Failure | None = None
    failure_is_reported: bool = False  # to vLLM, as a load that failed


@attrs.define
class Incoming:
    """Decode: a request whose KV comes from the receiver. It is used once."""

    transfer_id: str
    keys: list[bytes]
    prompt_tokens: int
    deadline: float  # of time.monotonic()
    failure: Failure | None = None


class Scheduler:
    """Both roles. Called by vLLM's scheduler, in its thread."""

    def __init__(self, layout: Layout, load_timeout_s: float, board: Readiness | None, *, is_producer: bool) -> None:
        self._layout = layout
        self._digest = layout.digest
        self._chunking = Chunking(layout.block_tokens, layout.chunk_tokens)
        self._load_timeout_s = load_timeout_s
        self._board = board
        self._is_producer = is_producer
        self._outgoing: dict[str, Outgoing] = {}
        self._incoming: dict[str, Incoming] = {}
        self._owners: dict[str, str] = {}  # transfer -> the request that uses it
        self._loading: set[str] = set()  # requests whose load the workers have not reported yet
        self._step = Step()
        self._was_idle = False  # the step before this one computed nothing

    # ------------------------------------------------------------------ a request appears

    def on_new_request(self, request: RequestView) -> None:
        """Read what it asks for; begin its transfer."""
        params = request.kv_transfer_params or {}
        wants_send, wants_load = bool(params.get("do_remote_decode")), bool(params.get("do_remote_prefill"))
        if not (wants_send or wants_load):
            return
        given = params.get("transfer_id")
        transfer_id = given if isinstance(given, str) else ""
        if wants_load and not wants_send and transfer_id in self._owners:
            return  # another choice of the same request (n > 1): computed here, and not its to fail or to free
        problem = self._problem(request, params, transfer_id)
        if problem is not None:
            engine_log.error("request_refused", request=request.request_id, detail=problem)
        failure = None if problem is None else Failure(ErrorCode.PROTOCOL_ERROR, problem)
        keys = [] if problem else self._keys(request)
        tokens = request.num_prompt_tokens
        if wants_send and self._is_producer:
            self._outgoing[request.request_id] = Outgoing(transfer_id, keys, tokens, failure=failure)
            if failure is None:
                self._owners[transfer_id] = request.request_id
                self._step.opens.append(
                    OpenJob(request.request_id, transfer_id, params["receiver"], len(keys), params.get("notify"))
                )
        elif wants_load and self._board is not None and transfer_id:
            self._owners[transfer_id] = request.request_id
            deadline = time.monotonic() + self._load_timeout_s
            failure = failure or self._announced_failure(params, tokens)
            self._incoming[request.request_id] = Incoming(transfer_id, keys, tokens, deadline, failure)

    def _problem(self, request: RequestView, params: dict[str, Any], transfer_id: str) -> str | None:
        """Why this request cannot be served as it asks, in words for who sent it."""
        if not 1 <= len(transfer_id) <= 512:
            return (
                f"kv_transfer_params.transfer_id = {params.get('transfer_id')!r} must be a text of 1 to 512 characters"
            )
        if not request.prompt_token_ids:
            return "a prompt without token ids (embeddings) cannot be transferred"
        if transfer_id in self._owners:
            return f"transfer_id {transfer_id!r} is in use by request {self._owners[transfer_id]}; each needs its own"
        if params.get("do_remote_decode") and not isinstance(params.get("receiver"), str):
            return f"kv_transfer_params.receiver = {params.get('receiver')!r} must be the receiver's host:port"
        return None

    def _announced_failure(self, params: dict[str, Any], tokens: int) -> Failure | None:
        """What the prefill engine's own words, where the proxy passes them on, say against the transfer."""
        error = params.get("error")
        if isinstance(error, dict):
            code = str(error.get("code"))
            known = ErrorCode(code) if code in set(ErrorCode) else ErrorCode.PROTOCOL_ERROR
            return Failure(known, f"the prefill engine: {error.get('detail', '')}"[:4096])
        text = params.get("layout")
        if isinstance(text, str) and text != self._layout.text:
            try:
                difference = self._layout.difference(Layout.parse(text))
            except ValueError as exc:
                difference = f"{exc}; here: {self._layout.text}"
            return Failure(ErrorCode.LAYOUT_MISMATCH, difference or text)
        count = params.get("num_tokens")
        if isinstance(count, int) and count != tokens:
            detail = f"the prefill engine computed {count} tokens, and this prompt has {tokens}"
            return Failure(ErrorCode.TOTAL_MISMATCH, detail)
        return None

    def _keys(self, request: RequestView) -> list[bytes]:
        adapter = request.lora_request
        extras = [
            None if adapter is None else str(adapter.lora_name),
            request.cache_salt,
            [
                [one.modality, one.identifier, one.mm_position.offset, one.mm_position.length]
                for one in request.mm_features or ()
            ],
        ]
        assert request.prompt_token_ids is not None
        return chunk_keys(self._digest, request.prompt_token_ids, self._chunking.chunk_tokens, extras)

    # ------------------------------------------------------------------ a request is scheduled

    def matched_tokens(self, request_id: str, computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens will come from outside, beyond the `computed_tokens` that are here; None: not known yet."""
        outgoing = self._outgoing.get(request_id)
        if outgoing is not None:
            if outgoing.failure is None or outgoing.failure_is_reported:
                return 0, False
            # Refused before it was computed: a load that fails is how vLLM lets a connector fail a request.
            tokens = self._chunking.loadable(outgoing.prompt_tokens, computed_tokens)
            return tokens, tokens > 0
        incoming = self._incoming.get(request_id)
        if incoming is None:
            return 0, False
        tokens = self._chunking.loadable(incoming.prompt_tokens, computed_tokens)
        if tokens and not self._is_decided(incoming):
            return None, False
        return tokens, tokens > 0

    def _is_decided(self, incoming: Incoming) -> bool:
        assert self._board is not None
        if incoming.failure is not None or self._board.is_ready(incoming.transfer_id):
            return True
        incoming.failure = self._board.failure(incoming.transfer_id)
        if incoming.failure is None and time.monotonic() >= incoming.deadline:
            detail = (
                f"transfer {incoming.transfer_id} was not complete within load_timeout_s = {self._load_timeout_s:g} s"
            )
            incoming.failure = Failure(ErrorCode.CLAIM_TIMEOUT, detail)
        return incoming.failure is not None

    def allocated(self, request_id: str, block_ids: Sequence[int], external_tokens: int) -> None:
        """The request has its blocks; `external_tokens` are to be loaded. Called again for the same load, it does
        nothing.
        """
        outgoing = self._outgoing.get(request_id)
        if outgoing is not None:
            if external_tokens:
                outgoing.failure_is_reported = True
                blocks = tuple(block_ids[:1])
                self._load(LoadJob(request_id, outgoing.transfer_id, (), 0, blocks, outgoing.failure))
            return
        incoming = self._incoming.pop(request_id, None)
        if incoming is None:
            return
        assert self._board is not None
        if not external_tokens:  # everything is here already: its sender may finish in peace
            self._let_go(incoming.transfer_id, at_once=False)
            return
        last = self._chunking.blocks(incoming.prompt_tokens - 1)
        first = last - self._chunking.blocks(external_tokens)
        self._load(
            LoadJob(
                request_id,
                incoming.transfer_id,
                tuple(incoming.keys),
                first,
                tuple(block_ids[first:last]),
                incoming.failure,
            )
        )
        if incoming.failure is None:
            self._board.forget(incoming.transfer_id)
            del self._owners[incoming.transfer_id]
        else:
            self._let_go(incoming.transfer_id)

    def _load(self, job: LoadJob) -> None:
        self._loading.add(job.request_id)
        self._step.loads.append(job)

    def received(self, request_ids: Iterable[str]) -> None:
        """Loads that the workers have ended, well or not."""
        self._loading.difference_update(request_ids)

    def _let_go(self, transfer_id: str, *, at_once: bool = True) -> None:
        assert self._board is not None
        self._board.discard(transfer_id, at_once=at_once)
        del self._owners[transfer_id]

    # ------------------------------------------------------------------ a step is built

    def build(
        self, new: Iterable[Any], cached: Any, scheduled_tokens: dict[str, int], preempted: Iterable[str]
    ) -> Step:
        """What the workers have to do in this step: `new`, `cached` and so on are the scheduler output's."""
        step, self._step = self._step, Step()
        if not scheduled_tokens:
            step.is_idle = not self._has_waited(step)
        self._was_idle = not scheduled_tokens
        step.preempted += [request_id for request_id in preempted if request_id in self._outgoing]
        for one in new:
            if one.req_id in self._outgoing:
                ids = list(one.block_ids[0])
                self._advance(step, one.req_id, one.num_computed_tokens + scheduled_tokens[one.req_id], ids, anew=True)
        for number, request_id in enumerate(cached.req_ids):
            if request_id in self._outgoing:
                groups = cached.new_block_ids[number]
                computed = cached.num_computed_tokens[number] + scheduled_tokens[request_id]
                anew = request_id in cached.resumed_req_ids
                self._advance(step, request_id, computed, list(groups[0]) if groups else [], anew=anew)
        return step

    def _has_waited(self, step: Step) -> bool:
        """Wait for the receiver's word where nothing else can happen: it is heard in this process, so that it ends the
        wait at once. A worker that waits instead would not hear it, and vLLM spins here until the worker is done.
        """
        # The step before may still run, and its tokens must not be kept waiting.
        if self._board is None or not self._incoming or not self._was_idle or step.opens or self._loading:
            return False
        self._board.wait(WAIT_S)
        return True

    def _advance(self, step: Step, request_id: str, computed_tokens: int, block_ids: list[int], *, anew: bool) -> None:
        """After this step the request has `computed_tokens`; its newest blocks, or all of them, are these."""
        outgoing = self._outgoing[request_id]
        outgoing.block_ids = block_ids if anew else outgoing.block_ids + block_ids
        if outgoing.failure is not None or outgoing.chunks_given == len(outgoing.keys):
            return
        complete = self._chunking.complete_chunks(outgoing.prompt_tokens, computed_tokens)
        if complete <= outgoing.chunks_given:
            step.computing.append(request_id)
            return
        chunks = []
        for number in range(outgoing.chunks_given, complete):
            blocks = self._chunking.chunk_blocks(outgoing.prompt_tokens, number)
            ids = tuple(outgoing.block_ids[blocks.start : blocks.stop])
            assert len(ids) == len(blocks), "vLLM computed a chunk without blocks"
            chunks.append(ChunkSource(outgoing.keys[number], ids))
        outgoing.chunks_given = complete
        step.saves.append(SaveJob(request_id, tuple(chunks), is_last=complete == len(outgoing.keys)))

    # ------------------------------------------------------------------ a request ends

    def failed(self, failures: dict[str, Failure]) -> None:
        """Transfers that the workers saw fail."""
        for request_id, failure in failures.items():
            outgoing = self._outgoing.get(request_id)
            # A cancelled one was meant to end.
            tell = engine_log.info if failure.code is ErrorCode.CANCELLED else engine_log.error
            tell("send_failed", request=request_id, code=str(failure.code), detail=failure.detail)
            if outgoing is not None:
                outgoing.failure = failure

    def finished(self, request_id: str) -> tuple[bool, dict[str, Any] | None]:
        """Whether its blocks must be kept until the workers report it as sent, and what its answer says."""
        incoming = self._incoming.pop(request_id, None)
        if incoming is not None:
            self._let_go(incoming.transfer_id)
        outgoing = self._outgoing.pop(request_id, None)
        if outgoing is None:
            return False, None
        if self._owners.get(outgoing.transfer_id) == request_id:
            del self._owners[outgoing.transfer_id]
        params: dict[str, Any] = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": outgoing.transfer_id,
            "num_tokens": outgoing.prompt_tokens,
            "layout": self._layout.text,
        }
        if outgoing.failure is not None:
            failure = outgoing.failure
            params["error"] = {
                "code": str(failure.code),
                "detail": failure.detail,
                "retry_after_s": failure.retry_after_s,
            }
        return outgoing.chunks_given > 0, params
