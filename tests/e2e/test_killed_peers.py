"""Processes that are killed in the middle of something: what they held comes back, and everybody else goes on."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transports.marks import needs_ucx_py

from kvpd.errors import ErrorCode, TransferError, TransferFailed

from .daemons import DEADLINE_S, Fleet, clean_environment
from .payloads import make_request, move, receive, send, stage

_PREFILL = """
import sys
import kvpd.client
_, path, receiver = sys.argv
with kvpd.client.connect_sender(path) as link:
    with link.open("filling", receiver=receiver, total_chunks=8) as transfer:
        with transfer.stage([b"a", b"b"]) as slots:
            for slot in slots:
                slot[:] = bytes(link.chunk_bytes)
        with transfer.stage([b"c", b"d"]) as slots:
            next(slots).view[:8] = b"half-way"
            print("there", flush=True)
            sys.stdin.read()
"""

_DECODE = """
import sys
import kvpd.client
with kvpd.client.connect_receiver(sys.argv[1]) as link:
    with link.claim("held", timeout=20) as chunks:
        print("there", flush=True)
        sys.stdin.read()
"""


@contextlib.contextmanager
def engine(program: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """An engine in a process of its own that has come to where it says so. Leaving kills it."""
    with subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)],
        env=clean_environment(Path("/tmp")),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "there\n"
            yield process
        finally:
            process.kill()
            process.wait(DEADLINE_S)


def test_a_killed_sender_gives_back_all_that_it_held(fleet: Fleet) -> None:
    """On one host its death is the fence; the lease is not waited for."""
    receiver, sender = fleet.pair({"lease_s": 600})
    request = make_request("cut", 8)
    with (  # noqa: PT012  leaving the transfer raises
        sender.sender_link() as prefill,
        pytest.raises(TransferFailed) as error,
        prefill.open("cut", receiver=receiver.address, total_chunks=8) as transfer,
    ):
        stage(transfer, request, 0, 4)
        receiver.wait_for("chunks_written")
        with transfer.stage(request.keys[4:8]) as slots:
            for slot, chunk in zip(slots, request.chunks[4:8], strict=True):
                assert slot is not None
                slot[:] = chunk
            assert receiver.slots() == {"ready": 4, "writing": 4, "free": 8}
            sender.kill()
            receiver.wait_quiet()
    assert error.value.code is ErrorCode.PEER_LOST
    assert receiver.slots() == {"free": 16}
    (revoked,) = receiver.said("transfer_revoked")
    assert (revoked["reason"], revoked["req_id"], revoked["quarantined"]) == ("peer_lost", "cut", 4)
    assert receiver.said("transfer_fenced", slots=4)
    assert receiver.said("session_ended", code="peer_lost")
    move(make_request("after", 16), fleet.sender("other"), receiver)
    move(make_request("again", 16), fleet.sender(), receiver)  # the same name, another incarnation


@pytest.mark.parametrize("transport", ["ucx", pytest.param("ucx-py", marks=needs_ucx_py)])
@pytest.mark.parametrize("tls", ["", "tcp"], ids=["cma", "tcp"])
def test_a_killed_receiver_costs_its_requests_and_nothing_else(fleet: Fleet, transport: str, tls: str) -> None:
    """The sender serves other receivers too, and this one again as soon as it is back at its address.

    Where errors are not handled, through either binding, UCX aborts the sender's process along with its peer.
    """
    common: dict[str, Any] = {"transport": transport, "ucx_tls": tls}
    short: dict[str, Any] = {"lease_s": 2, "put_deadline_s": 0.8}
    receiver, sender = fleet.pair({**common, **short}, common)
    address = receiver.address
    request = make_request("cut", 8)
    with sender.sender_link() as prefill:
        with (  # noqa: PT012  the first call to notice raises
            pytest.raises(TransferFailed) as error,
            prefill.open("cut", receiver=address, total_chunks=8) as transfer,
        ):
            stage(transfer, request, 0, 4)
            receiver.wait_for("chunks_written")
            receiver.kill()
            stage(transfer, request, 4, 4)
        assert error.value.code in (ErrorCode.PEER_LOST, ErrorCode.TRANSPORT_FAILED)
        assert sender.wait_for("transfer_failed", req_id="cut")["detail"]
        assert sender.get("/readyz")[0] == 200
        again = fleet.receiver(control_address=address, **common, **short).wait_ready()
        move(make_request("after", 8), sender, again)
    again.wait_quiet()
    assert again.slots() == {"free": 16}
    sender.stop()


def test_a_killed_prefill_engine_gives_back_staging_and_room(fleet: Fleet) -> None:
    """It dies half-way through a slot: what it wrote must reach nobody."""
    receiver, sender = fleet.pair({"slots": 8}, {"slots": 4})
    with engine(_PREFILL, sender.socket, receiver.address) as prefill:
        receiver.wait_for("chunks_written")
        assert receiver.slots() == {"ready": 2, "writing": 2, "reserved": 4}
        prefill.kill()
        sender.wait_for("transfer_cancelled", req_id="filling")
        receiver.wait_quiet()
    assert receiver.slots() == {"free": 8}
    move(make_request("after", 8), sender, receiver)


def test_a_claim_returns_once_when_its_engine_is_killed(fleet: Fleet) -> None:
    """Another engine may read it then; a request whose readers die one after another must not stay for ever."""
    receiver, sender = fleet.pair()
    request = make_request("held", 3)
    with sender.sender_link() as prefill, receiver.receiver_link() as decode:
        send(prefill, request, receiver.address)
        with engine(_DECODE, receiver.socket) as first:
            with pytest.raises(TransferError) as error, decode.claim("held", 20):
                pass
            assert error.value.code is ErrorCode.CLAIMED
            first.kill()
            receiver.wait_for("claim_returned", req_id="held")
        assert receive(decode, "held") == request.hashes
        send(prefill, request, receiver.address)
        for _ in range(2):
            with engine(_DECODE, receiver.socket) as reader:
                reader.kill()
                reader.wait(DEADLINE_S)
        receiver.wait_until(lambda: len(receiver.said("transfer_released")) == 2, "an end of the second request")
        assert len(receiver.said("claim_returned")) == 2
    assert receiver.slots() == {"free": 16}
