"""The contract of control channels, kept by every transport."""

from __future__ import annotations

import errno
import random
from contextlib import AsyncExitStack

import pytest
import trio
import trio.testing

from kvpd.transports.addresses import parse_address
from kvpd.transports.base import ControlClient, ControlServer

from .control_rig import DEADLINE_S, QUEUE_MESSAGES_MAX, Kind, fill, free_port, greet, pair, until_unknown


async def test_many_peers_get_their_own_answers(kind: Kind) -> None:
    """A ROUTER that mixes identities would give one sender another's slots."""
    peers = [b"peer-%d" % number for number in range(40)]
    with trio.fail_after(DEADLINE_S):
        async with AsyncExitStack() as stack, trio.open_nursery() as nursery:
            server = await stack.enter_async_context(kind.transport.serve(kind.address))
            assert parse_address(server.address).port if kind.name != "inproc" else server.address == kind.address

            async def ask(peer: bytes) -> None:
                async with kind.transport.connect(server.address, peer) as client:
                    for number in range(5):
                        client.send_nowait(b"%d" % number)
                        assert await client.receive() == b"%s:%d" % (peer, number)

            for peer in peers:
                nursery.start_soon(ask, peer)
            for _ in range(5 * len(peers)):
                peer, message = await server.receive()
                server.send_nowait(peer, peer + b":" + message)


