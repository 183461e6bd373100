"""Several prompts in one request: each goes its own way with its own transfer, and the client sees one answer.

Choices are numbered as one engine would number them. The answers' ids differ and a client must see one, so these
answers are taken apart and put together again; it is the only case in which a body is not passed on as it is.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import orjson
import trio

from kvpd.integrations.proxy import sse
from kvpd.integrations.proxy.errors import ClientGone, EngineAnswer, Headers, ProxyError, Refused
from kvpd.integrations.proxy.exchange import Sink
from kvpd.integrations.proxy.jobs import Job, Work
from kvpd.integrations.proxy.limits import KEPT_ANSWER_BYTES_MAX

RunJob = Callable[[Job, Sink], Awaitable[None]]

_OF_THE_WHOLE = ("id", "created")  # the same in every part of one answer


async def answer_together(work: Work, run: RunJob, sink: Sink) -> None:
    """Run all jobs at once and answer with one answer. The first refusal is the answer to all, and ends the others.

    Raises:
        Refused: one job was refused, and nothing was sent.
        ClientGone: nobody takes the answer.
    """
    parts: list[_Part] = []
    merged = _MergedStream(sink) if work.is_stream else None
    for number in range(len(work.jobs)):
        first_choice = number * work.choices_each
        parts.append(_Part(first_choice) if merged is None else _StreamedPart(first_choice, merged))
    errors: list[Refused | ClientGone] = []

    async def run_one(job: Job, part: _Part) -> None:
        try:
            await run(job, part)
            part.check()
        except (Refused, ClientGone) as exc:
            errors.append(exc)
            nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        for job, part in zip(work.jobs, parts, strict=True):
            nursery.start_soon(run_one, job, part)
    if errors:
        await _tell(errors[0], sink)
    elif merged is not None:
        await merged.finish(work.wants_usage)
    else:
        await _answer_merged(parts, sink)


async def _tell(error: Refused | ClientGone, sink: Sink) -> None:
    if not sink.started or not isinstance(error, Refused):
        raise error
    await sink.fail(
        error if isinstance(error, ProxyError) else ProxyError(502, "engine_failed", f"one prompt failed: {error}")
    )


async def _answer_merged(parts: list[_Part], sink: Sink) -> None:
    answers = [part.parsed() for part in parts]
    whole = dict(answers[0])
    whole["choices"] = [choice for answer in answers for choice in answer["choices"]]
    usages = [usage for answer in answers if isinstance(usage := answer.get("usage"), dict)]
    if usages:
        whole["usage"] = _summed(usages)
    whole.pop("kv_transfer_params", None)
    body = orjson.dumps(whole)
    await sink.start(200, [*_head(parts[0].headers), (b"content-length", b"%d" % len(body))])
    await sink.send(body)
    await sink.finish()


class _Part:
    """One prompt's answer, kept until all are there; a `Sink`."""

    def __init__(self, first_choice: int) -> None:
        self._first_choice = first_choice
        self._body = bytearray()
        self._status = 0
        self.headers: Headers = []

    @property
    def started(self) -> bool:
        return self._status != 0

    async def start(self, status: int, headers: Headers) -> None:
        self._status = status
        self.headers = headers

    async def send(self, data: bytes) -> None:
        self._body += data
        if len(self._body) > KEPT_ANSWER_BYTES_MAX:
            raise ProxyError(502, "answer_too_large", f"an answer of more than {KEPT_ANSWER_BYTES_MAX} bytes")

    async def finish(self) -> None:
        """Nothing is told before all parts are there."""

    async def fail(self, error: ProxyError) -> None:
        raise error

    def check(self) -> None:
        """Raises the engine's refusal, if this is one."""
        if self._status != 200:
            raise EngineAnswer(self._status, self.headers, bytes(self._body))

    def parsed(self) -> dict[str, Any]:
        """The answer, its choices numbered for the whole.

        Raises:
            ProxyError: it is none.
        """
        try:
            return self._renumbered(orjson.loads(self._body))
        except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError) as exc:
            raise ProxyError(502, "engine_broken", "the decode engine's answer is none") from exc

    def _renumbered(self, answer: dict[str, Any]) -> dict[str, Any]:
        for choice in answer["choices"]:
            choice["index"] += self._first_choice
        return answer


class _StreamedPart(_Part):
    """One prompt's stream, passed on event by event; a `Sink`."""

    def __init__(self, first_choice: int, merged: _MergedStream) -> None:
        super().__init__(first_choice)
        self._merged = merged
        self._reader = sse.EventReader()

    async def send(self, data: bytes) -> None:
        if self._status != 200:
            await super().send(data)
            return
        for raw in self._reader.feed(data):
            told = sse.data_of(raw)
            if told is None or told == sse.DONE:
                continue
            answer = sse.parsed(told)
            if "error" in answer:
                raise ProxyError(502, "engine_failed", f"one prompt failed: {answer['error']}")
            try:
                renumbered = self._renumbered(answer)
            except (KeyError, TypeError) as exc:
                raise ProxyError(502, "engine_broken", "the decode engine's event is none") from exc
            await self._merged.send(self.headers, renumbered)


class _MergedStream:
    """The client's stream, fed by all parts."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._first: dict[str, Any] = {}
        self._usages: list[dict[str, Any]] = []
        self._sending = trio.Lock()

    async def send(self, headers: Headers, answer: dict[str, Any]) -> None:
        """One event of one part. The last event of each, which has only its usage, is kept for the sum."""
        if not answer["choices"] and isinstance(answer.get("usage"), dict):
            self._first = self._first or answer
            self._usages.append(answer["usage"])
            return
        async with self._sending:
            if not self._sink.started:
                self._first = answer
                await self._sink.start(200, _head(headers))
            for key in _OF_THE_WHOLE:
                if key in self._first:
                    answer[key] = self._first[key]
            await self._sink.send(sse.event(orjson.dumps(answer)))

    async def finish(self, wants_usage: bool) -> None:
        """The sum of the usages, and the end."""
        if not self._sink.started:
            await self._sink.start(200, [(b"content-type", b"text/event-stream; charset=utf-8")])
        if wants_usage and self._usages:
            last = {**self._first, "choices": [], "usage": _summed(self._usages)}
            await self._sink.send(sse.event(orjson.dumps(last)))
        await self._sink.send(sse.event(sse.DONE))
        await self._sink.finish()


def _head(headers: Headers) -> Headers:
    return [(name, value) for name, value in headers if name.lower() not in {b"content-length", b"content-encoding"}]


def _summed(usages: list[dict[str, Any]]) -> dict[str, Any]:
    """The numbers added up; what is no number in all of them is left out."""
    return {
        key: sum(usage[key] for usage in usages)
        for key in usages[0]
        if all(isinstance(usage.get(key), int) for usage in usages)
    }
