"""The real cores as values: copied, compared and numbered, so that a search can come back to any state of them.

A core's state is numbered; what an event does to a numbered state is computed once, by the product's own `handle` on a
copy, and remembered. So a search over millions of worlds calls each core only a few thousand times.

What no decision depends on is taken out of a state, or states that are the same would never meet:

- Time. Every reading that a core keeps is a Moment, and all Moments are zero between events. A deadline is met when the
  search says so: `ChosenTimers` hands out one chosen key, and the core is told a time at which it is indeed due.
- Message ids. What a core numbers anew gets a number made of what the message says and of the session it is for. Later
  sessions have higher ones, as the sender's check of a restarted receiver needs.
- Which free slot is drawn: the lowest. Ranks in a line instead of a count of everybody who ever stood in it.
- Why something failed. Nothing is decided by it, but for `no_session`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from enum import Enum
from typing import Any, Final, Generic, TypeVar

import attrs
import msgspec

from kvpd.core.events import TransferId
from kvpd.core.messages import (
    AllocRequest,
    CancelNotif,
    ErrorInfo,
    FailNotif,
    Heartbeat,
    Hello,
    Message,
    RevokeNotif,
    WriteDone,
)
from kvpd.core.pool import SlotPool
from kvpd.core.receiver import ReceiverCore, ReceiverSettings
from kvpd.core.receiver.events import ClaimRequested, SendMessage
from kvpd.core.sender import SenderCore, SenderSettings
from kvpd.core.sender.events import NotifyProxy, SendToPeer, StagedSlot
from kvpd.core.sender.staging import Ask, Staging
from kvpd.core.timers import Timers
from kvpd.errors import ErrorCode, TransferError, transfer_error

K = TypeVar("K", bound=Hashable)
C = TypeVar("C", SenderCore, ReceiverCore)

_FRESH: Final = 1 << 40  # message ids from here on were drawn in this very step
NEAR: Final = 5.0  # seconds: a repeat is due, nothing is given up
FAR: Final = 1e6  # everything is due

# Values that hold nothing that changes: shared between states. The cores' only frozen sets are of ranks.
_BUILT_IN: Final = frozenset({int, str, bytes, bool, type(None), float, frozenset})
_SHARED: Final = _BUILT_IN | {TransferId, ClaimRequested, StagedSlot, SenderSettings, ReceiverSettings}


class Moment(float):
    """A reading of the clock, or one moved by a duration."""

    def __add__(self, other: float) -> Moment:
        return Moment(float(self) + other)

    __radd__ = __add__

    def __sub__(self, other: float) -> float:
        difference = float(self) - float(other)
        return difference if isinstance(other, Moment) else Moment(difference)


_ZERO: Final = Moment(0.0)


class ChosenTimers(Timers[K]):
    """Timers that say which deadlines are set; which of them is met is chosen from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.chosen: K | None = None

    def set(self, key: K, at: float) -> None:
        """See `Timers`; the time does not matter."""
        self._due[key] = _ZERO

    def next_at(self) -> float | None:
        """See `Timers`."""
        return _ZERO if self._due else None

    def pop_due(self, now: float) -> K | None:
        """The chosen key, once."""
        key, self.chosen = self.chosen, None
        if key is not None:
            self._due.pop(key)
        return key

    @property
    def keys(self) -> tuple[K, ...]:
        """The deadlines that are set, in an order of their own."""
        return tuple(sorted(self._due, key=repr))


class ExploredSender(SenderCore):
    """A sender's core that knows how many sessions it began: message ids are made of it."""

    def __init__(self, settings: SenderSettings) -> None:
        super().__init__(settings)
        self._timers = ChosenTimers()
        self._next_message_id = _FRESH
        self.hellos = 0


class ExploredReceiver(ReceiverCore):
    """A receiver's core whose deadlines are chosen."""

    def __init__(self, settings: ReceiverSettings) -> None:
        super().__init__(settings)
        self._timers = ChosenTimers()
        self._next_message_id = _FRESH


# ------------------------------------------------------------------ copies


def _plain_code(code: ErrorCode) -> ErrorCode:
    return code if code is ErrorCode.NO_SESSION else ErrorCode.REVOKED


def _plain_error(error: ErrorInfo | None) -> ErrorInfo | None:
    return None if error is None else ErrorInfo(_plain_code(error.code))


