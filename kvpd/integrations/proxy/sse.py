"""Server-sent events: as much of them as a proxy needs, which passes them on and only sometimes looks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import orjson

from kvpd.integrations.proxy.errors import EngineBroken
from kvpd.integrations.proxy.limits import EVENT_BYTES_MAX

DONE: Final = b"[DONE]"
_SEPARATORS: Final = (b"\n\n", b"\r\n\r\n", b"\r\r")


def is_event_stream(content_type: bytes | None, content_encoding: bytes | None = None) -> bool:
    """Whether a body with these headers is a stream of events that the proxy can read."""
    media_type = (content_type or b"").partition(b";")[0].strip().lower()
    return media_type == b"text/event-stream" and content_encoding in (None, b"identity")


def error_event(body: bytes) -> bytes:
    """An error and the end of the stream, as OpenAI's clients expect them."""
    return event(body) + event(DONE)


def event(data: bytes) -> bytes:
    """One event of one line."""
    return b"data: " + data + b"\n\n"


def data_of(raw: bytes) -> bytes | None:
    """The data of one event; None for a comment or an event without data."""
    lines = [line[5:].removeprefix(b" ") for line in raw.splitlines() if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None


def reports_an_error(piece: bytes) -> bool:
    """Whether a stream's first bytes are an engine's word that it will not answer."""
    first = next(iter(EventReader().feed(piece)), None)
    if first is None or (data := data_of(first)) is None or b'"error"' not in data:
        return False
    try:
        told = orjson.loads(data)
    except orjson.JSONDecodeError:
        return False
    return isinstance(told, dict) and "error" in told and not told.get("choices")


def parsed(data: bytes) -> dict[str, Any]:
    """An event's JSON object.

    Raises:
        EngineBroken: it is none.
    """
    try:
        told = orjson.loads(data)
    except orjson.JSONDecodeError as exc:
        raise EngineBroken(f"an event that is no JSON: {exc}") from exc
    if not isinstance(told, dict):
        raise EngineBroken("an event that is no JSON object")
    return told


class EventReader:
    """Cuts a stream into events, however the network has cut it."""

    def __init__(self) -> None:
        self._pending = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The events that are complete now.

        Raises:
            EngineBroken: one has no end.
        """
        self._pending += data
        while (end := self._end()) is not None:
            raw, self._pending = self._pending[:end], self._pending[end:]
            yield raw
        if len(self._pending) > EVENT_BYTES_MAX:
            raise EngineBroken(f"an event of more than {EVENT_BYTES_MAX} bytes")

    def _end(self) -> int | None:
        ends = [at + len(mark) for mark in _SEPARATORS if (at := self._pending.find(mark)) >= 0]
        return min(ends, default=None)
