"""Whole systems in one process: receivers and senders over real cores and services, on a network that can be cut.

Every world runs under a virtual clock: a deadlock is not a hang but an instant failure, because time jumps to the
test's deadline when nobody can run. Every invariant is checked by a full scan after every event.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar

import attrs
import pytest
import trio
from trio.testing import MockClock

from kvpd.config import ReceiverConfig, SenderConfig
from kvpd.core.events import TransferId
from kvpd.core.messages import FailNotif, HostIdentity, Message, ProxyAck, ProxyNotif, decode, encode
from kvpd.core.receiver import events as rev
from kvpd.errors import ErrorCode, TransferError
from kvpd.service.receiver import Receiver
from kvpd.service.sender import Sender
from kvpd.service.staging import Slot, Transfer
from kvpd.transports.base import ControlServer, ControlTransport, DataPlane
from kvpd.transports.memory_control import MemoryNetwork
from kvpd.transports.memory_data import MemoryFabric, open_memory_data_plane
from kvpd.transports.zmq import open_zmq_control

CHUNK_BYTES = 64
LIMIT_S = 3600.0  # of virtual time, for a whole test: an hour passes in an instant
REAL_LIMIT_S = 30.0
# A sender on another machine: the end of its session alone is a fence.
ELSEWHERE = HostIdentity(boot_id="another machine", pid_namespace="its own", pid=1, start_time=1)

P = ParamSpec("P")
T = TypeVar("T")


def run_in_virtual_time(main: Callable[..., Awaitable[T]], *args: Any) -> T:
    """`trio.run` under a virtual clock that jumps when everybody waits.

    Trio shuffles those who can run; here it does so in the same way every time, so that a failure can be repeated.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trio._core._run, "_ALLOW_DETERMINISTIC_SCHEDULING", True)
        patch.setattr(trio._core._run, "_r", random.Random(0))
        return trio.run(main, *args, clock=MockClock(autojump_threshold=0))


def in_virtual_time(test: Callable[P, Awaitable[None]]) -> Callable[P, None]:
    """Run a test, and the World among its arguments, under a virtual clock that jumps when everybody waits."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        async def main() -> None:
            async with AsyncExitStack() as stack:
                for argument in kwargs.values():
                    if isinstance(argument, World):
                        await stack.enter_async_context(argument)
                with trio.fail_after(LIMIT_S):
                    await test(*args, **kwargs)

        run_in_virtual_time(main)

    return run


class Watch:
    """Checks every invariant after every step of a daemon, and wakes those who wait for one."""

    def __init__(self, daemon: Receiver | Sender, *, audited: bool) -> None:
        self._daemon = daemon
        self._audited = audited
        self._waiting: dict[trio.Event, Callable[[], bool]] = {}
        daemon._driver.on_step(self._step)

    def _step(self) -> None:
        self._daemon._after_step()
        if self._audited:
            self._daemon.core.audit()
        for event, holds in self._waiting.items():
            if holds():
                event.set()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Until it holds after some step."""
        event = trio.Event()
        self._waiting[event] = holds
        try:
            if not holds():
                await event.wait()
        finally:
            del self._waiting[event]