class Copier:
    """Copies of a core, with fresh message ids replaced by lasting ones."""

    def __init__(self, ids: dict[int, int] | None = None) -> None:
        self._ids = ids or {}
        self._done: dict[int, Any] = {}

    def message(self, message: Any) -> Any:
        """A message without the reasons that nobody decides by, and with lasting ids."""
        changes: dict[str, Any] = {}
        if getattr(message, "error", None) is not None:
            changes["error"] = _plain_error(message.error)
        if isinstance(message, RevokeNotif | CancelNotif):
            changes["reason"] = _plain_code(message.reason)
        if isinstance(message, RevokeNotif):
            changes["detail"] = ""
        if getattr(message, "message_id", 0) >= _FRESH:
            changes["message_id"] = self._ids[message.message_id]
        return msgspec.structs.replace(message, **changes) if changes else message

    def copy(self, value: Any) -> Any:
        """A deep copy, each object copied once."""
        kind = type(value)
        if kind is int:
            return self._ids.get(value, value)
        if kind in _SHARED:
            return value
        if kind is Moment:
            return _ZERO
        known = self._done.get(id(value))
        return known if known is not None else self._copy_object(kind, value)

    def _copy_object(self, kind: type, value: Any) -> Any:
        copy = self.copy
        result: Any
        if kind is tuple:
            return tuple([copy(item) for item in value])
        if issubclass(kind, ErrorInfo):
            return _plain_error(value)
        if issubclass(kind, msgspec.Struct):
            return self.message(value)
        if issubclass(kind, Enum):
            return value
        if issubclass(kind, TransferError):
            return transfer_error(_plain_code(value.code))
        if issubclass(kind, dict):
            result = self._done[id(value)] = kind()
            for key, item in value.items():
                result[copy(key)] = copy(item)
        elif kind is list:
            result = self._done[id(value)] = []
            result.extend([copy(item) for item in value])
        elif kind is set:
            result = {copy(item) for item in value}
        elif issubclass(kind, Timers):
            result = self._done[id(value)] = kind()
            for key in value._due:
                result.set(copy(key), _ZERO)
        else:
            result = self._done[id(value)] = kind.__new__(kind)
            for name in _names(kind, value):
                object.__setattr__(result, name, copy(getattr(value, name)))
            _in_order(result)
        return result


def _names(kind: type, value: Any) -> Iterable[str]:
    if attrs.has(kind):
        names = _FIELDS.get(kind)
        if names is None:
            names = _FIELDS[kind] = tuple(field.name for field in attrs.fields(kind))
        return names
    return tuple(vars(value))


_FIELDS: Final[dict[type, tuple[str, ...]]] = {}


def _in_order(value: Any) -> None:
    """What only its history tells from another is made the same."""
    if isinstance(value, SlotPool | Staging):
        value._free.sort(reverse=True)
    if isinstance(value, Staging):
        asks = [(ask.order, line, key, ask.want) for line in value._waiting.values() for key, ask in line.items()]
        for rank, (_, line, key, want) in enumerate(sorted(asks, key=lambda ask: ask[0]), 1):
            line[key] = Ask(rank, want)
        value._order = len(asks)
    if isinstance(value, SenderCore | ReceiverCore):
        value._next_message_id = _FRESH


def freeze(value: Any) -> Hashable:
    """Everything that a core holds, as one hashable value: equal exactly when the cores are."""
    seen: dict[int, int] = {}

    def walk(value: Any) -> Hashable:
        kind = type(value)
        if kind in _SHARED or kind is Moment or issubclass(kind, msgspec.Struct | Enum):
            return value  # type: ignore[no-any-return]
        if kind is tuple:
            return tuple([walk(item) for item in value])
        if id(value) in seen:
            return ("seen", seen[id(value)])
        seen[id(value)] = len(seen)
        if issubclass(kind, ChosenTimers):
            return frozenset(value._due)
        if issubclass(kind, Timers):
            return tuple(value._due)
        if issubclass(kind, dict | OrderedDict):
            return tuple([(walk(key), walk(item)) for key, item in value.items()])
        if kind is list:
            return tuple([walk(item) for item in value])
        if kind is set:
            return frozenset(value)
        if issubclass(kind, TransferError):
            return str(value)
        return tuple([walk(getattr(value, name)) for name in _names(kind, value)])

    return walk(value)


# ------------------------------------------------------------------ numbered states


