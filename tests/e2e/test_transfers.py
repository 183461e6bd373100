"""Requests from engine to engine through real daemons: whatever their shape, every byte arrives, in order, once."""

from __future__ import annotations

import subprocess
import sys
import threading

import numpy as np
import pytest

from .conftest import CHUNK, Pair
from .daemons import DEADLINE_S, Fleet, clean_environment, in_background
from .payloads import Request, make_request, receive, send, sha256, stage


@pytest.mark.parametrize(
    ("chunks", "last_chunk_bytes", "batch"),
    [(1, None, None), (1, 1, None), (7, 4097, 3), (64, CHUNK - 1, 64), (5, None, 1)],
)
def test_every_byte_arrives_in_order(
    wired_pair: Pair, chunks: int, last_chunk_bytes: int | None, batch: int | None
) -> None:
    """The whole point, with a last chunk of odd length, in one batch and in many."""
    request = make_request(f"{chunks}-{last_chunk_bytes}-{batch}", chunks, CHUNK, last_chunk_bytes)
    send(wired_pair.prefill, request, wired_pair.address, batch=batch)
    with wired_pair.decode.claim(request.req_id, 20) as claim:
        assert [sha256(chunk.view) for chunk in claim] == request.hashes
        assert [chunk.key for chunk in claim] == list(request.keys)
        assert claim.sender_id == "s"


@pytest.mark.parametrize("chunk_bytes", [1000, 3 << 20])
def test_chunks_may_have_any_size(fleet: Fleet, chunk_bytes: int) -> None:
    """A layout's chunk is whatever its model makes it: never a multiple of a page."""
    receiver = fleet.receiver(slots=5, chunk_bytes=chunk_bytes)
    sender = fleet.sender(slots=2, chunk_bytes=chunk_bytes).wait_ready()
    receiver.wait_ready()
    request = make_request("odd", 5, chunk_bytes)
    with sender.sender_link() as prefill, receiver.receiver_link() as decode:
        send(prefill, request, receiver.address)
        assert receive(decode, "odd") == request.hashes
    receiver.wait_quiet()
    assert receiver.slots() == {"free": 5}


def test_two_senders_wait_whole_for_a_receiver_that_holds_one_request(fleet: Fleet) -> None:
    """With both half admitted, both would wait for ever."""
    receiver = fleet.receiver(slots=10)
    senders = [fleet.sender(name, slots=4) for name in ("a", "b")]
    for daemon in (receiver, *senders):
        daemon.wait_ready()
    requests = [make_request(f"from-{sender.name}", 8) for sender in senders]
    with senders[0].sender_link() as first, senders[1].sender_link() as second, receiver.receiver_link() as decode:
        with first.open("from-a", receiver=receiver.address, total_chunks=8) as transfer:
            stage(transfer, requests[0], 0, 4)
            with in_background(lambda: send(second, requests[1], receiver.address, batch=3)):
                queued = receiver.wait_for("transfer_queued", req_id="from-b")
                assert (queued["waits"], queued["log.level"]) == (True, "info")
                receiver.wait_for("chunks_written", req_id="from-a")
                assert receiver.slots() == {"ready": 4, "reserved": 4, "free": 2}
                stage(transfer, requests[0], 4, 4)
                assert receive(decode, "from-a") == requests[0].hashes
        assert receive(decode, "from-b") == requests[1].hashes
        receiver.wait_quiet()
        steps = [(line["message"], line["req_id"]) for line in receiver.lines if "req_id" in line]
        wanted = [("transfer_admitted", "from-a"), ("transfer_queued", "from-b")]
        wanted += [("transfer_released", "from-a"), ("transfer_admitted", "from-b"), ("transfer_released", "from-b")]
        assert [step for step in steps if step in wanted] == wanted
        assert receiver.said("transfer_admitted", req_id="from-b")[0]["queued_s"] > 0
        metrics = receiver.metrics()
    assert metrics["kvpd_admissions_total"] == 2
    assert metrics["kvpd_admission_wait_seconds_count"] == 2
    assert receiver.slots() == {"free": 10}


def test_chunks_that_are_there_do_not_travel_again(pair: Pair) -> None:
    """Two prompts that begin alike share their first chunks."""
    one = make_request("prefix-one", 6)
    two = Request("prefix-two", (*one.keys[:4], b"x", b"y"), (*one.chunks[:4], b"x" * CHUNK, b"y" * CHUNK))
    send(pair.prefill, one, pair.address)
    before = pair.sender.metrics()["kvpd_put_bytes_total"]
    with (
        pair.prefill.open(two.req_id, receiver=pair.address, total_chunks=6) as transfer,
        transfer.stage(two.keys) as slots,
    ):
        for slot, chunk in zip(slots, two.chunks, strict=True):
            assert (slot is None) == (chunk in one.chunks)
            if slot is not None:
                slot[:] = chunk
    assert pair.sender.metrics()["kvpd_put_bytes_total"] - before == 2 * CHUNK
    assert pair.receiver.said("transfer_completed", req_id="prefix-two")[0]["deduplicated"] == 4
    with pair.decode.claim("prefix-one", 20) as first, pair.decode.claim("prefix-two", 20) as second:
        assert [chunk.index for chunk in first[:4]] == [chunk.index for chunk in second[:4]]
        assert [sha256(chunk.view) for chunk in first] == one.hashes
        assert [sha256(chunk.view) for chunk in second] == two.hashes


