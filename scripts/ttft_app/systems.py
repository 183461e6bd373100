"""The systems that are compared, all up at once: five vLLM servers, kvpd's daemons, and a proxy for each way.

At any time the servers of one system at most run; those of all others are stopped (SIGSTOP), so that nothing that they
do of their own accord, NIXL's progress thread above all, takes a core from what is measured. Daemons and proxies run
on: while nobody asks them anything they do nothing, and the proxies' probes are put off for the length of a run.

kvpd's two modes share two servers and the daemons, and have a proxy each.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import attrs
from demo_app.children import interrupts_held
from vllm_app.asking import get
from vllm_app.stack import DAEMON_PYTHON, DAEMON_TIMEOUT_S, ROOT, Say, Served, Stack, free_ports

NIXL_PYTHON: Final = ROOT / ".venv-ttft" / "bin" / "python"
_SIDE_PORT: Final = "VLLM_NIXL_SIDE_CHANNEL_PORT"
_PROBE_S: Final = 100_000
_NOBODY: Final = "127.0.0.1:9"  # a decode engine is written with its receiver; NixlConnector has none


@attrs.frozen
class System:
    """One way from a prompt to its first token."""

    name: str
    entrance: str  # the part that a client asks
    engines: tuple[str, ...]

    @property
    def prefill(self) -> str:
        """The engine that computes prompts."""
        return self.engines[0]

    @property
    def decode(self) -> str:
        """The engine that answers."""
        return self.engines[-1]

    @property
    def alone(self) -> System:
        """The engine that computes prompts, asked directly: it generates too."""
        return System(f"{self.prefill} alone", self.prefill, (self.prefill,))


SINGLE: Final = System("single", "single", ("single",))
SEQUENTIAL: Final = System("kvpd sequential", "proxy", ("prefill", "decode"))
CONCURRENT: Final = System("kvpd concurrent", "proxy-concurrent", ("prefill", "decode"))
NIXL: Final = System("NixlConnector", "proxy-nixl", ("nixl-prefill", "nixl-decode"))
SYSTEMS: Final = (SINGLE, SEQUENTIAL, CONCURRENT, NIXL)
KVPD: Final = (SEQUENTIAL, CONCURRENT)


class Systems(Stack):
    """A context manager, as `Stack` is; within it, `running` says whose turn it is."""

    def __init__(self, served: Served, logs: Path, say: Say, *, nixl: Mapping[str, object]) -> None:
        quiet = {"proxy.probe_interval_s": _PROBE_S, **served.settings}
        super().__init__(attrs.evolve(served, settings=quiet), logs, say, with_single=True)
        self._nixl = dict(nixl)
        self._engines = tuple(dict.fromkeys(engine for system in SYSTEMS for engine in system.engines))
        self._side_ports = dict(zip(NIXL.engines, free_ports(len(NIXL.engines)), strict=True))
        self._stopped: set[str] = set()

    def address(self, name: str) -> str:
        """See `Stack`."""
        if name.startswith("proxy"):
            return str(self[name].said("ready")[-1]["address"])
        return super().address(name)

    # ------------------------------------------------------------------ whose turn it is

    @contextlib.contextmanager
    def running(self, system: System) -> Iterator[None]:
        """The servers of this system run, and no others."""
        halted = [name for name in self._engines if name not in system.engines]
        for name in halted:
            self._halt(name)
        for name in halted:  # a signal is not heard at once
            os.waitid(os.P_PID, self[name].pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        for name in system.engines:
            self._go_on(name)
        yield

    def _halt(self, name: str) -> None:
        if name not in self._stopped:
            self._stopped.add(name)
            os.killpg(self[name].pid, signal.SIGSTOP)

    def _go_on(self, name: str) -> None:
        if name in self._stopped:
            os.killpg(self[name].pid, signal.SIGCONT)
            self._stopped.remove(name)

    def _end_all(self) -> None:
        # What is stopped does not hear that it is to end.
        with interrupts_held():
            for name in tuple(self._stopped):
                with contextlib.suppress(ProcessLookupError):
                    self._go_on(name)
            super()._end_all()

    # ------------------------------------------------------------------ its parts

    def _start_all(self) -> None:
        super()._start_all()
        others = [system.entrance for system in (CONCURRENT, NIXL)]
        for name in others:
            self._start(name)
        self.wait_ready(*others, timeout_s=DAEMON_TIMEOUT_S)
        for name in others:
            self.wait_until(_is_ready(self.address(name)), f"{name} to find both engines", DAEMON_TIMEOUT_S)

    def _environment(self, name: str) -> dict[str, str]:
        environment = super()._environment(name)
        if name in self._side_ports:
            environment[_SIDE_PORT] = str(self._side_ports[name])
        return environment

    def _daemon_command(self, role: str) -> list[str]:
        if not role.startswith("proxy-"):
            return super()._daemon_command(role)
        command = super()._daemon_command("proxy")
        own: dict[str, object] = {"proxy.name": role}
        if role == CONCURRENT.entrance:
            own["proxy.mode"] = "concurrent"
        else:
            command = [str(DAEMON_PYTHON), "-m", "ttft_app.nixl_proxy", *command[command.index("serve") :]]
            own["proxy.prefill"] = f"http://{self._addresses[NIXL.prefill]}"
            own["proxy.decode"] = f"http://{self._addresses[NIXL.decode]}+{_NOBODY}"
        return [*command, *(flag for key, value in own.items() for flag in ("--set", f"{key}={value}"))]

    def _engine_command(self, name: str) -> list[str]:
        command = super()._engine_command(name)
        return [str(NIXL_PYTHON), *command[1:]] if name in NIXL.engines else command

    def _transfer_config(self, name: str) -> dict[str, Any]:
        if name not in NIXL.engines:
            return super()._transfer_config(name)
        return {
            "kv_connector": "CpuNixlConnector",
            "kv_connector_module_path": "ttft_app.nixl_connector",
            "kv_role": "kv_producer" if name == NIXL.prefill else "kv_consumer",
            "kv_buffer_device": "cpu",
            "kv_connector_extra_config": self._nixl,
        }


def _is_ready(address: str) -> Callable[[], bool]:
    return lambda: get(address, "/readyz").status == 200
