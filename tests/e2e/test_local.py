"""A receiver with transport = "local": prefill engines of its host fill its slots themselves, in real processes.

A slot that somebody might still write is given to nobody, whoever of the three is killed, stopped or restarted.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from kvpd.errors import ErrorCode, TransferFailed

from .daemons import DEADLINE_S, Daemon, Fleet, clean_environment
from .payloads import make_request, receive, send
from .test_ranks import ODD, RANKS, move_all_ranks, parts

LOCAL: Final[dict[str, Any]] = {"transport": "local"}
SHORT: Final[dict[str, Any]] = {"lease_s": 1.0, "put_deadline_s": 0.3}

# It asks for four slots, and does with them what it is told: to write into them, to hold arrays of them, to leave.
_FILLER = """
import sys
import kvpd.client
import kvpd.errors
import numpy
_, path, receiver, req_id = sys.argv
link = kvpd.client.connect_sender(path)
try:
    with link.open(req_id, receiver=receiver, total_chunks=6) as transfer:
        with transfer.stage([b"%d of %s" % (n, req_id.encode()) for n in range(4)]) as slots:
            views = [slot.view for slot in slots]
            print("there", flush=True)
            for line in sys.stdin:
                match line.strip():
                    case "write":
                        for view in views:
                            view[:] = bytes([0xEE]) * len(view)
                    case "hold":
                        arrays = [numpy.frombuffer(view, numpy.uint8) for view in views]
                    case "leave":
                        break
                print("done", flush=True)
        raise SystemExit("it had not failed before")
except kvpd.errors.TransferError:
    del views
    print("left", flush=True)
for line in sys.stdin:
    if line.strip() == "close":
        link.close()
    print("done", flush=True)
"""


class Filler:
    """An engine in a process of its own that has four slots of a request of six chunks, and writes into none yet."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def told(self, word: str) -> str:
        """What it says when it has done this."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait(DEADLINE_S)


@contextlib.contextmanager
def filler(sender: Daemon, receiver: Daemon, req_id: str = "filling") -> Iterator[Filler]:
    """A Filler, as far as it says so. Leaving kills it."""
    with subprocess.Popen(
        [sys.executable, "-c", _FILLER, str(sender.socket), receiver.address, req_id],
        env=clean_environment(Path("/tmp")),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "there\n"
            yield Filler(process)
        finally:
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait(DEADLINE_S)


def local_pair(fleet: Fleet, *, slots: int = 16, **settings: Any) -> tuple[Daemon, Daemon]:
    """Both daemons, for engines that fill in place: the receiver alone is told."""
    return fleet.pair({"slots": slots, **LOCAL, **settings}, {"slots": 2})


def serve_others(receiver: Daemon, sender: Daemon, chunks: int = 12, count: int = 8) -> None:
    """Requests that would soon be given every slot there is, through engines of their own."""
    with sender.sender_link() as prefill, receiver.receiver_link() as decode:
        for number in range(count):
            request = make_request(f"other-{sender.name}-{number}", chunks)
            send(prefill, request, receiver.address)
            assert receive(decode, request.req_id) == request.hashes


def shared_mappings() -> int:
    """How many receivers' memories this process has mapped to write into."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum("memfd:kvpd-receiver" in line and " rw-s " in line for line in lines)


# ---------------------------------------------------------------------- what arrives


def test_every_byte_arrives_without_being_staged_or_put(fleet: Fleet) -> None:
    """A batch much larger than the staging buffer comes in one piece; a short last chunk, and chunks that are there."""
    receiver, sender = local_pair(fleet, slots=24)
    request, again = make_request("r", 11, last_chunk_bytes=13), make_request("r", 11, last_chunk_bytes=13)
    with sender.sender_link() as prefill, receiver.receiver_link() as decode:
        send(prefill, request, receiver.address, batch=6)
        with decode.claim("r", 20) as chunks:
            send(prefill, again, receiver.address)
            assert [bytes(chunk.view) for chunk in chunks] == list(request.chunks)
        assert receive(decode, "r") == request.hashes
    receiver.wait_quiet()
    assert receiver.slots() == {"free": 24}
    sender.wait_for("session_opened", way="local")
    assert [line["chunks"] for line in sender.said("piece_filled")] == [6, 5]
    assert not sender.said("piece_written")
    metrics = sender.metrics()
    assert metrics["kvpd_filled_bytes_total"] == request.nbytes
    assert metrics["kvpd_put_bytes_total"] == 0


def test_every_rank_fills_its_own_window(fleet: Fleet) -> None:
    """The same slots, in the window of each rank; more requests than fit at once."""
    common = {"ranks": RANKS, "chunk_bytes": ODD}
    receiver, sender = fleet.pair({"slots": 8, **common, **LOCAL}, {"slots": 3, **common})
    requests = [parts(f"r{n}", 7, last=13) for n in range(4)]

    move_all_ranks(sender, receiver, requests)
    receiver.wait_quiet()
    assert receiver.slots() == {"free": 8}
    assert {line["rank"] for line in sender.said("piece_filled")} == {0, 1}


