"""How a daemon ends: it lets what runs finish, within its limit, and leaves nothing behind, whatever it was doing."""

from __future__ import annotations

import re
import signal
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvpd.errors import AdmissionRefused, ErrorCode, TransferError

from .conftest import CHUNK
from .daemons import Daemon, Fleet, in_background
from .payloads import make_request, receive, send, stage

SIGNALS = [signal.SIGTERM, signal.SIGINT]
NOBODY = "127.0.0.1:1"


def named_memory(daemon: Daemon) -> set[str]:
    """The names in shared memory that a daemon's mappings have or had: UCX makes some."""
    return set(re.findall(r"/dev/shm/(\S+)", Path(f"/proc/{daemon.pid}/maps").read_text()))


def test_p78_an_idle_daemon_ends_at_once_and_well(fleet: Fleet) -> None:
    """A rolling restart waits for every daemon; both signals take the same path."""
    for daemon, number in zip(fleet.pair(), SIGNALS, strict=True):
        assert daemon.children() == []
        began = time.monotonic()
        daemon.signal(number)
        assert daemon.wait() == 0
        assert time.monotonic() - began < 5  # drain_timeout_s is 10
        assert [line["message"] for line in daemon.lines[-3:]] == ["stop_requested", "drain_started", "stopped"]
        assert daemon.said("stop_requested", signal=number.name)
        assert not daemon.socket.exists()


def test_p78_a_running_transfer_may_finish_and_new_ones_are_refused(fleet: Fleet) -> None:
    """Who drains a host must lose no request on it."""
    receiver, sender = fleet.pair()
    request = make_request("running", 6)
    with sender.sender_link() as prefill, receiver.receiver_link() as decode:
        with prefill.open("running", receiver=receiver.address, total_chunks=6) as transfer:
            stage(transfer, request, 0, 3)
            for daemon in (sender, receiver):
                daemon.signal(signal.SIGTERM)
                daemon.wait_for("drain_started")
                status, text = daemon.get("/readyz")
                assert (status, text.splitlines()[0]) == (503, "[-] accepting: draining")
                assert daemon.get("/livez")[0] == 200
            with pytest.raises(AdmissionRefused) as refusal:
                send(prefill, make_request("late", 1), receiver.address)
            assert refusal.value.code is ErrorCode.DRAINING
            stage(transfer, request, 3, 3)
        assert receive(decode, "running") == request.hashes
        assert [sender.wait(), receiver.wait()] == [0, 0]
    assert not sender.said("drain_timed_out")
    assert not receiver.said("drain_timed_out")


def test_p78_what_never_finishes_is_cancelled_at_the_drain_timeout(fleet: Fleet) -> None:
    """An engine that hangs must not keep a host from being drained; whoever waits is told why it waits in vain."""
    receiver, sender = fleet.pair({"slots": 8}, {"drain_timeout_s": 0.3})
    ends: list[ErrorCode] = []

    def wait_for_room() -> None:
        with pytest.raises(TransferError) as error:
            send(prefill, make_request("waiting", 8), receiver.address)
        ends.append(error.value.code)

    with (  # noqa: PT012  leaving the transfer raises
        sender.sender_link() as prefill,
        pytest.raises(TransferError, match="draining"),
        prefill.open("stuck", receiver=receiver.address, total_chunks=6) as transfer,
    ):
        stage(transfer, make_request("stuck", 6), 0, 3)
        with in_background(wait_for_room):
            receiver.wait_for("transfer_queued", req_id="waiting")
            sender.signal(signal.SIGTERM)
            assert sender.wait() == 0
    assert ends == [ErrorCode.DRAINING]
    assert sender.said("drain_timed_out")
    receiver.wait_quiet()  # it was told, and has freed all
    assert receiver.slots() == {"free": 8}
    receiver.stop()


def test_p78_a_receiver_does_not_wait_for_a_reader_that_hangs(fleet: Fleet) -> None:
    """The claim is the engine's, the shutdown is the operator's."""
    receiver, sender = fleet.pair({"drain_timeout_s": 0.3})
    request = make_request("read", 2)
    with sender.sender_link() as prefill, receiver.receiver_link() as decode:
        send(prefill, request, receiver.address)
        with decode.claim("read", 20) as chunks:
            receiver.signal(signal.SIGTERM)
            assert receiver.wait() == 0
            assert bytes(chunks[0].view) == request.chunks[0]  # the memory lives as long as who reads it
    assert receiver.said("drain_timed_out")


