"""The control network: lines from senders to receivers, which are slow, cut, held up, or repeat themselves.

Within one connection messages keep their order; between two lines they do not. A broken connection loses what it
carried, the line reconnects by itself, and what was sent meanwhile waits at the sender's end, as ZMQ has it. A
partition holds up one way or both; when it heals, TCP has either kept the connection or given it up.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable
from random import Random

import attrs

from kvpd.core.messages import AnyMessage, Message, decode, encode
from kvpd.simulation.schedule import Process, Schedule

_BACKLOG_MAX = 1000  # messages that a line keeps while it is not connected
_RECENT_MAX = 4  # messages that a new connection may repeat


class Way(enum.IntEnum):
    """A direction of a line. A number, because it is looked up for every message."""

    TO_RECEIVER = 0
    TO_SENDER = 1


@attrs.define(eq=False)
class Listener:
    """A receiver's end: many lines, each with the identity that its sender announced."""

    address: str
    process: Process
    on_message: Callable[[bytes, Line, AnyMessage], None]
    lines: dict[bytes, Line] = attrs.field(factory=dict)

    def send(self, peer: bytes, message: Message) -> None:
        """To the peer of this identity; lost if no such peer is connected."""
        line = self.lines.get(peer)
        if line is not None:
            line.send(Way.TO_SENDER, message)


class Line:
    """One sender's channel to one address."""

    def __init__(
        self,
        network: Network,
        process: Process,
        address: str,
        identity: bytes,
        on_message: Callable[[AnyMessage], None],
    ) -> None:
        self.network = network
        self.process = process
        self.address = address
        self.identity = identity
        self.is_closed = False
        self._on_message = on_message
        self._listener: Listener | None = None
        self._connection = 0  # which one: what an earlier one carried is lost
        self._backlog: deque[Message] = deque(maxlen=_BACKLOG_MAX)
        self._recent: deque[Message] = deque(maxlen=_RECENT_MAX)
        self._held: tuple[list[tuple[int, Message]], ...] = tuple([] for _ in Way)
        self._arrivals = [0.0 for _ in Way]  # of the last message on its way
        self._congested_until = 0.0
        self._random = network.random_for(identity.decode())
        process.watch(self.close)
        self._connect_later(network.delay_s(self._random))

    def send(self, way: Way, message: Message) -> None:
        """Put a message on its way, or keep it for the next connection."""
        if self.is_closed:
            return
        if self.network.schedule.now < self._congested_until and self._random.random() < 0.5:
            self.network.exercised("congestion")
            return
        if self._listener is None:
            self._backlog.append(message)
            return
        self._carry(way, message)

    def _carry(self, way: Way, message: Message) -> None:
        schedule, connection = self.network.schedule, self._connection
        arrival = max(self._arrivals[way], schedule.now + self.network.delay_s(self._random))
        self._arrivals[way] = arrival
        schedule.at(arrival, lambda: self._arrive(way, connection, message))

    def _arrive(self, way: Way, connection: int, message: Message) -> None:
        if connection != self._connection:
            return
        if self._held[way] or self.network.is_blocked(self.process, self.address, way):
            self._held[way].append((connection, message))
            return
        self._deliver(way, message)

    def _deliver(self, way: Way, message: Message) -> None:
        self.network.delivered += 1
        arrived = self.network.coded(message)
        if way is Way.TO_SENDER:
            if not self.is_closed:
                self.process.run(lambda: self._hear(arrived))
        elif (listener := self._listener) is not None:
            self._recent.append(message)
            listener.process.run(lambda: listener.on_message(self.identity, self, arrived))

    def _hear(self, message: AnyMessage) -> None:
        if not self.is_closed:  # a closed channel's last words belong to a session that is over
            self._on_message(message)

    # -------------------------------------------------------------- connections

    def _connect_later(self, delay_s: float) -> None:
        self.network.schedule.after(delay_s, self._connect)

    def _connect(self) -> None:
        if self.is_closed or self._listener is not None:
            return
        network = self.network
        listener = network.listeners.get(self.address)
        blocked = any(network.is_blocked(self.process, self.address, way) for way in Way)
        if listener is None or blocked or not self.process.is_alive:
            self._connect_later(self._random.uniform(0.1, 1.0))
            return
        self._listener = listener
        listener.lines[self.identity] = self
        backlog = list(self._backlog)
        self._backlog.clear()
        for message in backlog:
            self._carry(Way.TO_RECEIVER, message)

    def cut(self, *, repeats: bool = False) -> None:
        """Break the connection: what it carries is lost. `repeats`: the next begins with what the last delivered."""
        if self._listener is None:
            return
        self._listener.lines.pop(self.identity, None)
        self._listener = None
        self._connection += 1
        for held in self._held:
            held.clear()
        if repeats and self._recent:
            self._backlog.extendleft(reversed(self._recent))
            self.network.exercised("duplication")
        self._recent.clear()
        if not self.is_closed:
            self._connect_later(self._random.uniform(0.01, 0.5))

    def congest(self, until: float) -> None:
        """Let queues overflow, so that messages are dropped, until then."""
        self._congested_until = until

    def release(self) -> None:
        """A partition has healed."""
        if any(self._held) and self._random.random() < 0.5:
            self.cut()
            return
        for way in Way:
            if self.network.is_blocked(self.process, self.address, way):
                continue
            held = list(self._held[way])
            self._held[way].clear()
            for connection, message in held:
                if connection == self._connection:
                    self._deliver(way, message)

    def close(self) -> None:
        """The sender's end is closed, or dead; what it has sent still arrives."""
        self.is_closed = True
        self.network.forget(self)


