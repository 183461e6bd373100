"""Daemons for a test of its own, and a pair that tests share because starting one takes a second."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

from kvpd.client import ReceiverLink, SenderLink

from .daemons import Daemon, Fleet

PAIR_SLOTS = 64
CHUNK = 65536


@attrs.frozen
class Pair:
    """A receiver and a sender of 64 slots of 64 KiB each, and an engine's link to either."""

    receiver: Daemon
    sender: Daemon
    decode: ReceiverLink
    prefill: SenderLink

    @property
    def address(self) -> str:
        """Where the receiver is reached."""
        return self.receiver.address


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    """Daemons of the test's own. None outlives it."""
    with Fleet(tmp_path) as fleet:
        yield fleet


def _pair(folder: Path, tls: str) -> Iterator[Pair]:
    with Fleet(folder) as fleet:
        receiver = fleet.receiver("r", slots=PAIR_SLOTS, chunk_bytes=CHUNK, ucx_tls=tls)
        sender = fleet.sender("s", slots=PAIR_SLOTS, chunk_bytes=CHUNK, ucx_tls=tls)
        receiver.wait_ready()
        sender.wait_ready()
        with receiver.receiver_link() as decode, sender.sender_link() as prefill:
            yield Pair(receiver, sender, decode, prefill)


@pytest.fixture(scope="session")
def _shared_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    yield from _pair(tmp_path_factory.mktemp("pair"), "")


@pytest.fixture
def pair(_shared_pair: Pair) -> Iterator[Pair]:
    """Daemons shared with other tests: whoever uses them leaves them as they were, alive and empty."""
    yield _shared_pair
    assert _shared_pair.receiver.process.poll() is None, _shared_pair.receiver.text
    assert _shared_pair.sender.process.poll() is None, _shared_pair.sender.text
    _shared_pair.receiver.wait_quiet()
    assert _shared_pair.receiver.slots() == {"free": PAIR_SLOTS}


@pytest.fixture(scope="module", params=["", "tcp"], ids=["cma", "tcp"])
def wired_pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """A pair over what UCX chooses between processes of one host, and one over TCP."""
    yield from _pair(tmp_path_factory.mktemp("wired"), request.param)
