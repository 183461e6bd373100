"""The data plane: puts that take their time, fail, or land after everybody has stopped waiting for them.

What the world knows and nobody in it does: which writes are still on their way. A write lands while its target (the
session's worker) exists. On one host, where the sender's own kernel may be writing, it lands after that too, until it
has ended at the sender, well or not, or the sender's process is dead. A force-closed endpoint ends its puts at the
sender at once (now and then one of them stays stuck), and stops no byte on a network.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterable
from random import Random
from typing import Protocol

import attrs

from kvpd.core.events import TransferId
from kvpd.core.sender.events import StagedSlot
from kvpd.simulation.in_place import Filling
from kvpd.simulation.schedule import Process, Schedule

Content = tuple[bytes, int]  # a chunk's key and length: what its bytes are, as far as the world is concerned


def content_of(key: bytes, length: int, rank: int) -> Content:
    """What one rank has of a chunk: under the same key, other bytes than the others."""
    return key + b"/rank %d" % rank if rank else key, length


def checksum_of(content: Content | None) -> int:
    """What stands for a checksum of these bytes."""
    return zlib.crc32(repr(content).encode())


class Landing(Protocol):
    """Who must know of every write into a receiver's memory."""

    def landed(self, flight: Flight) -> None: ...


@attrs.define(eq=False)
class Memory:
    """A receiver's buffer, and the writes on their way into it, by slot: first all of rank 0's, then all of rank 1's.

    `slots_per_rank` tells from such a number which slot it is.
    """

    process: Process
    watcher: Landing
    slots: list[Content | None]
    slots_per_rank: int
    flights: dict[int, dict[Flight, None]] = attrs.field(factory=dict)
    fillings: dict[Filling, None] = attrs.field(factory=dict)  # by engines, in place

    def in_flight(self, index: int) -> Iterable[Flight]:
        """The writes that may still land in this slot of any rank."""
        places = range(index, len(self.slots), self.slots_per_rank)
        return [flight for place in places for flight in self.flights.get(place, ())]

    def being_filled(self, index: int) -> Iterable[Filling]:
        """The pieces with this slot, of any rank, that engines may be writing."""
        return [filling for filling in self.fillings if index in {p % self.slots_per_rank for p in filling.places}]


@attrs.define(eq=False)
class Target:
    """A session's worker."""

    memory: Memory
    is_open: bool = True
    endpoints: dict[Endpoint, None] = attrs.field(factory=dict)
    flights: dict[Flight, None] = attrs.field(factory=dict)

    def close(self) -> None:
        """Destroy it: nothing lands through a network any more."""
        if not self.is_open:
            return
        self.is_open = False
        for flight in list(self.flights):
            if not flight.is_local or flight.has_ended:
                flight.vanish()
        for endpoint in list(self.endpoints):
            endpoint.peer_ended()


@attrs.define(eq=False)
class Batch:
    """Puts that were posted together."""

    transfer: TransferId
    left: int
    on_ended: Callable[[], None]
    failed: str | None = None
    given_up: bool = False  # its puts are stuck, and waited for no more

    @property
    def is_done(self) -> bool:
        """Nothing of it is in flight here."""
        return self.left == 0

    def ended(self, detail: str | None) -> None:
        """One of its puts has."""
        self.left -= 1
        self.failed = self.failed or detail
        if self.left == 0:
            self.on_ended()


@attrs.define(eq=False)
class Flight:
    """One put on its way."""

    batch: Batch
    put: StagedSlot
    endpoint: Endpoint
    has_ended: bool = False  # at the sender

    @property
    def target(self) -> Target:
        """Where to."""
        return self.endpoint.target

    @property
    def is_local(self) -> bool:
        """The sender's kernel writes by itself, whatever becomes of the target."""
        return self.endpoint.process.host is self.target.memory.process.host

    def depart(self) -> None:
        """It may land from now on."""
        self.target.flights[self] = None
        self.target.memory.flights.setdefault(self.put.remote, {})[self] = None

    def vanish(self) -> None:
        """It can land no more."""
        self.target.flights.pop(self, None)
        if (flights := self.target.memory.flights.get(self.put.remote)) is not None:
            flights.pop(self, None)

    def can_land(self) -> bool:
        """Whether the bytes are still on their way."""
        return self in self.target.flights

    def land(self, *, corrupted: bool = False) -> None:
        """The bytes are there."""
        memory = self.target.memory
        self.vanish()
        content = self.endpoint.staging[self.put.local]
        memory.slots[self.put.remote] = (b"corrupted", self.put.length) if corrupted else content
        memory.watcher.landed(self)

    def end(self, detail: str | None) -> None:
        """The sender knows how it went."""
        if not self.has_ended:
            self.has_ended = True
            if not self.target.is_open:
                self.vanish()
            self.endpoint.put_ended(self)
            self.batch.ended(detail)