class Network:
    """All lines and listeners."""

    def __init__(
        self,
        schedule: Schedule,
        random_for: Callable[[str], Random],
        exercised: Callable[[str], None],
        latency_s: float,
    ) -> None:
        self.schedule = schedule
        self.random_for = random_for
        self.exercised = exercised
        self.latency_s = latency_s
        self.listeners: dict[str, Listener] = {}
        self.lines: dict[Line, None] = {}
        self.delivered = 0
        self._blocks: dict[int, tuple[Callable[[Process, str], bool], frozenset[Way]]] = {}
        self._block_count = 0

    def delay_s(self, random: Random) -> float:
        """How long a message takes: mostly a little, at times much more."""
        return self.latency_s * (random.random() + 0.1) * (20.0 if random.random() < 0.02 else 1.0)

    def coded(self, message: Message) -> AnyMessage:
        """What arrives is what its bytes say."""
        return decode(encode(message))

    def listen(self, address: str, process: Process, on_message: Callable[[bytes, Line, AnyMessage], None]) -> Listener:
        """Bind; senders that wait for this address connect by themselves. Ends with the process."""
        listener = self.listeners[address] = Listener(address, process, on_message)
        process.watch(lambda: self._hang_up(listener))
        return listener

    def _hang_up(self, listener: Listener) -> None:
        del self.listeners[listener.address]
        for line in list(listener.lines.values()):
            line.cut()

    def connect(
        self, process: Process, address: str, identity: bytes, on_message: Callable[[AnyMessage], None]
    ) -> Line:
        """A new line."""
        line = Line(self, process, address, identity, on_message)
        self.lines[line] = None
        return line

    def forget(self, line: Line) -> None:
        """A closed line."""
        self.lines.pop(line, None)

    def block(self, applies: Callable[[Process, str], bool], ways: frozenset[Way]) -> int:
        """A partition between some processes and some addresses: its number."""
        self._block_count += 1
        self._blocks[self._block_count] = (applies, ways)
        return self._block_count

    def unblock(self, number: int) -> None:
        """It heals."""
        self._blocks.pop(number, None)
        for line in list(self.lines):
            line.release()

    def is_blocked(self, process: Process, address: str, way: Way) -> bool:
        """Whether nothing passes this way now."""
        return any(way in ways and applies(process, address) for applies, ways in self._blocks.values())
