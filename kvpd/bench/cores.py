"""What one event costs a core, alone, while a given number of transfers is alive: no sockets, no loop, no peer.

A world is a core with a population that stays and one transfer in the foreground, which runs through its whole life
again and again; every event of that life is timed by itself. The worlds of one kind differ in nothing but the size of
their population, so a cost that grows with it is the core's.
"""

from __future__ import annotations

import abc
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, TypeVar

import attrs

from kvpd.core.events import RequestCancelled, TimePassed
from kvpd.core.messages import (
    PROTOCOL_VERSION,
    Ack,
    AllocRequest,
    AllocResponse,
    CancelNotif,
    Heartbeat,
    Hello,
    HostIdentity,
    PeerMessage,
    Region,
    Welcome,
    WriteDone,
)
from kvpd.core.receiver import ReceiverCore, ReceiverSettings
from kvpd.core.receiver import events as rev
from kvpd.core.sender import SenderCore, SenderSettings
from kvpd.core.sender import events as sev
from kvpd.errors import ErrorCode

_CHUNK_BYTES: Final = 4096
_SPARE_SLOTS: Final = 64
_SENDER: Final = 11  # incarnations
_RECEIVER: Final = 22
_PEER: Final = b"sender"
_ADDRESS: Final = "receiver:1"
_TICK_S: Final = 1e-6  # that pass between two events; no deadline is ever due but those that are asked for
_FOR_EVER_S: Final = 1e9
_LEASE_S: Final = 30.0

M = TypeVar("M", bound=PeerMessage)


@attrs.frozen
class EventCost:
    """What an event cost, in seconds, by the size of the population."""

    core: str
    event: str
    seconds: Mapping[int, float]


class World(abc.ABC):
    """One core, its population and its clock. `costs` gathers nanoseconds by event while a life is lived."""

    name: str

    def __init__(self) -> None:
        self.costs: dict[str, list[int]] = defaultdict(list)
        self._now = 1.0
        self._message_id = 0
        self._next_no = 0

    @abc.abstractmethod
    def live(self) -> None:
        """One life of the transfer in the foreground; the population is the same before and after it."""

    def _clock(self) -> float:
        self._now += _TICK_S
        return self._now

    def _number(self) -> int:
        self._next_no += 1
        return self._next_no

    def _id(self) -> int:
        self._message_id += 1
        return self._message_id


class ReceiverWorld(World):
    """A receiver's core with `population` transfers admitted: half of them written and unread, half of them not."""

    name = "receiver"

    def __init__(self, population: int, total_slots: int) -> None:
        super().__init__()
        settings = ReceiverSettings(
            "receiver",
            _RECEIVER,
            total_slots,
            _CHUNK_BYTES,
            allocation_timeout_s=_FOR_EVER_S,
            ready_ttl_s=_FOR_EVER_S,
            progress_timeout_s=_FOR_EVER_S,
            lease_s=_FOR_EVER_S,
            queue_depth_max=population + _SPARE_SLOTS,
        )
        self.core = ReceiverCore(settings)
        hello = Hello(_SENDER, 0, self._id(), PROTOCOL_VERSION, "sender", _CHUNK_BYTES, "", 0, HostIdentity())
        self._feed("hello", rev.MessageReceived(_PEER, hello))
        region = Region(0, b"worker", 0, total_slots * _CHUNK_BYTES, b"rkey")
        self._feed("session_opened", rev.SessionOpened(1, (region,)))
        self._populate(population)
        self.costs.clear()

    def _populate(self, population: int) -> None:
        for position in range(population):
            number = self._open()
            if position % 2:
                self._say("write_done", self._write_done(number))

    def _feed(self, name: str, event: rev.ReceiverEvent) -> list[rev.ReceiverAction]:
        now = self._clock()
        began = time.perf_counter_ns()
        actions = self.core.handle(event, now=now)
        self.costs[name].append(time.perf_counter_ns() - began)
        return actions

    def _say(self, name: str, message: PeerMessage) -> list[rev.ReceiverAction]:
        return self._feed(name, rev.MessageReceived(_PEER, message))

    def _open(self, name: str = "alloc") -> int:
        number = self._number()
        key = number.to_bytes(16, "little")
        header = (_SENDER, _RECEIVER, self._id())
        self._say(name, AllocRequest(*header, number, f"request-{number}", True, (key,), True, 1, 0, _CHUNK_BYTES))
        return number

    def _write_done(self, number: int) -> WriteDone:
        return WriteDone(_SENDER, _RECEIVER, self._id(), number, 0, 0, 1)

    def _cancel(self, number: int, name: str) -> None:
        self._say(name, CancelNotif(_SENDER, _RECEIVER, self._id(), number, (), ErrorCode.CANCELLED, True))

    def live(self) -> None:
        """Sent, claimed and released; then another that is cancelled by its sender, and one by its req_id."""
        number = self._open()
        self._say("write_done", self._write_done(number))
        self._feed("claim", rev.ClaimRequested(1, number, f"request-{number}", 0, 1.0))
        self._feed("release", rev.ClaimReleased(1, number))
        self._cancel(self._open(), "cancel")
        number = self._open()
        self._feed("cancel_by_name", RequestCancelled(f"request-{number}"))
        self._cancel(number, "cancel_confirmed")
        self._say("heartbeat", Heartbeat(_SENDER, _RECEIVER, self._id(), 0, ()))
        self._feed("time_passed", TimePassed())


