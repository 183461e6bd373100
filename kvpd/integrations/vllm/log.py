"""The connector's lines in vLLM's own log: an event's name, then its values.

They go to a logger under vLLM's name, because its logging configuration drops all others. docs/VLLM.md lists them.
"""

from __future__ import annotations

import logging
from typing import Final


class EngineLog:
    """`engine_log.warning("receiver_lost", detail=...)` becomes `kvpd receiver_lost detail='...'`."""

    def __init__(self) -> None:
        self._logger = logging.getLogger("vllm.kvpd")

    def info(self, event: str, **values: object) -> None:
        """Nobody has to act."""
        self._write(logging.INFO, event, values)

    def warning(self, event: str, **values: object) -> None:
        """Something is not as it should be, and is being dealt with."""
        self._write(logging.WARNING, event, values)

    def error(self, event: str, **values: object) -> None:
        """A request was not served as it asked."""
        self._write(logging.ERROR, event, values)

    def _write(self, level: int, event: str, values: dict[str, object]) -> None:
        # Three levels up: vLLM's format names the line that calls us.
        self._logger.log(
            level, "kvpd %s%s", event, "".join(f" {name}={value!r}" for name, value in values.items()), stacklevel=3
        )


engine_log: Final = EngineLog()
