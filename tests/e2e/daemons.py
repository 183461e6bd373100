"""kvpd's daemons as processes of their own, for tests that need the real thing.

Whoever starts a daemon here leaves no process behind, waits for nothing without a deadline, and waits for what a
daemon says of itself, never for time to pass.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import kvpd.client
from kvpd.client import ReceiverLink, SenderLink

DEADLINE_S: Final = 30.0  # for whatever a test waits for; a healthy machine needs a fraction of it
Line = Mapping[str, Any]
_ENDS: Final = {"transfer_released", "transfer_revoked", "transfer_expired", "transfer_fenced"}

# Sets limits and leaves privileges for a program that it then becomes.
_AFTER = "import os, resource, sys\n{statements}\nos.execv(sys.executable, [sys.executable, *sys.argv[1:]])"


def clean_environment(folder: Path, **more: str) -> dict[str, str]:
    """This environment without what would change a daemon: no variable of kvpd's, UCX's or systemd's."""
    ours = ("KVPD_", "UCX_", "NOTIFY_SOCKET", "XDG_RUNTIME_DIR")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return {**kept, "XDG_RUNTIME_DIR": str(folder), **more}


class Daemon:
    """One `kvpd serve`. A context manager: leaving kills it, if a test has not ended it before.

    `settings` are keys of its own section. `before` is Python run in the process before it becomes the daemon.
    """

    def __init__(
        self,
        role: str,
        name: str,
        folder: Path,
        settings: Mapping[str, object],
        *,
        options: Sequence[str] = (),
        before: str = "",
        prefix: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        stderr: int = subprocess.PIPE,
    ) -> None:
        self.role = role
        self.name = name
        self.socket = folder / f"{name}.sock"
        values = {"name": name, "engine_socket": self.socket, **settings}
        flags = [part for key, value in values.items() for part in ("--set", f"{role}.{key}={value}")]
        # Tests wait for single batches, and take it that what was answered was logged.
        flags += ["--log-level", "debug", "--set", "log.gather_s=0"]
        launcher = ["-c", _AFTER.format(statements=before)] if before else []
        command = [*prefix, sys.executable, *launcher, "-m", "kvpd", "serve", role, *flags, *options]
        self.process = subprocess.Popen(
            command, stderr=stderr, stdin=subprocess.DEVNULL, env=clean_environment(folder, **(environment or {}))
        )
        self.pid = self.process.pid
        self.raw: list[bytes] = []  # whatever it wrote to stderr, by lines
        self._lines: list[Line] = []
        self._junk: list[bytes] = []  # lines that are no JSON: a crash, or a refusal for people to read
        self._changed = threading.Condition()  # its lock is one that a holder may take again
        self._ended = stderr != subprocess.PIPE
        self._reader = threading.Thread(target=self._read, name=f"stderr of {name}", daemon=True)
        if not self._ended:
            self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._changed:
                self.raw.append(line)
                try:
                    self._lines.append(json.loads(line))
                except ValueError:
                    self._junk.append(line)
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    # ------------------------------------------------------------------ what it says

    @property
    def lines(self) -> list[Line]:
        """Its log so far. Every line of it is a JSON object, or this fails."""
        with self._changed:
            assert not self._junk, self.text
            return list(self._lines)

    @property
    def text(self) -> str:
        """What it wrote, for a person."""
        with self._changed:
            return b"".join(self.raw).decode(errors="replace")

    def said(self, message: str, **fields: object) -> list[Line]:
        """The lines so far with this message and these fields."""
        wanted = {"message": message, **fields}
        return [line for line in self.lines if all(line.get(key) == value for key, value in wanted.items())]

    def wait_until(self, holds: Callable[[], bool], what: str) -> None:
        """Until `holds()`, asked anew after each line."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or bool(self._junk) or holds(), DEADLINE_S)
            assert holds(), f"{self.name} {'ended' if self._ended else 'runs'} without {what}:\n{self.text}"

    def wait_for(self, message: str, count: int = 1, **fields: object) -> Line:
        """The `count`-th line with this message and these fields, once it is there."""
        self.wait_until(lambda: len(self.said(message, **fields)) >= count, f"{count} of {message} {fields}")
        return self.said(message, **fields)[count - 1]

    def wait_quiet(self) -> None:
        """A receiver: until it has told the end of every transfer, and of every fence."""

        def is_quiet() -> bool:
            ended = [
                line["transfer"] for line in self.lines if line["message"] in _ENDS and not line.get("quarantined")
            ]
            return {line["transfer"] for line in self.said("transfer_queued")} <= set(ended)

        self.wait_until(is_quiet, "an end to every transfer")

    def wait_ready(self) -> Self:
        """Once it serves."""
        self.wait_for("ready")
        return self

    @property
    def address(self) -> str:
        """Where senders reach it."""
        return str(self.wait_for("ready")["control_address"])

    # ------------------------------------------------------------------ what it serves

    def get(self, path: str) -> tuple[int, str]:
        """A page of its HTTP side: status and text."""
        address = self.wait_for("ready")["metrics_address"]
        try:
            with urllib.request.urlopen(f"http://{address}{path}", timeout=DEADLINE_S) as answer:
                return int(answer.status), answer.read().decode()
        except urllib.error.HTTPError as exc:
            with exc:
                return exc.code, exc.read().decode()

    def metrics(self) -> dict[str, float]:
        """Its counters and gauges, without labels' quotes: `kvpd_slots{state=free}`."""
        self.get("/livez")  # answered by the loop, so that the step whose log line was seen has ended
        status, text = self.get("/metrics")
        assert status == 200
        samples = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        return {name.replace('"', ""): float(value) for name, value in samples}

    def slots(self) -> dict[str, int]:
        """Slots by state, those that there are none of left out."""
        names = ((name, value) for name, value in self.metrics().items() if name.startswith("kvpd_slots{"))
        return {name[len("kvpd_slots{state=") : -1]: int(value) for name, value in names if value}

    def sender_link(self) -> SenderLink:
        """A prefill engine's link to it."""
        return kvpd.client.connect_sender(self.socket)

    def receiver_link(self) -> ReceiverLink:
        """A decode engine's link to it."""
        return kvpd.client.connect_receiver(self.socket)

    def descriptors(self) -> int:
        """How many files it has open."""
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))

    def resident_bytes(self) -> int:
        """Its memory, but for the chunks: what it shares with engines does not count."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        (line,) = [line for line in status.splitlines() if line.startswith("RssAnon:")]
        return int(line.split()[1]) * 1024

    def children(self) -> list[str]:
        """The processes that it has started and that live."""
        return Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()

    # ------------------------------------------------------------------ its end

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self.process.send_signal(number)

    def wait(self) -> int:
        """Its exit status, once it has ended and all that it wrote has been read."""
        try:
            status = self.process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} does not end:\n{self.text}") from None
        if self.process.stderr is not None:
            self._reader.join(DEADLINE_S)
        return status

    def stop(self) -> float:
        """SIGTERM, a clean end with nothing left behind; how many seconds that took."""
        assert self.children() == []
        began = time.monotonic()
        self.signal(signal.SIGTERM)
        status = self.wait()
        assert status == 0, f"{self.name} ended with {status}:\n{self.text}"
        assert not self.socket.exists()
        return time.monotonic() - began

    def kill(self) -> None:
        """SIGKILL."""
        self.signal(signal.SIGKILL)
        assert self.wait() == -signal.SIGKILL

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)  # a stopped process would be killed all the same, but not reaped
            self.process.kill()
        self.process.wait(DEADLINE_S)
        if self.process.stderr is not None:
            self._reader.join(DEADLINE_S)
            self.process.stderr.close()
        if error is not None and self.raw:
            sys.stdout.write(f"----- the end of what {self.name} said\n{self.text[-6000:]}\n")


class Fleet:
    """The daemons of one test, or of several. Leaving it kills those that run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stack = contextlib.ExitStack()

    def start(self, role: str, name: str, settings: Mapping[str, object] | None = None, **how: Any) -> Daemon:
        """A daemon that may not be ready yet."""
        return self._stack.enter_context(Daemon(role, name, self.folder, settings or {}, **how))

    def receiver(self, name: str = "receiver", *, slots: int = 16, **settings: Any) -> Daemon:
        """A receiver of `slots` slots on a port of the kernel's choice, not waited for."""
        settings = {"chunk_bytes": 65536, "control_address": "127.0.0.1:0", **settings}
        settings.setdefault("buffer_size", slots * settings["chunk_bytes"])
        return self.start("receiver", name, settings)

    def sender(self, name: str = "sender", *, slots: int = 8, **settings: Any) -> Daemon:
        """A sender of `slots` staging slots, not waited for."""
        settings = {"chunk_bytes": 65536, **settings}
        settings.setdefault("staging_size", slots * settings["chunk_bytes"])
        return self.start("sender", name, settings)

    def pair(
        self, receiver: Mapping[str, Any] | None = None, sender: Mapping[str, Any] | None = None
    ) -> tuple[Daemon, Daemon]:
        """A receiver and a sender that are ready, and became so side by side."""
        daemons = self.receiver(**receiver or {}), self.sender(**sender or {})
        for daemon in daemons:
            daemon.wait_ready()
        return daemons

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)


@contextlib.contextmanager
def in_background(work: Callable[[], None]) -> Iterator[None]:
    """Run `work` in a thread while the body runs; it must have ended, and well, soon after the body."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as exc:  # noqa: BLE001  raised again where the test sees it
            failures.append(exc)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield
    thread.join(DEADLINE_S)
    assert not thread.is_alive(), "what runs in the background does not end"
    if failures:
        raise failures[0]
