"""Metrics, health and their server: telling of the work never harms the work."""

from __future__ import annotations

import http.client
import math
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import trio

from kvpd.errors import ErrorCode
from kvpd.metrics import Health, MetricsServer, ReceiverMetrics, SenderMetrics
from kvpd.metrics.recorders import LABEL_VALUES_MAX
from kvpd.metrics.server import CONNECTIONS_MAX

WAIT_S = 20.0
Fetch = Callable[[str], tuple[int, str]]


def fetch(address: str, path: str, method: str = "GET", headers: dict[str, str] | None = None) -> tuple[int, str]:
    """One request on a connection of its own."""
    connection = http.client.HTTPConnection(address, timeout=WAIT_S)
    try:
        connection.request(method, path, headers=headers or {})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


@pytest.fixture
def health() -> Health:
    """Nothing has started yet."""
    return Health()


@pytest.fixture
def metrics() -> ReceiverMetrics:
    """Nothing has happened yet."""
    return ReceiverMetrics(version="1.2.3", transport="ucx", log_lines_dropped=lambda: 7)


@pytest.fixture
def server(metrics: ReceiverMetrics, health: Health) -> Iterator[MetricsServer]:
    """On a port of the kernel's choice."""
    with MetricsServer("127.0.0.1:0", metrics, health) as serving:
        yield serving


# ------------------------------------------------------------------ recorders


def test_what_a_receiver_records_has_the_documented_names(metrics: ReceiverMetrics) -> None:
    """Dashboards are built on these."""
    metrics.admitted(0.25)
    metrics.rejected(ErrorCode.TOO_LARGE)
    metrics.revoked("no_progress")
    metrics.slots({"free": 3, "ready": 5})
    metrics.queue_depth.set(2)
    metrics.sessions.set(1)
    for tally in (metrics.batches, metrics.completed, metrics.claimed, metrics.released):
        tally.inc()
    metrics.message_dropped("malformed")
    metrics.peer_rejected(ErrorCode.PROTOCOL_VERSION)
    nonzero = {name: value for name, value in metrics.snapshot().items() if value}
    assert nonzero == {
        "kvpd_admissions_total": 1,
        "kvpd_admission_wait_seconds_count": 1,
        "kvpd_admission_wait_seconds_sum": 0.25,
        'kvpd_rejections_total{code="too_large"}': 1,
        'kvpd_revocations_total{reason="no_progress"}': 1,
        'kvpd_slots{state="free"}': 3,
        'kvpd_slots{state="ready"}': 5,
        "kvpd_queued_transfers": 2,
        "kvpd_sessions": 1,
        "kvpd_batches_total": 1,
        "kvpd_transfers_completed_total": 1,
        "kvpd_transfers_claimed_total": 1,
        "kvpd_transfers_released_total": 1,
        'kvpd_messages_dropped_total{reason="malformed"}': 1,
        'kvpd_peers_rejected_total{reason="protocol_version"}': 1,
        "kvpd_log_lines_dropped_total": 7,
    }


def test_what_a_sender_records_has_the_documented_names() -> None:
    """Two roles of one process keep registries of their own."""
    metrics = SenderMetrics()
    metrics.opened.inc()
    metrics.done.inc()
    metrics.failed(ErrorCode.PEER_LOST)
    metrics.put(0.5, 4096)
    metrics.staging_wait(0.125)
    metrics.staging(free=3, total=8)
    metrics.in_flight_bytes.set(10)
    metrics.notified("acknowledged")
    nonzero = {name: value for name, value in metrics.snapshot().items() if value}
    assert nonzero == {
        "kvpd_transfers_opened_total": 1,
        "kvpd_transfers_done_total": 1,
        'kvpd_transfers_failed_total{code="peer_lost"}': 1,
        "kvpd_batches_total": 1,
        "kvpd_put_seconds_count": 1,
        "kvpd_put_seconds_sum": 0.5,
        "kvpd_put_bytes_total": 4096,
        "kvpd_staging_wait_seconds_count": 1,
        "kvpd_staging_wait_seconds_sum": 0.125,
        'kvpd_staging_slots{state="free"}': 3,
        'kvpd_staging_slots{state="used"}': 5,
        "kvpd_in_flight_bytes": 10,
        'kvpd_notifications_total{outcome="acknowledged"}': 1,
    }


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1, -0.001, None, "many"])
def test_p85_a_sample_that_is_no_usable_number_is_dropped_and_counted(bad: float) -> None:
    """An assertion in a recorder once ended an engine's serving."""
    receiver, sender = ReceiverMetrics(), SenderMetrics()
    receiver.admitted(bad)
    receiver.queue_depth.set(bad)
    receiver.batches.inc(bad)
    sender.put(bad, 10)
    sender.staging_wait(bad)
    assert receiver.snapshot()["kvpd_samples_dropped_total"] == 3
    assert receiver.snapshot()["kvpd_admission_wait_seconds_count"] == 0
    assert sender.snapshot()["kvpd_samples_dropped_total"] == 2
    assert sender.snapshot()["kvpd_put_bytes_total"] == 10


