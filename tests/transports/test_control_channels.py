"""The contract of control channels, kept by every transport, and what ZMQ alone must survive."""

from __future__ import annotations

import errno
import itertools
import os
import random
import signal
import socket as stdlib_socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial

import attrs
import pytest
import trio
import trio.testing
import zmq

from kvpd.core.messages import MESSAGE_BYTES_MAX
from kvpd.transports.addresses import parse_address
from kvpd.transports.base import ControlClient, ControlServer, ControlTransport
from kvpd.transports.memory_control import RECONNECT_S, MemoryNetwork
from kvpd.transports.zmq import ZmqControl, ZmqLimits, open_zmq_control
from kvpd.transports.zmq_socket import Context

DEADLINE_S = 20.0
QUEUE_MESSAGES_MAX = 8
_names = itertools.count()


@attrs.frozen
class Kind:
    """One implementation under test."""

    name: str
    transport: ControlTransport
    address: str

    @property
    def reconnects(self) -> bool:
        """ZMQ does not reconnect within a process, because there nothing can break."""
        return self.name != "inproc"


@pytest.fixture(params=["memory", "inproc", "tcp"])
def kind_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def clock(kind_name: str) -> trio.abc.Clock | None:
    """The virtual clock, except where the kernel's is at work."""
    return None if kind_name == "tcp" else trio.testing.MockClock(autojump_threshold=0)


def make_limits() -> ZmqLimits:
    return ZmqLimits(queue_messages_max=QUEUE_MESSAGES_MAX, handshake_ms=300, reconnect_ms=10, reconnect_max_ms=50)


@pytest.fixture
async def kind(kind_name: str, clock: trio.abc.Clock | None) -> AsyncIterator[Kind]:
    if kind_name == "memory":
        yield Kind(kind_name, MemoryNetwork(queue_messages_max=QUEUE_MESSAGES_MAX), "tcp://127.0.0.1:0")
        return
    address = "tcp://127.0.0.1:0" if kind_name == "tcp" else f"inproc://test-{next(_names)}"
    async with open_zmq_control(make_limits()) as control:
        yield Kind(kind_name, control, address)


@pytest.fixture
async def tcp() -> AsyncIterator[ZmqControl]:
    async with open_zmq_control(make_limits()) as control:
        yield control


@asynccontextmanager
async def pair(kind: Kind, identity: bytes = b"a") -> AsyncIterator[tuple[ControlServer, ControlClient]]:
    """A server and a client that have greeted each other."""
    with trio.fail_after(DEADLINE_S):
        async with kind.transport.serve(kind.address) as server, kind.transport.connect(server.address, identity) as c:
            await greet(server, c, identity)
            yield server, c


async def greet(server: ControlServer, client: ControlClient, identity: bytes) -> None:
    client.send_nowait(b"hello")
    assert await server.receive() == (identity, b"hello")
    server.send_nowait(identity, b"welcome")
    assert await client.receive() == b"welcome"


def fill(send: Callable[[], None]) -> int:
    """Send until the queue is full: how many fitted."""
    for sent in range(10_000):
        try:
            send()
        except trio.WouldBlock:
            return sent
    raise AssertionError("a queue without a bound")


async def until_unknown(server: ControlServer, peer: bytes) -> None:
    """Until the server has noticed that the peer is gone."""
    while True:
        try:
            server.send_nowait(peer, b"?")
        except trio.WouldBlock:
            pass
        except trio.BrokenResourceError:
            return
        await trio.sleep(0.0005)


# ------------------------------------------------------------------ the contract


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


# ------------------------------------------------------------------ ZMQ over TCP


def free_port() -> int:
    with stdlib_socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


@asynccontextmanager
async def raw_zmq(kind: int, url: str, identity: bytes = b"") -> AsyncIterator[zmq.Socket[bytes]]:
    """Somebody else's ZMQ program."""
    context: Context = zmq.Context()
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 1000)
    if identity:
        socket.setsockopt(zmq.IDENTITY, identity)
    socket.connect(url)
    try:
        yield socket
    finally:
        socket.close()
        await trio.to_thread.run_sync(context.term)


async def test_p03_anything_but_one_frame_arrives_as_an_empty_message(tcp: ZmqControl) -> None:
    """One unexpected frame count ended another project's listener for good."""
    with trio.fail_after(DEADLINE_S):
        async with tcp.serve("127.0.0.1:0") as server, raw_zmq(zmq.DEALER, server.address, b"odd") as odd:
            for frames in ([b"", b""], [b"x", b"y"], [b""], [b"", b"payload", b"extra"], [b"x"] * 12):
                odd.send_multipart(frames)
                assert await server.receive() == (b"odd", b"")
            server.send_nowait(b"odd", b"answer")
            odd.send(b"one")
            assert await server.receive() == (b"odd", b"one")
            async with raw_zmq(zmq.REQ, server.address) as old_fashioned:
                old_fashioned.send(b"?")
                assert (await server.receive())[1] == b""


