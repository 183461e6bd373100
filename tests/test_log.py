"""Logging: lines are data, and nothing that happens to stderr is ever felt by who logs."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from kvpd.config import LogConfig
from kvpd.errors import ErrorCode
from kvpd.log import LogWriter, get_logger, start_logging
from kvpd.log.repeats import REPEATS_MAX

WAIT_S = 20.0


@pytest.fixture
def log_file(tmp_path: Path) -> Iterator[BinaryIO]:
    """Somewhere that always takes what is written."""
    with (tmp_path / "log").open("wb") as file:
        yield file


def lines_of(file: BinaryIO) -> list[dict[str, Any]]:
    """What has been written."""
    return [json.loads(line) for line in Path(file.name).read_bytes().splitlines()]


class FullPipe:
    """A pipe that takes no byte more until somebody reads."""

    def __init__(self) -> None:
        self.read_end, write_end = os.pipe()
        fcntl.fcntl(write_end, fcntl.F_SETFL, os.O_NONBLOCK)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(write_end, b"\n" * 4096)
        self.stream = os.fdopen(write_end, "wb", buffering=0)

    def set_blocking(self, blocking: bool) -> None:
        """A pipe given to a process blocks as a rule; one shared with others may not."""
        os.set_blocking(self.stream.fileno(), blocking)

    def read_until(self, word: bytes) -> bytes:
        """Whole lines, up to one that has `word` in it."""
        data = b""
        while word not in data or not data.endswith(b"\n"):
            data += os.read(self.read_end, 65536)
        return data

    def read_rest(self) -> bytes:
        """What is left when nobody writes any more."""
        self.stream.close()
        with os.fdopen(os.dup(self.read_end), "rb") as rest:
            return rest.read()

    def close(self) -> None:
        """Both ends."""
        os.close(self.read_end)
        self.stream.close()


def told_in(data: bytes) -> int:
    """How many lines were dropped, by the lines that say so."""
    return sum(json.loads(line)["count"] for line in data.split(b"\n") if b"log_lines_dropped" in line)


@pytest.fixture
def full_pipe() -> Iterator[FullPipe]:
    """Closed afterwards."""
    pipe = FullPipe()
    with contextlib.closing(pipe):
        yield pipe


# ------------------------------------------------------------------ lines


def test_a_line_is_one_json_object_with_the_agreed_fields(log_file: BinaryIO) -> None:
    """Collectors parse by these names; the order puts what people read first."""
    log = get_logger(peer="prefill-0")
    with start_logging(LogConfig(), "receiver", "decode-0", log_file):
        log.info("request_admitted", slots=3, queued_s=0.2)
    (line,) = lines_of(log_file)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", line.pop("@timestamp"))
    assert line == {
        "log.level": "info",
        "message": "request_admitted",
        "service.name": "kvpd",
        "role": "receiver",
        "service.node.name": "decode-0",
        "peer": "prefill-0",
        "slots": 3,
        "queued_s": 0.2,
    }


@pytest.mark.parametrize(
    ("nanoseconds", "text"),
    [
        (1_700_000_000_000_005_999, "2023-11-14T22:13:20.000005Z"),
        (1_700_000_000_999_999_999, "2023-11-14T22:13:20.999999Z"),
        (1_700_000_001_000_000_000, "2023-11-14T22:13:21.000000Z"),
        (1_709_251_199_500_000_000, "2024-02-29T23:59:59.500000Z"),
    ],
)
def test_a_lines_time_is_utc_to_the_microsecond(
    log_file: BinaryIO, monkeypatch: pytest.MonkeyPatch, nanoseconds: int, text: str
) -> None:
    """Lines are put in order by it: a digit that is missing makes a later line an earlier one."""
    monkeypatch.setattr(time, "time_ns", lambda: nanoseconds)
    with start_logging(LogConfig(), "receiver", "r", log_file):
        get_logger().info("timed")
    assert lines_of(log_file)[0]["@timestamp"] == text


def test_bound_fields_go_with_the_logger_they_were_bound_to(log_file: BinaryIO) -> None:
    """A transfer's logger must not leak its names into another's."""
    log = get_logger()
    with start_logging(LogConfig(), "sender", "s", log_file):
        log.bind(req_id="a").info("written")
        log.info("written")
    first, second = lines_of(log_file)
    assert first["req_id"] == "a"
    assert "req_id" not in second


def test_an_rkey_never_gets_into_a_line(log_file: BinaryIO) -> None:
    """Whoever has one can write into the buffer."""
    with start_logging(LogConfig(), "sender", "s", log_file):
        get_logger(rkey=b"SECRET").warning("endpoint_failed", remote_rkey="SECRET", detail="x")
    assert b"SECRET" not in Path(log_file.name).read_bytes()
    assert lines_of(log_file)[0]["detail"] == "x"


def test_every_kind_of_value_makes_a_line(log_file: BinaryIO) -> None:
    """A line that cannot be rendered would be an exception in the middle of a transfer."""
    log = get_logger()
    with start_logging(LogConfig(), "sender", "s", log_file):
        log.info("a", code=ErrorCode.OVERFLOW, data=b"\x01\xff", path=Path("/x"), names={"b", "a"}, nan=float("nan"))
        log.info("b", huge=1 << 80, surrogate="\udcff", ring=log)
    first, second = lines_of(log_file)
    assert (first["code"], first["data"], first["path"], first["names"]) == ("overflow", "01ff", "/x", ["a", "b"])
    assert second["huge"] == str(1 << 80)
    assert second["surrogate"] == "\\udcff"


def test_an_exception_becomes_type_text_and_trace(log_file: BinaryIO) -> None:
    """One line, whatever the number of frames."""
    with start_logging(LogConfig(), "sender", "s", log_file):
        try:
            os.stat("/nonexistent")  # noqa: PTH116  any error will do
        except OSError as exc:
            get_logger().error("request_failed", exc_info=exc)
    (line,) = lines_of(log_file)
    assert line["error.type"] == "FileNotFoundError"
    assert "/nonexistent" in line["error.message"]
    assert "Traceback" in line["error.stack_trace"]


def test_lines_below_the_level_are_not_written(log_file: BinaryIO) -> None:
    """The level is that of the writer, whenever the logger was made."""
    log = get_logger()
    with start_logging(LogConfig(level="warning"), "sender", "s", log_file):
        for write in (log.debug, log.info, log.warning, log.error):
            write("happened")
    assert [line["log.level"] for line in lines_of(log_file)] == ["warning", "error"]


def test_before_the_start_and_after_the_end_nothing_is_written(log_file: BinaryIO) -> None:
    """A program that embeds kvpd decides itself whether kvpd logs."""
    log = get_logger()
    log.error("early")
    with start_logging(LogConfig(), "sender", "s", log_file):
        pass
    log.error("late")
    assert lines_of(log_file) == []


def test_the_console_form_lets_nobody_steer_the_terminal(log_file: BinaryIO) -> None:
    """Some fields hold what a peer sent."""
    with start_logging(LogConfig(format="console"), "receiver", "r", log_file):
        get_logger().warning("peer_rejected", peer="\x1b[2Jx\ny", slots=3, waited_s=0.25)
    text = Path(log_file.name).read_text()
    assert "\x1b" not in text
    assert text.count("\n") == 1
    assert re.match(r"\d\d:\d\d:\d\d\.\d{3} warning receiver peer_rejected ", text)
    assert "slots=3 waited_s=0.25" in text


# ------------------------------------------------------------------ when stderr does not take them


@pytest.mark.parametrize("blocking", [True, False])
def test_p84_a_full_pipe_does_not_stop_who_logs_and_what_was_dropped_is_told(
    full_pipe: FullPipe, blocking: bool
) -> None:
    """A terminal that was stopped with Ctrl-S must not stop transfers."""
    full_pipe.set_blocking(blocking)
    log = get_logger()
    with start_logging(LogConfig(queue_depth_max=10), "sender", "s", full_pipe.stream) as writer:
        for number in range(1000):
            log.info("happened", number=number)  # would hang here
        dropped = writer.dropped
        assert 1000 - 10 - 256 <= dropped <= 1000 - 10  # one batch may be in the writer's hands
        data = b""
        while told_in(data) < dropped:  # in one line or several: the first may precede the last drop
            data += full_pipe.read_until(b"log_lines_dropped")
    assert told_in(data) == dropped
    data += full_pipe.read_rest()
    assert data.count(b'"happened"') == 1000 - dropped  # what was queued was kept


def test_p84_a_pipe_that_does_not_block_takes_long_lines_whole(full_pipe: FullPipe) -> None:
    """Whoever shares stderr may have made it non-blocking, and half a line is no JSON."""
    full_pipe.set_blocking(False)
    with start_logging(LogConfig(), "sender", "s", full_pipe.stream):
        get_logger().info("happened", text="x" * (1 << 20), last="the end")
        line = full_pipe.read_until(b"the end")
    assert len(json.loads(line)["text"]) == 1 << 20


def test_p84_the_end_waits_for_a_full_pipe_only_so_long(full_pipe: FullPipe) -> None:
    """Shutdown has a deadline, too."""
    full_pipe.set_blocking(True)
    done = threading.Event()

    def log_and_end() -> None:
        with start_logging(LogConfig(), "sender", "s", full_pipe.stream):
            get_logger().info("happened")
        done.set()

    thread = threading.Thread(target=log_and_end)
    thread.start()
    assert done.wait(WAIT_S)
    full_pipe.read_until(b"happened")  # lets the writer's thread end
    thread.join(WAIT_S)


def test_p84_a_reader_that_has_gone_costs_lines_and_nothing_else() -> None:
    """EPIPE is no reason to die, and the count still says what was lost."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "wb", buffering=0) as stream:
        with start_logging(LogConfig(), "sender", "s", stream) as writer:
            for _ in range(3):
                get_logger().info("happened")
        assert writer.dropped == 3


