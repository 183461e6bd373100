"""The engine's side of the link, against a daemon of plain threads that says exactly what each test needs."""

from __future__ import annotations

import ctypes
import fcntl
import itertools
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

try:
    import torch
except ImportError:  # its tests are for those who have it
    torch = None

from kvpd import client
from kvpd.errors import (
    AdmissionRefused,
    ErrorCode,
    LocalProtocolError,
    RemoteProtocolError,
    TransferCancelled,
    TransferError,
    TransferFailed,
    TransportError,
)
from kvpd.link import (
    LINK_VERSION,
    Attach,
    Attached,
    Cancel,
    CancelRequest,
    Claim,
    Claimed,
    ClaimedChunk,
    ClaimFailed,
    Close,
    DaemonFrame,
    Ended,
    EngineFrame,
    EngineFrameReader,
    Filled,
    LinkError,
    Open,
    RegionInfo,
    Rejected,
    Release,
    Stage,
    Staged,
    StageDeferred,
    Stats,
    StatsRequest,
    Touch,
    TransferEvent,
    encode_frame,
)

DEADLINE_S = 10.0
CHUNK_BYTES = 64
SLOTS = 8
F = TypeVar("F", bound=EngineFrame)
_names = itertools.count()


class Peer:
    """The daemon's end of one connection, and its buffer."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.memory = os.memfd_create("test", os.MFD_CLOEXEC)
        os.ftruncate(self.memory, CHUNK_BYTES * SLOTS)
        self.buffer = mmap.mmap(self.memory, CHUNK_BYTES * SLOTS)
        self._reader = EngineFrameReader()
        self._frames: list[EngineFrame] = []

    def next(self) -> EngineFrame | None:
        """The engine's next frame; None at the end."""
        while not self._frames:
            data = self.connection.recv(65536)
            if not data:
                return None
            self._frames += self._reader.feed(data)
        return self._frames.pop(0)

    def expect(self, kind: type[F]) -> F:
        """The engine's next frame, which is of this kind."""
        frame = self.next()
        assert isinstance(frame, kind), f"{frame} where {kind.__name__} was expected"
        return frame

    def send(self, *frames: DaemonFrame) -> None:
        self.connection.sendall(b"".join(encode_frame(frame) for frame in frames))

    def greet(self, *behind: DaemonFrame) -> Attach:
        """Answer Attach as a daemon with one region does; `behind` comes in the same breath."""
        attach = self.expect(Attach)
        attached = Attached(LINK_VERSION, "test", CHUNK_BYTES, 256, (RegionInfo(attach.rank, CHUNK_BYTES * SLOTS),))
        data = b"".join(encode_frame(frame) for frame in (attached, *behind))
        socket.send_fds(self.connection, [data], [self.memory])
        return attach

    def slot(self, index: int, length: int = CHUNK_BYTES) -> bytes:
        return self.buffer[index * CHUNK_BYTES : index * CHUNK_BYTES + length]

    def close(self) -> None:
        self.connection.close()
        self.buffer.close()
        os.close(self.memory)


@pytest.fixture
def daemon(tmp_path: Path) -> Callable[..., Any]:
    """`with daemon(script) as path`: the script runs, with one Peer, in a thread; what it raises fails the test."""

    @contextmanager
    def run(script: Callable[[Peer], None], *, greet: bool = True) -> Iterator[Path]:
        path = tmp_path / f"{next(_names)}.sock"
        failures: list[BaseException] = []
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(str(path))
            listener.listen()
            listener.settimeout(DEADLINE_S)

            def serve() -> None:
                connection, _ = listener.accept()
                connection.settimeout(DEADLINE_S)
                peer = Peer(connection)
                try:
                    if greet:
                        peer.greet()
                    script(peer)
                except BaseException as exc:  # noqa: BLE001  raised again in the test's own thread
                    failures.append(exc)
                finally:
                    peer.close()

            thread = threading.Thread(target=serve)
            thread.start()
            try:
                yield path
            finally:
                thread.join(2 * DEADLINE_S)
            assert not thread.is_alive()
        if failures:
            raise failures[0]

    return run


def chunk(number: int, length: int = CHUNK_BYTES) -> bytes:
    return bytes([number + 1]) * length


def keys(count: int) -> list[bytes]:
    return [b"key-%d" % number for number in range(count)]


def until_end(peer: Peer) -> None:
    """Read whatever the engine still says."""
    while peer.next() is not None:
        pass


def fill(slots: client.Staging, *, first: int = 0) -> None:
    """Write chunk n, n counting from `first`, into each slot that wants one."""
    for number, slot in enumerate(slots, first):
        if slot is not None:
            slot[:] = chunk(number, len(slot))


def fill_some(slots: client.Staging, count: int) -> None:
    """Write the first `count` slots and look at no more."""
    for slot in itertools.islice(slots, count):
        assert slot is not None
        slot[:] = chunk(0)


def send_one(link: client.SenderLink, *, req_id: str = "r", timeout: float | None = None) -> None:
    """A request of one chunk."""
    with link.open(req_id, receiver="d:1", total_chunks=1, timeout=timeout) as transfer:
        stage_and_fill(transfer, 1)


def stage_and_fill(transfer: client.Transfer, count: int) -> None:
    with transfer.stage(keys(count)) as slots:
        fill(slots)


def claim_and_leave(link: client.ReceiverLink, timeout: float) -> None:
    with link.claim("r", timeout):
        pass


# ------------------------------------------------------------------ attaching


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


