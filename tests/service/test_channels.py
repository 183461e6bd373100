"""The sender's channels: last words leave, and one that could not be made is made again."""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import trio

from kvpd.errors import ErrorCode
from kvpd.service.channels import Channel
from kvpd.service.turns import TurnEnd
from kvpd.transports.base import ControlClient, ControlServer, ControlTransport
from kvpd.transports.memory_control import MemoryNetwork

from .worlds import Proxy, Request, World, in_virtual_time, refused, send, stage, take, transfer


class ScarceControl:
    """A control transport that has no socket to be had at first, as when a process has too many files open."""

    def __init__(self, inner: ControlTransport, failures: int) -> None:
        self._inner = inner
        self.failures = failures

    def serve(self, address: str) -> AbstractAsyncContextManager[ControlServer]:
        return self._inner.serve(address)

    @asynccontextmanager
    async def connect(self, address: str, identity: bytes) -> AsyncIterator[ControlClient]:
        if self.failures:
            self.failures -= 1
            raise OSError(errno.EMFILE, "too many open files")
        async with self._inner.connect(address, identity) as client:
            yield client


@in_virtual_time
async def test_a_channel_to_a_proxy_that_could_not_be_made_is_made_again(memory_world: World) -> None:
    """A shortage of a second must not silence the sender towards that proxy for good."""
    world = memory_world
    async with world.control.serve("127.0.0.1:0") as server, world.receiver() as receiver:
        control = world.control = ScarceControl(world.control, 0)
        async with world.sender(proxy_address=server.address) as sender, trio.open_nursery() as nursery:
            await transfer(sender, receiver, Request("before", 1))
            control.failures = 0
            proxy = Proxy(server)
            nursery.start_soon(proxy.run)
            await world.until_clean(sender, receiver)
            control.failures = 2
            other = "127.0.0.1:9"
            await send(sender, receiver.address, Request("after", 1), notify=other)
            await take(receiver, Request("after", 1))
            async with world.control.serve(other) as second:
                late = Proxy(second)
                nursery.start_soon(late.run)
                await world.until_clean(sender, receiver)
                assert {told.req_id for told in late.notifications} == {"after"}
                nursery.cancel_scope.cancel()


@in_virtual_time
async def test_a_channel_to_a_receiver_that_could_not_be_made_fails_its_requests_in_time(memory_world: World) -> None:
    """And the next request makes a new one."""
    world = memory_world
    async with world.receiver() as receiver:
        world.control = ScarceControl(world.control, 1)
        async with world.sender(connect_timeout_s=3) as sender:
            with refused(ErrorCode.PEER_LOST):
                await send(sender, receiver.address, Request("first", 2))
            assert trio.current_time() <= 3.1
            await transfer(sender, receiver, Request("second", 2))
            await world.until_clean(sender, receiver)


class Farewells:
    """A control transport that notes how its channels were left: in peace, so that last words leave, or not."""

    def __init__(self, inner: ControlTransport) -> None:
        self._inner = inner
        self.seen: list[str] = []

    def serve(self, address: str) -> AbstractAsyncContextManager[ControlServer]:
        return self._inner.serve(address)

    @asynccontextmanager
    async def connect(self, address: str, identity: bytes) -> AsyncIterator[ControlClient]:
        async with self._inner.connect(address, identity) as client:
            try:
                yield client
            except BaseException as exc:
                self.seen.append(type(exc).__name__)
                raise
            self.seen.append("in peace")


@in_virtual_time
async def test_the_last_words_of_a_session_leave_before_its_channel_closes(memory_world: World) -> None:
    """Puts were cut off: the receiver is told at once, and need not wait for the lease to fence their slots."""
    world = memory_world
    control = world.control = Farewells(world.control)
    async with world.receiver() as receiver, world.sender() as sender:
        world.fabric.stall()
        with refused(ErrorCode.CANCELLED):
            async with sender.open("r", receiver=receiver.address, total_chunks=2) as moving:
                await stage(moving, Request("r", 2), range(2))
                moving.cancel()
                await moving.wait_ended()
        await world.until_clean(sender, receiver)
        await trio.sleep(0.1)
        assert control.seen == ["in peace"]
        assert trio.current_time() < receiver.config.lease_s


@in_virtual_time
async def test_a_channel_keeps_some_messages_until_it_is_connected_and_counts_the_rest() -> None:
    """Bounded, and never waiting: the core repeats what matters."""
    network = MemoryNetwork()
    dropped: list[str] = []
    heard: list[bytes] = []
    async with network.serve("127.0.0.1:7300") as server, trio.open_nursery() as nursery:
        turn_end = TurnEnd()
        nursery.start_soon(turn_end.run)
        channel = Channel(
            "127.0.0.1:7300",
            lambda _, message: heard.append(message),
            lambda reason, count: dropped.extend([reason] * count),
            turn_end,
        )
        for number in range(100):
            channel.send(b"%d" % number)
        assert dropped == ["queue_full"] * 36
        nursery.start_soon(channel.run, network, b"me")
        for number in range(64):
            assert await server.receive() == (b"me", b"%d" % number)
        server.send_nowait(b"me", b"answer")
        await trio.sleep(1)
        assert heard == [b"answer"]
        server.send_nowait(b"me", b"too late")
        channel.close()
        await trio.sleep(1)
        assert heard == [b"answer"]
        channel.send(b"closed")
        await trio.sleep(1)
        assert dropped[36:] == ["not_connected"]
        nursery.cancel_scope.cancel()
