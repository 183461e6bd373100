"""The proxy itself: its sockets, its tasks, and the order in which they end.

Connections end first, then what gives their transfers back, then the sockets. Every task that must run for ever is a
condition of readiness.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import trio

from kvpd.config import ProxyConfig, validate
from kvpd.integrations.proxy.app import OWN_PAGES, App
from kvpd.integrations.proxy.connection import ClientConnection, Hooks
from kvpd.integrations.proxy.engines import Engines
from kvpd.integrations.proxy.flow import Flow
from kvpd.integrations.proxy.limits import ABANDON_S, LATE_CONNECTIONS_MAX, Budget, fitting
from kvpd.integrations.proxy.notifications import Notifications
from kvpd.log import get_logger
from kvpd.metrics import Health, ProxyMetrics
from kvpd.transports.addresses import Address, parse_address, resolve
from kvpd.transports.zmq import open_zmq_control

log = get_logger()

_BACKLOG: Final = 1024
_FULL: Final = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Type: application/json\r\n"
    b"Content-Length: 94\r\nConnection: close\r\n\r\n"
    b'{"error":{"message":"too many connections are open","type":"service_unavailable","code":null}}'
)


class Proxy:
    """A proxy that serves. Made by `open_proxy`."""

    def __init__(
        self,
        app: App,
        engines: Engines,
        listeners: list[trio.SocketListener],
        notify_address: str,
        config: ProxyConfig,
        connections_max: int,
        metrics: ProxyMetrics,
        health: Health,
    ) -> None:
        host, port = listeners[0].socket.getsockname()[:2]
        self.address = str(Address(host, port))  # where it is really bound
        self.app = app
        self.engines = engines
        self.metrics = metrics
        self.notify_address = notify_address
        self._listeners = listeners
        self._config = config
        self._connections_max = connections_max
        self._health = health
        self._budget = Budget(config.body_memory_max)
        self._connections: set[ClientConnection] = set()
        self._accepting = trio.CancelScope()
        self._is_draining = False
        self._idle = trio.Event()

    @property
    def connection_count(self) -> int:
        """Clients' connections."""
        return len(self._connections)

    def reload(self, config: ProxyConfig) -> tuple[list[str], list[str]]:
        """Take over the engines of another configuration: which were added, which removed."""
        return self.engines.update(config.prefill, config.decode)

    async def drain(self, timeout_s: float) -> bool:
        """Take nothing new, and wait for what runs, `timeout_s` seconds at most. Whether all of it has ended."""
        self._is_draining = True
        self._health.mark_draining()
        self._accepting.cancel()
        for listener in self._listeners:
            listener.socket.close()
        for connection in list(self._connections):
            connection.end_if_idle()
        with trio.move_on_after(timeout_s):
            while self._connections:
                self._idle = trio.Event()
                await self._idle.wait()
        return not self._connections

    # ------------------------------------------------------------------ connections

    async def accept(self, nursery: trio.Nursery) -> None:
        """Serve clients until drained."""
        with self._accepting, self._health.task("accept_clients"):
            await trio.serve_listeners(self._serve, self._listeners, handler_nursery=nursery)

    async def _serve(self, stream: trio.SocketStream) -> None:
        over = len(self._connections) - self._connections_max
        if over >= LATE_CONNECTIONS_MAX:
            await _turn_away(stream)
            return
        hooks = Hooks(self.app.handle, self._budget, lambda: self._is_draining, self._client_cancelled)
        # Beyond the limit only probes are answered: an orchestrator must not kill a proxy because it is busy.
        connection = ClientConnection(stream, self._config, hooks, only_paths=OWN_PAGES if over >= 0 else None)
        self._connections.add(connection)
        self.metrics.connections.set(len(self._connections))
        try:
            await connection.run()
        finally:
            self._connections.discard(connection)
            self.metrics.connections.set(len(self._connections))
            if not self._connections:
                self._idle.set()

    def _client_cancelled(self) -> None:
        log.info("client_cancelled", rate_limited=True)


async def _turn_away(stream: trio.SocketStream) -> None:
    try:
        # It fits any socket's buffer, so this does not wait.
        await stream.send_all(_FULL)
    except trio.BrokenResourceError:
        pass
    finally:
        await trio.aclose_forcefully(stream)


async def _listen(address: str) -> list[trio.SocketListener]:
    wanted = await resolve(parse_address(address))
    try:
        return await trio.open_tcp_listeners(wanted.port, host=wanted.host, backlog=_BACKLOG)
    except OSError as exc:
        raise OSError(exc.errno, f"proxy.address = {address} cannot be bound: {exc.strerror}") from exc


@asynccontextmanager
async def open_proxy(
    config: ProxyConfig, *, metrics: ProxyMetrics, health: Health, descriptors: int
) -> AsyncIterator[Proxy]:
    """A proxy that serves until this is left; each engine has been asked once whether it is alive.

    `descriptors` is how many files this process may open, which bounds requests and connections.

    Raises:
        ConfigError: the configuration cannot work.
        OSError: an address cannot be bound.
    """
    validate(config)
    requests_max, connections_max = fitting(config.requests_max, config.connections_max, descriptors)
    if (requests_max, connections_max) != (config.requests_max, config.connections_max):
        log.warning(
            "requests_limited_by_descriptors", requests=requests_max, connections=connections_max, limit=descriptors
        )
    listeners = await _listen(config.address)
    try:
        async with (
            open_zmq_control() as control,
            control.serve(config.notify_address) as notify_server,
            trio.open_nursery() as background,
        ):
            notifications = Notifications(notify_server, metrics)
            notify_address = config.notify_advertise_address or notify_server.address
            engines = Engines(config, background, metrics, health)
            flow = Flow(config, engines, notifications, notify_address, metrics, background)
            app = App(config, requests_max, engines, notifications, flow, metrics, health)
            proxy = Proxy(app, engines, listeners, notify_address, config, connections_max, metrics, health)
            background.start_soon(_hear, notifications, health)
            await engines.wait_asked()
            async with trio.open_nursery() as connections:
                connections.start_soon(proxy.accept, connections)
                yield proxy
                connections.cancel_scope.cancel()
            with trio.move_on_after(ABANDON_S):
                await flow.wait_released()
            background.cancel_scope.cancel()
    finally:
        for listener in listeners:
            listener.socket.close()


async def _hear(notifications: Notifications, health: Health) -> None:
    with health.task("hear_notifications"):
        await notifications.run()
