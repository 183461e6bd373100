"""Daemons whose transport is ucx-py: alone, beside daemons with kvpd's own binding, and where it is not installed."""

from __future__ import annotations

from pathlib import Path

import pytest
from transports.marks import needs_ucx_py

from .daemons import Fleet
from .payloads import make_request, move

_CHUNKS = 12  # more than the sender's staging buffer holds
tls_of = pytest.mark.parametrize("tls", ["", "tcp"], ids=["cma", "tcp"])


def test_a_daemon_without_ucx_py_says_where_to_get_it(fleet: Fleet, tmp_path: Path) -> None:
    """At its start, not when the first request comes."""
    (tmp_path / "ucp.py").write_text("raise ModuleNotFoundError('not here')\n")
    settings = {"chunk_bytes": 65536, "buffer_size": 1 << 20, "control_address": "127.0.0.1:0", "transport": "ucx-py"}
    daemon = fleet.start("receiver", "r", settings, environment={"PYTHONPATH": str(tmp_path)})
    assert daemon.wait() == 2
    assert "kvpd[ucx-py]" in daemon.text
    assert "Traceback" not in daemon.text


@needs_ucx_py
@tls_of
@pytest.mark.parametrize(("there", "here"), [("ucx-py", "ucx-py"), ("ucx", "ucx-py"), ("ucx-py", "ucx")])
def test_requests_move_whatever_binding_either_side_has(fleet: Fleet, there: str, here: str, tls: str) -> None:
    """And both end cleanly: ucx-py closes at the interpreter's exit what is open then."""
    receiver, sender = fleet.pair({"transport": there, "ucx_tls": tls}, {"transport": here, "ucx_tls": tls})
    for number in range(3):
        move(make_request(f"request-{number}", _CHUNKS), sender, receiver)
    receiver.wait_quiet()
    assert receiver.slots() == {"free": 16}
    assert f"transport={there}" in "".join(receiver.metrics())
    sender.stop()
    receiver.stop()


@needs_ucx_py
@tls_of
def test_a_session_that_is_over_leaves_no_descriptor(fleet: Fleet, tls: str) -> None:
    """Each holds a worker, an epoll set and an eventfd of its own."""
    receiver = fleet.receiver(transport="ucx-py", ucx_tls=tls).wait_ready()
    descriptors = []
    for number in range(3):
        sender = fleet.sender(f"sender-{number}", transport="ucx-py", ucx_tls=tls).wait_ready()
        move(make_request(f"request-{number}", _CHUNKS), sender, receiver)
        receiver.wait_quiet()
        sender.stop()
        receiver.wait_for("session_ended", count=number + 1)
        receiver.get("/livez")  # answered by the loop, so that the step whose log line was seen has ended
        descriptors.append(receiver.descriptors())
    assert descriptors[-1] <= descriptors[0]