@attrs.frozen(eq=False)
class Entry(Generic[C]):
    """One state of a core. `core` is never changed: what follows is computed on a copy."""

    core: C
    timers: tuple[Any, ...]
    detail: Any  # what the world wants to know of such a state, computed once


class Cores(Generic[C]):
    """All states of one kind of core that a search has met, by number.

    `audit` is run on every new state and may raise; what it returns is kept beside the state.
    """

    def __init__(self, name_ids: Callable[[C, list[Any]], dict[int, int]], audit: Callable[[C], Any]) -> None:
        self._name_ids: Callable[[C, list[Any]], dict[int, int]] = name_ids
        self._audit: Callable[[C], Any] = audit
        self._numbers: dict[Hashable, int] = {}
        self._steps: dict[tuple[int, Hashable], tuple[int, tuple[Any, ...]]] = {}
        self.entries: list[Entry[C]] = []

    @property
    def steps_count(self) -> int:
        """Pairs of a state and an event that were computed."""
        return len(self._steps)

    def add(self, core: C) -> int:
        """The number of this very state, which must be a settled copy."""
        frozen = freeze(core)
        number = self._numbers.get(frozen)
        if number is None:
            detail = self._audit(core)
            number = self._numbers[frozen] = len(self.entries)
            timers = core._timers
            assert isinstance(timers, ChosenTimers)
            self.entries.append(Entry(core, timers.keys, detail))
        return number

    def step(self, number: int, event: Any, *, timer: Any = None, now: float = 0.0) -> tuple[int, tuple[Any, ...]]:
        """The state that follows and the actions on the way. With `timer`: that deadline is met, at `now`.

        Raises:
            AssertionError: the core broke one of its own invariants.
        """
        key = (number, (event, timer, now))
        known = self._steps.get(key)
        if known is not None:
            return known
        core: C = Copier().copy(self.entries[number].core)
        timers = core._timers
        assert isinstance(timers, ChosenTimers)
        timers.chosen = timer
        actions: list[Any] = list(core.handle(event, now=Moment(now)))
        copier = Copier(self._name_ids(core, actions))
        settled: C = copier.copy(core)
        told = tuple([_told(action, copier) for action in actions])
        result = self._steps[key] = self.add(settled), told
        return result


def _told(action: Any, copier: Copier) -> Any:
    if isinstance(action, SendMessage | SendToPeer | NotifyProxy):
        return attrs.evolve(action, message=copier.message(action.message))
    return action


def _new_messages(actions: list[Any]) -> list[Message]:
    messages = [a.message for a in actions if isinstance(a, SendMessage | SendToPeer | NotifyProxy)]
    return [m for m in messages if getattr(m, "message_id", 0) >= _FRESH]


def name_sender_ids(core: ExploredSender, actions: list[Any]) -> dict[int, int]:
    """Lasting ids for what a sender has just sent: its session, its kind, its transfer, its place."""
    ids = {}
    for message in _new_messages(actions):
        match message:
            case Hello():
                core.hellos += 1
                name = 0
            case AllocRequest(transfer_no=number, open=is_open, keys=keys, first_chunk=first):
                name = _id(2 if keys else 1 if is_open else 3, number, first)
            case WriteDone(transfer_no=number, rank=rank, first_chunk=first):
                name = _id(8 + rank, number, first)
            case CancelNotif(transfer_no=number, goes_on=goes_on):
                name = _id(4 if goes_on else 5, number)
            case Heartbeat():
                name = _id(6)
            case FailNotif(transfer_no=number):
                name = _id(8, number)
            case _:
                name = _id(7, getattr(message, "transfer_no", 0))
        ids[getattr(message, "message_id", 0)] = core.hellos * 4096 + name
    return ids


def _id(kind: int, transfer_no: int = 0, first_chunk: int = 0) -> int:
    assert transfer_no < 16, "more transfers than the search has names for"
    assert first_chunk < 16, "more chunks than the search has names for"
    assert kind < 16, "more ranks than the search has names for"
    return (kind * 16 + transfer_no) * 16 + first_chunk


def name_receiver_ids(core: ReceiverCore, actions: list[Any]) -> dict[int, int]:
    """A receiver numbers only its RevokeNotifs, and a transfer is revoked once."""
    return {getattr(m, "message_id", 0): getattr(m, "transfer_no", 0) + 1 for m in _new_messages(actions)}