def test_p73_attaching_maps_the_buffer_and_keeps_no_descriptor_open_to_children(daemon: Any) -> None:
    """A child that inherits the descriptor keeps a dead daemon's memory alive."""

    def script(peer: Peer) -> None:
        until_end(peer)

    before = set(os.listdir("/proc/self/fd"))  # noqa: PTH208
    with daemon(script) as path, client.connect_sender(path) as link:
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


def test_p13_a_daemon_that_does_not_answer_is_not_waited_for(daemon: Any) -> None:
    """A handshake has a deadline."""
    with daemon(until_end, greet=False) as path, pytest.raises(TransportError, match=r"did not answer within 0\.1 s"):
        client.connect_receiver(path, timeout=0.1)


def test_a_refusal_to_attach_is_told(daemon: Any) -> None:
    """Engines are pointed at the wrong socket now and then."""

    def script(peer: Peer) -> None:
        assert peer.expect(Attach) == Attach(LINK_VERSION, "receiver", 3)
        peer.send(Rejected("this is a sender"))
        until_end(peer)

    with daemon(script, greet=False) as path, pytest.raises(LocalProtocolError, match="this is a sender"):
        client.connect_receiver(path, rank=3)


GOOD = Attached(LINK_VERSION, "test", CHUNK_BYTES, 256, (RegionInfo(0, CHUNK_BYTES * SLOTS),))


@pytest.mark.parametrize(
    ("answer", "match"),
    [
        (Stats(1, {}), "greets with Stats"),
        (Attached(99, "test", CHUNK_BYTES, 256, (RegionInfo(0, 64),)), "version 99"),
        (Attached(LINK_VERSION, "test", CHUNK_BYTES, 256, (RegionInfo(0, 64), RegionInfo(1, 64))), "1 descriptors"),
        (Attached(LINK_VERSION, "test", CHUNK_BYTES, 256, (RegionInfo(0, 1 << 40),)), "in a file of 512"),
        (Attached(LINK_VERSION, "test", 0, 256, (RegionInfo(0, 64),)), "chunks of 0 bytes"),
        (Attached(LINK_VERSION, "test", 65, 256, (RegionInfo(0, 64),)), "chunks of 65 bytes"),
        (Attached(LINK_VERSION, "test", CHUNK_BYTES, 256, (RegionInfo(0, 64, "cuda:0"),)), "only cpu regions"),
    ],
)
def test_a_greeting_that_makes_no_sense_is_refused(daemon: Any, answer: DaemonFrame, match: str) -> None:
    """A mapping beyond the end of a file kills the engine at the first touch."""

    def script(peer: Peer) -> None:
        peer.expect(Attach)
        socket.send_fds(peer.connection, [encode_frame(answer)], [peer.memory])
        until_end(peer)

    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    with daemon(script, greet=False) as path, pytest.raises(RemoteProtocolError, match=match):
        client.connect_sender(path)
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_an_unknown_rank_is_refused(daemon: Any) -> None:
    """Another rank's buffer holds another rank's heads."""

    def script(peer: Peer) -> None:
        peer.expect(Attach)
        socket.send_fds(peer.connection, [encode_frame(GOOD)], [peer.memory])
        until_end(peer)

    with daemon(script, greet=False) as path, pytest.raises(LocalProtocolError, match=r"no region for rank 1, only"):
        client.connect_sender(path, rank=1)


def test_what_comes_right_behind_the_greeting_is_not_lost(daemon: Any) -> None:
    """A stream knows no frames: the first event may be in the greeting's own packet."""
    event = TransferEvent("ready", "r", "s", 1, 2)

    def script(peer: Peer) -> None:
        peer.greet(event)
        until_end(peer)

    with daemon(script, greet=False) as path, client.connect_receiver(path) as link:
        assert next(link.events(DEADLINE_S)) == event


# ------------------------------------------------------------------ sending


def test_a_request_travels_whole(daemon: Any) -> None:
    """The main road: open and stage leave together, the slots hold the engine's bytes, leaving waits for the end."""

    def script(peer: Peer) -> None:
        opened = peer.expect(Open)
        assert (opened.req_id, opened.receiver, opened.total_chunks, opened.notify) == ("r", "d:1", 3, "p:2")
        stage = peer.expect(Stage)  # both before the daemon has said a word
        assert (stage.keys, stage.is_last, stage.last_chunk_bytes) == (tuple(keys(3)), True, 10)
        peer.send(Staged(opened.transfer, stage.stage, 0, 0, (5, -1, 2), True))
        assert peer.expect(Filled) == Filled(opened.transfer, stage.stage, 0)
        assert peer.slot(5) == chunk(0)
        assert peer.slot(2, 11) == chunk(2, 10) + b"\0"
        peer.send(Ended(opened.transfer))
        assert peer.expect(Close) == Close(opened.transfer)
        until_end(peer)

    with (
        daemon(script) as path,
        client.connect_sender(path) as link,
        link.open("r", receiver="d:1", total_chunks=3, notify="p:2") as transfer,
        transfer.stage(keys(3), last_chunk_bytes=10) as slots,
    ):
        assert len(slots) == 3
        fill(slots)


