"""A peer that breaks every rule: it says Hello like anybody, then all that no correct sender says."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from kvpd.core.messages import (
    PROTOCOL_VERSION,
    Ack,
    AllocRequest,
    AnyMessage,
    CancelNotif,
    Heartbeat,
    Hello,
    HostIdentity,
    PeerMessage,
    Welcome,
    WriteDone,
)
from kvpd.core.receiver import events as rev
from kvpd.core.sender import events as sev
from kvpd.errors import ErrorCode
from kvpd.simulation.network import Way
from kvpd.simulation.population import LAYOUT, Population

_MESSAGES = 40


class Rogue:
    """One hostile peer of one receiver."""

    def __init__(self, world: Population, receiver: int, number: int, until: float) -> None:
        self._world = world
        self._receiver = receiver
        self._until = until
        self._incarnation = 1_000_000 + number
        self._process = world.new_process(0, f"rogue-{number}")
        self._random: Random = world.random_for(self._process.name)
        self._identity = f"rogue-{number}/{self._incarnation:x}/1".encode()
        self._line = world.network.connect(self._process, f"receiver-{receiver}:7300", self._identity, self._hear)
        self._receiver_incarnation = 0
        self._next_id = 1
        self._next_transfer = 1
        self._hello: Hello | None = None
        self._act()

    def _hear(self, message: AnyMessage) -> None:
        if isinstance(message, Welcome | Ack):
            self._receiver_incarnation = message.receiver_incarnation

    def _act(self) -> None:
        if self._world.schedule.now >= self._until:
            self._process.kill()
            return
        self._random.choice(self._moves())()
        self._process.soon(self._random.expovariate(_MESSAGES / 4.0), self._act)

    def _moves(self) -> list[Callable[[], None]]:
        return [
            lambda: self._say_hello(),
            lambda: self._say_hello(protocol_version=PROTOCOL_VERSION + 1),
            lambda: self._say_hello(layout="another"),
            lambda: self._say_hello(chunk_bytes=1),
            lambda: self._say_hello(sender_id=""),
            self._garbage,
            self._strange_batches,
            self._strange_batches,
            self._strange_batches,
            self._strange_ends,
            self._forge,
            self._wrong_kind,
            self._mislead_sender,
        ]

    def _id(self) -> int:
        self._next_id += 1
        return self._next_id

    def _say(self, message: PeerMessage) -> None:
        self._line.send(Way.TO_RECEIVER, message)

    def _say_hello(
        self,
        *,
        protocol_version: int = PROTOCOL_VERSION,
        layout: str = LAYOUT,
        chunk_bytes: int | None = None,
        sender_id: str | None = None,
    ) -> None:
        if self._hello is not None and self._random.random() < 0.5:
            self._say(self._hello)
            return
        self._hello = Hello(
            self._incarnation,
            0,
            self._id(),
            protocol_version=protocol_version,
            sender_id=self._process.name if sender_id is None else sender_id,
            chunk_bytes=self._world.scenario.chunk_bytes if chunk_bytes is None else chunk_bytes,
            layout=layout,
            oldest_live=0,
            host=HostIdentity(),
        )
        self._say(self._hello)

    def _garbage(self) -> None:
        receiver = self._world.receivers[self._receiver]
        event = rev.MessageRejected(self._identity, "40 bytes that are no message")
        receiver.process.soon(0.001, lambda: receiver.feed(event))

    def _batch(self, number: int, first: int, count: int, total: int, **changes: object) -> None:
        keys = tuple(f"{self._process.name}/{number}/{first + i}".encode() for i in range(count))
        fields: dict[str, object] = {
            "transfer_no": number,
            "req_id": f"{self._process.name}/{number}",
            "open": True,
            "keys": keys,
            "is_last_batch": first + count >= total,
            "total_chunks": total,
            "first_chunk": first,
            "last_chunk_bytes": self._world.scenario.chunk_bytes,
        } | changes
        self._say(AllocRequest(self._incarnation, self._receiver_incarnation, self._id(), **fields))  # type: ignore[arg-type]

    def _two_batches(self, number: int, one: tuple[int, int, int], other: tuple[int, int, int]) -> None:
        self._batch(number, *one)
        self._batch(number, *other)

    def _strange_batches(self) -> None:
        number, self._next_transfer = self._next_transfer, self._next_transfer + 1
        slots = self._world.scenario.slots[self._receiver]
        moves: list[Callable[[], None]] = [
            lambda: self._batch(number, 0, 0, 0),
            lambda: self._batch(number, 0, 1, 1, req_id=""),
            lambda: self._batch(number, 0, 0, slots + 1),
            lambda: self._batch(number, 0, 3, 2),
            lambda: self._batch(number, 0, 1, 2, is_last_batch=True),
            lambda: self._two_batches(number, (0, 1, 2), (0, 1, 3)),
            lambda: self._two_batches(number, (0, 2, 3), (1, 2, 3)),
            lambda: self._batch(number, 0, 1, 2, last_chunk_bytes=1 << 40),
            lambda: self._batch(number, 0, 1, 1, open=False),
            lambda: self._batch(self._random.randrange(number), 0, 1, 1),
            lambda: self._batch(number, 0, 1, min(2, slots)),
        ]
        self._random.choice(moves)()

    def _strange_ends(self) -> None:
        number = self._random.randrange(self._next_transfer + 3)
        ours, theirs = self._incarnation, self._receiver_incarnation
        self._say(WriteDone(ours, theirs, self._id(), number, 0, self._random.randrange(4), 1 << 20))
        drained = self._random.random() < 0.8
        self._say(CancelNotif(ours, theirs, self._id(), number, (), ErrorCode.CANCELLED, drained))
        self._say(Heartbeat(ours, theirs, self._id(), number, ((number, 3),)))

    def _forge(self) -> None:
        """Speak of others' transfers, in our own name and in theirs."""
        transfers = sorted(self._world.truth.requests)
        if not transfers:
            return
        victim = self._random.choice(transfers)
        for incarnation in (self._incarnation, victim.incarnation):
            theirs = self._receiver_incarnation
            number = victim.transfer_no
            self._say(CancelNotif(incarnation, theirs, self._id(), number, (), ErrorCode.CANCELLED, True))
            self._say(WriteDone(incarnation, theirs, self._id(), number, 0, 0, 1))

    def _wrong_kind(self) -> None:
        self._say(Ack(self._incarnation, self._receiver_incarnation, self._id()))

    def _mislead_sender(self) -> None:
        """What a receiver that has lost its mind tells a sender."""
        sender = self._random.choice(self._world.senders)
        address = f"receiver-{self._receiver}:7300"
        ours, theirs = sender.settings.incarnation, self._world.receivers[self._receiver].settings.incarnation
        nonsense: list[sev.SenderEvent] = [
            sev.PeerMessageRejected(address, "40 bytes that are no message"),
            sev.PeerMessageReceived(address, Ack(ours, theirs, 1 << 40)),
            sev.PeerMessageReceived(address, Ack(ours + 1, theirs, 1)),
            sev.PeerMessageReceived(address, Heartbeat(ours, theirs, 1, 0)),
        ]
        event = self._random.choice(nonsense)
        sender.process.soon(0.001, lambda: sender.feed(event))
