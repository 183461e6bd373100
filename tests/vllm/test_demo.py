"""`scripts/demo --vllm`, as a user runs it: a trained model's chat through the whole stack equals a single server's."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import PROJECT

DEADLINE_S = 400.0
PR_SET_CHILD_SUBREAPER = 36
COMMAND = [str(PROJECT / "scripts" / "demo"), "--vllm"]


@pytest.mark.timeout(DEADLINE_S + 20)
def test_a_chat_through_the_whole_stack_is_a_single_servers(tmp_path: Path) -> None:
    """A trained model answers in words: a mistake in its KV cache would be seen by anybody."""
    done = subprocess.run(
        [*COMMAND, "--keep-logs", str(tmp_path)], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    sys.stdout.write(done.stdout + done.stderr)  # shown if this fails
    assert done.returncode == 0
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["identical"] is True
    assert summary["requests"] == 2
    assert summary["prompt_tokens_from_outside"] == summary["prompt_tokens"] - summary["requests"]
    assert "Paris" in done.stdout
    assert {path.name for path in tmp_path.iterdir()} == {
        "receiver.jsonl", "sender.jsonl", "proxy.jsonl", "prefill.log", "decode.log", "single.log"
    }  # fmt: skip


@pytest.fixture
def adopted() -> Iterator[Callable[[], list[str]]]:
    """Adopts what a process of this test leaves behind when it ends; says which of those are alive."""
    libc = ctypes.CDLL(None, use_errno=True)
    before = set(own_children())
    assert libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0

    def alive() -> list[str]:
        orphans = [pid for pid in own_children() if pid not in before]
        return [name_of(pid) for pid in orphans if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG) is None]

    yield alive
    assert libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0) == 0


def own_children() -> list[int]:
    """Processes whose parent is this one."""
    tasks = Path("/proc/self/task").glob("*/children")
    return [int(pid) for task in tasks for pid in task.read_text().split()]


def name_of(pid: int) -> str:
    """What it runs."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")


def test_an_interrupted_demo_leaves_nothing_behind(adopted: Callable[[], list[str]], tmp_path: Path) -> None:
    """Six processes, of which three have started others."""
    with subprocess.Popen(
        [*COMMAND, "--keep-logs", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        process_group=0,
    ) as demo:
        assert demo.stdout is not None
        for line in demo.stdout:
            if "waiting for" in line and "decode" in line:
                break
        demo.send_signal(signal.SIGINT)
        rest = demo.communicate(timeout=DEADLINE_S)[0]
    assert demo.returncode == 130, rest
    assert "every process that it started is gone" in rest
    assert adopted() == []
