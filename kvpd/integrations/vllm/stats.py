"""What the connector counts, in the form that vLLM carries from its workers to its log line and its /metrics.

vLLM wants plain lists in a dictionary, which it aggregates over workers and intervals.
"""

from __future__ import annotations

import threading
from typing import Any, Final

LISTS: Final = ("sent_bytes", "sent_seconds", "received_bytes", "received_seconds", "deduplicated", "failures")
SAMPLES_MAX: Final = 10_000  # of a kind, between two steps of the engine


class Tally:
    """Counts, from any thread, until the engine takes them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._data = empty()

    def _add(self, **values: Any) -> None:
        with self._lock:
            for name, value in values.items():
                if len(self._data[name]) < SAMPLES_MAX:
                    self._data[name].append(value)

    def sent(self, length: int, seconds: float) -> None:
        """A transfer has landed: its bytes that crossed the wire, and how long it was on its way."""
        self._add(sent_bytes=length, sent_seconds=seconds)

    def received(self, length: int, seconds: float) -> None:
        """A transfer was claimed and is in the engine's blocks."""
        self._add(received_bytes=length, received_seconds=seconds)

    def deduplicated(self) -> None:
        """The receiver had a chunk already."""
        self._add(deduplicated=1)

    def failed(self, way: str, code: str) -> None:
        """A transfer ended without success; `way` is send or load."""
        self._add(failures=[way, str(code)])

    def take(self) -> dict[str, list[Any]] | None:
        """What came since the last call, or None."""
        with self._lock:
            if not any(self._data.values()):
                return None
            data, self._data = self._data, empty()
        return data


def empty() -> dict[str, list[Any]]:
    """Nothing counted."""
    return {name: [] for name in LISTS}


def summary(data: dict[str, list[Any]]) -> dict[str, int | float]:
    """One interval, for the log line."""
    line: dict[str, int | float] = {}
    for way in ("sent", "received"):
        total, seconds = sum(data[f"{way}_bytes"]), data[f"{way}_seconds"]
        line[f"kvpd transfers {way}"] = len(seconds)
        line[f"kvpd MB {way}"] = round(total / 1e6, 2)
        line[f"kvpd slowest {way} (ms)"] = round(max(seconds, default=0.0) * 1e3, 1)
    line["kvpd chunks deduplicated"] = sum(data["deduplicated"])
    line["kvpd transfers failed"] = len(data["failures"])
    return line
