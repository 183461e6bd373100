"""A daemon's life: everything is bound before it says that it is ready, and a signal drains it.

Start-up is all or nothing. The first SIGTERM or SIGINT stops new work and lets what runs finish, within
`drain_timeout_s`; a second one leaves at once. Either way no socket file and no memory is left behind.
"""

from __future__ import annotations

import abc
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Final

import trio

from kvpd.config import Config, Role
from kvpd.errors import ConfigError
from kvpd.log import LogWriter, get_logger, start_logging
from kvpd.metrics import Health, Metrics, MetricsServer
from kvpd.service.announce import tell_systemd, write_addresses
from kvpd.service.host import raise_descriptor_limit

log = get_logger()

_STARTUP_FAILED: Final = 1


class Daemon(abc.ABC):
    """One process of one role, from its start to its exit status."""

    def __init__(self, config: Config, writer: LogWriter, address_file: Path | None) -> None:
        self.config = config
        self.writer = writer
        self.health = Health()
        self.is_ready = False
        self.descriptors_max = 0  # once it serves
        self._address_file = address_file
        self._stop = trio.Event()
        self._descriptors_before = 0
        self._failure: ConfigError | OSError | None = None  # to be raised alone, not in a group
        self._exit_status = 0

    @abc.abstractmethod
    async def _serve(self) -> None:
        """Bind everything, then `serve_until_stopped`, then let go of everything."""

    def hang_up(self) -> None:
        """SIGHUP came."""
        log.info("hangup_ignored")

    async def run(self) -> int:
        """Until a signal has ended it: the exit status, 0 after a drain.

        Raises:
            ConfigError: the configuration cannot work on this machine.
            OSError: an address cannot be bound.
        """
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._obey, signals, nursery.cancel_scope)
                try:
                    self._descriptors_before, self.descriptors_max = raise_descriptor_limit()
                    self.health.attach_loop(trio.lowlevel.current_trio_token())
                    await self._serve()
                except (ConfigError, OSError) as exc:
                    self._failure = exc
                nursery.cancel_scope.cancel()
        if self._failure is not None:
            raise self._failure
        log.info("stopped", exit_status=self._exit_status)
        return self._exit_status

    async def _obey(self, signals: AsyncIterator[int], scope: trio.CancelScope) -> None:
        async for number in signals:
            name = signal.Signals(number).name
            if number == signal.SIGHUP:
                self.hang_up()
            elif self._stop.is_set():
                log.warning("drain_cut_short", signal=name)
                self._exit_status = 128 + number
                scope.cancel()
            else:
                log.info("stop_requested", signal=name)
                self._stop.set()
                if not self.is_ready:
                    scope.cancel()  # nothing runs yet that could be drained, and preparing the memory may take minutes

    def metrics_server(self, metrics: Metrics) -> AbstractContextManager[MetricsServer | None]:
        """The server of /metrics and the probes, unless it is off."""
        address = self.config.metrics.address
        return nullcontext() if address == "off" else MetricsServer(address, metrics, self.health)

    async def serve_until_stopped(self, addresses: Mapping[str, str], **facts: object) -> bool:
        """Say that everything is bound, and wait for a signal. False: the addresses could not be written.

        `facts` are more fields of the line `ready`.
        """
        if self._address_file is not None:
            try:
                write_addresses(self._address_file, addresses)
            except ConfigError as exc:
                self._failure = exc  # raised here it would come out in a group
                return False
        self.is_ready = True
        self.health.mark_ready()
        limits = {"descriptors_soft": self._descriptors_before, "descriptors_hard": self.descriptors_max}
        log.info("ready", pid=os.getpid(), **limits, **facts, **addresses)
        tell_systemd("READY=1")
        await self._stop.wait()
        return True

    @staticmethod
    async def drain(drain: Callable[[float], Awaitable[bool]], timeout_s: float) -> bool:
        """Let what runs end by `drain(timeout_s)`, and tell whoever watches. Whether all of it finished."""
        tell_systemd("STOPPING=1")
        log.info("drain_started", timeout_s=timeout_s)
        finished = await drain(timeout_s)
        if not finished:
            log.warning("drain_timed_out", timeout_s=timeout_s)
        return finished


def run_daemon(config: Config, role: Role, name: str, make: Callable[[LogWriter], Daemon]) -> int:
    """Log, run, and say why when it could not start: the exit status.

    Raises:
        ConfigError: the configuration cannot work on this machine.
    """
    with start_logging(config.log, role, name) as writer:
        try:
            return trio.run(make(writer).run)
        except OSError as exc:
            log.error("start_failed", detail=str(exc))
            return _STARTUP_FAILED
