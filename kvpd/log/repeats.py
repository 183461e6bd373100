"""Equal lines, again and again: a few are written each second, and the rest is counted.

However many peers cause them, what is remembered is bounded, and no count is ever lost untold.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Final

import attrs

REPEATS_MAX: Final = 20  # equal lines in one window; what is over is counted and told at the window's end
REPEATS_WINDOW_S: Final = 1.0
REPEATS_KEYS_MAX: Final = 1024


@attrs.define
class _Repeat:
    until: float
    count: int = 0
    suppressed: int = 0


class Repeats:
    """Counts equal lines in windows of a second. The loggers' threads and the writer's share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: dict[tuple[str, str, str], _Repeat] = {}
        self.deadline: float | None = None

    def __len__(self) -> int:
        return len(self._seen)

    def admit(self, level: str, event: str, peer: str) -> bool:
        """Whether this line is still written; the first that is not sets the deadline for telling of it."""
        now = time.monotonic()
        key = (event, level, peer)
        with self._lock:
            if key not in self._seen and len(self._seen) >= REPEATS_KEYS_MAX:
                self._forget_quiet(now)
                if len(self._seen) >= REPEATS_KEYS_MAX:
                    key = (event, level, "")  # so many peers share one allowance
            entry = self._seen.get(key)
            if entry is None or (now >= entry.until and not entry.suppressed):
                entry = self._seen[key] = _Repeat(until=now + REPEATS_WINDOW_S)
            if entry.count < REPEATS_MAX:
                entry.count += 1
                return True
            entry.suppressed += 1
            if self.deadline is None:
                self.deadline = entry.until
            return False

    def take(self, everything: bool) -> list[Mapping[str, object]]:
        """The fields of the lines that tell what was suppressed in windows that have ended, or in all."""
        now = time.monotonic()
        told: list[Mapping[str, object]] = []
        with self._lock:
            if self.deadline is None:
                return told
            for (event, level, peer), entry in list(self._seen.items()):
                if entry.suppressed and (everything or now >= entry.until):
                    told.append({"suppressed": event, "level": level, "peer": peer, "count": entry.suppressed})
                    del self._seen[event, level, peer]
            self.deadline = min((entry.until for entry in self._seen.values() if entry.suppressed), default=None)
        return told

    def _forget_quiet(self, now: float) -> None:
        for key in [key for key, entry in self._seen.items() if now >= entry.until and not entry.suppressed]:
            del self._seen[key]
