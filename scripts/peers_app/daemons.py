"""kvpd's own daemons, started for one measurement and killed after it."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from peers_app.children import ChildFailed, child_environment, cpu_seconds

_READY_S: Final = 60.0
_END_S: Final = 15.0


class Daemon:
    """`kvpd serve ROLE`; `settings` are keys of its own section. A context manager: leaving kills it."""

    def __init__(self, role: str, folder: Path, settings: Mapping[str, object], name: str = "") -> None:
        self.name = name or role
        self.socket = folder / f"{self.name}.sock"
        values = {"name": self.name, "engine_socket": self.socket, **settings}
        flags = [part for key, value in values.items() for part in ("--set", f"{role}.{key}={value}")]
        # Into a file, not a pipe: a reader in this process would take CPU from whoever measures.
        self._log_path = folder / f"{self.name}.log"
        self._notices = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._notices.bind(str(folder / f"{self.name}.notify"))
        self._notices.settimeout(_READY_S)
        self._addresses = addresses = folder / f"{self.name}.addresses"
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kvpd", "serve", role, "--address-file", addresses, *flags],
                stdin=subprocess.DEVNULL,
                stderr=log,
                env=child_environment({"NOTIFY_SOCKET": str(folder / f"{self.name}.notify")}),
            )
        self._fields: dict[str, Any] = {}

    def wait_ready(self) -> None:
        """Until it serves."""
        try:
            while b"READY=1" not in self._notices.recv(4096):
                pass
        except TimeoutError:
            text = self._log_path.read_text()[-2000:]
            raise ChildFailed(f"kvpd's {self.name} does not become ready:\n{text}") from None
        self._fields = json.loads(self._addresses.read_bytes())

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

    def kill(self) -> None:
        """SIGKILL; it is gone when this returns."""
        self._process.kill()
        self._process.wait(_END_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self.kill()
        self._notices.close()