def test_a_label_has_a_bounded_number_of_values() -> None:
    """Each value is a time series that the collector keeps."""
    metrics = ReceiverMetrics()
    for number in range(1000):
        metrics.message_dropped(f"reason-{number}")
    series = {name: value for name, value in metrics.snapshot().items() if name.startswith("kvpd_messages_dropped")}
    assert len(series) == LABEL_VALUES_MAX + 2  # `malformed` and `other`
    assert series['kvpd_messages_dropped_total{reason="other"}'] == 1000 - LABEL_VALUES_MAX


def test_a_slot_state_without_slots_is_zero(metrics: ReceiverMetrics) -> None:
    """A gauge that keeps its last value after the last slot left a state tells of a leak that is none."""
    metrics.slots({"quarantined": 2})
    metrics.slots({"free": 2})
    assert metrics.snapshot()['kvpd_slots{state="quarantined"}'] == 0


# ------------------------------------------------------------------ server


def test_metrics_are_served_as_prometheus_reads_them(server: MetricsServer, metrics: ReceiverMetrics) -> None:
    """In the old text form by default, in OpenMetrics where asked for."""
    metrics.admitted(0.25)
    status, text = fetch(server.address, "/metrics")
    assert status == 200
    assert "kvpd_admissions_total 1.0" in text
    assert 'kvpd_build_info{role="receiver",transport="ucx",version="1.2.3"} 1.0' in text
    assert 'kvpd_admission_wait_seconds_bucket{le="0.5"} 1.0' in text
    assert "kvpd_log_lines_dropped_total 7.0" in text
    assert "process_open_fds" in text
    assert "_created" not in text
    status, text = fetch(server.address, "/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    assert status == 200
    assert text.endswith("# EOF\n")


def test_names_follow_the_convention(metrics: ReceiverMetrics) -> None:
    """`kvpd_<subject>_<unit>`, and `_total` for what only grows."""
    for name in (*metrics.snapshot(), *SenderMetrics().snapshot()):
        assert re.fullmatch(r"kvpd(_[a-z]+)+(\{[a-z]+=\"[a-z_]+\"\})?", name)


def test_other_paths_and_methods_are_refused(server: MetricsServer) -> None:
    """With what there is, for who looks by hand."""
    status, text = fetch(server.address, "/")
    assert status == 404
    assert "/metrics" in text
    assert fetch(server.address, "/metrics", "POST")[0] == 501
    assert fetch(server.address, "/metrics", "HEAD") == (200, "")


def test_p90_a_port_in_use_is_an_error_that_names_it(
    server: MetricsServer, metrics: ReceiverMetrics, health: Health
) -> None:
    """Start-up is all or nothing, and says which of its ports was taken."""
    with pytest.raises(OSError, match=re.escape(f"metrics.address = {server.address}")):
        MetricsServer(server.address, metrics, health)


def test_p80_an_ipv6_address_is_served_and_shown_in_brackets(metrics: ReceiverMetrics, health: Health) -> None:
    """Clusters without IPv4 exist."""
    with MetricsServer("[::1]:0", metrics, health) as serving:
        assert serving.address.startswith("[::1]:")
        assert fetch(serving.address, "/metrics")[0] == 200


def test_closing_frees_the_port_and_may_be_repeated(metrics: ReceiverMetrics, health: Health) -> None:
    """The next start may want the same one."""
    serving = MetricsServer("127.0.0.1:0", metrics, health)
    assert fetch(serving.address, "/metrics")[0] == 200
    serving.close()
    serving.close()
    with MetricsServer(serving.address, metrics, health):
        pass


def test_closing_does_not_wait_for_who_is_connected_and_says_nothing(metrics: ReceiverMetrics, health: Health) -> None:
    """Shutdown has a deadline."""
    serving = MetricsServer("127.0.0.1:0", metrics, health)
    host, _, port = serving.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=WAIT_S):
        started = time.monotonic()
        serving.close()
        assert time.monotonic() - started < WAIT_S / 2


