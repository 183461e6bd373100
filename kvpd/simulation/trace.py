"""The trace: what happened last, in words, for whoever reads a counterexample."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

import attrs
import msgspec

from kvpd.core.events import Report, TimePassed, TransferId
from kvpd.core.messages import Ack, Heartbeat
from kvpd.simulation.schedule import Schedule

_HIDDEN = frozenset(
    {"sender_incarnation", "receiver_incarnation", "host", "process", "regions", "protocol_version", "layout"}
)
_IDLE_PER_ENTRY = 10
_LIST_MAX = 12  # entries of a list that are shown


@attrs.define
class Entry:
    """One thing that happened: a note, or an event with its actions, which it lacks if the core did not survive it."""

    at: float
    who: str
    what: object
    actions: Sequence[object] = ()


class Trace:
    """The last things that happened; the words are found only when somebody reads them.

    Heartbeats, and timers that lead to nothing else, are kept but not read: nobody learns from them.
    """

    def __init__(self, schedule: Schedule, keep: int, on_entry: Callable[[Entry], None] | None = None) -> None:
        self._schedule = schedule
        self._shown = keep
        self._entries: deque[Entry] = deque(maxlen=_IDLE_PER_ENTRY * keep)
        self._on_entry = on_entry

    def note(self, who: str, what: str) -> None:
        """The world did something."""
        entry = self.keep(who, what)
        self.completed(entry)

    def keep(self, who: str, what: object) -> Entry:
        """A new entry."""
        entry = Entry(self._schedule.now, who, what)
        self._entries.append(entry)
        return entry

    def completed(self, entry: Entry) -> None:
        """An entry has all that belongs to it."""
        if self._on_entry is not None:
            self._on_entry(entry)

    def lines(self) -> Iterator[str]:
        """What is kept, the oldest first."""
        shown = [entry for entry in self._entries if not _is_idle(entry)]
        for entry in shown[-self._shown :]:
            yield from describe(entry)

    def observer(self, who: str) -> TraceObserver:
        """What keeps a party's steps."""
        return TraceObserver(self, who)


class TraceObserver:
    """One party's steps."""

    def __init__(self, trace: Trace, who: str) -> None:
        self._trace = trace
        self._who = who
        self._entry = Entry(0.0, who, None)

    def before(self, event: object) -> None:
        """An event is about to be handled."""
        self._entry = self._trace.keep(self._who, event)

    def after(self, _event: object, actions: Sequence[object]) -> None:
        """It has been handled."""
        self._entry.actions = actions
        self._trace.completed(self._entry)


def _is_idle(entry: Entry) -> bool:
    """Whether it is about heartbeats alone: the event, and each of its actions."""
    if not isinstance(entry.what, TimePassed) and not _beats(getattr(entry.what, "message", None)):
        return False
    return all(_beats(getattr(action, "message", None)) for action in entry.actions)


def _beats(message: object) -> bool:
    """A heartbeat, or an answer that may be one's."""
    return isinstance(message, Heartbeat) or (isinstance(message, Ack) and message.error is None)


def describe(entry: Entry) -> Iterator[str]:
    """An entry in words: a line for the event, one for each action that is no mere report."""
    yield f"{entry.at:10.4f} s  {entry.who:<12} {words(entry.what)}"
    for action in entry.actions:
        if not isinstance(action, Report):
            yield f"{'':26} → {words(action)}"


def words(thing: object) -> str:
    """An event, an action or a message, without what only fills lines."""
    if isinstance(thing, str):
        return thing
    if isinstance(thing, TimePassed):
        return f"TimePassed lag_s={thing.lag_s:.3g}"
    if isinstance(thing, msgspec.Struct):
        fields = {name: getattr(thing, name) for name in thing.__struct_fields__ if name not in _HIDDEN}
        return _named(type(thing).__name__, fields)
    kind = type(thing)
    if attrs.has(kind):
        fields = {field.name: getattr(thing, field.name) for field in attrs.fields(kind)}
        return _named(kind.__name__, {name: value for name, value in fields.items() if name not in _HIDDEN})
    return _value(thing)


def _named(name: str, fields: dict[str, object]) -> str:
    shown = (f"{key}={_value(value)}" for key, value in fields.items() if value not in (None, (), ""))
    return f"{name} {' '.join(shown)}".rstrip()


def _value(value: object) -> str:
    if isinstance(value, TransferId):
        return str(value)
    if isinstance(value, tuple):
        shown = ", ".join(_value(item) for item in value[:_LIST_MAX])
        return f"[{shown}{f', … {len(value)} in all' if len(value) > _LIST_MAX else ''}]"
    if isinstance(value, bytes):
        return value.decode(errors="backslashreplace")
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, BaseException):
        return repr(str(value))
    if isinstance(value, msgspec.Struct) or attrs.has(type(value)):
        return f"({words(value)})"
    return str(value)