class World:
    """One network, one fabric, and whoever is on them. `transport` names the control channels' kind."""

    def __init__(self, transport: str = "memory", *, delay_s: float = 0.0, audited: bool = True) -> None:
        self.transport = transport
        self.delay_s = delay_s
        self.audited = audited
        self.fabric = MemoryFabric()
        self._stack = AsyncExitStack()
        self._watches: dict[Receiver | Sender, Watch] = {}

    async def __aenter__(self) -> Self:
        if self.transport == "memory":
            self.control: ControlTransport = MemoryNetwork(delay_s=self.delay_s)
        else:
            self.control = await self._stack.enter_async_context(open_zmq_control())
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    @property
    def network(self) -> MemoryNetwork:
        """The control network, for its faults."""
        assert isinstance(self.control, MemoryNetwork), "only the memory network can be cut"
        return self.control

    def plane(self, memory: Any, put_window_bytes: int | None) -> contextlib.AbstractAsyncContextManager[DataPlane]:
        """A data plane on this world's fabric."""
        if put_window_bytes is None:
            return open_memory_data_plane(memory, fabric=self.fabric)
        return open_memory_data_plane(memory, fabric=self.fabric, put_window_bytes=put_window_bytes)

    def address_of(self, name: str) -> str:
        """Where to bind."""
        return "127.0.0.1:0" if self.transport == "memory" else f"inproc://{name}"

    def receiver(
        self, *, name: str = "decode", slots: int = 10, address: str | None = None, share: str = "", **settings: Any
    ) -> Receiver:
        """A receiver that nobody has entered yet."""
        config = ReceiverConfig(
            name=name,
            control_address=address or self.address_of(name),
            buffer_size=slots * settings.get("chunk_bytes", CHUNK_BYTES),
            **{"chunk_bytes": CHUNK_BYTES, **settings},
        )
        receiver = Receiver(config, control=self.control, data_plane=self.plane, share=share)
        self._watches[receiver] = Watch(receiver, audited=self.audited)
        return receiver

    def sender(
        self,
        *,
        name: str = "prefill",
        staging: int = 4,
        host: HostIdentity = ELSEWHERE,
        now: Callable[[], float] | None = None,
        **settings: Any,
    ) -> Sender:
        """A sender that nobody has entered yet."""
        config = SenderConfig(
            name=name,
            staging_size=staging * settings.get("chunk_bytes", CHUNK_BYTES),
            **{"chunk_bytes": CHUNK_BYTES, **settings},
        )
        sender = Sender(config, control=self.control, data_plane=self.plane, host=host, now=now)
        self._watches[sender] = Watch(sender, audited=self.audited)
        return sender

    async def until(self, daemon: Receiver | Sender, holds: Callable[[], bool]) -> None:
        """Until something holds that only the daemon's own steps can bring about."""
        await self._watches[daemon].until(holds)

    async def until_clean(self, *daemons: Receiver | Sender) -> None:
        """Until nothing is left of any request: every slot free, every table empty."""
        for daemon in daemons:
            await self.until(daemon, lambda core=daemon.core: core.is_clean)  # type: ignore[misc]
            daemon.core.audit()


# ------------------------------------------------------------------ requests


@attrs.frozen
class Request:
    """One request and every byte of it, made from its name."""

    req_id: str
    chunks: int
    last_bytes: int = CHUNK_BYTES
    batch: int = 0  # chunks per stage; 0: all in one
    chunk_bytes: int = CHUNK_BYTES
    shared_keys: str = ""  # requests that share these have the same chunks
    rank: int = 0  # whose part of it this is: under the same keys each has bytes of its own

    def length(self, number: int) -> int:
        return self.last_bytes if number == self.chunks - 1 else self.chunk_bytes

    def chunk(self, number: int) -> bytes:
        """The bytes of one chunk."""
        seed = f"{self.shared_keys or self.req_id} {number} {self.length(number)} {self.rank or ''}"
        return random.Random(seed).randbytes(self.length(number))

    def key(self, number: int) -> bytes:
        """The key of one chunk."""
        return f"{self.shared_keys or self.req_id} {number}".encode()

    def of_rank(self, rank: int) -> Request:
        """Another rank's part of it."""
        return attrs.evolve(self, rank=rank)

    @property
    def payload(self) -> list[bytes]:
        """All chunks, in order."""
        return [self.chunk(number) for number in range(self.chunks)]

    @property
    def batches(self) -> list[range]:
        """Which chunks are staged together."""
        step = self.batch or self.chunks
        return [range(first, min(first + step, self.chunks)) for first in range(0, self.chunks, step)]


async def fill(slots: AsyncIterator[Slot], request: Request, *, first: int = 0) -> int:
    """Write the request's chunks from `first` on into what is left of a stage; how many were there already."""
    deduplicated = 0
    number = first
    async for slot in slots:
        if slot is None:
            deduplicated += 1
        else:
            slot[:] = request.chunk(number)
        number += 1
    return deduplicated


