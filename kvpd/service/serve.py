"""A daemon's life: everything is bound before it says that it is ready, and a signal drains it.

Start-up is all or nothing. The first SIGTERM or SIGINT stops new work and lets what runs finish, within
`drain_timeout_s`; a second one leaves at once. Either way no socket file and no memory is left behind.
"""

from __future__ import annotations

import functools
import gc
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final, Literal

import attrs
import trio

from kvpd.config import Config, ReceiverConfig
from kvpd.errors import ConfigError
from kvpd.link import LINK_VERSION, Attached, RegionInfo
from kvpd.log import LogWriter, get_logger, start_logging
from kvpd.metrics import Health, MetricsServer, ReceiverMetrics, SenderMetrics
from kvpd.service.announce import tell_systemd, write_addresses
from kvpd.service.engine_link import EngineServer, Memory, listen
from kvpd.service.engines import DecodeEngine, PrefillEngine
from kvpd.service.host import raise_descriptor_limit
from kvpd.service.receiver import Receiver
from kvpd.service.sender import Sender

log = get_logger()

_AFTER_DRAIN_S: Final = 1.0  # for the last messages: they are small, and nobody waits for an answer
_STARTUP_FAILED: Final = 1


def run(role: Literal["receiver", "sender"], config: Config, *, address_file: Path | None = None) -> int:
    """Serve until told to stop: the exit status, 0 after a drain.

    Raises:
        ConfigError: the configuration cannot work on this machine.
    """
    section = config.receiver if role == "receiver" else config.sender
    with start_logging(config.log, role, section.name) as writer:
        daemon = _Daemon(role, config, writer, address_file)
        try:
            return trio.run(daemon.run)
        except OSError as exc:
            log.error("start_failed", detail=str(exc))
            return _STARTUP_FAILED


def _boot_time() -> float:
    """Seconds since boot, suspend included: a lease runs on while a machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@attrs.define
class _Daemon:
    role: Literal["receiver", "sender"]
    config: Config
    writer: LogWriter
    address_file: Path | None
    stop: trio.Event = attrs.field(factory=trio.Event)
    is_ready: bool = False
    failure: ConfigError | OSError | None = None  # to be raised alone, not in a group
    exit_status: int = 0

    async def run(self) -> int:
        """Until a signal has ended it."""
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._obey, signals, nursery.cancel_scope)
                try:
                    await self._serve()
                except (ConfigError, OSError) as exc:
                    self.failure = exc
                nursery.cancel_scope.cancel()
        if self.failure is not None:
            raise self.failure
        log.info("stopped", exit_status=self.exit_status)
        return self.exit_status

    async def _obey(self, signals: AsyncIterator[int], scope: trio.CancelScope) -> None:
        async for number in signals:
            name = signal.Signals(number).name
            if number == signal.SIGHUP:
                log.info("hangup_ignored")
            elif self.stop.is_set():
                log.warning("drain_cut_short", signal=name)
                self.exit_status = 128 + number
                scope.cancel()
            else:
                log.info("stop_requested", signal=name)
                self.stop.set()
                if not self.is_ready:
                    scope.cancel()  # nothing runs yet that could be drained, and preparing the memory may take minutes

    async def _serve(self) -> None:
        soft, hard = raise_descriptor_limit()
        section = self.config.receiver if self.role == "receiver" else self.config.sender
        health = Health()
        health.attach_loop(trio.lowlevel.current_trio_token())
        metrics = self._metrics(section.transport)
        async with AsyncExitStack() as stack:
            listener = stack.enter_context(listen(section.engine_socket))
            server = self._metrics_server(stack, metrics, health)
            async with self._open(health, metrics) as daemon, trio.open_nursery() as nursery:
                engines = _engine_server(listener, daemon)
                nursery.start_soon(_serve_engines, engines, health)
                gc.collect()
                gc.freeze()  # a full collection would otherwise stop the loop for milliseconds
                addresses = _addresses(daemon, section.engine_socket, server)
                if self._write_addresses(addresses):
                    self.is_ready = True
                    health.mark_ready()
                    log.info("ready", pid=os.getpid(), descriptors_soft=soft, descriptors_hard=hard, **addresses)
                    tell_systemd("READY=1")
                    await self.stop.wait()
                    await self._drain(daemon, section.drain_timeout_s)
                    await engines.finish()
                nursery.cancel_scope.cancel()

    async def _drain(self, daemon: Receiver | Sender, timeout_s: float) -> None:
        tell_systemd("STOPPING=1")
        log.info("drain_started", timeout_s=timeout_s)
        finished = await daemon.drain(timeout_s)
        if not finished:
            log.warning("drain_timed_out", timeout_s=timeout_s)
            with trio.move_on_after(_AFTER_DRAIN_S):
                await daemon.wait_idle()

    def _metrics(self, transport: str) -> ReceiverMetrics | SenderMetrics:
        from kvpd import __version__  # noqa: PLC0415  computed when asked for

        kind = ReceiverMetrics if self.role == "receiver" else SenderMetrics
        return kind(version=__version__, transport=transport, log_lines_dropped=lambda: self.writer.dropped)

    def _metrics_server(
        self, stack: AsyncExitStack, metrics: ReceiverMetrics | SenderMetrics, health: Health
    ) -> MetricsServer | None:
        address = self.config.metrics.address
        return None if address == "off" else stack.enter_context(MetricsServer(address, metrics, health))

    @asynccontextmanager
    async def _open(self, health: Health, metrics: ReceiverMetrics | SenderMetrics) -> AsyncIterator[Receiver | Sender]:
        if isinstance(metrics, ReceiverMetrics):
            async with Receiver(self.config.receiver, metrics=metrics, health=health, now=_boot_time) as receiver:
                yield receiver
        else:
            async with Sender(self.config.sender, metrics=metrics, health=health, now=_boot_time) as sender:
                yield sender

    def _write_addresses(self, addresses: dict[str, str]) -> bool:
        """Where the command line wants them. Whether that worked."""
        if self.address_file is None:
            return True
        try:
            write_addresses(self.address_file, addresses)
        except ConfigError as exc:
            self.failure = exc
            return False
        return True


def _addresses(daemon: Receiver | Sender, engine_socket: str, server: MetricsServer | None) -> dict[str, str]:
    addresses = {"engine_socket": engine_socket, "metrics_address": "off" if server is None else server.address}
    if isinstance(daemon, Receiver):
        addresses["control_address"] = daemon.address
    return addresses


def _engine_server(listener: trio.SocketListener, daemon: Receiver | Sender) -> EngineServer:
    config = daemon.config
    attached = Attached(
        LINK_VERSION,
        name=config.name,
        chunk_bytes=config.chunk_bytes,
        chunk_tokens=config.chunk_tokens if isinstance(config, ReceiverConfig) else 0,
        regions=(RegionInfo(0, daemon.buffer.length),),
    )
    if isinstance(daemon, Receiver):
        memory = Memory("receiver", attached, [daemon.buffer.descriptor])
        return EngineServer(listener, memory, functools.partial(DecodeEngine, daemon), daemon.metrics.engines.set)
    memory = Memory("sender", attached, [daemon.buffer.descriptor])
    return EngineServer(listener, memory, functools.partial(PrefillEngine, daemon), daemon.metrics.engines.set)


async def _serve_engines(server: EngineServer, health: Health) -> None:
    with health.task("serve_engines"):
        await server.run()