async def test_p03_a_fuzz_of_frames_leaves_the_server_serving(tcp: ZmqControl) -> None:
    """Whatever the frames, each message costs one answer at most and nothing else."""
    dice = random.Random(3)
    total = 400
    with trio.fail_after(DEADLINE_S):
        async with tcp.serve("127.0.0.1:0") as server, raw_zmq(zmq.DEALER, server.address, b"odd") as odd:

            def send_all() -> None:
                for _ in range(total):
                    odd.send_multipart([dice.randbytes(dice.randrange(2000)) for _ in range(dice.randint(1, 12))])

            async with trio.open_nursery() as nursery:
                nursery.start_soon(trio.to_thread.run_sync, send_all)
                for _ in range(total):
                    peer, _ = await server.receive()
                    assert peer == b"odd"
            async with tcp.connect(server.address, b"a") as client:
                await greet(server, client, b"a")


async def test_p02_p06_p07_junk_on_the_port_leaves_it_serving(tcp: ZmqControl) -> None:
    """Web clients, port scanners and telnet users all find this port one day."""
    dice = random.Random(6)
    junk = [dice.randbytes(dice.randint(1, 63)) for _ in range(60)]
    junk += [
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),  # the beginning of TLS
        b"\xff\0\0\0\0\0\0\0\x09\x7f\x03" + bytes(21) + b"\xff" * 64,  # ZMQ's greeting and then rubbish
    ]
    with trio.fail_after(DEADLINE_S):
        async with tcp.serve("127.0.0.1:0") as server, tcp.connect(server.address, b"a") as client:
            await greet(server, client, b"a")
            address = parse_address(server.address)
            for data in junk:
                stream = await trio.open_tcp_stream(address.host, address.port)
                async with stream:
                    with suppress(trio.BrokenResourceError):
                        await stream.send_all(data)
            # Some of it reads as the greeting of ZMQ's first versions, and so arrives as what nobody can decode.
            client.send_nowait(b"still here")
            while (received := await server.receive())[0] != b"a":
                pass
            assert received == (b"a", b"still here")


async def test_p06_a_silent_connection_is_dropped(tcp: ZmqControl) -> None:
    """Who connects and says nothing must not hold a descriptor for ever."""
    with trio.fail_after(DEADLINE_S):
        async with tcp.serve("127.0.0.1:0") as server, tcp.connect(server.address, b"a") as client:
            address = parse_address(server.address)
            silent = await trio.open_tcp_stream(address.host, address.port)
            async with silent:
                while await silent.receive_some():  # ZMQ's greeting, then the end
                    pass
            await greet(server, client, b"a")


async def test_an_oversize_message_costs_its_sender_the_connection(tcp: ZmqControl) -> None:
    """A message is bounded where it enters: before it takes memory, and without harm to others."""
    with trio.fail_after(DEADLINE_S):
        async with (
            tcp.serve("127.0.0.1:0") as server,
            tcp.connect(server.address, b"a") as client,
            raw_zmq(zmq.DEALER, server.address, b"fat") as fat,
        ):
            await greet(server, client, b"a")
            client.send_nowait(bytes(MESSAGE_BYTES_MAX))
            assert await server.receive() == (b"a", bytes(MESSAGE_BYTES_MAX))
            fat.send(b"thin")
            assert await server.receive() == (b"fat", b"thin")
            fat.send(bytes(2 * MESSAGE_BYTES_MAX))
            fat.send(b"lost or late, never first")
            await until_unknown(server, b"fat")
            await greet(server, client, b"a")


async def test_a_stranger_with_a_known_identity_gets_nothing(tcp: ZmqControl) -> None:
    """Who announces another's identity must not take over what is meant for it."""
    with trio.fail_after(DEADLINE_S):
        async with tcp.serve("127.0.0.1:0") as server, tcp.connect(server.address, b"a") as client:
            await greet(server, client, b"a")
            async with raw_zmq(zmq.DEALER, server.address, b"a") as thief:
                thief.send(b"first")
                thief.send(b"second")
                await trio.sleep(0.2)  # a thief that was late proves nothing, and does no harm
                await greet(server, client, b"a")
                assert not thief.poll(0)