def test_p84_a_process_started_without_stderr_writes_nowhere() -> None:
    """Descriptor 2 may by then be a socket or a buffer, which lines would corrupt."""
    program = (
        "import os, sys\n"
        "from kvpd.config import LogConfig\n"
        "from kvpd.log import get_logger, start_logging\n"
        "descriptor = os.memfd_create('innocent')\n"
        "assert descriptor == 2, descriptor\n"
        "with start_logging(LogConfig(), 'sender', 's') as writer:\n"
        "    get_logger().info('happened')\n"
        "assert writer.dropped == 1\n"
        "sys.stdout.write(str(os.fstat(2).st_size))\n"
    )
    command = ["bash", "-c", 'exec "$0" -c "$1" 2>&-', sys.executable, program]
    ran = subprocess.run(command, stdout=subprocess.PIPE, timeout=60, check=True)
    assert ran.stdout == b"0"


def test_stderr_is_the_default(capfd: pytest.CaptureFixture[str]) -> None:
    """stdout belongs to whoever called the command."""
    with start_logging(LogConfig(), "sender", "s"):
        get_logger().info("happened")
    captured = capfd.readouterr()
    assert captured.out == ""
    assert json.loads(captured.err)["message"] == "happened"


# ------------------------------------------------------------------ again and again


