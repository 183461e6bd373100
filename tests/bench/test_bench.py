"""`kvpd bench` as a user runs it: what it writes, what it notices, and what it leaves behind."""

from __future__ import annotations

import functools
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from e2e.daemons import in_background
from transports.marks import needs_ucx_py

from kvpd.bench.command import SUBCOMMANDS
from kvpd.bench.decode import AttachDecode, DecodeEngine
from kvpd.bench.failure import BenchmarkFailed
from kvpd.bench.fleet import Daemon, Fleet
from kvpd.bench.pair import Pair
from kvpd.bench.payload import Load, Mode, Payload, put_stamps
from kvpd.bench.prefill import AttachPrefill, PrefillEngine
from kvpd.client import connect_sender

KVPD = Path(sys.executable).with_name("kvpd")
DEADLINE_S = 110.0
QUICK_S = 300.0  # it takes half a minute on a machine that does nothing else
CHUNK_BYTES = 4096
MODES: tuple[Mode, ...] = ("check", "copy", "in_place")


def command(*arguments: str | Path) -> list[str | Path]:
    return [KVPD, "bench", *arguments]


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with Fleet(tmp_path) as fleet:
        yield fleet


@pytest.mark.timeout(2 * QUICK_S)
def test_quick_runs_everything_and_writes_what_it_measured(tmp_path: Path) -> None:
    """One command shows that every benchmark still moves the right bytes. No time is asserted."""
    file, plot = tmp_path / "bench.json", tmp_path / "bench.svg"
    done = subprocess.run(
        command("--quick", "--json", file, "--plot", plot), capture_output=True, text=True, timeout=QUICK_S
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(file.read_bytes())
    assert [run["subcommand"] for run in report["runs"]] == [subcommand.name for subcommand in SUBCOMMANDS]
    assert {"kvpd", "python", "trio", "pyzmq", "ucx"} <= report["record"]["versions"].keys()
    results = {run["subcommand"]: run["result"] for run in report["runs"]}
    cases = [(case["transport"], case["binding"]) for case in results["transfer"]["cases"]]
    assert cases == [("cma", "ucx"), ("tcp", "ucx"), ("local", "ucx")]
    assert all(
        len(case[name]["values"]) == 2
        for case in results["transfer"]["cases"]
        for name in ("memcpy", "bare", "in_place", "copying")
    )
    assert all(
        case["cpu_s"].keys() == {"prefill", "sender", "receiver", "decode"} for case in results["requests"]["cases"]
    )
    assert [(each["outstanding"], each["transfers"]) for each in results["control"]["measured"]] == [
        (1, 200),
        (64, 200),
    ]
    assert [each["waiting"] for each in results["admission"]["waiting"]] == [1, 100]
    assert {cost["core"] for cost in results["admission"]["costs"]} == {"receiver", "queue", "sender"}
    assert results["trace"]["outcomes"] == {"ready": 40}
    assert [situation["waiting"] for situation in results["idle"]["situations"]] == [0, 0, 500]
    assert all(loop["turns"] > 0 for case in results["stall"]["cases"] for loop in case["loops"])
    assert plot.read_bytes().startswith(b"<?xml")
    assert "Goodput, GB/s" in done.stdout


@pytest.mark.parametrize("subcommand", [None, *(subcommand.name for subcommand in SUBCOMMANDS)])
def test_help_teaches(subcommand: str | None) -> None:
    """What is measured, and a line to type."""
    arguments = ["--help"] if subcommand is None else [subcommand, "--help"]
    done = subprocess.run(command(*arguments), capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0
    for part in ("Usage: kvpd bench", "Example", "--rounds", "--json"):
        assert part in done.stdout


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--quick", "idle"), "options stand behind the subcommand"),
        (("idle", "--json", "/no/such/folder/x.json"), "there is no folder"),
        (("idle", "--plot", "x.jpeg"), ".svg or .png"),
        (("transfer", "--chunk-bytes", "8"), "out of range"),
        (("transfer", "--transports", "pigeon"), "is none of cma, tcp, local"),
        (("transfer", "--bindings", "ctypes"), "is none of ucx, ucx-py"),
        (("requests", "--depths", "0"), "no whole number of 1 or more"),
        (("trace", "--trace", "/no/such/trace"), "is no trace that can be read"),
        (("trace", "--model-shape", "gpt-7"), "no model known here"),
        (("trace", "--buffer-size", "1MiB"), "holds no chunk"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_is_started(arguments: tuple[str, ...], reason: str) -> None:
    """Exit status 2, and the reason."""
    done = subprocess.run(command(*arguments), capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 2
    assert reason in done.stderr


def path_without_ucx_py(folder: Path) -> str:
    """A PYTHONPATH on which ucx-py cannot be imported, whether or not it is installed."""
    (folder / "ucp.py").write_text("raise ModuleNotFoundError('not here')\n")
    return os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))


def test_without_ucx_py_the_benchmark_says_where_to_get_it(tmp_path: Path) -> None:
    """Before a daemon is started, and in the words of a daemon that is told to use it."""
    done = subprocess.run(
        command("transfer", "--quick", "--bindings", "ucx,ucx-py"),
        env={**os.environ, "PYTHONPATH": path_without_ucx_py(tmp_path)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 2
    for part in ("--bindings", "not here", "kvpd[ucx-py]", "conda"):
        assert part in done.stderr


def test_the_daemons_of_a_row_go_through_its_binding(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else both rows would show the same binding, and the second table would compare it with itself."""
    monkeypatch.setenv("PYTHONPATH", path_without_ucx_py(tmp_path))
    with pytest.raises(BenchmarkFailed, match=r"transport = 'ucx-py': it cannot be imported: not here"):
        Pair(fleet, chunk_bytes=CHUNK_BYTES, slots=4, staging_slots=4, binding="ucx-py")


@needs_ucx_py
def test_two_bindings_take_turns_on_the_same_load(tmp_path: Path) -> None:
    """Each row's daemons and bare puts go through its own binding; memcpy was measured once for both."""
    file = tmp_path / "bench.json"
    done = subprocess.run(
        command("transfer", "--quick", "--bindings", "ucx,ucx-py", "--json", file),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr
    cases = json.loads(file.read_bytes())["runs"][0]["result"]["cases"]
    both = [(transport, binding) for transport in ("cma", "tcp") for binding in ("ucx", "ucx-py")]
    assert [(case["transport"], case["binding"]) for case in cases] == [*both, ("local", "ucx")]
    assert [case["versions"].split()[0] for case in cases] == ["UCX", "ucx-py", "UCX", "ucx-py", "UCX"]
    assert cases[0]["memcpy"] == cases[1]["memcpy"]
    assert cases[0]["bare"] != cases[1]["bare"]
    assert "Goodput through ucx-py ÷ through kvpd's own binding" in done.stdout


def test_a_daemon_that_cannot_start_says_why() -> None:
    """A benchmark's user gave the setting, and must not look for logs in a folder that is gone."""
    done = subprocess.run(
        command("idle", "--quick", "--set", "receiver.lease_s=soon"), capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.returncode == 1
    assert "receiver.lease_s = 'soon'" in done.stderr


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 1), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_however_it_ends_no_process_is_left(
    number: signal.Signals, status: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Daemons that went on would spoil the next measurement, and hold gigabytes."""
    folder = tmp_path_factory.mktemp("b")  # short: it will hold Unix sockets
    process = subprocess.Popen(
        command("idle", "--seconds", "100"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(folder)},
    )
    with process:
        assert process.stderr is not None
        assert "idle: alone" in process.stderr.readline()
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert len(children) == 2
        watched = [os.pidfd_open(int(child)) for child in children]
        process.send_signal(number)
        assert process.wait(DEADLINE_S) == status
        for pidfd in watched:
            assert select.select([pidfd], [], [], DEADLINE_S)[0], "a daemon goes on"
            os.close(pidfd)
    if number is not signal.SIGKILL:
        assert list(folder.iterdir()) == []


def test_a_temporary_folder_too_deep_for_sockets_is_refused(tmp_path: Path) -> None:
    """The kernel's limit is 107 bytes, and its error does not say of what."""
    deep = tmp_path / ("d" * 80)
    deep.mkdir()
    done = subprocess.run(
        command("idle"), env={**os.environ, "TMPDIR": str(deep)}, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.returncode == 2
    assert "set TMPDIR to a shorter one" in done.stderr


def daemons(fleet: Fleet) -> tuple[Daemon, Daemon]:
    return fleet.receiver(chunk_bytes=CHUNK_BYTES, slots=4), fleet.sender(chunk_bytes=CHUNK_BYTES, slots=4)


def send(engine: PrefillEngine, load: Load) -> None:
    engine.run(load)


@pytest.fixture
def released(tmp_path: Path) -> str:
    """The FIFO between two engines."""
    path = tmp_path / "released"
    os.mkfifo(path)
    return str(path)


def test_the_engines_of_a_benchmark_move_what_they_say_in_every_mode(fleet: Fleet, released: str) -> None:
    """More than fits at once, so that slots are used again."""
    receiver, sender = daemons(fleet)
    with closing(PrefillEngine()) as prefill, closing(DecodeEngine()) as decode:
        prefill.attach(AttachPrefill(socket=str(sender.socket), receiver=receiver.address, released=released))
        decode.attach(AttachDecode(socket=str(receiver.socket), released=released))
        for run, mode in enumerate(MODES):
            load = Load(run=run, requests=7, chunks=2, depth=2, mode=mode)
            with in_background(functools.partial(send, prefill, load)):
                taken = decode.run(load)
            assert (taken.chunks, taken.wrong, len(taken.claimed_at)) == (14, 0, 7)


@pytest.mark.parametrize("mode", MODES)
def test_wrong_bytes_are_noticed(fleet: Fleet, released: str, mode: Mode) -> None:
    """A benchmark that moves the wrong bytes fast is worth nothing."""
    receiver, sender = daemons(fleet)
    load = Load(run=1, requests=1, chunks=2, depth=1, mode=mode)
    payload = Payload(CHUNK_BYTES)
    with (
        closing(PrefillEngine()) as reader,
        closing(DecodeEngine()) as decode,
        connect_sender(sender.socket) as link,
    ):
        reader.attach(AttachPrefill(socket=str(sender.socket), receiver=receiver.address, released=released))
        decode.attach(AttachDecode(socket=str(receiver.socket), released=released))
        with (
            link.open(load.req_id(0), receiver=receiver.address, total_chunks=2) as transfer,
            transfer.stage(load.keys(0)) as slots,
        ):
            for chunk, slot in enumerate(slots):
                assert slot is not None
                slot[:] = payload.chunk(0, chunk)
                put_stamps(slot.view, load.stamp(0, 0 if mode != "check" else chunk))
                if mode == "check" and chunk == 1:
                    slot.view[CHUNK_BYTES // 2] ^= 1
        taken = decode.run(load)
    assert (taken.chunks, taken.wrong) == (2, 1)


def test_a_worker_that_dies_says_why(fleet: Fleet) -> None:
    """Its caller would wait for ever, and the reason is in another process."""
    worker = fleet.worker("kvpd.bench.prefill")
    with pytest.raises(BenchmarkFailed, match="cannot reach the daemon"):
        worker.call("attach", AttachPrefill(socket="/no/such.sock", receiver="127.0.0.1:1", released=""), type(None))
