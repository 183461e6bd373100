"""The whole stack on one machine: a receiver, a sender, two vLLM servers and the proxy; perhaps a single server beside.

It is up when every part has said that it is ready and the proxy has found both engines. Whatever is waited for has a
deadline, and is said every few seconds; a part that ends before its time ends the wait with its last words. Leaving
the stack ends all of it.
"""

from __future__ import annotations

import contextlib
import json
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import attrs
from demo_app.children import interrupts_held
from demo_app.chunks import CHUNK_TOKENS, KvShape
from demo_app.environment import child_environment

from vllm_app.asking import get, takes_connections
from vllm_app.parts import Part, PartFailed

ROOT: Final = Path(__file__).resolve().parents[2]
DAEMON_PYTHON: Final = ROOT / ".venv" / "bin" / "python"
VLLM_PYTHON: Final = ROOT / ".venv-vllm" / "bin" / "python"

START_TIMEOUT_S: Final = 300.0  # of vLLM servers that start side by side on two slow cores
DAEMON_TIMEOUT_S: Final = 60.0
_SAY_EVERY_S: Final = 5.0
_BLOCK_TOKENS: Final = 128
_DAEMON_READY: Final = '"ready"'
_ENGINE_READY: Final = "Application startup complete"
# One thread an engine, and not bound to a core: on two cores, three servers take turns.
_VLLM_ENVIRONMENT: Final = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}

Say = Callable[[str], None]


@attrs.frozen
class Served:
    """A model, and how much of it is served: sizes are in tokens unless they say otherwise."""

    folder: Path
    name: str
    shape: KvShape
    context: int  # the longest prompt with its answer
    room: int  # of each engine's KV cache
    receiver_chunks: int = 64
    sender_chunks: int = 16
    flags: Sequence[str] = ()  # of all vLLM servers
    settings: Mapping[str, object] = attrs.Factory(dict)  # of daemons, as in `proxy.transfer_timeout_s`
    connector: Mapping[str, object] = attrs.Factory(dict)  # kv_connector_extra_config, besides the sockets


