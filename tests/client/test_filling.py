"""How a prefill engine stages its chunks and fills their slots."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

try:
    import torch
except ImportError:  # its tests are for those who have it
    torch = None

from kvpd import client
from kvpd.errors import AdmissionRefused, ErrorCode, LocalProtocolError, TransferFailed
from kvpd.link import Cancel, Close, Ended, Filled, LinkError, Open, Stage, Staged

from .harness import CHUNK_BYTES, Peer, Prefill, chunk, fill, fill_some, keys, send_one, stage_and_fill


def test_a_request_travels_whole(prefill: Prefill) -> None:
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

    with (
        prefill(script) as link,
        link.open("r", receiver="d:1", total_chunks=3, notify="p:2") as transfer,
        transfer.stage(keys(3), last_chunk_bytes=10) as slots,
    ):
        assert len(slots) == 3
        fill(slots)


def test_pieces_are_filled_one_after_the_other(prefill: Prefill) -> None:
    """A batch larger than the staging buffer: the second piece's slots are the first one's, and come after it left."""

    def script(peer: Peer) -> None:
        transfer = peer.expect(Open).transfer
        peer.expect(Stage)
        for piece, first, slots in ((0, 0, (0, 1)), (1, 2, (0, 1)), (2, 4, (0,))):
            peer.send(Staged(transfer, 0, piece, first, slots, piece == 2))
            assert peer.expect(Filled).piece == piece
            assert [peer.slot(index) for index in slots] == [chunk(first + n) for n in range(len(slots))]
        peer.send(Ended(transfer))

    with (
        prefill(script) as link,
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


def test_every_kind_of_memory_fills_a_slot(prefill: Prefill) -> None:
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
            transfer = peer.stage(3)
            peer.expect(Filled)
            assert peer.slot(3) == chunk(0)
            peer.buffer[:] = bytes(len(peer.buffer))
            peer.send(Ended(transfer))
            peer.expect(Close)

    with prefill(script) as link:
        for value in values:
            with link.open("r", receiver="d:1", total_chunks=1) as transfer, transfer.stage(keys(1)) as slots:
                for slot in slots:
                    assert slot is not None
                    slot[:] = value


def test_a_slot_can_be_filled_in_place(prefill: Prefill) -> None:
    """A kernel that writes its output there saves a copy."""

    def script(peer: Peer) -> None:
        transfer = peer.stage(0)
        peer.expect(Filled)
        assert peer.slot(0) == chunk(7)
        peer.send(Ended(transfer))

    with (
        prefill(script) as link,
        link.open("r", receiver="d:1", total_chunks=1) as transfer,
        transfer.stage(keys(1)) as slots,
    ):
        for slot in slots:
            assert slot is not None
            np.frombuffer(slot.view, np.uint8)[:] = 8


@contextmanager
def one_slot(prefill: Prefill) -> Iterator[client.Slot]:
    """A slot that is written properly in the end: no refusal may have spoilt it."""

    def script(peer: Peer) -> None:
        transfer = peer.stage(0)
        peer.expect(Filled)
        assert peer.slot(0) == chunk(0)
        peer.send(Ended(transfer))
        peer.expect(Close)

    with (
        prefill(script) as link,
        link.open("r", receiver="d:1", total_chunks=1) as transfer,
        transfer.stage(keys(1)) as slots,
    ):
        slot = next(slots)
        assert slot is not None
        yield slot
        slot[:] = chunk(0)


@pytest.mark.parametrize("length", [0, CHUNK_BYTES - 1, CHUNK_BYTES + 1])
def test_a_wrong_length_is_refused_with_both_numbers(prefill: Prefill, length: int) -> None:
    """Half a chunk is wrong tokens, too much of one is somebody else's chunk."""
    with one_slot(prefill) as slot:
        for value in (bytes(length), np.zeros(length, np.uint8)):
            with pytest.raises(LocalProtocolError, match=f"{length} bytes for a chunk of {CHUNK_BYTES} bytes"):
                slot[:] = value


def test_what_cannot_be_copied_straight_is_refused(prefill: Prefill) -> None:
    """A hidden copy would cost what this interface is there to save."""

    class OnGpu:
        device = type("device", (), {"type": "cuda", "__str__": lambda _: "cuda:0"})()

        def data_ptr(self) -> int:
            raise AssertionError("asked for an address on another device")

    with one_slot(prefill) as slot:
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


def test_a_slot_that_nobody_wrote_is_never_sent(prefill: Prefill) -> None:
    """What an earlier request left in the slot would be decoded as this one's."""

    def script(peer: Peer) -> None:
        peer.stage(0, -1, 1)
        peer.expect(Cancel)
        peer.expect(Close)

    with (
        prefill(script) as link,
        pytest.raises(LocalProtocolError, match="chunk 2 of a stage of 3 was never written"),
        link.open("r", receiver="d:1", total_chunks=3) as transfer,
        transfer.stage(keys(3)) as slots,
    ):
        fill_some(slots, 1)


def test_a_stage_that_is_left_early_is_cancelled(prefill: Prefill) -> None:
    """`break` in the loop must not look like success."""

    def script(peer: Peer) -> None:
        transfer = peer.expect(Open).transfer
        peer.expect(Stage)
        peer.send(Staged(transfer, 0, 0, 0, (0,), False))
        peer.expect(Cancel)
        peer.expect(Close)

    with (
        prefill(script) as link,
        pytest.raises(LocalProtocolError, match="a stage of 2 chunks was left after 1"),
        link.open("r", receiver="d:1", total_chunks=2) as transfer,
        transfer.stage(keys(2)) as slots,
    ):
        fill_some(slots, 1)


def test_a_transfer_that_is_left_incomplete_is_an_error(prefill: Prefill) -> None:
    """It could never complete, and waiting for it would be waiting for ever."""

    def script(peer: Peer) -> None:
        for _ in range(2):
            peer.expect(Open)
            frame = peer.next()
            assert isinstance(frame, Close) or isinstance(peer.next(), Close)

    with prefill(script) as link:
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


def test_a_refusal_is_raised_by_stage_and_again_by_later_ones(prefill: Prefill) -> None:
    """open() never waits, so the refusal comes where the engine next looks, with all that it needs to decide."""
    error = LinkError(ErrorCode.QUEUE_FULL, "1024 wait", 0.5)

    def script(peer: Peer) -> None:
        transfer = peer.expect(Open).transfer
        peer.expect(Stage)
        peer.send(Ended(transfer, error))
        peer.expect(Close)

    with prefill(script) as link:
        transfer = link.open("r", receiver="d:1", total_chunks=2)
        with pytest.raises(AdmissionRefused, match="1024 wait") as refused:
            stage_and_fill(transfer, 1)
        assert (refused.value.code, refused.value.retry_after_s) == (ErrorCode.QUEUE_FULL, 0.5)
        for call in (lambda: transfer.stage(keys(1)), transfer.touch, lambda: transfer.__exit__(None, None, None)):
            with pytest.raises(AdmissionRefused):
                call()
        transfer.cancel()


def test_a_failure_while_leaving_is_raised(prefill: Prefill) -> None:
    """Leaving without an exception means success, and nothing else does."""

    def script(peer: Peer) -> None:
        transfer = peer.stage(0)
        peer.expect(Filled)
        peer.send(Ended(transfer, LinkError(ErrorCode.REVOKED, "the receiver has rolled it back")))
        peer.expect(Close)

    with prefill(script) as link, pytest.raises(TransferFailed, match="rolled it back"):
        send_one(link)