class Endpoint:
    """A sender's way to a target, with a window of puts in flight."""

    def __init__(
        self,
        plane: Plane,
        process: Process,
        staging: list[Content | None],
        target: Target,
        on_broken: Callable[[str], None],
    ) -> None:
        self.process = process
        self.staging = staging
        self.target = target
        self.is_broken = False
        self._plane = plane
        self._on_broken = on_broken
        self._queue: deque[tuple[Batch, StagedSlot]] = deque()
        self._flights: dict[Flight, None] = {}
        target.endpoints[self] = None
        plane.endpoints[self] = None
        process.watch(self._owner_died)

    def post(self, batch: Batch, puts: tuple[StagedSlot, ...]) -> None:
        """Queue puts; the window says when they begin."""
        self._queue.extend((batch, put) for put in puts)
        self._pump()

    def abandon(self, batch: Batch) -> None:
        """Begin no more of its puts."""
        unbegun = [entry for entry in self._queue if entry[0] is batch]
        if unbegun:
            self._queue = deque(entry for entry in self._queue if entry[0] is not batch)
            for _ in unbegun:
                batch.ended(None)

    def _pump(self) -> None:
        while self._queue and len(self._flights) < self._plane.window and not self.is_broken:
            batch, put = self._queue.popleft()
            flight = Flight(batch, put, self)
            self._flights[flight] = None
            self._plane.begin(flight)

    def put_ended(self, flight: Flight) -> None:
        """The window has room again."""
        self._flights.pop(flight, None)
        if not self.is_broken:
            self._pump()

    def force_close(self) -> None:
        """End everything here, now; the bytes go on."""
        self._end("the endpoint was force-closed")

    def fail(self, detail: str) -> None:
        """The transport reports it dead."""
        if not self.is_broken:
            self._end(detail)
            self.process.soon(self._plane.detection_s(), lambda: self._on_broken(detail))

    def peer_ended(self) -> None:
        """Its target is gone, which a keepalive notices after a while."""
        self._plane.schedule.after(self._plane.detection_s(), lambda: self.fail("the peer is gone"))

    def _end(self, detail: str) -> None:
        if self.is_broken:
            return
        self.is_broken = True
        self._forget()
        queue, self._queue = self._queue, deque()
        flights, self._flights = self._flights, {}
        for batch, _ in queue:
            batch.ended(detail)
        for flight in flights:
            if not self._plane.stays_stuck(flight):
                flight.end(detail)

    def _forget(self) -> None:
        self.target.endpoints.pop(self, None)
        self._plane.endpoints.pop(self, None)

    def _owner_died(self) -> None:
        """On one host the copies stop with the process; what is on a network goes on."""
        self.is_broken = True
        self._forget()
        self._queue.clear()
        self._flights.clear()
        for flight in list(self.target.flights):
            if flight.endpoint.process is self.process and flight.is_local:
                flight.vanish()


class Plane:
    """All endpoints, and how their puts fare."""

    def __init__(
        self, schedule: Schedule, random: Random, exercised: Callable[[str], None], *, put_s: float, window: int
    ) -> None:
        self.schedule = schedule
        self.window = window
        self.endpoints: dict[Endpoint, None] = {}
        self.slow_until = 0.0
        self.failing: dict[Process, int] = {}  # how many of a sender's next puts fail
        self.corrupting: dict[Process, int] = {}  # how many of them land as other bytes than were sent
        self.refusing: dict[Process, int] = {}  # how many of a sender's next endpoints cannot be made
        self._stalls: dict[Process, float] = {}  # receivers to which nothing moves, and until when
        self._random = random
        self._exercised = exercised
        self._put_s = put_s

    def stall(self, receiver: Process, until: float) -> None:
        """Nothing moves to this receiver until then."""
        self._stalls[receiver] = until

    def stays_stuck(self, flight: Flight) -> bool:
        """Whether not even the end of its endpoint ends this put: a copy that the kernel does not finish."""
        now, receiver = self.schedule.now, flight.target.memory.process
        stuck = flight.is_local and self._stalls.get(receiver, 0.0) > now and self._random.random() < 0.5
        if stuck:
            self._exercised("stuck_put")
        return stuck

    def detection_s(self) -> float:
        """How long it takes to notice that a peer is gone."""
        return self._random.uniform(0.001, 1.0)

    def connect(
        self, process: Process, staging: list[Content | None], target: Target, on_broken: Callable[[str], None]
    ) -> Endpoint | str:
        """An endpoint, or why there is none."""
        if self.refusing.get(process, 0) > 0:
            self.refusing[process] -= 1
            return "no endpoint can be made"
        if not target.is_open:
            return "no target has that worker address"
        return Endpoint(self, process, staging, target, on_broken)

    def begin(self, flight: Flight) -> None:
        """A put leaves."""
        random = self._random
        seconds = self._put_s * (0.2 + random.random())
        if self.schedule.now < self.slow_until:
            seconds *= random.choice((1, 20, 200, 2000))
            self._exercised("put_slow")
        process = flight.endpoint.process
        if self.failing.get(process, 0) > 0:
            self.failing[process] -= 1
            self._exercised("put_failure")
            if random.random() < 0.7:
                flight.depart()
                self.schedule.after(seconds * random.uniform(0.5, 20.0), lambda: self._land(flight))
            self.schedule.after(seconds, lambda: process.run(lambda: flight.end("input/output error")))
            return
        flight.depart()
        self.schedule.after(seconds, lambda: self._land(flight))

    def _land(self, flight: Flight) -> None:
        now = self.schedule.now
        ends = (flight.endpoint.process, flight.target.memory.process)
        until = max(
            self._stalls.get(ends[1], 0.0),
            ends[0].host.suspended_until,
            ends[1].host.suspended_until,
        )
        if until > now and flight.can_land():
            self.schedule.at(until + self._random.uniform(0.0, 2 * self._put_s), lambda: self._land(flight))
            return
        if not flight.can_land():
            return  # its target is gone, which its endpoint will notice
        if flight.has_ended or not ends[0].is_alive:
            self._exercised("late_landing")
        corrupted = self.corrupting.get(ends[0], 0) > 0
        if corrupted:
            self.corrupting[ends[0]] -= 1
            self._exercised("put_corruption")
        flight.land(corrupted=corrupted)
        # Its completion comes by the sender's own progress: not while it is stopped, and not if it is dead.
        if not flight.has_ended:
            self.schedule.after(self._put_s * 0.1, lambda: ends[0].run(lambda: flight.end(None)))
