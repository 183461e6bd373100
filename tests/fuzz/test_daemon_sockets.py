"""Every socket of real daemons meets the corpus and its mutants: connections end, daemons do not."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from e2e.control import Stranger
from e2e.daemons import DEADLINE_S, Daemon, Fleet
from e2e.payloads import make_request, receive, send

from kvpd.link import LINK_VERSION, Attach, encode_frame

from .mutation import mutants

pytestmark = pytest.mark.timeout(300)  # seconds; a machine may be busy
CONNECTIONS: Final = 300
MESSAGES: Final = 4000
_CONNECTIONS_AT_ONCE: Final = 40


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    """Daemons of the test's own. None outlives it."""
    with Fleet(tmp_path) as fleet:
        yield fleet


def framed(body: bytes) -> bytes:
    """A frame of the engine link."""
    return len(body).to_bytes(4, "little") + body


def fuzz_engine_socket(daemon: Daemon, *, seed: int) -> None:
    """Many engines, most of them attached, say what no correct engine says; some leave in the middle of a frame."""
    rng = random.Random(seed)
    bodies = list(mutants("engine_frames", seed=seed, count=4000))
    attach = encode_frame(Attach(LINK_VERSION, "sender" if daemon.role == "sender" else "receiver"))
    with contextlib.ExitStack() as stack:
        alive: list[socket.socket] = []
        for _ in range(CONNECTIONS):
            engine = stack.enter_context(socket.socket(socket.AF_UNIX))
            engine.connect(str(daemon.socket))  # without a timeout it waits where the backlog is full
            engine.settimeout(DEADLINE_S)
            data = b"".join(framed(rng.choice(bodies)) for _ in range(rng.randint(1, 8)))
            data = attach + data if rng.random() < 0.8 else data
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                engine.sendall(data[: rng.choice((len(data), len(data), rng.randrange(len(data) + 1)))])
            alive.append(engine)
            if len(alive) > _CONNECTIONS_AT_ONCE:
                alive.pop(rng.randrange(len(alive))).close()


def test_no_engine_and_no_peer_can_end_a_daemon(fleet: Fleet) -> None:
    """Both daemons' engine sockets and the receiver's control port; afterwards everything is free, and works."""
    receiver, sender = fleet.pair({"ready_ttl_s": 1, "lease_s": 2, "put_deadline_s": 0.5})
    for daemon in (receiver, sender):
        fuzz_engine_socket(daemon, seed=5)
    with Stranger(receiver.address, b"fuzz", queue=2 * MESSAGES) as stranger:
        for data in mutants("messages", seed=6, count=MESSAGES):
            stranger.send_frames(data)
        with sender.sender_link() as prefill, receiver.receiver_link() as decode:
            for number in range(3):
                request = make_request(f"after-{number}", 5)
                send(prefill, request, receiver.address)
                assert receive(decode, request.req_id) == request.hashes
    for daemon in (receiver, sender):
        assert daemon.get("/readyz") == (200, "ok\n")
    receiver.wait_quiet()
    assert receiver.slots() == {"free": 16}
    assert sender.metrics()["kvpd_engines"] == 0
    sender.stop()
    receiver.stop()
