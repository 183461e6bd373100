"""Control channels of every kind, for the contract tests."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator

import pytest
import trio
import trio.testing

from kvpd.transports.memory_control import MemoryNetwork
from kvpd.transports.zmq import ZmqControl, open_zmq_control

from .control_rig import QUEUE_MESSAGES_MAX, Kind, make_limits

_names = itertools.count()


@pytest.fixture(params=["memory", "inproc", "tcp"])
def kind_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def clock(kind_name: str) -> trio.abc.Clock | None:
    """The virtual clock, except where the kernel's is at work."""
    return None if kind_name == "tcp" else trio.testing.MockClock(autojump_threshold=0)


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