def test_p83_equal_lines_are_limited_and_the_rest_is_counted(log_file: BinaryIO) -> None:
    """A peer that sends garbage must not fill the disk."""
    log = get_logger()
    with start_logging(LogConfig(), "receiver", "r", log_file):
        for _ in range(REPEATS_MAX + 100):
            log.warning("message_dropped", peer="a", rate_limited=True)
        log.warning("message_dropped", peer="b", rate_limited=True)
    lines = lines_of(log_file)
    written = [line for line in lines if line["message"] == "message_dropped" and line["peer"] == "a"]
    told = [line for line in lines if line["message"] == "log_lines_suppressed"]
    assert len(written) + sum(line["count"] for line in told) == REPEATS_MAX + 100
    assert told
    assert told[0].items() >= {"suppressed": "message_dropped", "level": "warning", "peer": "a"}.items()
    assert [line["peer"] for line in lines].count("b") == 1
    assert all("rate_limited" not in line for line in lines)


def test_p83_what_was_suppressed_is_told_even_if_nothing_follows(full_pipe: FullPipe) -> None:
    """The window's end is a deadline of the writer's own."""
    full_pipe.set_blocking(True)
    log = get_logger()
    with start_logging(LogConfig(), "receiver", "r", full_pipe.stream):
        for number in range(REPEATS_MAX):
            log.warning("message_dropped", rate_limited=True, number=number)
        full_pipe.read_until(f'"number":{REPEATS_MAX - 1}'.encode())  # the writer has nothing more to do
        log.warning("message_dropped", rate_limited=True)
        full_pipe.read_until(b"log_lines_suppressed")


def test_lines_that_are_not_marked_are_never_suppressed(log_file: BinaryIO) -> None:
    """Each state change of a transfer is one line, however many transfers there are."""
    with start_logging(LogConfig(), "receiver", "r", log_file):
        for _ in range(REPEATS_MAX * 10):
            get_logger().warning("request_revoked", peer="a")
    assert len(lines_of(log_file)) == REPEATS_MAX * 10


def test_any_number_of_peers_takes_bounded_memory(log_file: BinaryIO) -> None:
    """Peers are named by peers."""
    with start_logging(LogConfig(queue_depth_max=100_000), "receiver", "r", log_file) as writer:
        for number in range(5000):
            get_logger().warning("peer_rejected", peer=str(number), rate_limited=True)
        assert isinstance(writer, LogWriter)
        assert len(writer.repeats) <= 1025


def test_lines_that_follow_each_other_closely_are_written_together() -> None:
    """A thread woken for every line would take the interpreter from the loop as often; and the end waits for none."""
    writes: list[bytes] = []
    with LogWriter(LogConfig(gather_s=1000), "sender", "s", writes.append):
        for number in range(5):
            get_logger().info("done", number=number)
    (together,) = writes
    assert [json.loads(line)["number"] for line in together.splitlines()] == [0, 1, 2, 3, 4]
