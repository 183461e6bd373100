"""The proxy as a process: its start, its signals, its file read anew, and its end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import orjson
import pytest
import trio

from .clients import ask, connect, connected
from .engines import Call, Engine, Sender
from .stacks import COMPLETIONS, RECEIVER, computes, generates

DEADLINE_S: Final = 30.0


class Process:
    """One `kvpd serve proxy`, and what it says."""

    def __init__(self, process: trio.Process) -> None:
        self._process = process
        self.lines: list[dict[str, Any]] = []
        self.junk: list[bytes] = []
        self._changed = trio.Event()
        self.ready: dict[str, Any] = {}

    async def read(self) -> None:
        """Its log, until it ends."""
        assert self._process.stderr is not None
        pending = b""
        async for data in self._process.stderr:
            *complete, pending = (pending + data).split(b"\n")
            for line in complete:
                try:
                    self.lines.append(orjson.loads(line))
                except orjson.JSONDecodeError:
                    self.junk.append(line)
            self._tell()
        self._tell()

    def _tell(self) -> None:
        changed, self._changed = self._changed, trio.Event()
        changed.set()

    async def wait_for(self, message: str, count: int = 1) -> dict[str, Any]:
        """The `count`-th line with this message."""
        with trio.fail_after(DEADLINE_S):
            while len(found := [line for line in self.lines if line["message"] == message]) < count:
                await self._changed.wait()
        return found[count - 1]

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self._process.send_signal(number)

    async def wait(self) -> int:
        """Its exit status."""
        with trio.fail_after(DEADLINE_S):
            return await self._process.wait()

    @property
    def address(self) -> str:
        """Where it takes requests."""
        return str(self.ready["address"])


@asynccontextmanager
async def served(folder: Path, *flags: str, before: str = "", is_ready: bool = True) -> AsyncIterator[Process]:
    """A process that is killed at the end, if it still runs."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("KVPD_", "NOTIFY_SOCKET"))}
    program = f"import os, resource, sys\n{before}\nos.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    settings = ["--set", "proxy.address=127.0.0.1:0", "--set", "proxy.notify_address=127.0.0.1:0"]
    arguments = ["-c", program, "-m", "kvpd", "serve", "proxy", *settings, *flags]
    async with trio.open_nursery() as nursery:
        run = partial(
            trio.run_process, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, check=False, env=kept, cwd=folder
        )
        process: trio.Process = await nursery.start(run, [sys.executable, *arguments])
        running = Process(process)
        nursery.start_soon(running.read)
        if is_ready:
            running.ready = await running.wait_for("ready")
        yield running
        if process.returncode is None:
            process.kill()
            await process.wait()
        assert not running.junk, b"\n".join(running.junk).decode()


@asynccontextmanager
async def engines() -> AsyncIterator[tuple[Engine, Engine, Sender]]:
    """One of each kind, and a sender."""
    sender = Sender()
    prefill, decode = Engine("prefill", computes(sender)), Engine("decode", generates)
    with trio.fail_after(2 * DEADLINE_S):
        async with trio.open_nursery() as nursery:
            await nursery.start(prefill.run)
            await nursery.start(decode.run)
            yield prefill, decode, sender
            nursery.cancel_scope.cancel()


def flags_for(prefill: Engine, decode: Engine) -> list[str]:
    """How the command line names them."""
    return ["--set", f"proxy.prefill={prefill.url}", "--set", f"proxy.decode={decode.url}+{RECEIVER}"]


