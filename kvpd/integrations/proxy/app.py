"""The proxy's pages: completions, which engines answer, and those that the proxy answers itself.

A path that is not listed here is not passed on: half of a protocol would be worse than none of it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

import attrs
import orjson

from kvpd.config import ProxyConfig
from kvpd.integrations.proxy.engines import Engines
from kvpd.integrations.proxy.errors import EngineFailed, Headers, ProxyError, Refused
from kvpd.integrations.proxy.exchange import Exchange, Request, header
from kvpd.integrations.proxy.fanout import answer_together
from kvpd.integrations.proxy.flow import Flow
from kvpd.integrations.proxy.jobs import CHAT_COMPLETIONS, COMPLETIONS, read_work
from kvpd.integrations.proxy.limits import RETRY_AFTER_S
from kvpd.integrations.proxy.notifications import Notifications
from kvpd.metrics import Health, ProxyMetrics, exposition
from kvpd.version import VERSION

_Page = Callable[[Request, Exchange], Awaitable[None]]

_TEXT: Final = [(b"content-type", b"text/plain; charset=utf-8")]
_JSON: Final = [(b"content-type", b"application/json")]

# Answered however full the proxy is: without waiting for anybody.
OWN_PAGES: Final = frozenset({"/health", "/healthz", "/livez", "/readyz", "/metrics", "/status"})


@attrs.frozen
class _Route:
    method: str
    page: _Page

    @property
    def allowed(self) -> tuple[str, ...]:
        return ("GET", "HEAD") if self.method == "GET" else (self.method,)


class App:
    """Takes requests to their pages, and counts those that engines work on."""

    def __init__(
        self,
        config: ProxyConfig,
        requests_max: int,
        engines: Engines,
        notifications: Notifications,
        flow: Flow,
        metrics: ProxyMetrics,
        health: Health,
    ) -> None:
        self._config = config
        self._requests_max = requests_max
        self._engines = engines
        self._notifications = notifications
        self._flow = flow
        self._metrics = metrics
        self._health = health
        self.in_flight = 0
        self._routes: dict[str, _Route] = {
            COMPLETIONS: _Route("POST", self._complete),
            CHAT_COMPLETIONS: _Route("POST", self._complete),
            "/v1/models": _Route("GET", self._models),
            "/health": _Route("GET", self._alive),
            "/healthz": _Route("GET", self._alive),
            "/livez": _Route("GET", self._alive),
            "/readyz": _Route("GET", self._ready),
            "/metrics": _Route("GET", self._numbers),
            "/status": _Route("GET", self._status),
        }

    async def handle(self, request: Request, exchange: Exchange) -> None:
        """Answer a request.

        Raises:
            Refused: it is not answered, and nothing was sent.
            ClientGone: nobody takes the answer.
        """
        route = self._routes.get(request.path)
        if route is None:
            raise ProxyError(404, "not_found", f"there is no {request.path[:200]} here")
        if request.method not in route.allowed:
            allowed = ", ".join(route.allowed)
            message = f"{request.path} takes {allowed}"
            raise ProxyError(405, "method_not_allowed", message, headers=[(b"allow", allowed.encode())])
        await route.page(request, exchange)

    # ------------------------------------------------------------------ the engines' pages

    async def _complete(self, request: Request, exchange: Exchange) -> None:
        if self.in_flight >= self._requests_max:
            self._metrics.request_ended("refused")
            message = f"{self._requests_max} requests are running, which is the limit"
            raise ProxyError(503, "too_many_requests", message, retry_after_s=RETRY_AFTER_S)
        self._count(1)
        outcome = "client_cancelled"
        try:
            await self._run(request, exchange)
            outcome = _outcome(exchange.status, exchange.failed)
        except Refused as exc:
            outcome = _outcome(exc.status)
            raise
        finally:
            self._count(-1)
            self._metrics.request_ended(outcome)

    async def _run(self, request: Request, exchange: Exchange) -> None:
        work = read_work(request)
        if len(work.jobs) == 1:
            await self._flow.run(work.jobs[0], exchange)
        else:
            await answer_together(work, self._flow.run, exchange)

    def _count(self, step: int) -> None:
        self.in_flight += step
        self._metrics.in_flight.set(self.in_flight)

    async def _models(self, request: Request, exchange: Exchange) -> None:
        """What a decode engine says: it is the one that answers."""
        engine = self._engines.choose("decode")
        if engine is None:
            raise ProxyError(503, "no_decode_engine", "no decode engine is available", retry_after_s=RETRY_AFTER_S)
        headers: Headers = [*request.forwarded(), (b"x-request-id", request.request_id.encode())]
        timeout_s = self._config.stall_timeout_s
        try:
            async with engine.upstream.ask(b"GET", request.target, headers, b"", timeout_s=timeout_s) as answer:
                piece = await answer.piece(timeout_s)
                await exchange.start(answer.status, answer.headers)
                while piece:
                    await exchange.send(piece)
                    piece = await answer.piece(timeout_s)
                await exchange.finish()
        except EngineFailed as exc:
            self._engines.doubt(engine, exc)
            if exchange.started:
                await exchange.fail(exc.refusal("decode"))
            else:
                raise exc.refusal("decode") from exc

    # ------------------------------------------------------------------ the proxy's own pages

    async def _alive(self, _request: Request, exchange: Exchange) -> None:
        """That this is answered says that the loop runs; engines have no say in it."""
        await exchange.answer(200, _TEXT, b"ok\n")

    async def _ready(self, request: Request, exchange: Exchange) -> None:
        conditions = self._health.conditions()
        is_ready = all(holds for _, holds, _ in conditions)
        shown = [entry for entry in conditions if "verbose" in request.query or not entry[1]]
        lines = [f"[{'+' if holds else '-'}] {name}: {text}\n" for name, holds, text in shown]
        text = "".join(lines) + ("ok\n" if is_ready else "not ready\n")
        await exchange.answer(200 if is_ready else 503, _TEXT, text.encode())

    async def _numbers(self, request: Request, exchange: Exchange) -> None:
        accept = header(request.headers, b"accept") or b""
        text, content_type = exposition(self._metrics, accept.decode("latin-1"))
        await exchange.answer(200, [(b"content-type", content_type.encode("ascii"))], text)

    async def _status(self, _request: Request, exchange: Exchange) -> None:
        await exchange.answer(200, _JSON, orjson.dumps(self.status(), option=orjson.OPT_INDENT_2))

    def status(self) -> dict[str, Any]:
        """Everything that decides about the next request."""
        ratio = self._metrics.transfer_ratio
        return {
            "name": self._config.name,
            "version": VERSION,
            "mode": self._config.mode,
            "policy": self._config.policy,
            "on_miss": self._config.on_miss,
            "decode_only_fallback": self._config.decode_only_fallback,
            "ready": {name: {"holds": holds, "detail": text} for name, holds, text in self._health.conditions()},
            "requests": {"running": self.in_flight, "limit": self._requests_max},
            "transfers": {"waited_for": self._notifications.waiting_count, "arrived_ratio": ratio},
            "engines": [
                {
                    "kind": engine.kind,
                    "url": engine.url,
                    "receiver": engine.receiver or None,
                    "alive": engine.alive,
                    "detail": engine.detail,
                    "requests": engine.requests,
                    "tokens": engine.tokens,
                    "connections_made": engine.upstream.connections_made,
                }
                for engine in self._engines.all()
            ],
        }


def _outcome(status: int, failed: bool = False) -> str:
    if failed or status >= 500:
        return "failed"
    return "answered" if status < 400 else "refused"
