"""A proxy's life as a process: the same start, signals and end as the other daemons', and SIGHUP reads its file anew.

Of a file that was read anew only the lists of engines are taken over; one that cannot work changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import attrs

from kvpd.config import Config
from kvpd.errors import ConfigError
from kvpd.integrations.proxy.server import Proxy, open_proxy
from kvpd.log import LogWriter, get_logger
from kvpd.metrics import ProxyMetrics
from kvpd.service.daemon import Daemon, run_daemon

log = get_logger()

_RELOADED: Final = frozenset({"prefill", "decode"})


def run(config: Config, *, read_again: Callable[[], Config], address_file: Path | None = None) -> int:
    """Serve until told to stop: the exit status, 0 after a drain. `read_again` gives the configuration of then.

    Raises:
        ConfigError: the configuration cannot work on this machine.
    """
    return run_daemon(
        config, "proxy", config.proxy.name, lambda writer: _ProxyDaemon(config, read_again, writer, address_file)
    )


class _ProxyDaemon(Daemon):
    def __init__(
        self, config: Config, read_again: Callable[[], Config], writer: LogWriter, address_file: Path | None
    ) -> None:
        super().__init__(config, writer, address_file)
        self._read_again = read_again
        self._proxy: Proxy | None = None  # once it is bound

    def hang_up(self) -> None:
        """SIGHUP: read the file anew."""
        if self._proxy is None:
            log.warning("reload_refused", problems=["it has not started yet"])
            return
        try:
            config = self._read_again()
        except ConfigError as exc:
            log.error("reload_refused", problems=list(exc.problems))
            return
        added, removed = self._proxy.reload(config.proxy)
        log.info("engines_reloaded", added=added, removed=removed, needs_restart=self._changed_otherwise(config))
        self.config = attrs.evolve(
            self.config, proxy=attrs.evolve(self.config.proxy, prefill=config.proxy.prefill, decode=config.proxy.decode)
        )

    def _changed_otherwise(self, config: Config) -> list[str]:
        """The keys whose new values are not in force before a restart."""
        old, new = self.config, config
        return [
            f"{section}.{field.name}"
            for section in ("proxy", "log", "metrics")
            for field in attrs.fields(type(getattr(old, section)))
            if getattr(getattr(old, section), field.name) != getattr(getattr(new, section), field.name)
            and not (section == "proxy" and field.name in _RELOADED)
        ]

    async def _serve(self) -> None:
        metrics = ProxyMetrics(log_lines_dropped=lambda: self.writer.dropped)
        with self.metrics_server(metrics) as server:
            async with open_proxy(
                self.config.proxy, metrics=metrics, health=self.health, descriptors=self.descriptors_max
            ) as proxy:
                self._proxy = proxy
                addresses = {
                    "address": proxy.address,
                    "notify_address": proxy.notify_address,
                    "metrics_address": "off" if server is None else server.address,
                }
                if await self.serve_until_stopped(addresses):
                    await self.drain(proxy.drain, self.config.proxy.drain_timeout_s)