def test_idle_connections_take_a_bounded_number_of_threads(
    server: MetricsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one too many is closed, not kept waiting."""
    monkeypatch.setattr("kvpd.metrics.server._Handler.timeout", 10 * WAIT_S)  # so that only the bound closes any
    host, _, port = server.address.rpartition(":")
    held = [socket.create_connection((host, int(port)), timeout=WAIT_S) for _ in range(CONNECTIONS_MAX + 4)]
    try:
        # They are accepted in order, so the last ones find no place: they are closed, which reads as an end.
        assert all(connection.recv(1) == b"" for connection in held[CONNECTIONS_MAX:])
    finally:
        for connection in held:
            connection.close()


# ------------------------------------------------------------------ health


async def ask(server: MetricsServer, path: str) -> tuple[int, str]:
    """Ask from a thread, as a probe is outside the loop."""
    with trio.fail_after(WAIT_S):
        return await trio.to_thread.run_sync(partial(fetch, server.address, path))


async def test_readiness_needs_the_start_every_task_and_no_drain(server: MetricsServer, health: Health) -> None:
    """A dead long-lived task with a 200 beside it is how outages last."""
    health.attach_loop(trio.lowlevel.current_trio_token())
    assert await ask(server, "/readyz") == (503, "[-] started: not yet\nnot ready\n")
    with health.task("control"):
        health.mark_ready()
        assert bool(health.ready)
        assert await ask(server, "/readyz") == (200, "ok\n")
        _, text = await ask(server, "/readyz?verbose")
        assert "[+] task control: runs\n" in text
        assert text.endswith("ok\n")
        health.mark_draining()
        assert not bool(health.ready)
        assert await ask(server, "/readyz") == (503, "[-] accepting: draining\nnot ready\n")


async def test_p87_a_task_that_ended_takes_readiness_with_it_and_is_named(
    server: MetricsServer, health: Health
) -> None:
    """The process lives, its loop answers, and it can move nothing."""
    health.attach_loop(trio.lowlevel.current_trio_token())
    health.mark_ready()

    def die() -> None:
        with health.task("progress"):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        die()
    assert await ask(server, "/readyz") == (503, "[-] task progress: has ended\nnot ready\n")
    assert await ask(server, "/livez") == (200, "ok\n")


async def test_liveness_is_the_loop_s_own_answer(server: MetricsServer, health: Health) -> None:
    """It depends on nothing else: not on tasks, a drain, or peers."""
    health.attach_loop(trio.lowlevel.current_trio_token())
    health.task_started("control")
    health.task_ended("control")
    health.mark_draining()
    assert await ask(server, "/livez") == (200, "ok\n")
    assert await ask(server, "/healthz") == (200, "ok\n")


async def test_a_loop_that_is_stuck_is_not_alive(server: MetricsServer, health: Health) -> None:
    """The probe's thread answers for it, within a bound."""
    health.attach_loop(trio.lowlevel.current_trio_token())
    answers: list[tuple[int, str]] = []
    thread = threading.Thread(target=lambda: answers.append(fetch(server.address, "/livez")))
    thread.start()
    thread.join(WAIT_S)  # blocks the loop, which is the point
    assert answers == [(503, "the loop does not answer\n")]


def test_a_loop_that_has_ended_or_was_never_there_is_not_alive(server: MetricsServer, health: Health) -> None:
    """Before the start and after the end, there is nothing to wait for."""
    assert fetch(server.address, "/livez")[0] == 503

    async def attach() -> None:
        health.attach_loop(trio.lowlevel.current_trio_token())

    trio.run(attach)
    assert fetch(server.address, "/livez")[0] == 503
