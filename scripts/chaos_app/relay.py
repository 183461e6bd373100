"""A TCP relay between senders and a receiver's control port, whose connections can be cut or run dry."""

from __future__ import annotations

from collections.abc import Callable

import trio

_READ_BYTES = 65536


class Relay:
    """Everything that connects to `address` talks to `target()`, until `cut`; nothing moves while it is dry."""

    def __init__(self, target: Callable[[], str], host: str) -> None:
        self._target = target
        self._host = host
        self._scopes: set[trio.CancelScope] = set()
        self._flowing = trio.Event()
        self._flowing.set()
        self.address = ""

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled."""
        (listener,) = await trio.open_tcp_listeners(0, host=self._host)
        host, port = listener.socket.getsockname()
        self.address = f"{host}:{port}"
        task_status.started()
        await trio.serve_listeners(self._serve, [listener])

    def cut(self) -> int:
        """End every connection, now; how many that were."""
        scopes = list(self._scopes)
        for scope in scopes:
            scope.cancel()
        return len(scopes)

    def dry(self) -> None:
        """Pass nothing on until `flow`; the connections stay."""
        self._flowing = trio.Event()

    def flow(self) -> None:
        """Pass things on again."""
        self._flowing.set()

    async def _serve(self, stream: trio.SocketStream) -> None:
        host, _, port = self._target().rpartition(":")
        with trio.CancelScope() as scope:
            self._scopes.add(scope)
            try:
                other = await trio.open_tcp_stream(host, int(port))
                async with other, trio.open_nursery() as nursery:
                    nursery.start_soon(self._pump, stream, other, scope)
                    nursery.start_soon(self._pump, other, stream, scope)
            except OSError:
                pass  # the receiver is not there: this connection ends, as it would without us
            finally:
                self._scopes.discard(scope)
        await trio.aclose_forcefully(stream)

    async def _pump(self, source: trio.SocketStream, sink: trio.SocketStream, scope: trio.CancelScope) -> None:
        try:
            async for data in source:
                await self._flowing.wait()
                await sink.send_all(data)
        except trio.BrokenResourceError:
            pass
        scope.cancel()  # either end is the end of both