@pytest.mark.parametrize(
    ("receiver_has", "sender_has"),
    [
        pytest.param({}, {}, id="receiver offers nothing"),
        pytest.param(LOCAL, {"transport": "ucx"}, id="sender wants none"),
        pytest.param({**LOCAL, "verify": "crc32c"}, {}, id="chunks are verified"),
    ],
)
def test_what_is_not_shared_is_put(fleet: Fleet, receiver_has: dict[str, Any], sender_has: dict[str, Any]) -> None:
    """The receiver must offer it, the sender can do without, and nobody could verify what an engine wrote by itself."""
    receiver, sender = fleet.pair({**receiver_has}, {**sender_has})
    request = make_request("r", 5)
    with sender.sender_link() as prefill, receiver.receiver_link() as decode:
        send(prefill, request, receiver.address)
        assert receive(decode, "r") == request.hashes
    assert sender.said("piece_written")
    assert not sender.said("piece_filled")
    assert sender.wait_for("session_opened")["way"] != "local"


def test_memory_that_cannot_be_had_fails_the_request_and_says_what_to_do(fleet: Fleet) -> None:
    """An engine in another container sees another file system than its sender."""
    receiver, sender = local_pair(fleet)
    with sender.sender_link() as prefill, filler(sender, receiver, "first"):  # the session is there
        hidden = receiver.socket.rename(receiver.socket.with_suffix(".hidden"))
        with pytest.raises(TransferFailed, match=r"receiver\.sock .*run this engine on the receiver's host") as error:
            send(prefill, make_request("r", 2), receiver.address)
        assert error.value.code is ErrorCode.TRANSPORT_FAILED
        hidden.rename(receiver.socket)
        send(prefill, make_request("r2", 2), receiver.address)
    with receiver.receiver_link() as decode:
        assert receive(decode, "r2") == make_request("r2", 2).hashes
    receiver.wait_quiet()
    assert receiver.slots() == {"free": 16}


# ---------------------------------------------------------------------- cancels


def test_a_cancel_waits_for_the_engine_that_fills(fleet: Fleet) -> None:
    """It is told at once; its slots are free when it has left, and not before."""
    receiver, sender = local_pair(fleet)
    with filler(sender, receiver) as engine:
        with receiver.receiver_link() as decode:
            decode.cancel("filling")
        sender.wait_for("transfer_cancelled")
        assert receiver.slots() == {"quarantined": 4, "free": 12}
        assert engine.told("write") == "done"
        assert engine.told("leave") == "left"
        receiver.wait_quiet()
    assert receiver.slots() == {"free": 16}
    assert not receiver.said("session_ended")


@pytest.mark.parametrize("end", ["leaves", "dies"])
def test_an_engine_that_hangs_while_it_fills_costs_its_own_slots_and_nobody_else(fleet: Fleet, end: str) -> None:
    """The receiver hears in time that the request is over, in a session that goes on; only the slots wait."""
    receiver, sender = local_pair(fleet, **SHORT)
    with filler(sender, receiver) as engine:
        with receiver.receiver_link() as decode:
            engine.process.send_signal(signal.SIGSTOP)
            with sender.sender_link() as prefill:
                prefill.cancel("filling")
            receiver.wait_for("transfer_revoked", req_id="filling", quarantined=4)
            assert receiver.slots() == {"quarantined": 4, "free": 12}
            serve_others(receiver, sender)
            decode.cancel("filling")  # harmless
        assert receiver.slots() == {"quarantined": 4, "free": 12}
        if end == "dies":
            engine.kill()
        else:
            engine.process.send_signal(signal.SIGCONT)
            assert engine.told("write") == "done"
            assert receiver.slots() == {"quarantined": 4, "free": 12}
            assert engine.told("leave") == "left"
        receiver.wait_quiet()
    assert receiver.slots() == {"free": 16}
    assert not receiver.said("session_ended")
    assert len(receiver.said("session_opened")) == 1


def test_a_killed_engine_ends_its_request_and_frees_its_slots(fleet: Fleet) -> None:
    """Its death is the fence, and the sender sees it."""
    receiver, sender = local_pair(fleet)
    with filler(sender, receiver) as engine:
        engine.kill()
        receiver.wait_quiet()
    assert receiver.slots() == {"free": 16}
    serve_others(receiver, sender)


# ---------------------------------------------------------------------- the sender dies, or loses its session