def test_pieces_are_filled_one_after_the_other(daemon: Any) -> None:
    """A batch larger than the staging buffer: the second piece's slots are the first one's, and come after it left."""

    def script(peer: Peer) -> None:
        transfer = peer.expect(Open).transfer
        peer.expect(Stage)
        for piece, first, slots in ((0, 0, (0, 1)), (1, 2, (0, 1)), (2, 4, (0,))):
            peer.send(Staged(transfer, 0, piece, first, slots, piece == 2))
            assert peer.expect(Filled).piece == piece
            assert [peer.slot(index) for index in slots] == [chunk(first + n) for n in range(len(slots))]
        peer.send(Ended(transfer))
        until_end(peer)

    with (
        daemon(script) as path,
        client.connect_sender(path) as link,
        link.open("r", receiver="d:1", total_chunks=5) as transfer,
        transfer.stage(keys(5)) as slots,
    ):
        kept = []
        for slot, data in zip(slots, map(chunk, range(5)), strict=True):
            assert slot is not None
            slot[:] = data
            kept.append(slot)
        with pytest.raises(LocalProtocolError, match="sent already"):
            kept[0][:] = chunk(9)
        with pytest.raises(LocalProtocolError, match="sent already"):
            kept[0].view  # noqa: B018


def test_every_kind_of_memory_fills_a_slot(daemon: Any) -> None:
    """Engines hold their KV in numpy arrays and torch tensors of many types, bfloat16 and fp8 among them."""
    values: list[Any] = [
        chunk(0),
        bytearray(chunk(0)),
        memoryview(chunk(0)),
        (ctypes.c_uint8 * CHUNK_BYTES)(*chunk(0)),
    ]
    raw = np.frombuffer(chunk(0), np.uint8)
    values += [raw, raw.view(np.float16).reshape(4, 8), raw.view(">f4"), raw.view(np.complex64), raw.view("M8[s]")]
    values += [raw.view(np.dtype([("a", "u4"), ("b", "f4")])), raw.view(bool).reshape(2, 1, 32)]
    if torch is not None:
        tensor = torch.frombuffer(bytearray(chunk(0)), dtype=torch.uint8)
        values += [tensor.view(dtype) for dtype in (torch.bfloat16, torch.float32, torch.float8_e4m3fn)]
        values += [tensor.view(torch.float32).clone().requires_grad_(), tensor.reshape(2, 32)]

    def script(peer: Peer) -> None:
        for _ in values:
            transfer = peer.expect(Open).transfer
            peer.expect(Stage)
            peer.send(Staged(transfer, 0, 0, 0, (3,), True))
            peer.expect(Filled)
            assert peer.slot(3) == chunk(0)
            peer.buffer[:] = bytes(len(peer.buffer))
            peer.send(Ended(transfer))
            peer.expect(Close)
        until_end(peer)

    with daemon(script) as path, client.connect_sender(path) as link:
        for value in values:
            with link.open("r", receiver="d:1", total_chunks=1) as transfer, transfer.stage(keys(1)) as slots:
                for slot in slots:
                    assert slot is not None
                    slot[:] = value


def test_a_slot_can_be_filled_in_place(daemon: Any) -> None:
    """A kernel that writes its output there saves a copy."""

    def script(peer: Peer) -> None:
        transfer = peer.expect(Open).transfer
        peer.expect(Stage)
        peer.send(Staged(transfer, 0, 0, 0, (0,), True))
        peer.expect(Filled)
        assert peer.slot(0) == chunk(7)
        peer.send(Ended(transfer))
        until_end(peer)

    with (
        daemon(script) as path,
        client.connect_sender(path) as link,
        link.open("r", receiver="d:1", total_chunks=1) as transfer,
        transfer.stage(keys(1)) as slots,
    ):
        for slot in slots:
            assert slot is not None
            np.frombuffer(slot.view, np.uint8)[:] = 8


@contextmanager
def one_slot(daemon: Any) -> Iterator[client.Slot]:
    """A slot that is written properly in the end: no refusal may have spoilt it."""

    def script(peer: Peer) -> None:
        transfer = peer.expect(Open).transfer
        peer.expect(Stage)
        peer.send(Staged(transfer, 0, 0, 0, (0,), True))
        peer.expect(Filled)
        assert peer.slot(0) == chunk(0)
        peer.send(Ended(transfer))
        peer.expect(Close)
        until_end(peer)

    with (
        daemon(script) as path,
        client.connect_sender(path) as link,
        link.open("r", receiver="d:1", total_chunks=1) as transfer,
        transfer.stage(keys(1)) as slots,
    ):
        slot = next(slots)
        assert slot is not None
        yield slot
        slot[:] = chunk(0)


@pytest.mark.parametrize("length", [0, CHUNK_BYTES - 1, CHUNK_BYTES + 1])
def test_a_wrong_length_is_refused_with_both_numbers(daemon: Any, length: int) -> None:
    """Half a chunk is wrong tokens, too much of one is somebody else's chunk."""
    with one_slot(daemon) as slot:
        for value in (bytes(length), np.zeros(length, np.uint8)):
            with pytest.raises(LocalProtocolError, match=f"{length} bytes for a chunk of {CHUNK_BYTES} bytes"):
                slot[:] = value


def test_what_cannot_be_copied_straight_is_refused(daemon: Any) -> None:
    """A hidden copy would cost what this interface is there to save."""

    class OnGpu:
        device = type("device", (), {"type": "cuda", "__str__": lambda _: "cuda:0"})()

        def data_ptr(self) -> int:
            raise AssertionError("asked for an address on another device")

    with one_slot(daemon) as slot:
        for value in (np.zeros((CHUNK_BYTES, 2), np.uint8)[:, 0], memoryview(bytes(2 * CHUNK_BYTES))[::2]):
            with pytest.raises(LocalProtocolError, match="not contiguous"):
                slot[:] = value
        with pytest.raises(LocalProtocolError, match="the tensor is on cuda:0"):
            slot[:] = OnGpu()
        with pytest.raises(LocalProtocolError, match="a str has no memory"):
            slot[:] = "x" * CHUNK_BYTES
        for where in (slice(0, 1), slice(None, None, 2), 0):
            with pytest.raises(LocalProtocolError, match="filled whole"):
                slot[where] = bytes(1)  # type: ignore[index]


