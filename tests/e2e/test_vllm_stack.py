"""What starts and stops vLLM servers with kvpd between them, tried with stand-ins for vLLM and real daemons.

How vLLM itself fares is what tests/vllm is for.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import vllm_app.stack
from demo_app.chunks import KvShape
from vllm_app.asking import get, metric
from vllm_app.parts import PartFailed
from vllm_app.stack import Served, Stack

DEADLINE_S = 30.0
SHAPE = KvShape(layers=1, kv_heads=1, head_dim=8)
# A vLLM server as far as the stack looks at one: a port, /health, a line; and a process that it has started.
SERVER = """
import http.server, subprocess, sys
port, kind = int(sys.argv[sys.argv.index("--port") + 1]), "kv-transfer" in " ".join(sys.argv)
child = subprocess.Popen(["sleep", "1000"])
print("child", child.pid, flush=True)
{special}
class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass
    def do_GET(self):
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()
server = http.server.HTTPServer(("127.0.0.1", port), Handler)
print("INFO:     Application startup complete.", flush=True)
server.serve_forever()
"""
MakeStack = Callable[..., Stack]


@pytest.fixture
def make_stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeStack:
    """A stack whose engines are stand-ins; `special` is what they do before they serve."""

    def make(special: str = "", said: list[str] | None = None) -> Stack:
        script, program = tmp_path / "server.py", tmp_path / "python"
        script.write_text(SERVER.format(special=special))
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{script}" "$@"\n')
        program.chmod(0o755)
        monkeypatch.setattr(vllm_app.stack, "VLLM_PYTHON", program)
        monkeypatch.setattr(vllm_app.stack, "DAEMON_PYTHON", Path(sys.executable))
        logs = tmp_path / "logs"
        logs.mkdir()
        say = ([] if said is None else said).append
        return Stack(Served(tmp_path, "m", SHAPE, 512, 512), logs, say, with_single=True)

    return make


def child_of(stack: Stack, engine: str) -> int:
    """The process that an engine has started."""
    (line,) = [line for line in (stack.logs / f"{engine}.log").read_text().splitlines() if line.startswith("child")]
    return int(line.split()[1])


def lives(pid: int) -> bool:
    """Whether there is such a process."""
    return Path(f"/proc/{pid}").exists()


def wait_gone(*pids: int) -> None:
    """Until these have ended: a killed process takes a moment."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            handle = os.pidfd_open(pid)
            ended, _, _ = select.select([handle], [], [], DEADLINE_S)
            os.close(handle)
            assert ended, pid


def test_a_stack_comes_up_and_leaves_nothing_behind(make_stack: MakeStack) -> None:
    """Servers start others; whoever ends them must end those too."""
    said: list[str] = []
    with make_stack(said=said) as stack:
        assert get(stack.address("proxy"), "/readyz").status == 200
        assert metric(stack.address("receiver"), "kvpd_slots", state="free") == stack.served.receiver_chunks
        pids = [stack[name].pid for name in ("receiver", "sender", "proxy", "prefill", "decode", "single")]
        pids += [child_of(stack, engine) for engine in ("prefill", "decode", "single")]
        assert all(lives(pid) for pid in pids)
        statuses = stack.stop()
    assert [statuses[name] for name in ("receiver", "sender", "proxy")] == [0, 0, 0]
    wait_gone(*pids)
    assert sum("is ready after" in line for line in said) == 6


def test_a_part_that_was_killed_comes_back_where_it_was(make_stack: MakeStack) -> None:
    """Peers look for it at the address that they were told of."""
    with make_stack() as stack:
        (before,) = stack["receiver"].said("ready")
        child = child_of(stack, "prefill")
        for name in ("receiver", "prefill"):
            stack[name].kill()
            stack.check()  # it was meant to go
            stack.restart(name)
        wait_gone(child)
        (after,) = stack["receiver"].said("ready")
        assert after["control_address"] == before["control_address"]
        assert after["pid"] != before["pid"]


def test_a_part_that_does_not_start_says_why(make_stack: MakeStack) -> None:
    """A traceback in one of six logs is of no use to somebody who does not know in which."""
    stack = make_stack('if not kind: sys.exit("out of memory, perhaps")')
    with (
        pytest.raises(PartFailed, match=r"(?s)single ended with status 1; its last lines.*out of memory, perhaps"),
        stack,
    ):
        raise AssertionError("it came up")
    assert stack["receiver"].status == stack["sender"].status == 0
    wait_gone(child_of(stack, "single"))


def test_a_part_that_dies_later_ends_what_is_waited_for(make_stack: MakeStack) -> None:
    """Nobody waits for a server that is gone."""
    with make_stack() as stack:
        os.kill(stack["decode"].pid, 9)
        with pytest.raises(PartFailed, match="decode ended with status -9"):
            stack.wait_until(lambda: False, "nothing", DEADLINE_S)


def test_a_part_ends_with_its_owner(tmp_path: Path) -> None:
    """A test run that is cut off by a time limit must not leave gigabytes behind."""
    owner = f"""
import os, pathlib, threading
from vllm_app.parts import Part
folder = pathlib.Path({str(tmp_path)!r})
command = ["/bin/sh", "-c", "echo ready; exec sleep 1000"]
news = threading.Condition()
part = Part("it", command, log=folder / "log", ready_mark="ready", environment=os.environ, folder=folder, news=news)
with news:
    news.wait_for(lambda: part.is_ready)
print(part.pid, flush=True)
threading.Event().wait()
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(vllm_app.stack.__file__).parents[1])}
    with subprocess.Popen([sys.executable, "-c", owner], stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert lives(pid)
        process.kill()
    wait_gone(pid)


def test_a_part_that_is_never_ready_has_a_deadline(make_stack: MakeStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what it said last is shown."""
    monkeypatch.setattr(vllm_app.stack, "START_TIMEOUT_S", 3.0)
    stack = make_stack("if not kind: print('loading', flush=True); child.wait()")
    with pytest.raises(PartFailed, match=r"(?s)in vain.*single is not ready; its last lines.*loading"), stack:
        raise AssertionError("it came up")
    wait_gone(stack["single"].pid, child_of(stack, "single"))