def test_p78_a_second_signal_leaves_at_once(fleet: Fleet) -> None:
    """Whoever presses Ctrl-C twice means it; the status says that it was not a clean end."""
    daemons = fleet.pair({"drain_timeout_s": 600}, {"drain_timeout_s": 600})
    receiver, sender = daemons
    with (  # noqa: PT012  the first call to notice raises
        sender.sender_link() as prefill,
        pytest.raises(TransferError),
        prefill.open("held", receiver=receiver.address, total_chunks=4) as transfer,
    ):
        stage(transfer, make_request("held", 4), 0, 2)
        for daemon, second in zip(daemons, SIGNALS, strict=True):
            daemon.signal(signal.SIGTERM)
            daemon.wait_for("drain_started")
            daemon.signal(second)
            assert daemon.wait() == 128 + second
            assert daemon.said("drain_cut_short", signal=second.name)
            assert not daemon.socket.exists()
        stage(transfer, make_request("held", 4), 2, 2)


@pytest.mark.parametrize("number", SIGNALS)
def test_p78_a_signal_during_start_up_ends_it(fleet: Fleet, number: signal.Signals) -> None:
    """Preparing a large buffer takes minutes; nobody waits for them in order to stop."""
    receiver = fleet.receiver(buffer_size=(1 << 40) + 1, chunk_bytes="64MiB")
    receiver.wait_for("buffer_rounded_down")
    receiver.signal(number)
    assert receiver.wait() == 0
    assert not receiver.said("ready")
    assert receiver.said("stopped", exit_status=0)
    assert not receiver.socket.exists()


def test_p77_a_peer_that_is_not_there_does_not_keep_a_daemon_from_its_end(fleet: Fleet) -> None:
    """Messages that nobody takes, to a receiver and to a proxy, are queued when the signal comes."""
    receiver, sender = fleet.pair({}, {"drain_timeout_s": 0.3, "connect_timeout_s": 60})
    request = make_request("told-nobody", 1)
    with sender.sender_link() as prefill, receiver.receiver_link() as decode:
        with prefill.open("told-nobody", receiver=receiver.address, total_chunks=1, notify=NOBODY) as transfer:
            stage(transfer, request, 0, 1)
        assert receive(decode, "told-nobody") == request.hashes
        with in_background(lambda: _expect_failure(lambda: send(prefill, make_request("lost", 1), NOBODY))):
            sender.wait_for("transfer_opened", req_id="lost")
            assert sender.stop() < 10


def _expect_failure(work: Callable[[], None]) -> None:
    with pytest.raises(TransferError):
        work()


def test_p75_restarts_leave_nothing_behind(fleet: Fleet) -> None:
    """A named pool that a killed daemon left in shared memory kept another project's hosts from starting."""
    names: set[str] = set()
    for number in range(5):
        # The same names and so the same socket paths: a killed daemon's file must not be in the way of the next.
        receiver, sender = fleet.receiver("r"), fleet.sender("s")
        for daemon in (receiver, sender):
            daemon.wait_ready()
            assert stat.S_IMODE(daemon.socket.stat().st_mode) == 0o600
        with sender.sender_link() as prefill, receiver.receiver_link() as decode:
            send(prefill, make_request("again", 2), receiver.address)
            assert receive(decode, "again") == make_request("again", 2).hashes
        names |= named_memory(receiver) | named_memory(sender)
        killed, stopped = (receiver, sender) if number % 2 else (sender, receiver)
        killed.kill()
        assert killed.socket.exists()
        stopped.stop()
    assert not names & {path.name for path in Path("/dev/shm").iterdir()}


def test_p75_a_start_that_is_cut_short_leaves_nothing_behind(fleet: Fleet) -> None:
    """Whatever it was doing: nothing of the next start depends on how the last one ended."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGKILL):
        receiver = fleet.receiver("r", buffer_size=64 * CHUNK)
        receiver.signal(number)
        assert receiver.wait() in (0, 1, -number)  # 1: Ctrl-C before kvpd's own code has begun
        assert not receiver.socket.exists()
    fleet.receiver("r").wait_ready().stop()


def test_p75_the_memory_goes_with_its_last_holder(fleet: Fleet) -> None:
    """An engine may outlive its daemon, and its daemon it: nothing has a name that somebody must remember to remove."""
    sender = fleet.sender(slots=256, chunk_bytes=1 << 20).wait_ready()
    with sender.sender_link():
        sender.kill()
        assert not [path for path in Path("/dev/shm").iterdir() if "kvpd" in path.name]
        assert "kvpd-sender" in Path("/proc/self/maps").read_text()
    assert "kvpd-sender" not in Path("/proc/self/maps").read_text()