def test_a_slot_that_nobody_wrote_is_never_sent(daemon: Any) -> None:
    """What an earlier request left in the slot would be decoded as this one's."""

    def script(peer: Peer) -> None:
        transfer = peer.expect(Open).transfer
        peer.expect(Stage)
        peer.send(Staged(transfer, 0, 0, 0, (0, -1, 1), True))
        peer.expect(Cancel)
        peer.expect(Close)
        until_end(peer)

    with (
        daemon(script) as path,
        client.connect_sender(path) as link,
        pytest.raises(LocalProtocolError, match="chunk 2 of a stage of 3 was never written"),
        link.open("r", receiver="d:1", total_chunks=3) as transfer,
        transfer.stage(keys(3)) as slots,
    ):
        fill_some(slots, 1)


def test_a_stage_that_is_left_early_is_cancelled(daemon: Any) -> None:
    """`break` in the loop must not look like success."""

    def script(peer: Peer) -> None:
        transfer = peer.expect(Open).transfer
        peer.expect(Stage)
        peer.send(Staged(transfer, 0, 0, 0, (0,), False))
        peer.expect(Cancel)
        peer.expect(Close)
        until_end(peer)

    with (
        daemon(script) as path,
        client.connect_sender(path) as link,
        pytest.raises(LocalProtocolError, match="a stage of 2 chunks was left after 1"),
        link.open("r", receiver="d:1", total_chunks=2) as transfer,
        transfer.stage(keys(2)) as slots,
    ):
        fill_some(slots, 1)


def test_a_transfer_that_is_left_incomplete_is_an_error(daemon: Any) -> None:
    """It could never complete, and waiting for it would be waiting for ever."""

    def script(peer: Peer) -> None:
        for _ in range(2):
            peer.expect(Open)
            frame = peer.next()
            assert isinstance(frame, Close) or isinstance(peer.next(), Close)
        until_end(peer)

    with daemon(script) as path, client.connect_sender(path) as link:
        with (
            pytest.raises(LocalProtocolError, match="0 of 3 chunks staged"),
            link.open("r", receiver="d:1", total_chunks=3),
        ):
            pass
        with (
            pytest.raises(LocalProtocolError, match="3 of 3 chunks staged and 1 stages not filled"),
            link.open("r", receiver="d:1", total_chunks=3) as transfer,
        ):
            transfer.stage(keys(3))


def test_a_refusal_is_raised_by_stage_and_again_by_later_ones(daemon: Any) -> None:
    """open() never waits, so the refusal comes where the engine next looks, with all that it needs to decide."""
    error = LinkError(ErrorCode.QUEUE_FULL, "1024 wait", 0.5)

    def script(peer: Peer) -> None:
        transfer = peer.expect(Open).transfer
        peer.expect(Stage)
        peer.send(Ended(transfer, error))
        peer.expect(Close)
        until_end(peer)

    with daemon(script) as path, client.connect_sender(path) as link:
        transfer = link.open("r", receiver="d:1", total_chunks=2)
        with pytest.raises(AdmissionRefused, match="1024 wait") as refused:
            stage_and_fill(transfer, 1)
        assert (refused.value.code, refused.value.retry_after_s) == (ErrorCode.QUEUE_FULL, 0.5)
        for call in (lambda: transfer.stage(keys(1)), transfer.touch, lambda: transfer.__exit__(None, None, None)):
            with pytest.raises(AdmissionRefused):
                call()
        transfer.cancel()


def test_a_failure_while_leaving_is_raised(daemon: Any) -> None:
    """Leaving without an exception means success, and nothing else does."""

    def script(peer: Peer) -> None:
        transfer = peer.expect(Open).transfer
        peer.expect(Stage)
        peer.send(Staged(transfer, 0, 0, 0, (0,), True))
        peer.expect(Filled)
        peer.send(Ended(transfer, LinkError(ErrorCode.REVOKED, "the receiver has rolled it back")))
        peer.expect(Close)
        until_end(peer)

    with (
        daemon(script) as path,
        client.connect_sender(path) as link,
        pytest.raises(TransferFailed, match="rolled it back"),
    ):
        send_one(link)


def test_p65_leaving_waits_no_longer_than_its_timeout(daemon: Any) -> None:
    """Nothing waits without a timer."""

    def script(peer: Peer) -> None:
        transfer = peer.expect(Open).transfer
        peer.expect(Stage)
        peer.send(Staged(transfer, 0, 0, 0, (0,), True))
        peer.expect(Filled)
        peer.expect(Close)
        peer.send(Ended(transfer, LinkError(ErrorCode.CANCELLED)))  # late, and nobody's any more
        peer.send(Stats(peer.expect(StatsRequest).call, {}))
        until_end(peer)

    with daemon(script) as path, client.connect_sender(path) as link:
        with pytest.raises(TransferFailed, match=r"not over within 0\.05 s") as failed:
            send_one(link, timeout=0.05)
        assert failed.value.code is ErrorCode.REQUEST_TIMEOUT
        assert link.stats() == {}


