"""What daemons tell: lines that a collector can read, numbers that add up, probes that are true."""

from __future__ import annotations

import datetime

import pytest

from kvpd.errors import AdmissionRefused, ErrorCode, TransferCancelled, TransferFailed

from .conftest import CHUNK, PAIR_SLOTS, Pair
from .daemons import Fleet
from .payloads import in_order, make_request, receive, send, stage


def test_the_life_of_a_transfer_is_told_in_order(pair: Pair) -> None:
    """Whoever has only the logs must be able to follow a request through both daemons."""
    request = make_request("told", 4)
    send(pair.prefill, request, pair.address, batch=2)
    assert receive(pair.decode, "told") == request.hashes
    released = pair.receiver.wait_for("transfer_released", req_id="told")
    story = [line for line in pair.receiver.lines if line.get("req_id") == "told"]
    told = [line["message"] for line in story]
    assert in_order(told, ["transfer_queued", "transfer_admitted", "batch_allocated", "chunks_written"])
    assert told[-3:] == ["transfer_completed", "transfer_claimed", "transfer_released"]
    assert (told.count("batch_allocated"), told.count("chunks_written"), len(told)) == (2, 2, 9)
    assert {line["transfer"] for line in story} == {released["transfer"]}
    assert {line["peer"] for line in story} == {released["peer"]}
    assert (story[0]["waits"], story[0]["log.level"]) == (False, "debug")
    assert story[1]["queued_s"] >= 0
    assert story[-3]["bytes"] == request.nbytes
    done = pair.sender.wait_for("transfer_done", req_id="told")
    story = [line for line in pair.sender.lines if line.get("req_id") == "told"]
    told = [line["message"] for line in story]
    wanted = ["transfer_opened", "admission_granted", "batch_staged", "piece_written", "transfer_done"]
    assert in_order(told, wanted)
    assert (told.count("batch_staged"), told.count("piece_written")) == (2, 2)
    assert {(line["transfer"], line["peer"]) for line in story} == {(released["transfer"], pair.address)}
    assert done["bytes"] == request.nbytes


def test_every_line_is_an_object_that_says_who_and_when(pair: Pair) -> None:
    """Collectors index by these names; a line without them is lost."""
    send(pair.prefill, make_request("lines", 1), pair.address)
    receive(pair.decode, "lines")
    for daemon in (pair.receiver, pair.sender):
        assert len(daemon.lines) > 5
        for line in daemon.lines:
            assert datetime.datetime.fromisoformat(line["@timestamp"]).utcoffset() == datetime.timedelta(0)
            assert line["log.level"] in {"debug", "info", "warning", "error"}
            assert line["message"].replace("_", "").isalpha()
            assert (line["service.name"], line["role"]) == ("kvpd", daemon.role)
            assert line["service.node.name"] == daemon.name


def test_every_failure_says_why(pair: Pair) -> None:
    """On both sides, with a code that can be counted and the numbers that matter."""
    with pytest.raises(AdmissionRefused) as refused:
        send(pair.prefill, make_request("vast", PAIR_SLOTS + 1, 1), pair.address)
    assert refused.value.code is ErrorCode.TOO_LARGE
    line = pair.receiver.wait_for("transfer_refused", req_id="vast")
    assert (line["code"], line["log.level"]) == ("too_large", "warning")
    assert str(PAIR_SLOTS + 1) in line["detail"]
    assert str(PAIR_SLOTS) in line["detail"]
    assert pair.sender.wait_for("transfer_failed", req_id="vast")["code"] == "too_large"

    request = make_request("unwanted", 4)
    with (  # noqa: PT012  leaving the transfer raises
        pytest.raises(TransferCancelled),
        pair.prefill.open("unwanted", receiver=pair.address, total_chunks=4) as transfer,
    ):
        stage(transfer, request, 0, 2)
        pair.receiver.wait_for("chunks_written", req_id="unwanted")
        pair.prefill.cancel("unwanted")
        pair.sender.wait_for("transfer_cancelled", req_id="unwanted")
        stage(transfer, request, 2, 2)
    line = pair.receiver.wait_for("transfer_revoked", req_id="unwanted")
    assert (line["reason"], line["was"]) == ("cancelled", "admitted")

    with pytest.raises(TransferFailed) as late, pair.decode.claim("nowhere", 0.05):
        pass
    assert late.value.code is ErrorCode.CLAIM_TIMEOUT
    assert pair.receiver.wait_for("claim_refused", req_id="nowhere")["code"] == "claim_timeout"


def test_the_numbers_add_up(fleet: Fleet) -> None:
    """After a transfer nothing is left in any gauge, and every counter has counted it once."""
    receiver, sender = fleet.pair()
    with sender.sender_link() as prefill, receiver.receiver_link() as decode:
        request = make_request("counted", 6, last_chunk_bytes=100)
        send(prefill, request, receiver.address, batch=3)
        with decode.claim("counted", 20) as chunks:
            assert len(chunks) == 6
            assert receiver.slots() == {"free": 10, "ready": 6}
        with pytest.raises(AdmissionRefused):
            send(prefill, make_request("vast", 17, 1), receiver.address)
        receiver.wait_for("transfer_released")
        sender.wait_for("transfer_failed", req_id="vast")
        metrics = receiver.metrics()
        assert receiver.slots() == {"free": 16}
        wanted = {
            "kvpd_admissions_total": 1,
            "kvpd_admission_wait_seconds_count": 1,
            "kvpd_batches_total": 2,
            "kvpd_transfers_completed_total": 1,
            "kvpd_transfers_claimed_total": 1,
            "kvpd_transfers_released_total": 1,
            "kvpd_rejections_total{code=too_large}": 1,
            "kvpd_queued_transfers": 0,
            "kvpd_sessions": 1,
            "kvpd_engines": 1,
            "kvpd_log_lines_dropped_total": 0,
        }
        assert {name: metrics.get(name) for name in wanted} == wanted
        metrics = sender.metrics()
        wanted = {
            "kvpd_transfers_opened_total": 2,
            "kvpd_transfers_done_total": 1,
            "kvpd_transfers_failed_total{code=too_large}": 1,
            "kvpd_batches_total": 2,
            "kvpd_put_bytes_total": request.nbytes,
            "kvpd_put_seconds_count": 2,
            "kvpd_staging_wait_seconds_count": 2,
            "kvpd_staging_slots{state=used}": 0,
            "kvpd_in_flight_bytes": 0,
            "kvpd_sessions": 1,
            "kvpd_engines": 1,
        }
        assert {name: metrics.get(name) for name in wanted} == wanted
        # What an engine asks for over its link is the same.
        assert prefill.stats()["kvpd_put_bytes_total"] == 5 * CHUNK + 100


def test_probes_say_what_they_look_at(pair: Pair) -> None:
    """A readiness that is false must say which part of it is."""
    for daemon, tasks in (
        (pair.receiver, {"hear_senders", "keep_time", "serve_engines"}),
        (pair.sender, {"keep_time"}),
    ):
        assert daemon.get("/livez") == (200, "ok\n")
        assert daemon.get("/readyz") == (200, "ok\n")
        status, text = daemon.get("/readyz?verbose")
        assert status == 200
        shown = {line.partition("] ")[2].partition(":")[0] for line in text.splitlines()}
        assert {"loop", "started", "accepting", *(f"task {task}" for task in tasks)} <= shown
        assert daemon.get("/nothing")[0] == 404