async def test_a_client_whose_old_connection_lingers_gets_through_by_reconnecting(tcp: ZmqControl) -> None:
    """A server that has not noticed a dead connection ignores the new one; the client alone can tell, and help."""
    with trio.fail_after(DEADLINE_S):
        async with tcp.serve("127.0.0.1:0") as server, raw_zmq(zmq.DEALER, server.address, b"a") as lingering:
            lingering.send(b"hello")
            assert await server.receive() == (b"a", b"hello")
            async with tcp.connect(server.address, b"a") as client:
                client.send_nowait(b"ignored")
                lingering.close(0)
                await until_unknown(server, b"a")
                client.reconnect()
                client.send_nowait(b"heard")
                while await server.receive() != (b"a", b"heard"):
                    pass


async def test_p09_a_peer_that_falls_silent_without_a_word_is_forgotten() -> None:
    """A stopped process or an unplugged host closes no connection, and what is queued for it must go some day."""
    limits = ZmqLimits(heartbeat_ms=50, heartbeat_ttl_ms=300, heartbeat_timeout_ms=400, reconnect_ms=10)
    program = """
import sys, trio
from kvpd.transports.zmq import ZmqLimits, open_zmq_control
async def main():
    limits = ZmqLimits(heartbeat_ms=50, heartbeat_ttl_ms=300, heartbeat_timeout_ms=400, reconnect_ms=10)
    async with open_zmq_control(limits) as control, control.connect(sys.argv[1], b"far") as client:
        while True:
            client.send_nowait(b"hello")
            await client.receive()
trio.run(main)
"""
    with trio.fail_after(DEADLINE_S):
        async with (
            open_zmq_control(limits) as control,
            control.serve("127.0.0.1:0") as server,
            trio.open_nursery() as nursery,
        ):
            command = [sys.executable, "-c", program, server.address]
            far = await nursery.start(partial(trio.run_process, command, check=False))
            assert await server.receive() == (b"far", b"hello")
            far.send_signal(signal.SIGSTOP)
            await until_unknown(server, b"far")
            far.send_signal(signal.SIGCONT)  # it finds back by itself
            heard = False
            while not heard:
                with suppress(trio.BrokenResourceError, trio.WouldBlock):
                    server.send_nowait(b"far", b"are you there?")
                with trio.move_on_after(0.05):
                    heard = await server.receive() == (b"far", b"hello")
            far.kill()


async def test_p76_connect_loops_keep_descriptors_flat(tcp: ZmqControl) -> None:
    """A leak of one descriptor a connection ends a daemon in days."""
    with trio.fail_after(60):
        async with tcp.serve("127.0.0.1:0") as server:

            async def rounds(count: int) -> None:
                for number in range(count):
                    identity = b"round-%d" % number
                    async with tcp.connect(server.address, identity) as client:
                        client.send_nowait(b"hello")
                        while await server.receive() != (identity, b"hello"):
                            pass

            async def settle(limit: int) -> None:
                while open_descriptors() > limit:  # noqa: ASYNC110  libzmq's own threads close them
                    await trio.sleep(0.01)

            await rounds(10)
            await settle(open_descriptors())
            before = open_descriptors()
            await rounds(300)
            await settle(before + 4)


async def test_an_idle_pump_sleeps(tcp: ZmqControl) -> None:
    """Nothing polls: an idle daemon costs nothing."""
    with trio.fail_after(DEADLINE_S):
        async with tcp.serve("127.0.0.1:0") as server, tcp.connect(server.address, b"a") as client:
            await greet(server, client, b"a")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(server.receive)
                nursery.start_soon(client.receive)
                await trio.sleep(0.1)
                before = server.statistics().wakeups, client.statistics().wakeups
                await trio.sleep(0.5)
                assert (server.statistics().wakeups, client.statistics().wakeups) == before
                nursery.cancel_scope.cancel()


async def test_last_words_arrive(tcp: ZmqControl) -> None:
    """The answer to a cancel is the last thing that a daemon says before it stops."""
    with trio.fail_after(DEADLINE_S):
        async with tcp.serve("127.0.0.1:0") as server:
            for number in range(20):
                async with tcp.connect(server.address, b"%d" % number) as client:
                    client.send_nowait(bytes(200_000))
                assert await server.receive() == (b"%d" % number, bytes(200_000))


async def test_p77_closing_towards_nobody_ends_within_a_second() -> None:
    """What cannot be delivered must not keep a process from its end."""
    with trio.fail_after(DEADLINE_S):
        async with open_zmq_control(make_limits()) as control:
            async with control.connect(f"127.0.0.1:{free_port()}", b"a") as client:
                for _ in range(5):
                    client.send_nowait(b"nobody reads this")
            started = trio.current_time()
        assert trio.current_time() - started < 5.0