async def test_order_is_kept_both_ways(kind: Kind) -> None:
    """Heartbeats say which transfers are live: an old one must not arrive after a new one."""
    async with pair(kind) as (server, client):
        for number in range(QUEUE_MESSAGES_MAX // 2):
            client.send_nowait(b"%d" % number)
            server.send_nowait(b"a", b"%d" % number)
        for number in range(QUEUE_MESSAGES_MAX // 2):
            assert await server.receive() == (b"a", b"%d" % number)
            assert await client.receive() == b"%d" % number


async def test_what_is_sent_together_comes_one_by_one_and_is_not_lost_by_cancellation(kind: Kind) -> None:
    """A turn's messages leave as one; what came behind the first must survive whoever was waiting for it."""
    numbers = [b"%d" % number for number in range(7)]
    async with pair(kind) as (server, client):
        client.send_nowait(*numbers)
        server.send_nowait(b"a", *numbers)
        client.send_nowait(b"last")
        server.send_nowait(b"a", b"last")
        for number in [*numbers, b"last"]:
            for end in (server, client):
                with trio.CancelScope() as scope:
                    scope.cancel()
                    await end.receive()
                assert scope.cancelled_caught
            assert await server.receive() == (b"a", number)
            assert await client.receive() == number
        for end in (server, client):
            with pytest.raises(trio.WouldBlock):
                end.receive_nowait()


async def test_a_storm_of_cancelled_receives_loses_nothing(kind: Kind) -> None:
    """Every request with a deadline cancels a receive now and then; a lost answer is a slot lost for ever."""
    total = 600
    got: list[bytes] = []
    dice = random.Random(1)
    async with pair(kind) as (server, client), trio.open_nursery() as nursery:

        async def send() -> None:
            for number in range(total):
                while True:
                    try:
                        client.send_nowait(b"%d" % number)
                        break
                    except trio.WouldBlock:
                        await trio.sleep(0.001)
                if dice.random() < 0.5:
                    await trio.lowlevel.checkpoint()

        nursery.start_soon(send)
        while len(got) < total:
            with trio.CancelScope() as scope:
                if dice.random() < 0.5:
                    scope.deadline = trio.current_time() + dice.random() * 0.0005
                else:
                    nursery.start_soon(_cancel_soon, scope, dice.randrange(3))
                _, message = await server.receive()
                got.append(message)
    assert got == [b"%d" % number for number in range(total)]


async def _cancel_soon(scope: trio.CancelScope, steps: int) -> None:
    for _ in range(steps):
        await trio.lowlevel.checkpoint()
    scope.cancel()


async def test_sending_does_not_swallow_the_signal_of_an_arrival(kind: Kind) -> None:
    """Any call into libzmq takes the descriptor's edge, and a task that it was meant for would sleep for ever."""
    got: list[bytes] = []
    async with pair(kind) as (server, client):
        async with trio.open_nursery() as nursery:

            async def wait() -> None:
                got.append(await client.receive())

            nursery.start_soon(wait)
            await trio.testing.wait_all_tasks_blocked()
            server.send_nowait(b"a", b"here")
            fill(lambda: client.send_nowait(b"busy"))
        assert got == [b"here"]


async def test_receive_nowait_takes_what_is_here_and_nothing_else(kind: Kind) -> None:
    """The lease is judged only after the socket has been drained."""
    async with pair(kind) as (server, client):
        with pytest.raises(trio.WouldBlock):
            server.receive_nowait()
        with pytest.raises(trio.WouldBlock):
            client.receive_nowait()
        client.send_nowait(b"1")
        client.send_nowait(b"2")
        assert await server.receive() == (b"a", b"1")
        client.send_nowait(b"mark")  # over TCP, what was sent before this receive ended may not be here yet
        assert await server.receive() == (b"a", b"2")
        assert await server.receive() == (b"a", b"mark")
        server.send_nowait(b"a", b"3")
        assert await client.receive() == b"3"


async def test_p08_p09_a_peer_that_does_not_read_harms_nobody_else(kind: Kind) -> None:
    """A full queue is an exception at once, for that peer alone; a blocked send would stop every transfer."""
    payload = bytes(100_000)  # so that the kernel's buffers fill too
    async with pair(kind) as (server, _), kind.transport.connect(server.address, b"b") as other:
        await greet(server, other, b"b")
        fill(lambda: server.send_nowait(b"a", payload))
        server.send_nowait(b"b", b"still here")
        assert await other.receive() == b"still here"


async def test_a_server_that_does_not_read_is_a_full_queue(kind: Kind) -> None:
    """A sender that queues without bound dies of a receiver that hangs."""
    async with pair(kind) as (server, client):
        payload = bytes(100_000)
        for _ in range(fill(lambda: client.send_nowait(payload))):
            assert await server.receive() == (b"a", payload)
        await greet(server, client, b"a")


async def test_an_unknown_peer_is_an_error(kind: Kind) -> None:
    """A ROUTER silently drops what it cannot route, and somebody waits for the answer for ever."""
    async with pair(kind) as (server, client):
        with pytest.raises(trio.BrokenResourceError):
            server.send_nowait(b"nobody", b"?")
        await greet(server, client, b"a")


async def test_a_peer_that_left_becomes_unknown(kind: Kind) -> None:
    """The receiver must notice that answers reach nobody."""
    with trio.fail_after(DEADLINE_S):
        async with kind.transport.serve(kind.address) as server:
            async with kind.transport.connect(server.address, b"a") as client:
                await greet(server, client, b"a")
            await until_unknown(server, b"a")


async def test_p68_a_client_may_come_before_its_server(kind: Kind) -> None:
    """Daemons start in any order."""
    address = kind.address
    if kind.name == "tcp":
        address = f"127.0.0.1:{free_port()}"
    elif kind.name == "memory":
        address = "127.0.0.1:7300"
    with trio.fail_after(DEADLINE_S):
        async with kind.transport.connect(address, b"a") as client:
            client.send_nowait(b"early")
            async with kind.transport.serve(address) as server:
                assert await server.receive() == (b"a", b"early")
                server.send_nowait(b"a", b"late")
                assert await client.receive() == b"late"


async def test_p55_a_restarted_server_is_found_again(kind: Kind) -> None:
    """Nobody restarts the senders by hand because a receiver was restarted."""
    if not kind.reconnects:
        return
    with trio.fail_after(DEADLINE_S):
        async with kind.transport.serve(kind.address) as server:
            address = server.address
        async with kind.transport.connect(address, b"a") as client:
            for _ in range(3):
                async with kind.transport.serve(address) as server:
                    # What was under way when the connection broke is lost, so it is said again until it is heard.
                    heard = False
                    while not heard:
                        client.send_nowait(b"hello")
                        with trio.move_on_after(0.5):
                            heard = await server.receive() == (b"a", b"hello")
                    server.send_nowait(b"a", b"welcome")
                    assert await client.receive() == b"welcome"


async def test_p61_an_address_in_use_is_an_error_that_names_it(kind: Kind) -> None:
    """A daemon that takes another port instead is a daemon that nobody finds."""
    async with pair(kind) as (server, _):
        with pytest.raises(OSError, match=f"cannot bind {server.address}: .ddress already in use") as refused:
            async with kind.transport.serve(server.address):
                pass
        assert refused.value.errno == errno.EADDRINUSE


async def test_an_address_is_free_again_when_its_server_was_left(kind: Kind) -> None:
    """A restart within one process must not race with the clean-up of what it replaces."""
    with trio.fail_after(DEADLINE_S):
        async with kind.transport.serve(kind.address) as server:
            address = server.address
        for _ in range(20):
            async with kind.transport.serve(address) as server:
                assert server.address == address


@pytest.mark.parametrize("identity", [b"", b"\0a", b"x" * 256])
async def test_an_impossible_identity_is_refused(kind: Kind, identity: bytes) -> None:
    """ZMQ would draw one of its own, and the receiver would answer nobody."""
    with pytest.raises(ValueError, match="is no identity"):
        async with kind.transport.connect("127.0.0.1:1", identity):
            pass


async def test_a_bad_address_is_refused(kind: Kind) -> None:
    """One parser for all, so one refusal for all."""
    with pytest.raises(ValueError, match="is no address"):
        async with kind.transport.connect("http://x:1", b"a"):
            pass
    with pytest.raises(ValueError, match="is no address"):
        async with kind.transport.serve("x:70000"):
            pass


async def test_closing_wakes_who_waits(kind: Kind) -> None:
    """A task that is never woken keeps its nursery open, and a daemon that cannot stop is killed."""
    with trio.fail_after(DEADLINE_S):
        async with trio.open_nursery() as nursery:

            async def wait(end: ControlServer | ControlClient) -> None:
                with pytest.raises(trio.ClosedResourceError):
                    await end.receive()

            async with pair(kind) as (server, client):
                nursery.start_soon(wait, server)
                nursery.start_soon(wait, client)
                await trio.testing.wait_all_tasks_blocked()
        for end in (client, server):
            with pytest.raises(trio.ClosedResourceError):
                end.receive_nowait()
        with pytest.raises(trio.ClosedResourceError):
            client.send_nowait(b"?")
        with pytest.raises(trio.ClosedResourceError):
            server.send_nowait(b"a", b"?")


async def test_one_task_at_a_time_receives(kind: Kind) -> None:
    """Two dispatchers on one socket would act on messages out of order."""
    async with pair(kind) as (server, client), trio.open_nursery() as nursery:
        nursery.start_soon(server.receive)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(trio.BusyResourceError):
            await server.receive()
        client.send_nowait(b"for the first")


async def test_p64_a_cancelled_server_leaves_at_once(kind: Kind) -> None:
    """The end of a daemon is not the place to wait for peers."""
    with trio.fail_after(DEADLINE_S):
        async with AsyncExitStack() as stack:
            with trio.CancelScope() as scope:
                async with kind.transport.serve(kind.address) as server:
                    client = await stack.enter_async_context(kind.transport.connect(server.address, b"a"))
                    await greet(server, client, b"a")
                    scope.cancel()
                    await server.receive()
            assert scope.cancelled_caught
