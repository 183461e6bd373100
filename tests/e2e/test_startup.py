"""How a daemon begins: all or nothing, and what it says of itself is true."""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from .daemons import DEADLINE_S, Daemon, Fleet
from .payloads import make_request, receive, send


@pytest.fixture
def taken_port() -> Iterator[int]:
    """A port on which somebody else listens."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield int(other.getsockname()[1])


def refused(daemon: Daemon) -> str:
    """What a daemon said that did not start, and left nothing behind."""
    assert daemon.wait() == 2
    assert not daemon.socket.exists()
    return daemon.text


def failed(daemon: Daemon) -> str:
    """Why a daemon could not start; its last line says so, and nothing was left behind."""
    assert daemon.wait() == 1
    assert not daemon.socket.exists()
    assert not daemon.said("ready")
    (line,) = daemon.said("start_failed")
    assert line["log.level"] == "error"
    return str(line["detail"])


def test_a_bad_configuration_is_refused_whole_before_anything_starts(fleet: Fleet) -> None:
    """Who fixes one problem must not find the next one only at the next start."""
    text = refused(
        fleet.receiver(buffer_size="4KiB", lease_s=5, put_deadline_s=4, pool_sise=1, control_address="0.0.0.0:0")
    )
    assert "4 problems" in text
    for part in ("buffer_size", "65536", "put_deadline_s", "pool_sise", "advertise_address"):
        assert part in text
    assert "Traceback" not in text


def test_every_address_that_ready_names_is_bound(fleet: Fleet) -> None:
    """With port 0 there is no other way to learn them."""
    address_file = fleet.folder / "addresses.json"
    receiver = fleet.start(
        "receiver",
        "r",
        {"buffer_size": "1MiB", "chunk_bytes": "64KiB", "control_address": "tcp://127.0.0.1:0"},
        options=["--address-file", str(address_file)],
    ).wait_ready()
    ready = receiver.wait_for("ready")
    assert ready["pid"] == receiver.pid
    assert ready["memory_bytes"] == 1 << 20
    assert ready["huge_page_bytes"] in range(ready["memory_bytes"] + 1)
    for key in ("control_address", "metrics_address"):
        host, _, port = ready[key].rpartition(":")
        assert (host, int(port) > 0) == ("127.0.0.1", True)
        socket.create_connection((host, int(port)), DEADLINE_S).close()
    assert Path(ready["engine_socket"]).is_socket()
    names = ("control_address", "metrics_address", "engine_socket")
    assert json.loads(address_file.read_bytes()) == {name: ready[name] for name in names}


def test_an_address_file_that_cannot_be_written_is_refused(fleet: Fleet) -> None:
    """Whoever waits for the file would wait for ever."""
    receiver = fleet.start(
        "receiver",
        "r",
        {"buffer_size": "1MiB", "chunk_bytes": "64KiB", "control_address": "127.0.0.1:0"},
        options=["--address-file", str(fleet.folder / "none" / "addresses.json")],
    )
    assert "none/addresses.json cannot be written" in refused(receiver)


def test_a_taken_control_port_is_named(fleet: Fleet, taken_port: int) -> None:
    """The other daemon of the same name, most likely."""
    detail = failed(fleet.receiver(control_address=f"127.0.0.1:{taken_port}"))
    assert f"127.0.0.1:{taken_port}" in detail
    assert "in use" in detail


def test_a_taken_metrics_port_is_named(fleet: Fleet, taken_port: int) -> None:
    """P90's other half: a daemon that serves without being seen looks like one that is down."""
    receiver = fleet.start(
        "receiver",
        "r",
        {"buffer_size": "1MiB", "chunk_bytes": "64KiB", "control_address": "127.0.0.1:0"},
        options=["--set", f"metrics.address=127.0.0.1:{taken_port}"],
    )
    detail = failed(receiver)
    assert f"metrics.address = 127.0.0.1:{taken_port}" in detail
    assert "in use" in detail


def test_metrics_may_be_off(fleet: Fleet) -> None:
    """Not every site wants one more port."""
    sender = fleet.start(
        "sender", "s", {"staging_size": "1MiB", "chunk_bytes": "64KiB"}, options=["--set", "metrics.address=off"]
    ).wait_ready()
    assert sender.wait_for("ready")["metrics_address"] == "off"
    sender.stop()


def test_a_socket_on_which_a_daemon_listens_is_refused(fleet: Fleet) -> None:
    """A second daemon must not take the first one's engines."""
    first = fleet.sender("s").wait_ready()
    second = fleet.sender("s")
    assert second.wait() == 2
    assert "a daemon listens there already" in second.text
    first.sender_link().close()  # it is still there
    first.stop()


def test_a_file_that_is_no_socket_is_left_alone(fleet: Fleet) -> None:
    """A wrong path must cost nobody a file."""
    (fleet.folder / "s.sock").write_text("precious")
    sender = fleet.sender("s")
    assert sender.wait() == 2
    assert "is no socket" in sender.text
    assert (fleet.folder / "s.sock").read_text() == "precious"


def test_systemd_is_told(fleet: Fleet) -> None:
    """Type=notify: whoever depends on the daemon starts when it serves, not when it was started."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
        notify.bind(str(fleet.folder / "notify"))
        notify.settimeout(DEADLINE_S)
        sender = fleet.start(
            "sender",
            "s",
            {"staging_size": "1MiB", "chunk_bytes": "64KiB"},
            environment={"NOTIFY_SOCKET": str(fleet.folder / "notify")},
        )
        assert notify.recv(64) == b"READY=1"
        sender.wait_ready().stop()
        assert notify.recv(64) == b"STOPPING=1"


def test_p84_a_daemon_serves_without_anybody_to_read_its_log(fleet: Fleet) -> None:
    """Another project hung or ran depending on its log level: who logs must not need a reader."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
        notify.bind(str(fleet.folder / "notify"))
        notify.settimeout(DEADLINE_S)
        address_file = fleet.folder / "addresses.json"
        receiver = fleet.start(
            "receiver",
            "r",
            {"buffer_size": "1MiB", "chunk_bytes": "64KiB", "control_address": "127.0.0.1:0"},
            options=["--log-level", "debug", "--address-file", str(address_file)],
            environment={"NOTIFY_SOCKET": str(fleet.folder / "notify")},
            before="os.close(2)",
            stderr=subprocess.DEVNULL,
        )
        notify.recv(64)
    sender = fleet.sender().wait_ready()
    request = make_request("unseen", 3)
    with sender.sender_link() as prefill, receiver.receiver_link() as decode:
        send(prefill, request, json.loads(address_file.read_bytes())["control_address"])
        assert receive(decode, "unseen") == request.hashes
    receiver.stop()