def test_a_batch_larger_than_the_staging_buffer_is_cut(fleet: Fleet) -> None:
    """Whoever waits for more staging than there is would wait for ever."""
    receiver, sender = fleet.receiver(slots=20), fleet.sender(slots=3)
    request = make_request("cut", 20)
    with sender.wait_ready().sender_link() as prefill, receiver.wait_ready().receiver_link() as decode:
        send(prefill, request, receiver.address)
        assert receive(decode, "cut") == request.hashes
    sender.wait_for("transfer_done")
    assert sorted(line["chunks"] for line in sender.said("piece_written")) == [2, *[3] * 6]


def test_p86_probes_are_answered_while_a_large_request_arrives_whole(fleet: Fleet) -> None:
    """256 MiB through 64 MiB of staging. Elsewhere the busiest hosts were restarted by their probes."""
    size = 4 << 20
    receiver, sender = fleet.receiver(slots=64, chunk_bytes=size), fleet.sender(slots=16, chunk_bytes=size)
    pattern = np.random.default_rng(7).integers(0, 256, size + 64, np.uint8)
    keys = [b"%d" % number for number in range(64)]
    probes: list[int] = []
    moved = threading.Event()

    def probe() -> None:
        while not moved.is_set():
            probes.extend(daemon.get(path)[0] for daemon in (receiver, sender) for path in ("/livez", "/readyz"))

    with sender.wait_ready().sender_link() as prefill, receiver.wait_ready().receiver_link() as decode:
        with in_background(probe):
            try:
                with (
                    prefill.open("large", receiver=receiver.address, total_chunks=64) as transfer,
                    transfer.stage(keys, last=True) as slots,
                ):
                    for number, slot in enumerate(slots):
                        assert slot is not None
                        slot[:] = pattern[number : number + size]
            finally:
                moved.set()
        with decode.claim("large", 20) as chunks:
            assert len(chunks) == 64
            for number, chunk in enumerate(chunks):
                assert sha256(chunk.view) == sha256(pattern[number : number + size].data)
        metrics = sender.metrics()
    assert probes
    assert set(probes) == {200}
    assert metrics["kvpd_put_bytes_total"] == 256 << 20
    assert metrics["kvpd_in_flight_bytes"] == 0


_ENGINES = """
import hashlib, sys
import kvpd.client
_, sender, receiver, address, name = sys.argv
with kvpd.client.connect_sender(sender) as prefill, kvpd.client.connect_receiver(receiver) as decode:
    for number in range(10):
        req_id = f"{name}-{number}"
        chunks = [f"{req_id}/{n};".encode().ljust(prefill.chunk_bytes, b".") for n in range(9)]
        with prefill.open(req_id, receiver=address, total_chunks=9) as transfer:
            for first in range(0, 9, 3):
                with transfer.stage([c[:64] for c in chunks[first:first + 3]]) as slots:
                    for slot, chunk in zip(slots, chunks[first:first + 3]):
                        slot[:] = chunk
        with decode.claim(req_id, timeout=20) as claim:
            assert [bytes(c.view) for c in claim] == chunks
print("good")
"""


def test_engines_in_processes_of_their_own_share_the_daemons(pair: Pair) -> None:
    """Two engines at once, as a host with two model servers has them."""
    sockets = str(pair.sender.socket), str(pair.receiver.socket)
    engines = [
        subprocess.Popen(
            [sys.executable, "-c", _ENGINES, *sockets, pair.address, name],
            env=clean_environment(pair.sender.socket.parent),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for name in ("one", "two")
    ]
    try:
        assert [engine.communicate(timeout=DEADLINE_S)[0] for engine in engines] == ["good\n"] * 2
    finally:
        for engine in engines:
            engine.kill()
            engine.communicate()


def test_arrays_travel_without_a_copy_of_their_own(pair: Pair) -> None:
    """What engines have is arrays: both ends see numpy's and torch's own types."""
    shape = (2, 8, 2048)
    sent = np.random.default_rng(1).standard_normal(shape, np.float32)[..., : CHUNK // 64].copy()
    chunks = np.ascontiguousarray(sent.reshape(-1)[: CHUNK // 4]), bytearray(b"b" * CHUNK), memoryview(b"m" * CHUNK)
    with (
        pair.prefill.open("arrays", receiver=pair.address, total_chunks=3) as transfer,
        transfer.stage([b"n", b"b", b"m"]) as slots,
    ):
        for slot, chunk in zip(slots, chunks, strict=True):
            assert slot is not None
            slot[:] = chunk
    with pair.decode.claim("arrays", 20) as claim:
        array = np.frombuffer(claim[0].view, np.float32)
        assert not array.flags.writeable
        assert np.array_equal(array, chunks[0])
        assert [claim[1].view[0], claim[2].view[0]] == [ord("b"), ord("m")]
        del array


def test_tensors_travel_without_a_copy_of_their_own(pair: Pair) -> None:
    """bfloat16 is what models compute in, and what neither numpy nor buffers know."""
    torch = pytest.importorskip("torch")
    tensor = torch.arange(CHUNK // 2, dtype=torch.float32).to(torch.bfloat16).reshape(2, -1)
    with (
        pair.prefill.open("tensor", receiver=pair.address, total_chunks=1) as transfer,
        transfer.stage([b"tensor"]) as slots,
    ):
        slot = next(slots)
        assert slot is not None
        slot[:] = tensor
    with pair.decode.claim("tensor", 20) as claim:
        copy = torch.frombuffer(bytearray(claim[0].view), dtype=torch.bfloat16).reshape(2, -1)
        assert torch.equal(copy, tensor)