async def test_p80_ipv6_works(tcp: ZmqControl) -> None:
    """Clusters without IPv4 exist; every address and every socket must do."""
    with trio.fail_after(DEADLINE_S):
        async with tcp.serve("[::1]:0") as server:
            assert server.address.startswith("tcp://[::1]:")
            async with tcp.connect(server.address, b"a") as client:
                await greet(server, client, b"a")


async def test_p82_a_name_is_bound_and_found(tcp: ZmqControl) -> None:
    """ZMQ takes a name to bind for a network device."""
    with trio.fail_after(DEADLINE_S):
        async with tcp.serve("localhost:0") as server:
            assert server.address.startswith("tcp://127.0.0.1:")
            port = parse_address(server.address).port
            async with tcp.connect(f"localhost:{port}", b"a") as client:
                await greet(server, client, b"a")


async def test_a_push_client_reaches_a_pull_socket(tcp: ZmqControl) -> None:
    """Proxies made for the reference bind a PULL socket."""
    context: Context = zmq.Context()
    pull = context.socket(zmq.PULL)
    port = pull.bind_to_random_port("tcp://127.0.0.1")
    with trio.fail_after(DEADLINE_S):
        async with tcp.connect_push(f"127.0.0.1:{port}") as push:
            push.send_nowait(b"ready")
            assert await trio.to_thread.run_sync(pull.poll, 10_000)
            assert pull.recv() == b"ready"
    pull.close(0)
    context.term()


# ------------------------------------------------------------------ the memory network's faults


async def test_a_delay_is_the_clocks(autojump_clock: trio.testing.MockClock) -> None:
    """Simulated latency must be exact, or a failing seed does not fail again."""
    network = MemoryNetwork(delay_s=0.25)
    async with network.serve("r:1") as server, network.connect("r:1", b"a") as client:
        client.send_nowait(b"1")
        network.set_delay(b"a", 0.0)
        client.send_nowait(b"2")
        with pytest.raises(trio.WouldBlock):
            server.receive_nowait()
        assert await server.receive() == (b"a", b"1")
        assert trio.current_time() == pytest.approx(0.25)
        assert server.receive_nowait() == (b"a", b"2")


async def test_a_partition_loses_and_tells_nobody(autojump_clock: trio.testing.MockClock) -> None:
    """A lease exists because nobody is told."""
    network = MemoryNetwork()
    async with network.serve("r:1") as server, network.connect("r:1", b"a") as client:
        network.partition(b"a")
        client.send_nowait(b"lost")
        server.send_nowait(b"a", b"lost")
        network.heal()
        await greet(server, client, b"a")


async def test_a_broken_connection_loses_what_was_on_its_way(autojump_clock: trio.testing.MockClock) -> None:
    """A control channel may lose messages when a connection breaks: the core repeats what matters."""
    network = MemoryNetwork(delay_s=0.01)
    async with network.serve("r:1") as server, network.connect("r:1", b"a") as client:
        await greet(server, client, b"a")
        client.send_nowait(b"lost")
        server.send_nowait(b"a", b"lost")
        network.disconnect(b"a")
        with pytest.raises(trio.BrokenResourceError):
            server.send_nowait(b"a", b"?")
        await trio.sleep(RECONNECT_S)
        await greet(server, client, b"a")


async def test_a_second_client_of_the_same_identity_waits(autojump_clock: trio.testing.MockClock) -> None:
    """As over ZMQ, nobody gets another's messages by announcing its identity."""
    network = MemoryNetwork()
    async with network.serve("r:1") as server:
        async with network.connect("r:1", b"a") as first, network.connect("r:1", b"a") as second:
            second.send_nowait(b"mine")
            await greet(server, first, b"a")
            with pytest.raises(trio.WouldBlock):
                second.receive_nowait()
        async with network.connect("r:1", b"a") as third:
            await greet(server, third, b"a")


async def test_an_oversize_message_breaks_the_memory_connection_too(autojump_clock: trio.testing.MockClock) -> None:
    """What ZMQ refuses must not pass in simulation."""
    network = MemoryNetwork()
    async with network.serve("r:1") as server, network.connect("r:1", b"a") as client:
        client.send_nowait(bytes(MESSAGE_BYTES_MAX + 1))
        with pytest.raises(trio.BrokenResourceError):
            server.send_nowait(b"a", b"?")
        await trio.sleep(RECONNECT_S)
        await greet(server, client, b"a")


async def test_closing_waits_no_longer_than_its_bound_for_a_socket_that_libzmq_does_not_let_go() -> None:
    """Every shutdown has a deadline (fault 22), whatever libzmq waits for."""
    with trio.fail_after(DEADLINE_S):
        async with open_zmq_control() as control:
            stray = control._context.socket(zmq.DEALER)
    stray.close(0)
