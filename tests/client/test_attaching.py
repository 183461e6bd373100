"""How an engine attaches: who answers, what it is given, and what it refuses to believe."""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from kvpd import client
from kvpd.errors import LocalProtocolError, RemoteProtocolError, TransportError
from kvpd.link import (
    LINK_VERSION,
    Attach,
    Attached,
    DaemonFrame,
    Ended,
    Filled,
    Open,
    RegionInfo,
    Rejected,
    Stage,
    Staged,
    Stats,
    TransferEvent,
    encode_frame,
)

from .harness import CHUNK_BYTES, DEADLINE_S, GOOD, SLOTS, Daemon, Decode, Peer, Prefill, chunk, send_one


def test_the_client_needs_neither_trio_nor_torch_nor_zmq() -> None:
    """An engine must not import our event loop, and may not have one of these at all."""
    program = (
        "import sys\n"
        "for name in ('trio', 'torch', 'zmq', 'structlog', 'numpy', 'orjson', 'click'): sys.modules[name] = None\n"
        "import kvpd.client, kvpd\n"
        "assert kvpd.client.connect_sender\n"
        "assert not any(name.startswith(('kvpd.core', 'kvpd.service', 'kvpd.transports')) for name in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_p73_attaching_maps_the_buffer_and_keeps_no_descriptor_open_to_children(prefill: Prefill) -> None:
    """A child that inherits the descriptor keeps a dead daemon's memory alive."""

    before = set(os.listdir("/proc/self/fd"))  # noqa: PTH208
    with prefill() as link:
        assert (link.name, link.chunk_bytes, link.chunk_tokens) == ("test", CHUNK_BYTES, 256)
        for descriptor in set(os.listdir("/proc/self/fd")) - before:  # noqa: PTH208
            with suppress(OSError):  # the directory's own, closed by now
                assert fcntl.fcntl(int(descriptor), fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    assert set(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_no_daemon_is_an_error_that_names_the_path(tmp_path: Path) -> None:
    """The commonest mistake of all must read like one."""
    path = tmp_path / "nobody.sock"
    with pytest.raises(TransportError, match=f"cannot reach the daemon at {path}: No such file"):
        client.connect_sender(path)
    with pytest.raises(TransportError, match=r"cannot reach the daemon at .*path too long"):
        client.connect_sender(tmp_path / ("x" * 200))


def test_p13_a_daemon_that_does_not_answer_is_not_waited_for(daemon: Daemon) -> None:
    """A handshake has a deadline."""
    with daemon(greet=False) as path, pytest.raises(TransportError, match=r"did not answer within 0\.1 s"):
        client.connect_receiver(path, timeout=0.1)


def test_the_name_of_a_group_has_a_bound(tmp_path: Path) -> None:
    """The daemon would end the connection over it, and say less."""
    with pytest.raises(LocalProtocolError, match="the name of a group has at most 128 characters"):
        client.connect_sender(tmp_path / "any.sock", group="g" * 129)


def test_a_refusal_to_attach_is_told(daemon: Daemon) -> None:
    """Engines are pointed at the wrong socket now and then."""

    def script(peer: Peer) -> None:
        assert peer.expect(Attach) == Attach(LINK_VERSION, "receiver", 3)
        peer.send(Rejected("this is a sender"))

    with daemon(script, greet=False) as path, pytest.raises(LocalProtocolError, match="this is a sender"):
        client.connect_receiver(path, rank=3)


@pytest.mark.parametrize(
    ("answer", "match"),
    [
        (Stats(1, {}), "greets with Stats"),
        (Attached(99, "test", CHUNK_BYTES, 256, (RegionInfo(0, 64),)), "version 99"),
        (Attached(LINK_VERSION, "test", CHUNK_BYTES, 256, (RegionInfo(0, 64), RegionInfo(1, 64))), "1 descriptors"),
        (Attached(LINK_VERSION, "test", CHUNK_BYTES, 256, (RegionInfo(0, 1 << 40),)), "in a file of 512"),
        (
            Attached(LINK_VERSION, "test", CHUNK_BYTES, 256, (RegionInfo(0, 64, offset=4096),)),
            "64 bytes at 4096 from .* in a file of 512",
        ),
        (Attached(LINK_VERSION, "test", CHUNK_BYTES, 256, (RegionInfo(0, 64, offset=64),)), "64 bytes at 64 from"),
        (Attached(LINK_VERSION, "test", 0, 256, (RegionInfo(0, 64),)), "chunks of 0 bytes"),
        (Attached(LINK_VERSION, "test", 65, 256, (RegionInfo(0, 64),)), "chunks of 65 bytes"),
        (Attached(LINK_VERSION, "test", CHUNK_BYTES, 256, (RegionInfo(0, 64, "cuda:0"),)), "only cpu regions"),
    ],
)
def test_a_greeting_that_makes_no_sense_is_refused(daemon: Daemon, answer: DaemonFrame, match: str) -> None:
    """A mapping beyond the end of a file kills the engine at the first touch."""

    def script(peer: Peer) -> None:
        peer.expect(Attach)
        socket.send_fds(peer.connection, [encode_frame(answer)], [peer.memory])

    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    with daemon(script, greet=False) as path, pytest.raises(RemoteProtocolError, match=match):
        client.connect_sender(path)
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_an_unknown_rank_is_refused(daemon: Daemon) -> None:
    """Another rank's buffer holds another rank's heads."""

    def script(peer: Peer) -> None:
        peer.expect(Attach)
        socket.send_fds(peer.connection, [encode_frame(GOOD)], [peer.memory])

    with daemon(script, greet=False) as path, pytest.raises(LocalProtocolError, match=r"no region for rank 1, only"):
        client.connect_sender(path, rank=1)


def test_a_rank_maps_its_own_window_of_the_file(prefill: Prefill) -> None:
    """What lies before and behind it is other ranks', and stays out of reach of this one's mistakes."""
    length = CHUNK_BYTES * SLOTS
    offset = mmap.ALLOCATIONGRANULARITY

    def script(peer: Peer) -> None:
        assert peer.expect(Attach) == Attach(LINK_VERSION, "sender", 1, "engine-a")
        os.ftruncate(peer.memory, 3 * offset)
        region = RegionInfo(1, length, offset=offset)
        attached = Attached(LINK_VERSION, "test", CHUNK_BYTES, 256, (region,))
        socket.send_fds(peer.connection, [encode_frame(attached)], [peer.memory])
        opened = peer.expect(Open)
        peer.expect(Stage)
        peer.send(Staged(opened.transfer, 0, 0, 0, (2,), is_last_piece=True))
        peer.expect(Filled)
        assert os.pread(peer.memory, 3 * offset, 0).rstrip(b"\0") == bytes(offset + 2 * CHUNK_BYTES) + chunk(0)
        peer.send(Ended(opened.transfer))

    with prefill(script, greet=False, rank=1, group="engine-a") as link:
        send_one(link)


def test_what_comes_right_behind_the_greeting_is_not_lost(decode: Decode) -> None:
    """A stream knows no frames: the first event may be in the greeting's own packet."""
    event = TransferEvent("ready", "r", "s", 1, 2)

    def script(peer: Peer) -> None:
        peer.greet(event)

    with decode(script, greet=False) as link:
        assert next(link.events(DEADLINE_S)) == event


def test_a_daemon_whose_backlog_is_full_is_waited_for_as_long_as_the_timeout_says(tmp_path: Path) -> None:
    """Many engines may start at once; one that finds no place yet must not be told that nobody is there."""
    path = tmp_path / "full.sock"
    with socket.socket(socket.AF_UNIX) as listener, ExitStack() as stack:
        listener.bind(str(path))
        listener.listen(0)
        with suppress(BlockingIOError):
            for _ in range(64):
                one = stack.enter_context(socket.socket(socket.AF_UNIX))
                one.setblocking(False)
                one.connect(str(path))
        with pytest.raises(TransportError, match=r"did not answer within 0\.2 s"):
            client.connect_sender(path, timeout=0.2)
