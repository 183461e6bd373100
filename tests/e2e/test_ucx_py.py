"""Daemons whose transport is ucx-py: alone, beside daemons with kvpd's own binding, and where it is not installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transports.ucx_modes import why_not_ucx_py

from kvpd.errors import ErrorCode, TransferFailed

from .daemons import Daemon, Fleet
from .payloads import make_request, receive, send, stage

needs_ucx_py = pytest.mark.skipif(bool(why_not_ucx_py()), reason=why_not_ucx_py())
tls_of = pytest.mark.parametrize("tls", ["", "tcp"], ids=["cma", "tcp"])


def move(sender: Daemon, receiver: Daemon, req_id: str) -> None:
    """A request through both daemons, larger than the sender's staging buffer."""
    request = make_request(req_id, 12)
    with sender.sender_link() as prefill, receiver.receiver_link() as decode:
        send(prefill, request, receiver.address)
        assert receive(decode, req_id) == request.hashes


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
        move(sender, receiver, f"request-{number}")
    receiver.wait_quiet()
    assert receiver.slots() == {"free": 16}
    assert f"transport={there}" in "".join(receiver.metrics())
    sender.stop()
    receiver.stop()


@needs_ucx_py
@tls_of
def test_a_killed_receiver_costs_its_requests_and_nothing_else(fleet: Fleet, tls: str) -> None:
    """UCX aborts the sender's process along with its peer where errors are not handled."""
    common: dict[str, Any] = {"transport": "ucx-py", "ucx_tls": tls}
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
    again = fleet.receiver(control_address=address, **common, **short).wait_ready()
    move(sender, again, "after")
    again.wait_quiet()
    assert again.slots() == {"free": 16}
    sender.stop()


@needs_ucx_py
@tls_of
def test_a_session_that_is_over_leaves_no_descriptor(fleet: Fleet, tls: str) -> None:
    """Each holds a worker, an epoll set and an eventfd of its own."""
    receiver = fleet.receiver(transport="ucx-py", ucx_tls=tls).wait_ready()
    descriptors = []
    for number in range(3):
        sender = fleet.sender(f"sender-{number}", transport="ucx-py", ucx_tls=tls).wait_ready()
        move(sender, receiver, f"request-{number}")
        receiver.wait_quiet()
        sender.stop()
        receiver.wait_for("session_ended", count=number + 1)
        receiver.get("/livez")  # answered by the loop, so that the step whose log line was seen has ended
        descriptors.append(receiver.descriptors())
    assert descriptors[-1] <= descriptors[0]
