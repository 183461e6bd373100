"""One prompt's way: prefill engine, KV cache, decode engine, answer; and a second try while nothing was answered.

The decode engine is asked only when the prefill engine has answered and a sender has said that the KV cache is
complete (`concurrent`: at once, and it waits by itself). Whatever ends a request early closes its connections to the
engines, which is how they learn of it, and a KV cache that nobody will read is given back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import attrs
import msgspec
import trio

from kvpd.config import ProxyConfig
from kvpd.errors import ErrorCode
from kvpd.integrations.proxy import sse
from kvpd.integrations.proxy.engines import Engine, Engines
from kvpd.integrations.proxy.errors import (
    AttemptFailed,
    ClientGone,
    EngineAnswer,
    EngineBroken,
    EngineFailed,
    EngineUnreachable,
    Headers,
    ProxyError,
    Refused,
    transfer_failed,
)
from kvpd.integrations.proxy.exchange import Sink, end_to_end, header
from kvpd.integrations.proxy.jobs import Job
from kvpd.integrations.proxy.limits import ABANDON_S, ABANDONED_MAX, KEPT_ANSWER_BYTES_MAX, RETRY_AFTER_S
from kvpd.integrations.proxy.notifications import Arrival, Notifications
from kvpd.integrations.proxy.transfer import Transfer, read_prefill_answer
from kvpd.integrations.proxy.upstream import Answer
from kvpd.log import get_logger
from kvpd.metrics import ProxyMetrics

log = get_logger()

_TRIES: Final = 2
_TRIES_MAX: Final = 6  # with those that met engines which were gone: asking these cost nothing


@attrs.frozen
class Pair:
    """The engines of one try. Without a prefill engine the decode engine computes the prompt itself."""

    prefill: Engine | None
    decode: Engine


class Flow:
    """Takes jobs through the engines."""

    def __init__(
        self,
        config: ProxyConfig,
        engines: Engines,
        notifications: Notifications,
        notify_address: str,
        metrics: ProxyMetrics,
        nursery: trio.Nursery,
    ) -> None:
        self._config = config
        self._engines = engines
        self._notifications = notifications
        self._notify_address = notify_address
        self._metrics = metrics
        self._nursery = nursery
        self._abandoning = 0
        self._released = trio.Event()

    async def run(self, job: Job, sink: Sink) -> None:
        """Answer a job.

        Raises:
            Refused: it is not answered, and nothing was sent.
            ClientGone: nobody takes the answer.
        """
        began = trio.current_time()
        pair: Pair | None = self._first_pair(job)
        failures: list[AttemptFailed] = []
        avoided: set[Engine] = set()
        while pair is not None:
            try:
                await self._try(job, pair, sink, began)
                return
            except AttemptFailed as exc:
                failures.append(exc)
            avoided.update(failures[-1].avoided, (pair.prefill or pair.decode,))
            pair = self._next_pair(job, failures, avoided)
            if pair is not None:
                self._metrics.retries.inc()
                detail = str(failures[-1])
                log.warning("request_retried", request=job.request_id, detail=detail, rate_limited=True)
        await self._give_up(job, failures, sink, began)

    def _first_pair(self, job: Job) -> Pair:
        """The engines of the first try.

        Raises:
            ProxyError: there are none.
        """
        decode = self._engines.choose("decode", job.prefix)
        if decode is None:
            raise _none_alive("decode")
        prefill = self._engines.choose("prefill", job.prefix)
        if prefill is None:
            if not self._config.decode_only_fallback:
                raise _none_alive("prefill")
            self._metrics.recomputed("no_prefill")
        return Pair(prefill, decode)

    def _next_pair(self, job: Job, failures: list[AttemptFailed], avoided: set[Engine]) -> Pair | None:
        """The engines of another try; None: there is to be none."""
        heard = sum(failure.was_heard for failure in failures)
        if heard == _TRIES or len(failures) == _TRIES_MAX or not failures[-1].can_retry:
            return None
        blamed = _blamed(failures)
        decode = self._engines.choose("decode", job.prefix, blamed, avoided)
        prefill = self._engines.choose("prefill", job.prefix, blamed, avoided)
        return None if decode is None or prefill is None else Pair(prefill, decode)

    async def _give_up(self, job: Job, failures: list[AttemptFailed], sink: Sink, began: float) -> None:
        """No try has worked: have the decode engine compute the prompt where that is wanted, else say what failed."""
        failure = failures[-1]
        log.warning("request_failed", request=job.request_id, detail=str(failure), rate_limited=True)
        is_wanted = self._config.on_miss == "recompute" or (
            self._config.decode_only_fallback and not self._engines.alive("prefill")
        )
        decode = self._engines.choose("decode", job.prefix, _blamed(failures))
        if not failure.can_recompute or not is_wanted or decode is None:
            raise failure.refused
        self._metrics.recomputed("miss")
        try:
            await self._decode(job, decode, None, sink, began)
        except AttemptFailed as exc:
            raise exc.refused from exc

    async def _try(self, job: Job, pair: Pair, sink: Sink, began: float) -> None:
        if pair.prefill is None:
            await self._decode(job, pair.decode, None, sink, began)
            return
        transfer = Transfer()
        way = self._both_at_once if self._config.mode == "concurrent" else self._one_by_one
        try:
            await way(job, pair.prefill, pair.decode, transfer, sink, began)
        except AttemptFailed as exc:
            transfer.may_arrive = exc.may_arrive
            raise
        finally:
            if transfer.may_arrive and not transfer.is_handed_over:
                self._abandon(job, pair.decode, transfer)

    # ------------------------------------------------------------------ the two modes

    async def _one_by_one(
        self, job: Job, prefill: Engine, decode: Engine, transfer: Transfer, sink: Sink, began: float
    ) -> None:
        params: Mapping[str, Any] = {}
        with self._notifications.expect(transfer.transfer_id) as arrival, decode.load(job.prompt_tokens):
            with arrival.meanwhile:
                params = await self._prefill(job, prefill, decode, transfer)
            await self._wait_for(arrival, prefill)
        await self._decode(job, decode, transfer, sink, began, params)

    async def _wait_for(self, arrival: Arrival, prefill: Engine) -> None:
        """Until a sender says that the KV cache is complete.

        Raises:
            AttemptFailed: it says why it will never be, or nothing in time.
        """
        answered = trio.current_time()
        with trio.move_on_after(self._config.transfer_timeout_s) as scope:
            error = await arrival.outcome()
        if scope.cancelled_caught:
            self._metrics.transfer_ended(ErrorCode.REQUEST_TIMEOUT)
            waited = f"{self._config.transfer_timeout_s:g} s"
            refused = ProxyError(502, "transfer_lost", f"the prompt's KV cache did not arrive within {waited}")
            raise AttemptFailed(refused, blamed=[prefill], may_arrive=True)
        if error is not None:
            raise self._transfer_failed(error.code, error.detail, error.retry_after_s)
        self._metrics.transfer.observe(trio.current_time() - answered)
        self._metrics.transfer_ended("arrived")

    def _transfer_failed(self, code: ErrorCode, detail: str, retry_after_s: float | None) -> AttemptFailed:
        """A transfer has ended without success, by a sender's word or by its connector's."""
        self._metrics.transfer_ended(code)
        return transfer_failed(code, detail, retry_after_s)

    async def _both_at_once(
        self, job: Job, prefill: Engine, decode: Engine, transfer: Transfer, sink: Sink, began: float
    ) -> None:
        failures: list[AttemptFailed] = []

        async def prefill_beside() -> None:
            try:
                await self._prefill(job, prefill, decode, transfer)
            except AttemptFailed as exc:
                # Once an answer has begun, the decode engine has all that it needed.
                if not sink.started:
                    failures.append(exc)
                    nursery.cancel_scope.cancel()

        async def hear_of_failure(arrival: Arrival) -> None:
            error = await arrival.outcome()
            if error is not None and not sink.started:
                failures.append(self._transfer_failed(error.code, error.detail, error.retry_after_s))
                nursery.cancel_scope.cancel()

        gone: list[ClientGone | Refused] = []  # what a nursery's body raises would come out wrapped
        with self._notifications.expect(transfer.transfer_id) as arrival:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(prefill_beside)
                nursery.start_soon(hear_of_failure, arrival)
                try:
                    if await self._decode(job, decode, transfer, sink, began) == 200:
                        self._metrics.transfer_ended("arrived")
                except AttemptFailed as exc:
                    failures.append(exc)
                except (ClientGone, Refused) as exc:
                    gone.append(exc)
                nursery.cancel_scope.cancel()
        for error in [*gone, *failures]:
            raise error

    # ------------------------------------------------------------------ the two engines

    async def _prefill(self, job: Job, engine: Engine, decode: Engine, transfer: Transfer) -> Mapping[str, Any]:
        """Have the prompt computed and sent: what the engine says about the transfer.

        Raises:
            AttemptFailed: it will not arrive.
        """
        config = self._config
        body = job.prefill_body(transfer.for_prefill(decode.receiver, self._notify_address))
        headers = [(key, value) for key, value in _headers(job) if key != b"accept-encoding"]
        began = trio.current_time()
        try:
            with engine.load(job.prompt_tokens):
                async with engine.upstream.ask(
                    b"POST", job.target, headers, body, timeout_s=config.prefill_timeout_s
                ) as answer:
                    del body
                    told = await answer.read(KEPT_ANSWER_BYTES_MAX, config.prefill_timeout_s)
        except EngineFailed as exc:
            self._metrics.transfer_ended(ErrorCode.PEER_LOST)
            raise self._failed(engine, exc) from exc
        self._metrics.prefill.observe(trio.current_time() - began)
        if answer.status != 200:
            self._metrics.transfer_ended(ErrorCode.CANCELLED if answer.status < 500 else ErrorCode.PEER_LOST)
            raise _not_answered(engine, answer, told)
        return self._read_params(engine, told)

    def _read_params(self, engine: Engine, told: bytes) -> Mapping[str, Any]:
        """The connector's words in a prefill engine's answer."""
        try:
            params, fault = read_prefill_answer(told)
        except msgspec.MsgspecError as exc:
            self._metrics.transfer_ended(ErrorCode.PROTOCOL_ERROR)
            raise self._failed(engine, EngineBroken(f"{engine.url}: an answer that is none: {exc}")) from exc
        if fault is None:
            return params
        raise self._transfer_failed(fault.error_code, fault.detail, fault.retry_after_s)

    async def _decode(
        self,
        job: Job,
        engine: Engine,
        transfer: Transfer | None,
        sink: Sink,
        began: float,
        params: Mapping[str, Any] | None = None,
    ) -> int:
        """Ask the decode engine and pass its answer on: its status. Nothing is passed on before its first bytes came.

        Without a transfer it computes the prompt itself. `params` is what the prefill engine's connector has for it.
        """
        config = self._config
        body = job.decode_body(transfer.for_decode(params) if transfer else None)
        first_s = config.first_byte_timeout_s if job.is_stream else config.answer_timeout_s
        try:
            with engine.load(job.prompt_tokens + job.answer_tokens):
                async with engine.upstream.ask(
                    b"POST",
                    job.target,
                    _headers(job),
                    body,
                    timeout_s=first_s,
                    when_sent=transfer.hand_over if transfer else lambda: None,
                ) as answer:
                    if answer.status >= 500:
                        told = await answer.read(KEPT_ANSWER_BYTES_MAX, config.stall_timeout_s)
                        raise _not_answered(engine, answer, told)
                    piece = await answer.piece(first_s)
                    if transfer is not None and _is_stream(answer) and sse.reports_an_error(piece):
                        refused = ProxyError(502, "transfer_lost", "the decode engine has not got the KV cache")
                        raise AttemptFailed(refused)
                    self._metrics.first_byte.observe(trio.current_time() - began)
                    await self._pass_on(answer, piece, sink)
                    return answer.status
        except EngineFailed as exc:
            failure = self._failed(engine, exc)
            if not sink.started:
                raise failure from exc
            log.warning("stream_broken", request=job.request_id, peer=engine.url, detail=str(exc), rate_limited=True)
            await sink.fail(exc.refusal("decode"))
            return failure.refused.status

    async def _pass_on(self, answer: Answer, piece: bytes, sink: Sink) -> None:
        await sink.start(answer.status, end_to_end(answer.headers))
        while piece:
            await sink.send(piece)
            piece = await answer.piece(self._config.stall_timeout_s)
        await sink.finish()

    def _failed(self, engine: Engine, exc: EngineFailed) -> AttemptFailed:
        self._engines.doubt(engine, exc)
        was_heard = not isinstance(exc, EngineUnreachable)
        is_prefill = engine.kind == "prefill"
        return AttemptFailed(
            exc.refusal(engine.kind),
            blamed=[engine],
            can_recompute=is_prefill,
            was_heard=was_heard,
            may_arrive=was_heard or not is_prefill,
        )

    # ------------------------------------------------------------------ what nobody reads

    def _abandon(self, job: Job, decode: Engine, transfer: Transfer) -> None:
        """A KV cache is on its way, or there, and nobody will read it: have its room given back now.

        The decode engine is asked to take it, for one token; closing that connection releases what it holds.
        """
        if self._abandoning >= ABANDONED_MAX:
            return  # the receiver gives the room back by itself, later
        self._abandoning += 1
        self._metrics.abandoned.inc()
        self._nursery.start_soon(self._release, job, decode, transfer)

    async def _release(self, job: Job, decode: Engine, transfer: Transfer) -> None:
        body = job.release_body(transfer.for_decode())
        try:
            async with decode.upstream.ask(b"POST", job.target, _headers(job), body, timeout_s=ABANDON_S) as answer:
                await answer.read(KEPT_ANSWER_BYTES_MAX, ABANDON_S)
        except EngineFailed as exc:
            log.info("transfer_abandoned", request=job.request_id, peer=decode.url, detail=str(exc))
        finally:
            self._abandoning -= 1
            self._released.set()

    async def wait_released(self) -> None:
        """Until everything that was abandoned so far has been given back, or not."""
        while self._abandoning:
            self._released = trio.Event()
            await self._released.wait()


def _headers(job: Job) -> Headers:
    return [*job.headers, (b"x-request-id", job.request_id.encode())]


def _is_stream(answer: Answer) -> bool:
    return sse.is_event_stream(answer.content_type, header(answer.headers, b"content-encoding"))


def _none_alive(kind: str) -> ProxyError:
    return ProxyError(503, f"no_{kind}_engine", f"no {kind} engine is available", retry_after_s=RETRY_AFTER_S)


def _not_answered(engine: Engine, answer: Answer, told: bytes) -> AttemptFailed:
    """An engine's refusal. What it says of the request (4xx) another engine would say too; 5xx are its own troubles."""
    headers = end_to_end(answer.headers)
    if answer.status in {429, 503} and header(headers, b"retry-after") is None:
        headers.append((b"retry-after", b"%d" % RETRY_AFTER_S))
    is_its_own = answer.status >= 500
    refused = EngineAnswer(answer.status, headers, told)
    # A decode engine that could not get the KV cache says 500, too, and may well get another one.
    blamed = [engine] if is_its_own and engine.kind == "prefill" else []
    return AttemptFailed(refused, blamed=blamed, avoided=[engine], can_retry=is_its_own, can_recompute=is_its_own)


def _blamed(failures: list[AttemptFailed]) -> set[Engine]:
    return {engine for failure in failures for engine in failure.blamed}