def test_the_next_batch_is_asked_for_before_this_one_is_filled(daemon: Any) -> None:
    """Small requests are bound by round trips."""

    def script(peer: Peer) -> None:
        transfer = peer.expect(Open).transfer
        assert not peer.expect(Stage).is_last
        peer.send(Staged(transfer, 0, 0, 0, (0,), True))
        assert peer.expect(Stage).is_last
        peer.send(StageDeferred(transfer, 1))
        assert peer.expect(Filled).stage == 0
        peer.send(Staged(transfer, 1, 0, 0, (0,), True))
        assert peer.expect(Filled).stage == 1
        peer.send(Ended(transfer))
        until_end(peer)

    with (
        daemon(script) as path,
        client.connect_sender(path) as link,
        link.open("r", receiver="d:1", total_chunks=2) as transfer,
    ):
        with transfer.stage(keys(1)) as slots:
            following = transfer.stage(keys(1))
            fill(slots)
        with following as slots:
            fill(slots, first=1)


def test_waiting_for_a_deferred_stage_with_unfilled_slots_is_refused(daemon: Any) -> None:
    """It would wait for slots that it holds itself."""

    def script(peer: Peer) -> None:
        transfer = peer.expect(Open).transfer
        peer.expect(Stage)
        peer.send(Staged(transfer, 0, 0, 0, (0,), True))
        peer.expect(Stage)
        peer.send(StageDeferred(transfer, 1))
        peer.expect(Cancel)
        peer.expect(Close)
        until_end(peer)

    with (
        daemon(script) as path,
        client.connect_sender(path) as link,
        pytest.raises(LocalProtocolError, match="fill and leave it first"),
        link.open("r", receiver="d:1", total_chunks=2) as transfer,
        transfer.stage(keys(1)),
    ):
        stage_and_fill(transfer, 1)


def test_cancel_from_another_thread_ends_the_wait(daemon: Any) -> None:
    """An aborted request must not hold its thread until a timeout."""

    def script(peer: Peer) -> None:
        transfer = peer.expect(Open).transfer
        peer.expect(Stage)
        peer.expect(Touch)
        peer.expect(Cancel)
        peer.send(Ended(transfer, LinkError(ErrorCode.CANCELLED, "the engine asked for it")))
        peer.expect(Close)
        until_end(peer)

    with daemon(script) as path, client.connect_sender(path) as link:
        transfer = link.open("r", receiver="d:1", total_chunks=1)
        staging = transfer.stage(keys(1))
        transfer.touch()
        thread = threading.Thread(target=transfer.cancel)
        thread.start()
        with pytest.raises(TransferCancelled, match="asked for it"), transfer, staging:
            pass
        thread.join()
        transfer.cancel()
        with pytest.raises(LocalProtocolError, match="was left"):
            transfer.stage(keys(1))


def test_nothing_follows_a_close(daemon: Any) -> None:
    """A daemon that hears of a transfer that it knows no more ends the connection, and every other request with it."""
    rounds = 200

    def script(peer: Peer) -> None:
        for _ in range(rounds):
            transfer = peer.expect(Open).transfer
            frames = []
            while not isinstance(frame := peer.next(), Close):
                frames.append(frame)
            assert frame.transfer == transfer
            assert frames in ([], [Cancel(transfer)])
        until_end(peer)

    with daemon(script) as path, client.connect_sender(path) as link:
        for _ in range(rounds):
            transfer = link.open("r", receiver="d:1", total_chunks=1)
            thread = threading.Thread(target=transfer.cancel)
            thread.start()
            with pytest.raises(ZeroDivisionError), transfer:
                raise ZeroDivisionError
            thread.join()


