"""kvpd's daemons in a run: at the same names and addresses, however often they die."""

from __future__ import annotations

import json
import signal
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import trio

from chaos_app.process import Process, python

_READY_S: Final = 60.0
_HTTP_S: Final = 10.0
_LOOK_AGAIN_S: Final = 1.0  # where a log line that would have said so was suppressed

Metrics = dict[str, float]


class Daemon(Process):
    """`kvpd serve ROLE`. `settings` are keys of its own section; `prefix` runs it, if anything does;
    `host` is where its metrics are asked for."""

    def __init__(
        self,
        role: str,
        name: str,
        folder: Path,
        settings: Mapping[str, object],
        *,
        prefix: Sequence[str] = (),
        host: str = "127.0.0.1",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(name)
        self.role = role
        self.socket = folder / f"{name}.sock"
        self.address = ""
        self.starts = 0
        self.lock = trio.Lock()  # one fault at a time
        self.quarantined: dict[str, int] = {}  # slots by transfer, at a receiver
        self._settings = {"name": name, "engine_socket": self.socket, **settings}
        self._prefix = prefix
        self._host = host
        self._environment = environment
        self._ready = trio.Event()
        self._line = trio.Event()
        self._metrics_url = ""

    async def up(self, nursery: trio.Nursery) -> None:
        """Start it, and wait until it serves."""
        flags = [part for key, value in self._settings.items() for part in ("--set", f"{self.role}.{key}={value}")]
        flags += ["--set", f"metrics.address={self._host}:0"]
        self._ready = trio.Event()
        self.quarantined.clear()
        self.starts += 1
        command = [*self._prefix, *python("-m", "kvpd", "serve", self.role, *flags)]
        await self.start(nursery, command, on_out=lambda _: None, on_err=self._heard, environment=self._environment)
        with trio.move_on_after(_READY_S):
            await self.until_said(self._ready)
        if not self._ready.is_set():
            raise RuntimeError(f"{self.name} does not become ready:\n" + "\n".join(self.tail))

    def _heard(self, line: bytes) -> None:
        try:
            fields = json.loads(line)
        except ValueError:
            # A person's words: a refusal, a traceback or one of UCX's. Only the first two end a daemon, and then show.
            fields = {}
        match fields.get("message"):
            case "ready":
                self._metrics_url = f"http://{fields['metrics_address']}"
                if self.role == "receiver":
                    self.address = fields["control_address"]
                self._ready.set()
            case "transfer_revoked":
                if fields["quarantined"]:
                    self.quarantined[fields["transfer"]] = fields["quarantined"]
            case "transfer_fenced":
                self.quarantined.pop(fields["transfer"], None)
            case _:
                pass
        self._line.set()
        self._line = trio.Event()

    async def metrics(self) -> Metrics:
        """Its counters and gauges: `kvpd_slots{state=free}`."""
        return await trio.to_thread.run_sync(self._get_metrics)

    def _get_metrics(self) -> Metrics:
        # The first answer comes from the loop, so that the step whose line was seen has ended.
        for path in ("/livez", "/metrics"):
            with urllib.request.urlopen(self._metrics_url + path, timeout=_HTTP_S) as answer:
                text = answer.read().decode()
        samples = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        return {name.replace('"', ""): float(value) for name, value in samples}

    async def until(self, holds: Callable[[Metrics], bool], bound_s: float) -> Metrics | None:
        """Its metrics once they are so, asked for anew after each of its lines; None if they are not in time."""
        deadline = trio.current_time() + bound_s
        while True:
            line = self._line
            try:
                metrics = await self.metrics()
            except OSError:
                return None
            if holds(metrics):
                return metrics
            if trio.current_time() >= deadline or not self.is_alive:
                return None
            with trio.move_on_after(min(_LOOK_AGAIN_S, deadline - trio.current_time())):
                await line.wait()

    def descriptors(self) -> int:
        """How many files it has open."""
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))

    def resident_bytes(self) -> int:
        """Its memory but for the chunks."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        (line,) = [line for line in status.splitlines() if line.startswith("RssAnon:")]
        return int(line.split()[1]) * 1024


async def freeze(process: Process, seconds: float) -> None:
    """Stop a process for so long; it goes on even if this is cancelled."""
    process.send_signal(signal.SIGSTOP)
    try:
        await trio.sleep(seconds)
    finally:
        process.send_signal(signal.SIGCONT)


def slots_of(metrics: Mapping[str, float]) -> dict[str, int]:
    """A receiver's slots by state."""
    names: dict[str, Any] = {name: value for name, value in metrics.items() if name.startswith("kvpd_slots{")}
    return {name[len("kvpd_slots{state=") : -1]: int(value) for name, value in names.items()}
