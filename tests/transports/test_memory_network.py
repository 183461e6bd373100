"""The memory network's faults are those of ZMQ, on the clock's word."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from kvpd.core.messages import MESSAGE_BYTES_MAX
from kvpd.transports.memory_control import RECONNECT_S, MemoryNetwork

from .control_rig import greet


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