async def test_the_command_serves_and_ends_by_sigterm_with_status_0(tmp_path: Path) -> None:
    """What systemd and Kubernetes do with it."""
    file = tmp_path / "addresses.json"
    async with (
        engines() as (prefill, decode, sender),
        served(tmp_path, *flags_for(prefill, decode), "--address-file", str(file)) as proxy,
    ):
        addresses = json.loads(await trio.Path(file).read_text())
        assert addresses["address"] == proxy.address
        assert addresses["notify_address"] == proxy.ready["notify_address"]
        async with sender.connected(addresses["notify_address"]):
            assert (await ask(proxy.address, "POST", COMPLETIONS, {"prompt": "a"})).status == 200
        assert (await ask(addresses["metrics_address"], "GET", "/readyz")).status == 200
        async with connect(proxy.address) as idle:
            assert (await idle.ask("GET", "/health")).status == 200
            proxy.signal(signal.SIGTERM)
            assert await idle.rest() == b""
        assert await proxy.wait() == 0
        await proxy.wait_for("stopped")


async def test_p78_a_drain_lets_a_request_end_and_a_second_signal_does_not(tmp_path: Path) -> None:
    """SIGTERM is asked politely once; whoever asks again has waited long enough."""

    async def hangs(call: Call) -> None:
        await call.hang()

    async with engines() as (prefill, decode, _):
        prefill.behave = hangs
        async with served(tmp_path, *flags_for(prefill, decode)) as proxy, connect(proxy.address) as client:
            await client.send("POST", COMPLETIONS, b'{"prompt":"a"}')
            call = await prefill.wait_calls(1)
            proxy.signal(signal.SIGTERM)
            await proxy.wait_for("drain_started")
            proxy.signal(signal.SIGINT)
            assert await proxy.wait() == 128 + signal.SIGINT
            with trio.fail_after(DEADLINE_S):
                await call.closed.wait()


async def test_p78_a_drain_that_takes_too_long_is_cut_short_by_its_deadline(tmp_path: Path) -> None:
    """The supervisor's own deadline ends in SIGKILL."""
    async with engines() as (prefill, decode, _):
        prefill.behave = lambda call: call.hang()
        flags = [*flags_for(prefill, decode), "--set", "proxy.drain_timeout_s=0.1"]
        async with served(tmp_path, *flags) as proxy, connect(proxy.address) as client:
            await client.send("POST", COMPLETIONS, b'{"prompt":"a"}')
            await prefill.wait_calls(1)
            proxy.signal(signal.SIGTERM)
            assert await proxy.wait() == 0
            await proxy.wait_for("drain_timed_out")


@pytest.fixture
def written(tmp_path: Path) -> Callable[[Engine, Engine, str], Path]:
    """Writes the file that names the engines."""

    def write(prefill: Engine, decode: Engine, more: str = "") -> Path:
        file = tmp_path / "kvpd.toml"
        lists = f'prefill = ["{prefill.url}"]\ndecode = ["{decode.url}+{RECEIVER}"]'
        file.write_text(f"[proxy]\n{lists}\n{more}")
        return file

    return write


async def test_sighup_takes_over_the_file_s_engines_and_a_bad_file_changes_nothing(
    tmp_path: Path, written: Callable[[Engine, Engine, str], Path]
) -> None:
    """Engines come and go daily; a typing mistake must not be an outage."""
    async with engines() as (prefill, decode, sender), engines() as (_, other, _):
        file = written(prefill, decode, "")
        async with served(tmp_path, "--config", str(file)) as proxy, sender.connected(proxy.ready["notify_address"]):
            written(prefill, other, 'policy = "sticky"')
            proxy.signal(signal.SIGHUP)
            line = await proxy.wait_for("engines_reloaded")
            assert line["added"] == [f"{other.url}+{RECEIVER}"]
            assert line["removed"] == [f"{decode.url}+{RECEIVER}"]
            assert line["needs_restart"] == ["proxy.policy"]
            await proxy.wait_for("engine_up", count=3)
            assert (await ask(proxy.address, "POST", COMPLETIONS, {"prompt": "a"})).status == 200
            assert (len(decode.calls), len(other.calls)) == (0, 1)
            await trio.Path(file).write_text("[proxy]\nprefil = []\n")
            proxy.signal(signal.SIGHUP)
            line = await proxy.wait_for("reload_refused")
            assert "proxy.prefil" in line["problems"][0]
            assert (await ask(proxy.address, "POST", COMPLETIONS, {"prompt": "a"})).status == 200


