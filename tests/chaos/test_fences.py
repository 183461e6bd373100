"""The fences, by experiment with real processes: what stops a write that is under way, and what does not."""

from __future__ import annotations

import contextlib
import json
import mmap
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest
import trio
from e2e.daemons import Daemon, Fleet
from e2e.payloads import make_request, receive, send, stage

from kvpd.errors import ErrorCode, TransferFailed
from kvpd.transports.base import Target
from kvpd.transports.ucx import open_ucx_data_plane

pytestmark = pytest.mark.timeout(300)  # seconds; a machine may be busy
BUFFER: Final = 192 << 20
PIECE: Final = 1 << 20  # of what tests/chaos/late_writer.py writes
DEADLINE_S: Final = 60.0
SHORT: Final[dict[str, Any]] = {"lease_s": 1.0, "put_deadline_s": 0.4}
TLS = pytest.mark.parametrize("tls", ["", "tcp"], ids=["cma", "tcp"])


class LateWriter:
    """tests/chaos/late_writer.py, and what it says."""

    def __init__(self, process: trio.Process) -> None:
        self._process = process
        self._heard = b""

    async def says(self) -> str:
        """Its next line."""
        assert self._process.stdout is not None
        while b"\n" not in self._heard:
            data = await self._process.stdout.receive_some()
            assert data, "it ended without a word"
            self._heard += data
        line, _, self._heard = self._heard.partition(b"\n")
        return line.decode()


@asynccontextmanager
async def late_writer(target: Target, tls: str, does: str) -> AsyncIterator[LateWriter]:
    """A process that writes into the target; `does` as tests/chaos/late_writer.py says."""
    region = {
        "worker": target.worker_address.hex(),
        "base": target.base_address,
        "length": target.length,
        "rkey": target.rkey.hex(),
    }
    program = str(Path(__file__).with_name("late_writer.py"))
    command = [sys.executable, program, json.dumps(region), tls, does]
    process = await trio.lowlevel.open_process(command, stdout=subprocess.PIPE)
    try:
        yield LateWriter(process)
    finally:
        with trio.CancelScope(shield=True):
            process.kill()
            await process.wait()
            assert process.stdout is not None
            await process.stdout.aclose()


def pages_written(buffer: mmap.mmap) -> int:
    """How many pages hold what the writer writes; the last piece behind a fence is of another kind."""
    return sum(buffer[offset] == 2 for offset in range(0, BUFFER, mmap.PAGESIZE))


async def test_over_tcp_nothing_lands_after_the_worker_is_destroyed() -> None:
    """Fault 12, and what a receiver on another host relies on when it ends a session."""
    buffer = mmap.mmap(-1, BUFFER)
    with trio.fail_after(DEADLINE_S):
        async with open_ucx_data_plane(buffer, tls="tcp") as plane:
            target = await plane.open_target()
            async with late_writer(target, "tcp", "write") as writer:
                assert await writer.says() == "begun"
                target.close()
                written = pages_written(buffer)
                assert 0 < written < BUFFER // mmap.PAGESIZE, "it was cut off in the middle"
                _, landed, batches = (await writer.says()).split()
                assert int(landed) < int(batches), "the writer learns that its bytes went nowhere"
                assert pages_written(buffer) == written


async def test_over_tcp_everything_lands_while_the_worker_lives() -> None:
    """The other half of the experiment: it is the worker's end that stopped it, and nothing else."""
    buffer = mmap.mmap(-1, BUFFER)
    with trio.fail_after(DEADLINE_S):
        async with open_ucx_data_plane(buffer, tls="tcp") as plane:
            target = await plane.open_target()
            async with late_writer(target, "tcp", "write") as writer:
                assert await writer.says() == "begun"
                _, landed, batches = (await writer.says()).split()
                assert landed == batches
                assert pages_written(buffer) == BUFFER // mmap.PAGESIZE


async def test_over_cma_nothing_lands_after_the_writer_has_seen_its_puts_end() -> None:
    """Fault 12 on one host: no worker's end stops a CMA write, so `puts_ended` of a sender's next Hello is the fence.

    The worker lives on. A write that comes later, through it, shows that the way was open all the time.
    """
    buffer = mmap.mmap(-1, BUFFER)
    with trio.fail_after(DEADLINE_S):
        async with open_ucx_data_plane(buffer) as plane:
            target = await plane.open_target()
            async with late_writer(target, "", "fence") as writer:
                assert await writer.says() == "begun"
                assert await writer.says() == "fenced"
                written = pages_written(buffer)
                assert 0 < written < (BUFFER - PIECE) // mmap.PAGESIZE, "it was cut off in the middle"
                assert await writer.says() == "ended"
                assert buffer[BUFFER - PIECE :] == b"\x03" * PIECE
                assert pages_written(buffer) == written


@contextlib.contextmanager
def stopped_in_the_middle(receiver: Daemon, sender: Daemon) -> Iterator[None]:
    """A sender that is stopped while four chunks of a request have landed and four more may be written at any time."""
    request = make_request("cut", 8)
    with (  # noqa: PT012  leaving the transfer raises
        pytest.raises(TransferFailed) as error,
        sender.sender_link() as prefill,
        prefill.open("cut", receiver=receiver.address, total_chunks=8) as transfer,
    ):
        stage(transfer, request, 0, 4)
        receiver.wait_for("chunks_written")
        with transfer.stage(request.keys[4:]) as slots:
            for slot, chunk in zip(slots, request.chunks[4:], strict=True):
                assert slot is not None
                slot[:] = chunk
            assert receiver.slots() == {"ready": 4, "writing": 4, "free": 8}
            sender.signal(signal.SIGSTOP)
            receiver.wait_for("session_ended", code="peer_lost")
            assert receiver.slots() == {"quarantined": 4, "free": 12}
            yield
    assert error.value.code is ErrorCode.PEER_LOST


def serve_others(receiver: Daemon, other: Daemon) -> None:
    """Requests that take much longer than a lease, and would fill every slot that is given out again."""
    with other.sender_link() as prefill, receiver.receiver_link() as decode:
        for number in range(12):
            request = make_request(f"after-{number}", 12)
            send(prefill, request, receiver.address)
            assert receive(decode, request.req_id) == request.hashes


@TLS
def test_a_stopped_sender_on_this_host_keeps_its_slots_until_it_dies(fleet: Fleet, tls: str) -> None:
    """When it goes on, its kernel may still write: no lease is long enough. Others use the rest of the room."""
    receiver, sender = fleet.pair({"ucx_tls": tls, **SHORT}, {"ucx_tls": tls})
    other = fleet.sender("other", ucx_tls=tls).wait_ready()
    with stopped_in_the_middle(receiver, sender):
        serve_others(receiver, other)
        assert receiver.slots() == {"quarantined": 4, "free": 12}
        sender.kill()
        receiver.wait_quiet()
    assert receiver.slots() == {"free": 16}


@TLS
def test_a_sender_that_goes_on_after_its_lease_puts_nothing_more(fleet: Fleet, tls: str) -> None:
    """It fences itself before anything else, opens a new session, and works again without a restart."""
    receiver, sender = fleet.pair({"ucx_tls": tls, **SHORT}, {"ucx_tls": tls})
    other = fleet.sender("other", ucx_tls=tls).wait_ready()
    with stopped_in_the_middle(receiver, sender):
        sender.signal(signal.SIGCONT)
        sender.wait_for("transfer_failed", req_id="cut")
    serve_others(receiver, other)
    serve_others(receiver, sender)
    receiver.wait_quiet()
    assert receiver.slots() == {"free": 16}
