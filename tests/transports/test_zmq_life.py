"""What ZMQ alone must do: lose, forget and find peers, sleep, close, bind names, and speak to what others made."""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import suppress
from functools import partial

import trio
import trio.lowlevel
import trio.testing
import zmq

from kvpd.transports.addresses import parse_address
from kvpd.transports.zmq import ZmqControl, ZmqLimits, open_zmq_control
from kvpd.transports.zmq_socket import Context

from .control_rig import DEADLINE_S, free_port, greet, make_limits, open_descriptors


async def test_p09_a_peer_that_falls_silent_without_a_word_is_forgotten() -> None:
    """A stopped process or an unplugged host closes no connection, and what is queued for it must go."""
    limits = ZmqLimits(server_gives_up_ms=300, client_gives_up_ms=400, reconnect_ms=10)
    program = """
import sys, trio
from kvpd.transports.zmq import ZmqLimits, open_zmq_control
async def main():
    limits = ZmqLimits(server_gives_up_ms=300, client_gives_up_ms=400, reconnect_ms=10)
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
            with suppress(trio.BrokenResourceError):
                while True:
                    with suppress(trio.WouldBlock):
                        server.send_nowait(b"far", bytes(10_000))
                    await trio.sleep(0.0005)
            far.send_signal(signal.SIGCONT)  # it finds back by itself
            heard = False
            while not heard:
                with suppress(trio.BrokenResourceError, trio.WouldBlock):
                    server.send_nowait(b"far", b"are you there?")
                with trio.move_on_after(0.05):
                    heard = await server.receive() == (b"far", b"hello")
            far.kill()


async def test_p09_a_connection_that_is_reset_while_its_queue_is_full_does_not_end_the_process() -> None:
    """libzmq aborts there at its next heartbeat, if it has any: a daemon that is behind would die with its peer."""
    program = """
import sys, time, trio
from kvpd.transports.zmq import ZmqLimits, open_zmq_control
async def main():
    limits = ZmqLimits(queue_messages_max=8)
    async with open_zmq_control(limits) as control, control.connect(sys.argv[1], b"busy") as client:
        client.send_nowait(b"hello")
        await trio.to_thread.run_sync(sys.stdin.buffer.read)
        time.sleep(4.5)  # past two of the heartbeats that kvpd once had
        assert len(await client.receive()) == 10_000
trio.run(main)
"""
    with trio.fail_after(DEADLINE_S):
        async with open_zmq_control(make_limits()) as control, trio.open_nursery() as nursery:
            async with control.serve("127.0.0.1:0") as server:
                command = [sys.executable, "-c", program, server.address]
                run = partial(trio.run_process, command, check=False, stdin=subprocess.PIPE)
                busy = await nursery.start(run)
                assert await server.receive() == (b"busy", b"hello")
                rest_until = trio.current_time() + 0.5
                while trio.current_time() < rest_until:  # every buffer on the way is full
                    with suppress(trio.WouldBlock):
                        server.send_nowait(b"busy", bytes(10_000))
                        rest_until = trio.current_time() + 0.5
                    await trio.sleep(0.005)
            await busy.stdin.aclose()
            assert await busy.wait() == 0


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


async def test_closing_waits_no_longer_than_its_bound_for_a_socket_that_libzmq_does_not_let_go() -> None:
    """Every shutdown has a deadline (fault 22), whatever libzmq waits for."""
    with trio.fail_after(DEADLINE_S):
        async with open_zmq_control() as control:
            stray = control._context.socket(zmq.DEALER)
    stray.close(0)
