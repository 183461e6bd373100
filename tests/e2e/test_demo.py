"""The demo as a whole, with the tiny model: real daemons, real engines, real UCX, all in processes of their own."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from demo_app.environment import child_environment
from demo_app.model import TINY_SHAPE
from demo_app.prompts import TINY_TARGETS

DEADLINE_S = 90.0
COMMAND = [sys.executable, "-u", "-m", "demo_app.main", "--model", "tiny"]


def test_two_requests_that_do_not_fit_together_both_arrive_whole(tmp_path: Path) -> None:
    """The product's promise: the second waits whole for the first, every token is right and every slot comes back."""
    done = subprocess.run(
        [*COMMAND, "--keep-logs", str(tmp_path)],
        env=child_environment(),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["identical"] is True
    assert summary["requests"] == len(TINY_TARGETS)
    assert summary["bytes"] == TINY_SHAPE.bytes_of(sum(TINY_TARGETS))
    lines = [json.loads(line) for line in (tmp_path / "receiver.jsonl").read_text().splitlines()]
    steps = [line["message"] for line in lines if line["message"] in {"transfer_admitted", "transfer_released"}]
    assert steps == ["transfer_admitted", "transfer_released"] * 2


@pytest.mark.parametrize("awaited", ["listening on", "ready, engines", "first slot after"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_nothing_behind(awaited: str, number: signal.Signals) -> None:
    """No daemon, no engine, no socket: whatever it was doing when Ctrl-C came."""
    demo = subprocess.Popen(
        COMMAND,
        env=child_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        process_group=0,
    )
    try:
        assert demo.stdout is not None
        folder = None
        for line in demo.stdout:
            folder = re.search(r"/tmp/kvpd-demo-\w+", line) or folder
            if awaited in line:
                demo.send_signal(number)
                break
        demo.communicate(timeout=DEADLINE_S)
        assert demo.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143}[number]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(demo.pid, signal.SIGKILL)  # nobody is left, unless this test fails
        demo.wait(DEADLINE_S)
    if folder is not None:
        assert not Path(folder.group()).exists()
        assert not mentioned_by_processes(folder.group())


def mentioned_by_processes(text: str) -> list[str]:
    """The command lines of living processes with `text` in them."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().decode(errors="replace")
        except OSError:
            continue  # it has ended meanwhile
        if text in command:
            found.append(command)
    return found
