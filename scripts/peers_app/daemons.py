"""kvpd's own daemons, started for one measurement and killed after it."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from peers_app.children import ChildFailed, child_environment, cpu_seconds

_READY_S: Final = 60.0
_END_S: Final = 15.0


class Daemon:
    """`kvpd serve ROLE`; `settings` are keys of its own section. A context manager: entering waits until it serves."""

    def __init__(self, role: str, folder: Path, settings: Mapping[str, object], name: str = "") -> None:
        self.role = role
        self.name = name or role
        self.socket = folder / f"{self.name}.sock"
        values = {"name": self.name, "engine_socket": self.socket, **settings}
        flags = [part for key, value in values.items() for part in ("--set", f"{role}.{key}={value}")]
        command = [sys.executable, "-m", "kvpd", "serve", role, *flags]
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, env=child_environment({})
        )
        self._ready = threading.Event()
        self._fields: dict[str, Any] = {}
        self._tail: list[bytes] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if not self._ready.is_set():
                self._tail.append(line)
                if b'"ready"' in line:
                    self._fields = json.loads(line)
                    self._ready.set()
        self._ready.set()  # it ended; whoever waits finds no fields

    @property
    def pid(self) -> int:
        """Its number."""
        return self._process.pid

    @property
    def address(self) -> str:
        """A receiver's: where senders reach it."""
        return str(self._fields["control_address"])

    def cpu_s(self) -> float:
        """CPU seconds so far."""
        return cpu_seconds(self.pid)

    def slots(self) -> dict[str, int]:
        """A receiver's slots by state, those that there are none of left out."""
        url = f"http://{self._fields['metrics_address']}"
        for path in ("/livez", "/metrics"):  # the first is answered by the loop: the step before it has ended
            with urllib.request.urlopen(url + path, timeout=_END_S) as answer:
                text = answer.read().decode()
        samples = (line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("kvpd_slots{"))
        return {name.split('"')[1]: int(float(value)) for name, value in samples if float(value)}

    def kill(self) -> None:
        """SIGKILL; it is gone when this returns."""
        self._process.kill()
        self._process.wait(_END_S)

    def __enter__(self) -> Self:
        if not self._ready.wait(_READY_S) or not self._fields:
            text = b"".join(self._tail[-20:]).decode(errors="replace")
            self.__exit__(None, None, None)
            raise ChildFailed(f"kvpd's {self.name} does not become ready:\n{text}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self.kill()
        self._reader.join(_END_S)
        assert self._process.stderr is not None
        self._process.stderr.close()
