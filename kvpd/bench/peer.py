"""A worker that speaks to a receiver as a sender does, over real ZMQ, and puts no byte: it measures the control path.

Its transfers have one chunk each. One that is answered with its slot is cancelled at once, as drained, so that the
receiver frees the slot. Between two calls only the heartbeats go on, which a session needs.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from contextlib import AsyncExitStack
from typing import Final, TypeVar

import msgspec
import trio

from kvpd.bench.workers import serve_async
from kvpd.core.messages import (
    PROTOCOL_VERSION,
    Ack,
    AllocRequest,
    AllocResponse,
    AnyMessage,
    CancelNotif,
    Heartbeat,
    Hello,
    HostIdentity,
    PeerMessage,
    Welcome,
    decode,
    encode,
)
from kvpd.errors import ErrorCode
from kvpd.service.turns import together
from kvpd.transports.zmq import ZmqClient, ZmqLimits, open_zmq_control

_ANSWER_S: Final = 60.0  # for any answer that does not wait for admission
_KEY_BYTES: Final = 32  # as long as a hash
_QUEUE_MAX: Final = 1 << 17  # messages: nothing of ours is dropped, or waits for room

M = TypeVar("M", bound=PeerMessage)


class Connect(msgspec.Struct, frozen=True):
    """Whom to speak to."""

    address: str
    chunk_bytes: int


class RoundTrips(msgspec.Struct, frozen=True):
    """How many transfers are to be opened in all, and how many at once."""

    transfers: int
    outstanding: int


class Times(msgspec.Struct, frozen=True):
    """How long everything took, and each single round trip, in seconds."""

    seconds: float
    each: list[float]


class Peer:
    """One session. What it has asked for is answered in any order; what nobody asked for ends the worker."""

    def __init__(self, nursery: trio.Nursery, stack: AsyncExitStack) -> None:
        self._nursery = nursery
        self._stack = stack
        self._client: ZmqClient
        self._chunk_bytes = 0
        self._incarnation = secrets.randbits(61) + 1
        self._receiver = 0  # its incarnation
        self._message_id = 0
        self._next_no = 0
        self._live: dict[int, None] = {}  # transfers, the oldest first
        self._heartbeats: set[int] = set()  # message ids, unanswered
        self._outgoing: list[bytes] = []  # leaves together, as a sender's messages of one turn do
        self._queue: deque[int] = deque()  # transfers that wait; before them, the one that holds the slot

    # -------------------------------------------------------------- the session

    async def connect(self, to: Connect) -> int:
        """Say Hello, and go on with heartbeats: how many slots the receiver has."""
        control = await self._stack.enter_async_context(open_zmq_control(ZmqLimits(queue_messages_max=_QUEUE_MAX)))
        name = f"bench-{self._incarnation:x}"
        self._client = await self._stack.enter_async_context(control.connect(to.address, name.encode()))
        self._chunk_bytes = to.chunk_bytes
        hello = Hello(
            *(self._incarnation, 0, self._id(), PROTOCOL_VERSION, name, to.chunk_bytes, "", 0),
            host=HostIdentity(),  # of no host that the receiver knows: there is no process to be watched
        )
        self._client.send_nowait(encode(hello))
        with trio.fail_after(_ANSWER_S):
            welcome = self._expected(decode(await self._client.receive()), Welcome)
        self._receiver = welcome.receiver_incarnation
        self._nursery.start_soon(self._beat, (welcome.lease_s - welcome.put_deadline_s) / 3)
        return welcome.total_chunks

    async def _beat(self, interval_s: float) -> None:
        while True:
            await trio.sleep(interval_s)
            oldest = next(iter(self._live), self._next_no)
            message = Heartbeat(self._incarnation, self._receiver, self._id(), oldest)
            self._heartbeats.add(message.message_id)
            self._client.send_nowait(encode(message))

    def _id(self) -> int:
        self._message_id += 1
        return self._message_id

    async def _answers(self) -> list[AnyMessage]:
        """Send what there is to say, then: what has come, one message at least, but for answers to heartbeats."""
        outgoing, self._outgoing = self._outgoing, []
        for messages in together(outgoing):
            self._client.send_nowait(*messages)
        answers: list[AnyMessage] = []
        with trio.fail_after(_ANSWER_S):
            while not answers:
                frames = [await self._client.receive()]
                try:
                    while True:
                        frames.append(self._client.receive_nowait())
                except trio.WouldBlock:
                    pass
                answers = [message for message in map(decode, frames) if not self._is_beat(message)]
        return answers

    def _is_beat(self, message: AnyMessage) -> bool:
        is_beat = isinstance(message, Ack) and message.message_id in self._heartbeats
        if is_beat:
            self._heartbeats.discard(message.message_id)
        return is_beat

    @staticmethod
    def _expected(message: AnyMessage, kind: type[M]) -> M:
        if not isinstance(message, kind) or getattr(message, "error", None) is not None:
            raise ValueError(f"{message} where a {kind.__name__} without an error was expected")
        return message

    # -------------------------------------------------------------- transfers

    def _open(self) -> AllocRequest:
        """Ask for room for the only chunk of a new transfer, and for its slot."""
        number, self._next_no = self._next_no, self._next_no + 1
        self._live[number] = None
        message = AllocRequest(
            *(self._incarnation, self._receiver, self._id(), number, f"request-{number}"),
            open=True,
            keys=(number.to_bytes(_KEY_BYTES, "little"),),
            is_last_batch=True,
            total_chunks=1,
            first_chunk=0,
            last_chunk_bytes=self._chunk_bytes,
        )
        self._outgoing.append(encode(message))
        return message

    def _cancel(self, number: int) -> int:
        """Give a transfer up; the id of the message."""
        message = CancelNotif(
            *(self._incarnation, self._receiver, self._id(), number, (), ErrorCode.CANCELLED), drained=True
        )
        self._outgoing.append(encode(message))
        del self._live[number]
        return message.message_id

    async def round_trips(self, want: RoundTrips) -> Times:
        """Open, get the slot, cancel, be told so: so many at once, until so many have been."""
        opened: dict[int, float] = {}  # message id → when
        cancelled: set[int] = set()
        each: list[float] = []
        left = want.transfers
        began = time.perf_counter()

        def begin() -> None:
            nonlocal left
            left -= 1
            at = time.perf_counter()
            opened[self._open().message_id] = at

        for _ in range(min(want.outstanding, left)):
            begin()
        while opened or cancelled:
            for message in await self._answers():
                if isinstance(message, AllocResponse):
                    answer = self._expected(message, AllocResponse)
                    each.append(time.perf_counter() - opened.pop(answer.message_id))
                    if len(answer.remote_indexes) != 1:
                        raise ValueError(f"{answer} bears no slot")
                    cancelled.add(self._cancel(answer.transfer_no))
                else:
                    cancelled.remove(self._expected(message, Ack).message_id)
                    if left:
                        begin()
        return Times(time.perf_counter() - began, each)

    # -------------------------------------------------------------- the queue

    async def queue_up(self, waiting: int) -> int:
        """Take the only slot, and have so many transfers wait for it: how many there are."""
        unanswered = set()
        for _ in range(waiting + 1):
            message = self._open()
            unanswered.add(message.message_id)
            self._queue.append(message.transfer_no)
        while unanswered:
            for answer in await self._answers():
                self._expected(answer, Ack if isinstance(answer, Ack) else AllocResponse)
                unanswered.remove(answer.message_id)
        return len(self._queue) - 1

    async def wake_ups(self, samples: int) -> list[float]:
        """So many times: from giving up the slot until the next in line is known to have it, in seconds.

        Whoever left the line is replaced at its end, outside of the measurement.
        """
        return [await self._wake_up() for _ in range(samples)]

    async def _wake_up(self) -> float:
        holder = self._queue.popleft()
        began = time.perf_counter()
        cancel = self._cancel(holder)
        seconds, acknowledged = 0.0, False
        while not seconds or not acknowledged:
            for message in await self._answers():
                if isinstance(message, AllocResponse):
                    seconds = time.perf_counter() - began
                    if self._expected(message, AllocResponse).transfer_no != self._queue[0]:
                        raise ValueError(f"transfer {message.transfer_no} was admitted, not the next in line")
                else:
                    acknowledged = self._expected(message, Ack).message_id == cancel
        joined = self._open()
        self._queue.append(joined.transfer_no)
        (waits,) = await self._answers()
        if self._expected(waits, Ack).message_id != joined.message_id:
            raise ValueError(f"{waits} where transfer {joined.transfer_no} has to wait")
        return seconds


async def _main() -> None:
    async with trio.open_nursery() as nursery, AsyncExitStack() as stack:
        peer = Peer(nursery, stack)
        await serve_async(
            {
                "connect": peer.connect,
                "round_trips": peer.round_trips,
                "queue_up": peer.queue_up,
                "wake_ups": peer.wake_ups,
            }
        )
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(_main)
