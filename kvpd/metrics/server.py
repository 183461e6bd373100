"""The HTTP side: /metrics, /livez, /readyz and /healthz, from threads of their own.

A probe is answered even when the loop is not: that is what it is for. Connections are bounded in number and time, and
closing waits for nobody longer than a second.
"""

from __future__ import annotations

import errno
import http.server
import socket
import socketserver
import sys
import threading
from collections.abc import Iterable
from http import HTTPStatus
from types import TracebackType
from typing import Any, ClassVar, Final, Self
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from kvpd.log import get_logger
from kvpd.metrics.health import Health
from kvpd.metrics.recorders import Metrics
from kvpd.transports.addresses import parse_address

CONNECTIONS_MAX: Final = 16
SOCKET_TIMEOUT_S: Final = 5.0
CLOSE_TIMEOUT_S: Final = 1.0
EXHAUSTED_PAUSE_S: Final = 0.1

_EXHAUSTED: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_PATHS: Final = "/metrics, /livez, /readyz (also ?verbose) and /healthz"

log = get_logger()


class MetricsServer:
    """Serves from its making until `close`; also a context manager.

    Raises:
        OSError: `address` cannot be bound, and the text says which it is.
        ValueError: `address` is none.
    """

    def __init__(self, address: str, metrics: Metrics, health: Health) -> None:
        parsed = parse_address(address)
        host = "" if parsed.host == "*" else parsed.host
        try:
            found = socket.getaddrinfo(host or None, parsed.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            # IPv4 where a name has both, as everywhere in kvpd.
            family, _, _, _, where = min(found, key=lambda entry: entry[0] != socket.AF_INET)
            self._listener = _Listener(family, where, metrics, health)
        except OSError as exc:
            raise OSError(exc.errno, f"metrics.address = {address} cannot be bound: {exc.strerror}") from exc
        self._thread = threading.Thread(target=self._listener.run, name="kvpd-metrics", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """Where it is really bound, as `host:port`."""
        host, port = self._listener.server_address[:2]
        return f"[{host!s}]:{port}" if ":" in str(host) else f"{host!s}:{port}"

    def close(self) -> None:
        """Stop. Idempotent; requests being answered may still end by themselves."""
        self._listener.stop()
        self._thread.join(CLOSE_TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def exposition(metrics: Metrics, accept: str) -> tuple[bytes, str]:
    """All values as /metrics gives them to a client that accepts these types, and the type chosen."""
    encode, content_type = choose_encoder(accept)
    metrics.refresh()
    return encode(_Values(metrics.registry)), content_type


class _Listener(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """Accepts, and hands each connection to a thread, of which there are at most CONNECTIONS_MAX."""

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, family: int, where: Any, metrics: Metrics, health: Health) -> None:
        self.address_family = family
        self.metrics = metrics
        self.health = health
        self._stopping = threading.Event()
        self._places = threading.BoundedSemaphore(CONNECTIONS_MAX)
        super().__init__(where, _Handler)

    def run(self) -> None:
        # Not serve_forever, which wakes twice a second to see whether it should stop.
        with self:
            while not self._stopping.is_set():
                self.handle_request()

    def stop(self) -> None:
        self._stopping.set()
        try:
            # This wakes the thread that waits for the next connection.
            self.socket.shutdown(socket.SHUT_RDWR)
        except OSError as exc:
            if exc.errno not in (errno.EBADF, errno.ENOTCONN):
                raise

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError as exc:
            if exc.errno in _EXHAUSTED:
                # The connection stays where it is, so the next attempt would come, and fail, at once.
                self._stopping.wait(EXHAUSTED_PAUSE_S)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._places.acquire(blocking=False):
            log.warning("metrics_connection_refused", connections_max=CONNECTIONS_MAX, rate_limited=True)
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:
            # No thread could be started; the caller reports it and closes the connection.
            self._places.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        exc = sys.exception()
        if not isinstance(exc, ConnectionError | TimeoutError):
            log.error("metrics_request_failed", exc_info=exc, rate_limited=True)


class _Handler(http.server.BaseHTTPRequestHandler):
    """One request on one connection."""

    timeout = SOCKET_TIMEOUT_S
    server: _Listener
    server_version = "kvpd"
    sys_version = ""
    _routes: ClassVar[dict[str, str]] = {
        "/metrics": "_metrics",
        "/livez": "_livez",
        "/healthz": "_livez",
        "/readyz": "_readyz",
    }

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        route = self._routes.get(url.path)
        if route is None:
            self._answer(HTTPStatus.NOT_FOUND, f"there are {_PATHS}\n")
        else:
            getattr(self, route)(url.query)

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Nothing: probes come every few seconds."""

    def _metrics(self, _query: str) -> None:
        text, content_type = exposition(self.server.metrics, self.headers.get("Accept", ""))
        self._answer(HTTPStatus.OK, text, content_type)

    def _livez(self, _query: str) -> None:
        alive = self.server.health.loop_answers()
        self._answer(*(_OK if alive else (HTTPStatus.SERVICE_UNAVAILABLE, "the loop does not answer\n")))

    def _readyz(self, query: str) -> None:
        report = self.server.health.report()
        ready = all(holds for _, holds, _ in report)
        lines = [f"[{'+' if holds else '-'}] {name}: {text}\n" for name, holds, text in report]
        failing = [line for line, (_, holds, _) in zip(lines, report, strict=True) if not holds]
        shown = lines if "verbose" in query else failing
        status = HTTPStatus.OK if ready else HTTPStatus.SERVICE_UNAVAILABLE
        self._answer(status, "".join(shown) + ("ok\n" if ready else "not ready\n"))

    def _answer(self, status: HTTPStatus, body: str | bytes, content_type: str = "text/plain; charset=utf-8") -> None:
        data = body.encode() if isinstance(body, str) else body
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


class _Values(Collector):
    """A registry without the times at which its counters were made, which treble what a scrape carries."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterable[Metric]:
        for metric in self._registry.collect():
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric


_OK: Final = (HTTPStatus.OK, "ok\n")