class Stack:
    """A context manager: entering starts everything and returns when it is up."""

    def __init__(self, served: Served, logs: Path, say: Say, *, with_single: bool) -> None:
        self.served = served
        self.logs = logs
        self._say = say
        self._parts: dict[str, Part] = {}
        self._news = threading.Condition()
        self._addresses: dict[str, str] = {}
        self._control = "127.0.0.1:0"  # the receiver's: what it takes at first it takes again
        self._scratch = contextlib.ExitStack()
        self._sockets = Path()
        self._engines: tuple[str, ...] = ("prefill", "decode", *(("single",) if with_single else ()))

    def __getitem__(self, name: str) -> Part:
        return self._parts[name]

    def address(self, name: str) -> str:
        """Where it answers HTTP: an engine's or the proxy's own pages, a daemon's metrics."""
        if name in self._addresses:
            return self._addresses[name]
        return self.told(name, "address" if name == "proxy" else "metrics_address")

    def told(self, daemon: str, field: str) -> str:
        """What a daemon has said of itself when it was ready."""
        return str(json.loads(self._parts[daemon].ready_line)[field])

    # ------------------------------------------------------------------ its life

    def __enter__(self) -> Self:
        # The folder's name is short because a Unix socket's path may have no more than 107 bytes.
        scratch = tempfile.TemporaryDirectory(prefix="kvpd-vllm-", dir="/tmp")
        self._sockets = Path(self._scratch.enter_context(scratch))
        try:
            self._start_all()
        except BaseException:
            self._end_all()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_all()

    def _start_all(self) -> None:
        for name in ("receiver", "sender"):
            self._start(name)
        self.wait_ready("receiver", "sender", timeout_s=DAEMON_TIMEOUT_S)
        self._control = self.told("receiver", "control_address")
        for name, port in zip(self._engines, free_ports(len(self._engines)), strict=True):
            self._addresses[name] = f"127.0.0.1:{port}"
        for name in ("proxy", *self._engines):
            self._start(name)
        self.wait_ready("proxy", *self._engines, timeout_s=START_TIMEOUT_S)
        self._wait_found()
        # An engine's line comes a moment before its port is open; the proxy has found two of them, and not the third.
        addresses = [self._addresses[name] for name in self._engines]
        self.wait_until(lambda: all(map(takes_connections, addresses)), "the engines' ports to open", DAEMON_TIMEOUT_S)

    def _end_all(self) -> None:
        # A second Ctrl-C has nothing to hasten, for each part has a time limit, and must not leave half of them alive.
        with interrupts_held():
            # All hear it first, so that the slowest alone decides how long this takes.
            for part in reversed(self._parts.values()):
                part.leave()
            for part in reversed(self._parts.values()):
                part.end()
            self._scratch.close()

    def stop(self) -> dict[str, int]:
        """End all of it now: the exit status of each part."""
        self._end_all()
        return {name: part.status for name, part in self._parts.items() if part.status is not None}

    def restart(self, name: str) -> None:
        """Start a part that was killed again, where its peers look for it; returns when it is ready."""
        assert self._parts[name].status is not None
        self._start(name)
        self.wait_ready(name, timeout_s=START_TIMEOUT_S)
        self._wait_found()

    def _wait_found(self) -> None:
        # The proxy writes a line when it finds an engine, and that is when it is asked.
        proxy = self.address("proxy")
        self.wait_until(lambda: get(proxy, "/readyz").status == 200, "the proxy to find both engines", DAEMON_TIMEOUT_S)

    # ------------------------------------------------------------------ waiting

    def wait_ready(self, *names: str, timeout_s: float) -> None:
        """Until these parts have said that they are ready; each is told of as it comes.

        Raises:
            PartFailed: one of them has not within `timeout_s`, or a part has ended.
        """
        began = time.monotonic()
        waiting = list(names)

        def all_are_ready() -> bool:
            for name in [name for name in waiting if self._parts[name].is_ready]:
                waiting.remove(name)
                self._say(f"{name} is ready after {time.monotonic() - began:.1f} s")
            return not waiting

        self.wait_until(all_are_ready, lambda: f"{' and '.join(waiting)} to be ready", timeout_s)

    def wait_until(self, holds: Callable[[], bool], what: str | Callable[[], str], timeout_s: float) -> None:
        """Until `holds()`, asked anew after each line that a part writes.

        Raises:
            PartFailed: it does not within `timeout_s`, or a part has ended that was not told to.
        """
        began = time.monotonic()
        with self._news:
            while not holds():
                self.check()
                waited_s = time.monotonic() - began
                text = what if isinstance(what, str) else what()
                if waited_s >= timeout_s:
                    raise PartFailed(self._in_vain(text, timeout_s))
                if not self._news.wait_for(lambda: holds() or self._has_failed(), min(_SAY_EVERY_S, timeout_s)):
                    self._say(f"waiting for {text}: {time.monotonic() - began:.0f} s")

    def check(self) -> None:
        """Whether all parts are there.

        Raises:
            PartFailed: one has ended that was not told to.
        """
        for part in self._parts.values():
            if part.has_failed:
                raise part.failure(f"ended with status {part.status}")

    def _has_failed(self) -> bool:
        return any(part.has_failed for part in self._parts.values())

    def _in_vain(self, text: str, timeout_s: float) -> str:
        words = [f"waited {timeout_s:g} s for {text}, in vain"]
        unready = [part for part in self._parts.values() if not part.is_ready] or list(self._parts.values())
        return "\n".join(
            [*words, *(str(part.failure("runs" if part.is_ready else "is not ready")) for part in unready)]
        )

    # ------------------------------------------------------------------ its parts

    def _start(self, name: str) -> None:
        is_daemon = name not in self._engines
        command = self._daemon_command(name) if is_daemon else self._engine_command(name)
        # An interrupt between the start of a process and its entry here would leave it behind.
        with interrupts_held():
            self._parts[name] = Part(
                name,
                command,
                log=self.logs / f"{name}{'.jsonl' if is_daemon else '.log'}",
                ready_mark=_DAEMON_READY if is_daemon else _ENGINE_READY,
                environment=self._environment(name),
                folder=ROOT,
                news=self._news,
            )

    def _environment(self, name: str) -> dict[str, str]:
        return {**child_environment(), **(_VLLM_ENVIRONMENT if name in self._engines else {})}

    def _daemon_command(self, role: str) -> list[str]:
        served = self.served
        own: dict[str, object] = {f"{role}.name": role}
        if role == "proxy":
            own["proxy.address"] = own["proxy.notify_address"] = "127.0.0.1:0"
            own["proxy.prefill"] = f"http://{self._addresses['prefill']}"
            own["proxy.decode"] = f"http://{self._addresses['decode']}+{self._control}"
            own["proxy.probe_backoff_max_s"] = 1
        else:
            own[f"{role}.engine_socket"] = self._sockets / f"{role}.sock"
            own[f"{role}.chunk_bytes"] = served.shape.chunk_bytes
        if role == "receiver":
            own["receiver.control_address"] = self._control
            own["receiver.buffer_size"] = served.receiver_chunks * served.shape.chunk_bytes
        if role == "sender":
            own["sender.staging_size"] = served.sender_chunks * served.shape.chunk_bytes
        own |= {key: value for key, value in served.settings.items() if key.startswith(f"{role}.")}
        flags = [flag for key, value in own.items() for flag in ("--set", f"{key}={value}")]
        return [str(DAEMON_PYTHON), "-m", "kvpd", "serve", role, *flags]

    def _engine_command(self, name: str) -> list[str]:
        served = self.served
        block_bytes = served.shape.bytes_of(_BLOCK_TOKENS)
        flags: dict[str, object] = {
            "model": served.folder,
            "served-model-name": served.name,
            "host": "127.0.0.1",
            "port": self._addresses[name].rpartition(":")[2],
            "dtype": "float32",
            "block-size": _BLOCK_TOKENS,
            "max-model-len": served.context,
            "kv-cache-memory-bytes": served.room // _BLOCK_TOKENS * block_bytes,
            # A part of the machine's memory that must be free at the start; what is used is the number above.
            "gpu-memory-utilization": 0.05,
        }
        if name != "single":
            flags["kv-transfer-config"] = json.dumps(self._transfer_config(name))
        options = [option for key, value in flags.items() for option in (f"--{key}", str(value))]
        module = "vllm.entrypoints.openai.api_server"
        return [str(VLLM_PYTHON), "-W", "ignore", "-m", module, *options, "--enforce-eager", *served.flags]

    def _transfer_config(self, name: str) -> dict[str, Any]:
        role, daemon = ("kv_producer", "sender") if name == "prefill" else ("kv_consumer", "receiver")
        own = {f"{daemon}_socket": str(self._sockets / f"{daemon}.sock"), "chunk_tokens": CHUNK_TOKENS}
        return {
            "kv_connector": "KvpdConnector",
            "kv_connector_module_path": "kvpd.integrations.vllm",
            "kv_role": role,
            # A prefill server then answers a request whose transfer was refused early with the reason, not with 500.
            "kv_load_failure_policy": "recompute" if name == "prefill" else "fail",
            "kv_connector_extra_config": {**own, **self.served.connector},
        }


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nobody listens on: vLLM cannot be told to take any and say which."""
    with contextlib.ExitStack() as taken:
        sockets = [taken.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]
