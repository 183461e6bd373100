"""What a line looks like: a JSON object for collectors, or columns for people.

Every event makes a line: a value that JSON does not know becomes text.
"""

from __future__ import annotations

import datetime
import functools
import time
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, Final

import orjson

Event = MutableMapping[str, Any]
Renderer = Callable[[Event], bytes]


def completed(event: Event, level: str, bound: Mapping[str, object]) -> Event:
    """The event with its time, level and what the writer says of the process, in the order of reading."""
    second, nanoseconds = divmod(time.time_ns(), 1_000_000_000)
    now = f"{_clock(second)}.{nanoseconds // 1000:06}Z"
    return {"@timestamp": now, "log.level": level, "message": event.pop("event"), **bound, **event}


@functools.lru_cache(maxsize=2)
def _clock(second: int) -> str:
    """The UTC date and time: of the line before as well, mostly."""
    return datetime.datetime.fromtimestamp(second, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S")


def render_json(event: Event) -> bytes:
    """One JSON object and a line feed."""
    try:
        return orjson.dumps(event, default=_plain, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_NON_STR_KEYS)
    except (TypeError, RecursionError):
        # A number beyond 64 bits or a text that is no Unicode: the line matters more than its fields' types.
        printable = {_unicode(str(field)): _unicode(str(value)) for field, value in event.items()}
        return orjson.dumps(printable, option=orjson.OPT_APPEND_NEWLINE)


def render_console(event: Event) -> bytes:
    """A line for people: time, level, event and fields; what could steer a terminal is escaped."""
    fields = {field: value for field, value in event.items() if field not in _CONSOLE_HEAD}
    stack = fields.pop("error.stack_trace", "")
    clock = event["@timestamp"].partition("T")[2][:12]
    words = [clock, f"{event['log.level']:<7}", f"{event['role']:<8}", f"{event['message']:<24}"]
    words += [f"{field}={_word(value)}" for field, value in fields.items()]
    text = " ".join(words).rstrip() + "\n" + "".join(f"    {_escaped(line)}\n" for line in stack.splitlines())
    return text.encode("utf-8", "backslashreplace")


_CONSOLE_HEAD: Final = frozenset({"@timestamp", "log.level", "message", "service.name", "service.node.name", "role"})


def _word(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = value if isinstance(value, str) else str(_plain(value) if isinstance(value, bytes) else value)
    return text if text.isprintable() and text and not set(text) & set(" =\"'") else ascii(text)


def _escaped(line: str) -> str:
    return line if line.isprintable() else ascii(line)[1:-1]


def _unicode(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def _plain(value: object) -> object:
    """What JSON can hold of a value it does not know."""
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value[:64]).hex()
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    return str(value)