@pytest.mark.parametrize("end", ["leaves", "dies"])
def test_the_death_of_a_sender_is_no_fence_while_its_engine_has_the_memory(fleet: Fleet, end: str) -> None:
    """The engine lives on, and writes. Others fill the rest of the buffer meanwhile, and get what they sent."""
    receiver, sender = local_pair(fleet, **SHORT)
    other = fleet.sender("other").wait_ready()
    with filler(sender, receiver) as engine:
        sender.kill()
        receiver.wait_for("session_ended")
        assert receiver.slots() == {"quarantined": 4, "free": 12}
        serve_others(receiver, other)
        assert engine.told("write") == "done"
        serve_others(receiver, other)
        assert receiver.slots() == {"quarantined": 4, "free": 12}
        if end == "dies":
            engine.kill()
        else:
            assert engine.told("leave") == "left"
        receiver.wait_quiet()
        serve_others(receiver, other, chunks=16)
    assert receiver.slots() == {"free": 16}


def test_an_engine_whose_arrays_still_refer_to_the_memory_has_not_let_go(fleet: Fleet) -> None:
    """It left the transfer, and says nothing of the memory until it is unmapped: so its death is waited for."""
    receiver, sender = local_pair(fleet, **SHORT)
    with filler(sender, receiver) as engine:
        assert engine.told("hold") == "done"
        sender.kill()
        receiver.wait_for("session_ended")
        assert engine.told("leave") == "left"
        assert engine.told("close") == "done"
        receiver.wait_for("engine_left_holding_memory")
        assert receiver.slots() == {"quarantined": 4, "free": 12}
        engine.kill()
        receiver.wait_quiet()
    assert receiver.slots() == {"free": 16}


def test_an_idle_engine_does_not_delay_the_fence_of_a_dead_sender(fleet: Fleet) -> None:
    """It has the memory mapped and no slot of it: it lets go as soon as its sender is gone. No lease is waited for."""
    receiver, sender = local_pair(fleet, lease_s=600.0)
    request = make_request("before", 2)
    with sender.sender_link() as idle, receiver.receiver_link() as decode:
        send(idle, request, receiver.address)
        assert receive(decode, "before") == request.hashes
        with filler(sender, receiver) as engine:
            assert shared_mappings() == 1
            sender.kill()
            engine.kill()
            receiver.wait_for("transfer_fenced", req_id="filling", slots=4)
            assert shared_mappings() == 0
    assert receiver.slots() == {"free": 16}


def test_a_session_that_was_lost_while_an_engine_fills_gets_its_fence_later(fleet: Fleet) -> None:
    """The next session is opened all the same and serves; once the engine has left, a heartbeat says so."""
    receiver, sender = local_pair(fleet, **SHORT)
    with filler(sender, receiver) as engine:
        engine.process.send_signal(signal.SIGSTOP)
        sender.signal(signal.SIGSTOP)
        receiver.wait_for("session_ended")
        sender.signal(signal.SIGCONT)
        receiver.wait_for("session_opened", 2)
        serve_others(receiver, sender)
        assert receiver.slots() == {"quarantined": 4, "free": 12}
        engine.process.send_signal(signal.SIGCONT)
        assert engine.told("write") == "done"
        assert receiver.slots() == {"quarantined": 4, "free": 12}
        assert engine.told("leave") == "left"
        receiver.wait_quiet()
    assert receiver.slots() == {"free": 16}
    assert len(receiver.said("session_opened")) == 2


# ---------------------------------------------------------------------- the receiver restarts


def test_a_mapping_of_a_receiver_that_has_restarted_harms_nobody(fleet: Fleet) -> None:
    """An engine that still writes there writes into nothing; the next request goes into the new one's memory."""
    lease: dict[str, Any] = {"lease_s": 4.0, "put_deadline_s": 1.0}  # a starved machine is no dead one
    receiver, sender = local_pair(fleet, **lease)
    port = int(receiver.address.rpartition(":")[2])
    with sender.sender_link() as prefill, filler(sender, receiver) as engine:
        send(prefill, make_request("before", 2), receiver.address)
        receiver.kill()
        again = fleet.receiver(slots=16, control_address=f"127.0.0.1:{port}", **LOCAL, **lease).wait_ready()
        sender.wait_for("transfer_failed", req_id="filling")
        assert engine.told("write") == "done"
        for number in range(4):
            request = make_request(f"after-{number}", 16)
            send(prefill, request, again.address)
            with again.receiver_link() as decode:
                assert engine.told("write") in ("done", "left")
                assert receive(decode, request.req_id) == request.hashes
        assert shared_mappings() == 1
        engine.told("leave")
        again.wait_quiet()
        assert again.slots() == {"free": 16}
    assert shared_mappings() == 0


def test_a_decode_engine_cannot_write(fleet: Fleet) -> None:
    """What it maps is shared with others by dedupe; here the seal that forbids writing cannot be set."""
    receiver, sender = local_pair(fleet)
    request = make_request("r", 2)
    with sender.sender_link() as prefill, receiver.receiver_link() as decode:
        send(prefill, request, receiver.address)
        with decode.claim("r", 20) as chunks:
            assert not np.frombuffer(chunks[0].view, np.uint8).flags.writeable