class QueueWorld(ReceiverWorld):
    """A receiver's core with room for one transfer, and `population` that wait for it."""

    name = "queue"

    def __init__(self, population: int, total_slots: int) -> None:
        self._oldest = 1
        super().__init__(population, 1)

    def _populate(self, population: int) -> None:
        for _ in range(population + 1):
            self._open()

    def live(self) -> None:
        """The one that holds the room is cancelled, the next in line is admitted, another joins the line."""
        self._cancel(self._oldest, "next_admitted")
        self._oldest += 1
        self._open("alloc_queued")
        self._say("heartbeat", Heartbeat(_SENDER, _RECEIVER, self._id(), self._oldest, ()))
        self._feed("time_passed", TimePassed())


class SenderWorld(World):
    """A sender's core with `population` transfers to one receiver: half of them admitted, half waiting for that."""

    name = "sender"

    def __init__(self, population: int, total_slots: int) -> None:
        super().__init__()
        settings = SenderSettings(
            "sender",
            _SENDER,
            _SPARE_SLOTS,
            _CHUNK_BYTES,
            request_timeout_s=_FOR_EVER_S,
            transfers_max=population + _SPARE_SLOTS,
        )
        self.core = SenderCore(settings)
        self._waiting = 0
        first = self._number()
        hello = _sent(self._feed("open", sev.OpenRequested(first, 1, f"request-{first}", _ADDRESS, 1)), Hello)
        region = Region(0, b"worker", 0, total_slots * _CHUNK_BYTES, b"rkey")
        welcome = Welcome(
            *(_SENDER, _RECEIVER, hello.message_id, PROTOCOL_VERSION, "receiver", total_slots, _CHUNK_BYTES, ""),
            lease_s=_LEASE_S,
            put_deadline_s=_LEASE_S / 3,
            regions=(region,),
        )
        self._hear("welcome", welcome)
        self._feed("endpoint_opened", sev.EndpointOpened(_ADDRESS, 1))
        self._populate(population)
        self.costs.clear()

    def _populate(self, population: int) -> None:
        for position in range(population):
            _, request = self._open()
            if position % 2:
                self._answer("alloc_answered", request)
            else:
                self._ack("must_wait", request)
                self._waiting += 1

    def _feed(self, name: str, event: sev.SenderEvent) -> list[sev.SenderAction]:
        now = self._clock()
        began = time.perf_counter_ns()
        actions = self.core.handle(event, now=now)
        self.costs[name].append(time.perf_counter_ns() - began)
        return actions

    def _hear(self, name: str, message: PeerMessage) -> list[sev.SenderAction]:
        return self._feed(name, sev.PeerMessageReceived(_ADDRESS, message))

    def _open(self) -> tuple[int, AllocRequest]:
        number = self._number()
        actions = self._feed("open", sev.OpenRequested(number, 1, f"request-{number}", _ADDRESS, 1))
        return number, _sent(actions, AllocRequest)

    def _answer(self, name: str, request: AllocRequest) -> list[sev.SenderAction]:
        indexes = tuple(range(len(request.keys)))
        header = (_SENDER, _RECEIVER, request.message_id, request.transfer_no)
        return self._hear(name, AllocResponse(*header, request.first_chunk, indexes, ()))

    def _ack(self, name: str, message: PeerMessage) -> None:
        self._hear(name, Ack(_SENDER, _RECEIVER, message.message_id, waiting=self._waiting))

    def _cancelled(self, number: int, name: str, event: sev.SenderEvent) -> None:
        self._feed(name, event)
        notif = _sent(self._feed("puts_drained", sev.PutsDrained(number, True)), CancelNotif)
        self._ack("cancel_acked", notif)
        self._feed("let_go", sev.EngineLetGo(number))

    def live(self) -> None:
        """Sent and acknowledged; then another that is cancelled by its engine, and one by its req_id."""
        number, request = self._open()
        self._answer("alloc_answered", request)
        stage = sev.StageRequested(number, 0, (number.to_bytes(16, "little"),), True, _CHUNK_BYTES)
        request = _sent(self._feed("stage", stage), AllocRequest)
        self._answer("batch_answered", request)
        self._feed("filled", sev.PieceFilled(number, 0))
        self._ack("write_acked", _sent(self._feed("puts_completed", sev.PutsCompleted(number, 0)), WriteDone))
        self._feed("let_go", sev.EngineLetGo(number))
        number, request = self._open()
        self._answer("alloc_answered", request)
        self._cancelled(number, "cancel", sev.CancelRequested(number))
        number, request = self._open()
        self._cancelled(number, "cancel_by_name", RequestCancelled(f"request-{number}"))
        self._beat()

    def _beat(self) -> None:
        """Time passes until a heartbeat is due; it is answered."""
        heartbeats: list[Heartbeat] = []
        while not heartbeats:
            self._now = max(self._now, self.core.next_deadline() or 0.0)
            heartbeats = _all_sent(self._feed("time_passed", TimePassed()), Heartbeat)
        self._ack("heartbeat_acked", heartbeats[0])


