"""An address is free again when its server has been left, however often, and with clients that come back at once."""

from __future__ import annotations

import contextlib
import random
import socket
from typing import Final

import trio

from kvpd.transports.zmq import ZmqControl, open_zmq_control

_DEADLINE_S: Final = 60.0
_CLIENTS: Final = 6
_ROUNDS: Final = 60
_PORTS: Final = range(20_000, 30_000)  # the kernel gives none of them to a client that finds nobody there


def _free_address() -> str:
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return f"127.0.0.1:{port}"
    raise AssertionError("no port is free")


async def _call_for_ever(control: ZmqControl, address: str, name: bytes) -> None:
    async with control.connect(address, name) as client:
        while True:
            with contextlib.suppress(trio.WouldBlock):
                client.send_nowait(name)
            with trio.move_on_after(0.01):
                await client.receive()


async def test_a_server_that_is_left_and_made_again_finds_its_address_free() -> None:
    """libzmq once told of the closed listener to nobody, and the thread that closes sockets waited for ever."""
    address = _free_address()
    with trio.fail_after(_DEADLINE_S):
        async with open_zmq_control() as control, trio.open_nursery() as nursery:
            for number in range(_CLIENTS):
                nursery.start_soon(_call_for_ever, control, address, b"client-%d" % number)
            for _ in range(_ROUNDS):
                async with control.serve(address) as server:
                    heard: set[bytes] = set()
                    while len(heard) < _CLIENTS:
                        peer, _ = await server.receive()
                        heard.add(peer)
                        with contextlib.suppress(trio.WouldBlock, trio.BrokenResourceError):
                            server.send_nowait(peer, b"heard")
            nursery.cancel_scope.cancel()
