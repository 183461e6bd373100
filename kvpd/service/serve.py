"""`kvpd serve receiver` and `kvpd serve sender`: a receiver or a sender, its engine socket and its metrics."""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, Literal

import trio

from kvpd.config import Config, ReceiverConfig
from kvpd.link import LINK_VERSION, Attached, RegionInfo
from kvpd.log import LogWriter
from kvpd.metrics import Health, MetricsServer, ReceiverMetrics, SenderMetrics
from kvpd.service.buffer import Buffer
from kvpd.service.daemon import Daemon, run_daemon
from kvpd.service.engine_link import EngineServer, Memory, listen
from kvpd.service.engines import DecodeEngine, PrefillEngine, WriterEngine
from kvpd.service.receiver import Receiver
from kvpd.service.sender import Sender

_AFTER_DRAIN_S: Final = 1.0  # for the last messages: they are small, and nobody waits for an answer
# So many new objects until the young ones are searched for garbage, which takes part of a millisecond then. Python's
# own limit, 700, has it search what a request is about to free by itself.
_YOUNG_OBJECTS_MAX: Final = 10_000


def run(role: Literal["receiver", "sender"], config: Config, *, address_file: Path | None = None) -> int:
    """Serve until told to stop: the exit status, 0 after a drain.

    Raises:
        ConfigError: the configuration cannot work on this machine.
    """
    section = config.receiver if role == "receiver" else config.sender
    return run_daemon(config, role, section.name, lambda writer: _TransferDaemon(role, config, writer, address_file))


def _boot_time() -> float:
    """Seconds since boot, suspend included: a lease runs on while a machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class _TransferDaemon(Daemon):
    def __init__(
        self, role: Literal["receiver", "sender"], config: Config, writer: LogWriter, address_file: Path | None
    ) -> None:
        super().__init__(config, writer, address_file)
        self._section = config.receiver if role == "receiver" else config.sender

    async def _serve(self) -> None:
        section = self._section
        with listen(section.engine_socket) as listener, self.metrics_server(self._metrics) as server:
            async with self._open() as daemon, trio.open_nursery() as nursery:
                engines = _engine_server(listener, daemon)
                nursery.start_soon(_serve_engines, engines, self.health)
                memory = await _look_at(daemon.buffer)
                gc.collect()
                gc.freeze()  # a full collection would otherwise stop the loop for milliseconds
                gc.set_threshold(_YOUNG_OBJECTS_MAX)
                addresses = _addresses(daemon, section.engine_socket, server)
                if await self.serve_until_stopped(addresses, **memory):
                    if not await self.drain(daemon.drain, section.drain_timeout_s):
                        with trio.move_on_after(_AFTER_DRAIN_S):
                            await daemon.wait_idle()
                    await engines.finish()
                nursery.cancel_scope.cancel()

    @functools.cached_property
    def _metrics(self) -> ReceiverMetrics | SenderMetrics:
        kind = ReceiverMetrics if isinstance(self._section, ReceiverConfig) else SenderMetrics
        return kind(transport=self._section.transport, log_lines_dropped=lambda: self.writer.dropped)

    @property
    def _share(self) -> str:
        """Where engines get a receiver's memory, as engines of any working directory can name it."""
        return str(Path(self._section.engine_socket).absolute())

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[Receiver | Sender]:
        health, metrics = self.health, self._metrics
        if isinstance(metrics, ReceiverMetrics):
            config, share = self.config.receiver, self._share
            async with Receiver(config, metrics=metrics, health=health, now=_boot_time, share=share) as receiver:
                yield receiver
        else:
            async with Sender(self.config.sender, metrics=metrics, health=health, now=_boot_time) as sender:
                yield sender


def _addresses(daemon: Receiver | Sender, engine_socket: str, server: MetricsServer | None) -> dict[str, str]:
    addresses = {"engine_socket": engine_socket, "metrics_address": "off" if server is None else server.address}
    if isinstance(daemon, Receiver):
        addresses["control_address"] = daemon.address
    return addresses


async def _look_at(buffer: Buffer) -> dict[str, int | None]:
    """What an operator should see of the chunk memory: whether the kernel has given the huge pages asked for."""
    huge = await trio.to_thread.run_sync(buffer.huge_page_bytes, abandon_on_cancel=True)
    return {"memory_bytes": buffer.total_bytes, "huge_page_bytes": huge}


def _engine_server(listener: trio.SocketListener, daemon: Receiver | Sender) -> EngineServer:
    config, buffer = daemon.config, daemon.buffer
    attached = Attached(
        LINK_VERSION,
        name=config.name,
        chunk_bytes=config.chunk_bytes,
        chunk_tokens=config.chunk_tokens if isinstance(config, ReceiverConfig) else 0,
        regions=tuple(RegionInfo(rank, buffer.length, offset=buffer.offset(0, rank)) for rank in range(config.ranks)),
        layout=config.layout,
        ranks=config.ranks,
    )
    if isinstance(daemon, Receiver):
        is_shared = bool(daemon.core.settings.share)
        return EngineServer(
            listener,
            Memory("receiver", attached, buffer.reading_descriptor, buffer.descriptor),
            functools.partial(DecodeEngine, daemon),
            daemon.metrics.engines.set,
            functools.partial(WriterEngine, daemon) if is_shared else None,
        )
    memory = Memory("sender", attached, buffer.descriptor)
    return EngineServer(listener, memory, functools.partial(PrefillEngine, daemon), daemon.metrics.engines.set)


async def _serve_engines(server: EngineServer, health: Health) -> None:
    with health.task("serve_engines"):
        await server.run()