def _sent(actions: Iterable[sev.SenderAction], kind: type[M]) -> M:
    """The one message of this kind that the sender sends."""
    (message,) = _all_sent(actions, kind)
    return message


def _all_sent(actions: Iterable[sev.SenderAction], kind: type[M]) -> list[M]:
    return [a.message for a in actions if isinstance(a, sev.SendToPeer) and isinstance(a.message, kind)]


WORLDS: Final[tuple[Callable[[int, int], World], ...]] = (ReceiverWorld, QueueWorld, SenderWorld)


def measure(
    populations: Sequence[int], *, rounds: int, lives: int, progress: Callable[[str], None] = lambda what: None
) -> tuple[EventCost, ...]:
    """The median cost of every event of every core, at each size of the population.

    Populations take turns, `lives` lives of the foreground at a time, in `rounds` rounds; each round gives one median.
    """
    total_slots = max(populations) + _SPARE_SLOTS
    costs = []
    for make in WORLDS:
        worlds: dict[int, World] = {}
        for population in populations:
            progress(f"a core with {population:,} live transfers")
            worlds[population] = make(population, total_slots)
        medians: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        for _ in range(rounds):
            for population, world in worlds.items():
                for _ in range(lives):
                    world.live()
                for event, nanoseconds in world.costs.items():
                    medians[event][population].append(statistics.median(nanoseconds) / 1e9)
                world.costs.clear()
        name = next(iter(worlds.values())).name
        for event, by_population in medians.items():
            costs.append(EventCost(name, event, {n: statistics.median(of) for n, of in by_population.items()}))
    return tuple(costs)