def test_two_threads_share_a_link(daemon: Any) -> None:
    """One link a process is enough: frames of two requests interleave, and neither gets the other's answers."""
    rounds = 50

    def script(peer: Peer) -> None:
        names: dict[int, int] = {}
        for _ in range(2 * rounds * 4):
            match peer.next():
                case Open(transfer, req_id):
                    names[transfer] = int(req_id)
                case Stage(transfer, stage):
                    peer.send(Staged(transfer, stage, 0, 0, (names[transfer],), True))
                case Filled(transfer):
                    assert peer.slot(names[transfer]) == chunk(names[transfer])
                    error = LinkError(ErrorCode.REVOKED) if names[transfer] else None
                    peer.send(Ended(transfer, error))
                case Close(transfer):
                    del names[transfer]
                case other:
                    raise AssertionError(other)
        assert not names
        until_end(peer)

    def work(link: client.SenderLink, number: int, outcomes: list[str]) -> None:
        for _ in range(rounds):
            try:
                with (
                    link.open(str(number), receiver="d:1", total_chunks=1) as transfer,
                    transfer.stage(keys(1)) as slots,
                ):
                    fill(slots, first=number)
                outcomes.append("ok")
            except TransferFailed:
                outcomes.append("revoked")

    with daemon(script) as path, client.connect_sender(path) as link:
        outcomes: list[list[str]] = [[], []]
        threads = [threading.Thread(target=work, args=(link, n, outcomes[n])) for n in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
    assert outcomes == [["ok"] * rounds, ["revoked"] * rounds]


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda link: link.open("", receiver="d:1", total_chunks=1), "req_id is a text of 1 to 512"),
        (lambda link: link.open("x" * 513, receiver="d:1", total_chunks=1), "req_id is a text"),
        (lambda link: link.open("\ud800", receiver="d:1", total_chunks=1), "cannot be sent"),
        (lambda link: link.open("r", receiver="", total_chunks=1), "receiver is a text"),
        (lambda link: link.open("r", receiver="d:1", notify="", total_chunks=1), "notify is a text"),
        (lambda link: link.open("r", receiver="d:1", total_chunks=1 << 70), "a request of"),
        (lambda link: link.open("r", receiver="d:1", total_chunks=1, timeout=-1), "timeout of -1"),
        (lambda link: link.open("r", receiver="d:1", total_chunks=1).stage([]), "a batch of 0 chunks"),
        (lambda link: link.open("r", receiver="d:1", total_chunks=1).stage([b"x"] * 8193), "a batch of 8193"),
        (lambda link: link.open("r", receiver="d:1", total_chunks=1).stage([bytes(97)]), "a key has at most 96"),
        (lambda link: link.open("r", receiver="d:1", total_chunks=1).stage(["k"]), "a key has at most 96"),
        (
            lambda link: link.open("r", receiver="d:1", total_chunks=1).stage([b"k"], last_chunk_bytes=65),
            "a last chunk of 65 bytes; 1 to 64",
        ),
        (
            lambda link: link.open("r", receiver="d:1", total_chunks=1).stage([b"k"], last_chunk_bytes=0),
            "a last chunk of 0 bytes",
        ),
    ],
)
def test_impossible_arguments_are_refused_and_the_link_lives(
    daemon: Any, call: Callable[[client.SenderLink], Any], match: str
) -> None:
    """A caller's mistake is his own: the other requests on the link go on."""

    def script(peer: Peer) -> None:
        while not isinstance(frame := peer.next(), StatsRequest):
            assert frame is not None
        peer.send(Stats(frame.call, {"alive": 1.0}))
        until_end(peer)

    with daemon(script) as path:
        link = client.connect_sender(path)
        with pytest.raises(LocalProtocolError, match=match):
            call(link)
        assert link.stats() == {"alive": 1.0}
        link._connection._open.clear()  # what was opened above is never left
        link.close()


# ------------------------------------------------------------------ claiming


def test_a_claim_gives_the_chunks_in_order_and_gives_them_back(daemon: Any) -> None:
    """Views without a copy, read-only because deduplicated chunks are shared, and invalid afterwards."""

    def script(peer: Peer) -> None:
        peer.buffer[:] = b"".join(chunk(index) for index in range(SLOTS))
        claim = peer.expect(Claim)
        assert (claim.req_id, claim.timeout_s, claim.sender_id) == ("r", 5.0, "s")
        first = (ClaimedChunk(b"k0", 4, CHUNK_BYTES), ClaimedChunk(b"k1", 1, CHUNK_BYTES))
        peer.send(Claimed(claim.claim, "s", 7, 0, first, False))
        peer.send(Claimed(claim.claim, "s", 7, 2, (ClaimedChunk(b"k2", 6, 5),), True))
        assert peer.expect(Release) == Release(claim.claim)
        until_end(peer)

    with daemon(script) as path, client.connect_receiver(path) as link:
        with link.claim("r", 5, sender_id="s") as chunks:
            assert (len(chunks), chunks.sender_id, chunks.transfer_no) == (3, "s", 7)
            assert [(c.key, c.index, bytes(c.view)) for c in chunks] == [
                (b"k0", 4, chunk(4)),
                (b"k1", 1, chunk(1)),
                (b"k2", 6, chunk(6, 5)),
            ]
            assert chunks[1:] == [chunks[1], chunks[2]]
            view = chunks[0].view
            with pytest.raises(TypeError, match="read-only"):
                view[0] = 0
            assert not np.frombuffer(view, np.uint8).flags.writeable
            assert repr(chunks[0]) == "Chunk(key=b'k0', index=4)"
        with pytest.raises(ValueError, match="released"):
            view[0]
        assert len(chunks) == 0


def test_an_array_that_outlives_its_claim_does_no_harm_to_the_link(daemon: Any) -> None:
    """A loop's variable lives on after the loop; that must not turn a success into an exception."""

    def script(peer: Peer) -> None:
        claim = peer.expect(Claim)
        peer.send(Claimed(claim.claim, "s", 1, 0, (ClaimedChunk(b"k", 0, CHUNK_BYTES),), True))
        peer.expect(Release)
        until_end(peer)

    with daemon(script) as path:
        with client.connect_receiver(path) as link, link.claim("r", 5) as chunks:
            array = np.frombuffer(chunks[0].view, np.uint8)
        assert array.sum() == 0  # the memory is still mapped, whosever it is


def test_a_failed_claim_is_a_typed_error(daemon: Any) -> None:
    """What an engine does next depends on why."""

    def script(peer: Peer) -> None:
        for code in (ErrorCode.CLAIM_TIMEOUT, ErrorCode.CLAIMED, ErrorCode.AMBIGUOUS_REQUEST):
            peer.send(ClaimFailed(peer.expect(Claim).claim, LinkError(code, "so it is")))
            peer.expect(Release)
        until_end(peer)

    with daemon(script) as path, client.connect_receiver(path) as link:
        for code in (ErrorCode.CLAIM_TIMEOUT, ErrorCode.CLAIMED, ErrorCode.AMBIGUOUS_REQUEST):
            with pytest.raises(TransferFailed, match="so it is") as failed, link.claim("r", 5):
                pass
            assert failed.value.code is code


