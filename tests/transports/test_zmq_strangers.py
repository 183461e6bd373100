"""What reaches a ZMQ port one day: junk, odd frames, other ZMQ programs, and known names in the wrong mouth."""

from __future__ import annotations

import random
from contextlib import suppress

import trio
import trio.testing
import zmq

from kvpd.core.messages import MESSAGE_BYTES_MAX
from kvpd.transports.addresses import parse_address
from kvpd.transports.zmq import ZmqControl

from .control_rig import DEADLINE_S, greet, raw_zmq, until_unknown


async def test_p03_any_number_of_frames_is_as_many_messages(tcp: ZmqControl) -> None:
    """One unexpected frame count ended another project's listener for good."""
    with trio.fail_after(DEADLINE_S):
        async with tcp.serve("127.0.0.1:0") as server, raw_zmq(zmq.DEALER, server.address, b"odd") as odd:
            for frames in ([b"", b""], [b"x", b"y"], [b""], [b"", b"payload", b"extra"], [b"x"] * 12):
                odd.send_multipart(frames)
                for frame in frames:
                    assert await server.receive() == (b"odd", frame)
            server.send_nowait(b"odd", b"answer")
            odd.send(b"one")
            assert await server.receive() == (b"odd", b"one")
            async with raw_zmq(zmq.REQ, server.address) as old_fashioned:
                old_fashioned.send(b"?")
                assert [(await server.receive())[1] for _ in range(2)] == [b"", b"?"]


async def test_p03_a_fuzz_of_frames_leaves_the_server_serving(tcp: ZmqControl) -> None:
    """Whatever the frames, each costs one answer at most and nothing else."""
    dice = random.Random(3)
    numbers = [dice.randint(1, 12) for _ in range(400)]
    with trio.fail_after(DEADLINE_S):
        async with tcp.serve("127.0.0.1:0") as server, raw_zmq(zmq.DEALER, server.address, b"odd") as odd:

            def send_all() -> None:
                for number in numbers:
                    odd.send_multipart([dice.randbytes(dice.randrange(2000)) for _ in range(number)])

            async with trio.open_nursery() as nursery:
                nursery.start_soon(trio.to_thread.run_sync, send_all)
                for _ in range(sum(numbers)):
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