async def stage(transfer: Transfer, request: Request, batch: range) -> int:
    """Stage and fill one batch; how many of its chunks the receiver had already."""
    keys = [request.key(number) for number in batch]
    is_last = batch.stop == request.chunks
    last_chunk_bytes = request.last_bytes if is_last else None
    async with transfer.stage(keys, last=is_last, last_chunk_bytes=last_chunk_bytes) as slots:
        return await fill(slots, request, first=batch.start)


async def send(sender: Sender, receiver: str, request: Request, **options: Any) -> int:
    """A whole request; how many of its chunks the receiver had already."""
    deduplicated = 0
    options = {"rank": request.rank, **options}
    async with sender.open(request.req_id, receiver=receiver, total_chunks=request.chunks, **options) as transfer:
        for batch in request.batches:
            deduplicated += await stage(transfer, request, batch)
    return deduplicated


async def take(receiver: Receiver, request: Request, *, timeout_s: float = 1000.0) -> None:
    """Claim a request and compare every byte."""
    async with receiver.claim(request.req_id, timeout_s=timeout_s, rank=request.rank) as chunks:
        assert [chunk.key for chunk in chunks] == [request.key(number) for number in range(request.chunks)]
        assert [bytes(chunk.view) for chunk in chunks] == request.payload


async def transfer(sender: Sender, receiver: Receiver, *requests: Request) -> None:
    """Send and take, all at once."""
    async with trio.open_nursery() as nursery:
        for request in requests:
            nursery.start_soon(send, sender, receiver.address, request)
            nursery.start_soon(take, receiver, request)


@contextmanager
def refused(*codes: ErrorCode, match: str | None = None) -> Iterator[None]:
    """What is inside ends with a TransferError of one of these codes, alone and not in a group."""
    with pytest.raises(TransferError, match=match) as caught:
        yield
    assert caught.value.code in codes, f"{caught.value.code} ({caught.value.detail}) instead of {codes}"


# ------------------------------------------------------------------ others


class Proxy:
    """A stand-in proxy: it counts notifications and acknowledges them, but the first `deaf` ones."""

    def __init__(self, server: ControlServer, *, deaf: int = 0) -> None:
        self.notifications: list[ProxyNotif] = []
        self.failures: list[FailNotif] = []
        self.heard = trio.Event()
        self._server = server
        self._deaf = deaf

    @property
    def address(self) -> str:
        return self._server.address

    async def run(self, on_notification: Callable[[ProxyNotif], None] = lambda _: None) -> None:
        while True:
            peer, frame = await self._server.receive()
            message = decode(frame)
            assert isinstance(message, ProxyNotif | FailNotif)
            if isinstance(message, ProxyNotif):
                self.notifications.append(message)
                on_notification(message)
            else:
                self.failures.append(message)
            if len(self.notifications) + len(self.failures) > self._deaf:
                self._server.send_nowait(peer, encode(ProxyAck(message.sender_incarnation, message.message_id)))
            self.heard.set()


class Announcements:
    """An engine that listens to what becomes of transfers."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []

    def granted(self, grant: rev.GrantClaim) -> None:
        raise AssertionError("it claims nothing")

    def refused(self, refusal: rev.RefuseClaim) -> None:
        raise AssertionError("it claims nothing")

    def cut_off(self, detail: str) -> None:
        raise AssertionError(f"it does nothing wrong: {detail}")

    def announced(self, announcement: rev.AnnounceTransfer) -> None:
        assert isinstance(announcement.transfer, TransferId)
        self.seen.append((announcement.req_id, announcement.outcome.value))


async def ask(control: ControlTransport, address: str, *messages: Message | bytes) -> list[Message]:
    """Say these things to a receiver from a channel of one's own; what it answers while it has anything to say."""
    answers: list[Message] = []
    async with control.connect(address, b"stranger") as client:
        for message in messages:
            client.send_nowait(message if isinstance(message, bytes) else encode(message))
        with trio.move_on_after(1.0):
            while True:
                answers.append(decode(await client.receive()))
    return answers


def free_slots(receivers: Sequence[Receiver]) -> list[int]:
    """Free slots of each."""
    return [receiver.core.counts.free for receiver in receivers]