def test_a_silent_daemon_does_not_hold_a_claim(daemon: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline is the engine's, whoever keeps it; and what comes too late was given back before."""
    monkeypatch.setattr("kvpd.client._receiver.ANSWER_GRACE_S", 0.05)

    def script(peer: Peer) -> None:
        claim = peer.expect(Claim)
        assert peer.expect(Release) == Release(claim.claim)
        peer.send(Claimed(claim.claim, "s", 1, 0, (ClaimedChunk(b"k", 0, 1),), True))
        peer.send(Stats(peer.expect(StatsRequest).call, {}))
        until_end(peer)

    with daemon(script) as path, client.connect_receiver(path) as link:
        with pytest.raises(TransferFailed, match=r"'r' is not complete within 0 s") as failed, link.claim("r", 0):
            pass
        assert failed.value.code is ErrorCode.CLAIM_TIMEOUT
        assert link.stats() == {}


def test_an_interrupted_claim_is_released(daemon: Any) -> None:
    """Ctrl-C in an engine must not leave a request claimed until the engine dies."""

    def script(peer: Peer) -> None:
        claim = peer.expect(Claim)
        os.kill(os.getpid(), signal.SIGINT)
        assert peer.expect(Release) == Release(claim.claim)
        until_end(peer)

    with (
        daemon(script) as path,
        client.connect_receiver(path) as link,
        pytest.raises(KeyboardInterrupt),
        link.claim("r", 60),
    ):
        pass


@pytest.mark.parametrize("timeout", [-1, float("nan"), 1e10])
def test_p91_an_impossible_claim_timeout_is_refused(daemon: Any, timeout: float) -> None:
    """The meaning of 0 is documented, that of -1 is none."""
    with (
        daemon(until_end) as path,
        client.connect_receiver(path) as link,
        pytest.raises(LocalProtocolError, match="timeout of"),
    ):
        link.claim("r", timeout)


# ------------------------------------------------------------------ events, counters, cancelling by name


def test_events_are_pushed_and_the_oldest_go_first_when_nobody_takes_them(daemon: Any) -> None:
    """An engine's scheduler answers from memory; one that never asks must not fill it."""
    total = 1030

    def script(peer: Peer) -> None:
        for number in range(total):
            peer.send(TransferEvent("ready", "r", "s", number, 1))
        peer.send(Stats(peer.expect(StatsRequest).call, {}))
        peer.send(Stats(peer.expect(StatsRequest).call, {}))
        peer.send(TransferEvent("failed", "r", "s", total, 1, LinkError(ErrorCode.REVOKED)))
        until_end(peer)

    with daemon(script) as path, client.connect_receiver(path) as link:
        link.stats()  # answered behind the events
        assert link.events_dropped == total - 1024
        assert [event.transfer_no for event in link.events(timeout=0)] == list(range(total - 1024, total))
        link.stats()
        event = next(link.events(DEADLINE_S))
        assert event.error is not None
        assert event.error.code is ErrorCode.REVOKED
        assert list(link.events(timeout=0.01)) == []


def test_cancel_by_name_needs_no_handle_and_never_raises(daemon: Any) -> None:
    """The thread that learns of an abort is seldom the one that holds the transfer."""

    def script(peer: Peer) -> None:
        assert peer.expect(CancelRequest) == CancelRequest("r")
        assert peer.next() is None

    with daemon(script) as path:
        link = client.connect_receiver(path)
        link.cancel("r")
        link.cancel("")
        link.cancel("x" * 513)
        link.close()
        link.cancel("r")


def test_p85_a_daemon_without_counters_is_not_waited_for(daemon: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Telemetry must not stop an engine."""
    monkeypatch.setattr("kvpd.client._link.STATS_TIMEOUT_S", 0.05)
    with (
        daemon(until_end) as path,
        client.connect_receiver(path) as link,
        pytest.raises(TransferFailed, match="gave no counters"),
    ):
        link.stats()


# ------------------------------------------------------------------ the end


@pytest.mark.parametrize("call", ["stage", "leave", "claim", "events"])
def test_a_dead_daemon_ends_every_call_that_waits(daemon: Any, call: str) -> None:
    """An engine that waits for a daemon that is gone is gone too."""

    def script(peer: Peer) -> None:
        if call in ("stage", "leave"):
            transfer = peer.expect(Open).transfer
            peer.expect(Stage)
            if call == "leave":
                peer.send(Staged(transfer, 0, 0, 0, (0,), True))
                peer.expect(Filled)
        elif call == "claim":
            peer.expect(Claim)

    with daemon(script) as path:
        link = client.connect_sender(path) if call in ("stage", "leave") else client.connect_receiver(path)

        def wait() -> None:
            if isinstance(link, client.SenderLink):
                send_one(link)
            elif call == "claim":
                claim_and_leave(link, 60)
            else:
                list(link.events())

        with link:
            with pytest.raises(TransferFailed, match=str(path)) as failed:
                wait()
            assert failed.value.code is ErrorCode.PEER_LOST
            with pytest.raises(TransferFailed, match=str(path)):
                link.stats()
            link.cancel("r")


GARBAGE = {
    "bytes": b"\x05\0\0\0hello",
    "too long": b"\xff\xff\xff\xff",
    "an engine's frame": encode_frame(Touch(1)),
    "another role's frame": encode_frame(Claimed(1, "s", 1, 0, (), True)),
    "a transfer never opened": encode_frame(Ended(99)),
    "a stage never asked for": encode_frame(Staged(1, 5, 0, 0, (0,), True)),
    "a slot beyond the buffer": encode_frame(Staged(1, 0, 0, 0, (SLOTS,), True)),
    "a slot before the buffer": encode_frame(Staged(1, 0, 0, 0, (-2,), True)),
    "more slots than keys": encode_frame(Staged(1, 0, 0, 0, (0, 1), True)),
    "a piece twice": 2 * encode_frame(Staged(1, 0, 0, 0, (0,), True)),
    "a piece with a gap": encode_frame(Staged(1, 0, 0, 1, (), True)),
    "an end too early": encode_frame(Staged(1, 0, 0, 0, (), True)),
    "a refusal": encode_frame(Rejected("you bore me")),
}


@pytest.mark.parametrize("name", GARBAGE)
def test_a_daemon_that_makes_no_sense_is_left(daemon: Any, name: str) -> None:
    """A slot that is not ours must not be written because a daemon said so."""

    def script(peer: Peer) -> None:
        assert peer.expect(Open).transfer == 1
        peer.expect(Stage)
        peer.connection.sendall(GARBAGE[name])
        until_end(peer)

    with daemon(script) as path, client.connect_sender(path) as link:
        with pytest.raises(TransferFailed, match=str(path)) as failed:
            send_one(link)
        assert failed.value.code is ErrorCode.PROTOCOL_ERROR


@pytest.mark.parametrize(
    "chunks",
    [
        (ClaimedChunk(b"k", SLOTS, 1),),
        (ClaimedChunk(b"k", -1, 1),),
        (ClaimedChunk(b"k", 0, CHUNK_BYTES + 1),),
        (ClaimedChunk(b"k", 0, 0),),
    ],
)
def test_a_claim_of_what_does_not_exist_is_not_believed(daemon: Any, chunks: tuple[ClaimedChunk, ...]) -> None:
    """A view beyond the chunk is a view of somebody else's."""

    def script(peer: Peer) -> None:
        peer.send(Claimed(peer.expect(Claim).claim, "s", 1, 0, chunks, True))
        until_end(peer)

    with daemon(script) as path, client.connect_receiver(path) as link:
        with pytest.raises(TransferFailed) as failed, link.claim("r", 5):
            pass
        assert failed.value.code is ErrorCode.PROTOCOL_ERROR


def test_a_closed_link_refuses_and_its_waiting_calls_end(daemon: Any) -> None:
    """Shutting an engine down must not need its daemon's help."""

    def script(peer: Peer) -> None:
        claim = peer.expect(Claim)
        assert peer.expect(Release) == Release(claim.claim)
        assert peer.next() is None

    with daemon(script) as path:
        link = client.connect_receiver(path)
        outcomes: list[object] = []

        def claim() -> None:
            try:
                with link.claim("r", 60):
                    outcomes.append("claimed")
            except TransferError as exc:
                outcomes.append(exc.code)

        def watch() -> None:
            outcomes.append(list(link.events()))

        threads = [threading.Thread(target=claim), threading.Thread(target=watch)]
        for thread in threads:
            thread.start()
        while not link._connection._open:
            time.sleep(0.001)
        link.close()
        for thread in threads:
            thread.join(DEADLINE_S)
        assert sorted(map(str, outcomes)) == ["[]", "cancelled"]
        for call in (link.stats, lambda: link.claim("r", 1)):
            with pytest.raises(LocalProtocolError, match="was closed"):
                call()
        assert list(link.events()) == []
        link.close()


def test_closing_waits_for_whoever_still_writes(daemon: Any) -> None:
    """The daemon gives a slot away when it is told that nobody writes it any more: that must be true."""
    closed = threading.Event()

    def script(peer: Peer) -> None:
        transfer = peer.expect(Open).transfer
        peer.expect(Stage)
        peer.send(Staged(transfer, 0, 0, 0, (0,), True))
        assert closed.wait(DEADLINE_S)
        assert peer.expect(Close) == Close(transfer)
        assert peer.slot(0) == chunk(0)
        assert peer.next() is None

    def close_and_fill(link: client.SenderLink, slots: client.Staging) -> None:
        link.close()
        closed.set()
        fill(slots)

    with daemon(script) as path:
        link = client.connect_sender(path)
        with (
            pytest.raises(LocalProtocolError, match="was closed"),
            link.open("r", receiver="d:1", total_chunks=1) as transfer,
            transfer.stage(keys(1)) as slots,
        ):
            close_and_fill(link, slots)


def test_p73_a_forked_child_is_refused_and_does_no_harm(daemon: Any) -> None:
    """Two processes on one stream cut each other's frames."""

    def script(peer: Peer) -> None:
        peer.expect(Open)
        peer.send(Stats(peer.expect(StatsRequest).call, {"alive": 1.0}))
        assert isinstance(peer.next(), Close)
        until_end(peer)

    def in_child(link: client.SenderLink, transfer: client.Transfer) -> None:
        calls: list[Callable[[], Any]] = [link.stats, transfer.touch, lambda: transfer.stage(keys(1))]
        calls += [lambda: link.open("x", receiver="d:1", total_chunks=1), lambda: list(link.events(0))]
        for call in calls:
            with pytest.raises(LocalProtocolError, match="belongs to process"):
                call()
        transfer.cancel()
        link.cancel("r")
        transfer.__exit__(None, None, None)
        link.close()

    with daemon(script) as path, client.connect_sender(path) as link:
        transfer = link.open("r", receiver="d:1", total_chunks=1)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                in_child(link, transfer)
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        assert link.stats() == {"alive": 1.0}
        with pytest.raises(ZeroDivisionError), transfer:
            raise ZeroDivisionError