async def test_p68_the_proxy_starts_before_its_engines(tmp_path: Path) -> None:
    """It is ready to be asked, says that it is not ready to serve, and waits for nobody."""
    flags = ["--set", "proxy.prefill=http://127.0.0.1:9", "--set", f"proxy.decode=http://127.0.0.1:9+{RECEIVER}"]
    with trio.fail_after(DEADLINE_S):
        async with served(tmp_path, *flags) as proxy:
            assert (await ask(proxy.address, "GET", "/health")).status == 200
            assert (await ask(proxy.address, "GET", "/readyz")).status == 503
            metrics = await ask(str(proxy.ready["metrics_address"]), "GET", "/readyz")
            assert b"[-] prefill engines: 0 of 1 answer\n" in metrics.body


@pytest.mark.parametrize("key", ["address", "notify_address"])
async def test_p61_a_port_that_is_taken_ends_the_start_by_name(key: str, tmp_path: Path) -> None:
    """Another port than the one that was asked for is one that nobody will find."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        flags = [*nobody(), "--set", f"proxy.{key}={address}"]
        with trio.fail_after(DEADLINE_S):
            async with served(tmp_path, *flags, is_ready=False) as proxy:
                assert await proxy.wait() == 1
                line = await proxy.wait_for("start_failed")
    assert address in line["detail"]


def nobody() -> list[str]:
    """Engines that are not there."""
    return ["--set", "proxy.prefill=http://127.0.0.1:9", "--set", f"proxy.decode=http://127.0.0.1:9+{RECEIVER}"]


async def test_p23_a_flood_of_connections_does_not_end_the_process(tmp_path: Path) -> None:
    """With as few descriptors as a shell gives, and more connections than that."""
    limit = "resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))"
    with trio.fail_after(2 * DEADLINE_S):
        async with served(tmp_path, *nobody(), before=limit) as proxy:
            line = await proxy.wait_for("requests_limited_by_descriptors")
            assert line["requests"] * 4 + 64 <= 256
            clients = [await connected(proxy.address) for _ in range(300)]
            served_late = [await client.ask("GET", "/health") for client in clients[:100]]
            assert {reply.status for reply in served_late} == {200}
            assert {(await client.reply()).status for client in clients[-100:]} == {503}
            for client in clients:
                await trio.aclose_forcefully(client.stream)
            again = await ask(proxy.address, "POST", COMPLETIONS, {"prompt": "a"})
            while again.json["error"]["code"] != "no_decode_engine":  # until it has seen the connections' ends
                again = await ask(proxy.address, "POST", COMPLETIONS, {"prompt": "a"})
            proxy.signal(signal.SIGTERM)
            assert await proxy.wait() == 0


def test_without_h11_the_command_says_what_to_install() -> None:
    """It comes with an extra, and a traceback says nothing of extras."""
    program = "import sys; sys.modules['h11'] = None; from kvpd.cli import main; main()"
    command = [sys.executable, "-c", program, "serve", "proxy", *nobody()]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert ran.returncode == 2
    assert "kvpd[proxy]" in ran.stderr
    assert "Traceback" not in ran.stderr


async def test_systemd_is_told_that_it_is_ready(tmp_path: Path) -> None:
    """`Type=notify` waits for it."""
    path = tmp_path / "notify"
    told: list[bytes] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
        notify.bind(str(path))
        notify.settimeout(DEADLINE_S)
        reader = threading.Thread(target=lambda: told.append(notify.recv(100)))
        reader.start()
        async with served(tmp_path, *nobody(), before=f"os.environ['NOTIFY_SOCKET'] = {str(path)!r}"):
            await trio.to_thread.run_sync(reader.join)
    assert told == [b"READY=1"]
