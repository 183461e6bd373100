"""A process of the stack: started, heard, and surely gone, with everything that it has started in its turn.

Each runs in a process group of its own, so that Ctrl-C reaches it only by way of its owner, and so that what a server
leaves behind when it is killed, its engine for example, goes with it. Should its owner be killed, the kernel ends it.
All that it writes goes into its log; its last lines are kept for whoever has to say why it failed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

_LINES_MAX: Final = 20_000
_TAIL_LINES: Final = 15
_GRACE_S: Final = 20.0
# Becomes a program that gets SIGTERM when the process with this number, its parent, dies (PR_SET_PDEATHSIG is 1).
_TIED: Final = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    sys.exit("its owner is gone")
os.execv(sys.argv[2], sys.argv[2:])
"""


class PartFailed(Exception):
    """A process ended, or did not get ready, when it should have; the text has its last words."""


class Part:
    """One process. `news` is notified of each line that it writes, and of its end.

    The thread that makes it must live as long as it is wanted.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        log: Path,
        ready_mark: str,
        environment: Mapping[str, str],
        folder: Path,
        news: threading.Condition,
    ) -> None:
        self.name = name
        self.log = log
        self.status: int | None = None  # once it is gone, and all that it wrote has been read
        self.ready_line = ""  # once it has said so
        self.is_leaving = False  # it was told to, and its end is no failure
        self._ready_mark = ready_mark
        self._news = news
        self._lines: deque[str] = deque(maxlen=_LINES_MAX)
        self._process = subprocess.Popen(
            [sys.executable, "-c", _TIED, str(os.getpid()), *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=environment,
            process_group=0,
        )
        self._signalling = threading.Lock()  # while it is held, the process keeps its number
        self._is_reaped = False
        self._reader = threading.Thread(target=self._read, name=f"reads {name}", daemon=True)
        self._watcher = threading.Thread(target=self._watch, name=f"watches {name}", daemon=True)
        self._reader.start()
        self._watcher.start()

    @property
    def pid(self) -> int:
        """Its number, which is its group's too."""
        return self._process.pid

    @property
    def is_ready(self) -> bool:
        """Whether it has said that it is."""
        return bool(self.ready_line)

    @property
    def has_failed(self) -> bool:
        """Whether it is gone without having been told to go."""
        return self.status is not None and not self.is_leaving

    def said(self, message: str) -> list[dict[str, Any]]:
        """A daemon's log lines with this message, among the last ones that are kept."""
        with self._news:
            lines = [line for line in self._lines if line.startswith("{") and f'"{message}"' in line]
        parsed: list[dict[str, Any]] = [json.loads(line) for line in lines]
        return [line for line in parsed if line.get("message") == message]

    def failure(self, what: str) -> PartFailed:
        """What to raise when it has done `what`: the text ends with its last lines and the name of its log."""
        with self._news:
            tail = list(self._lines)[-_TAIL_LINES:]
        last_words = "\n".join(f"    {line}" for line in tail) or "    (it wrote nothing)"
        return PartFailed(f"{self.name} {what}; its last lines, all of which are in {self.log}:\n{last_words}")

    # ------------------------------------------------------------------ its end

    def leave(self) -> None:
        """Tell it to end, once, for a second signal would cut its drain short; returns at once."""
        with self._signalling:
            if not self.is_leaving and not self._is_reaped:
                os.kill(self.pid, signal.SIGTERM)
        self.is_leaving = True

    def kill(self) -> None:
        """SIGKILL, for it and for all of its group; returns when it is gone."""
        self.is_leaving = True
        with self._signalling:
            if not self._is_reaped:
                os.killpg(self.pid, signal.SIGKILL)
        self._watcher.join()

    def end(self) -> None:
        """Tell it to end, insist when it has not after a while, and return when it is gone."""
        self.leave()
        self._watcher.join(_GRACE_S)
        if self._watcher.is_alive():
            self.kill()

    # ------------------------------------------------------------------ its threads

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output, self.log.open("ab", buffering=0) as log:
            for raw in output:
                log.write(raw)
                line = raw.decode(errors="replace").rstrip()
                with self._news:
                    self._lines.append(line)
                    if not self.ready_line and self._ready_mark in line:
                        self.ready_line = line
                    self._news.notify_all()

    def _watch(self) -> None:
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        with self._signalling:
            # What is left of its group would hold the pipe open and, if it is an engine, two gigabytes.
            os.killpg(self.pid, signal.SIGKILL)
            status = self._process.wait()
            self._is_reaped = True
        self._reader.join()
        with self._news:
            self.status = status
            self._news.notify_all()
