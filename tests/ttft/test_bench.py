"""The benchmark itself, with real daemons and proxies and with stand-ins for vLLM's servers.

A figure is worth what its measuring is: that what was compared was the same work, that nothing else ran, and that a
system which cheats is found out.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import ttft_app.systems
import vllm_app.stack
from demo_app.chunks import KvShape
from ttft_app import report, rounds
from ttft_app.figures import Figures, Spread
from ttft_app.measuring import Sample
from ttft_app.systems import CONCURRENT, NIXL, SEQUENTIAL, SINGLE, SYSTEMS, Systems
from vllm_app.stack import Served

from kvpd.bench.record import record

SHAPE = KvShape(layers=1, kv_heads=1, head_dim=8)
LENGTHS = (100, 300)
MakeSystems = Callable[[], Systems]


class Numbers(rounds.Texts):
    """Prompts that need no tokenizer."""

    def __init__(self) -> None:
        self._tokens, self._next = list(range(2_000)), 0


@pytest.fixture
def make_systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeSystems:
    """The whole stack, with `server.py` in vLLM's place."""

    def make() -> Systems:
        program = tmp_path / "python"
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{Path(__file__).with_name("server.py")}" "$@"\n')
        program.chmod(0o755)
        monkeypatch.setattr(vllm_app.stack, "VLLM_PYTHON", program)
        monkeypatch.setattr(ttft_app.systems, "NIXL_PYTHON", program)
        monkeypatch.setattr(vllm_app.stack, "DAEMON_PYTHON", Path(sys.executable))
        monkeypatch.setattr(ttft_app.systems, "DAEMON_PYTHON", Path(sys.executable))
        logs = tmp_path / "logs"
        logs.mkdir()
        return Systems(Served(tmp_path, "m", SHAPE, 512, 512), logs, lambda _: None, nixl={})

    return make


def state_of(stack: Systems, part: str) -> str:
    """`T`: it is stopped."""
    return Path(f"/proc/{stack[part].pid}/stat").read_text().rpartition(") ")[2][0]


def sample(system: str, number: int, first_s: float, alone_s: float) -> Sample:
    """A request that took its prompt from outside."""
    return Sample(system, 100, number, first_s, alone_s, (1,), 99, {})


def test_every_system_answers_each_length_in_each_round_and_the_tables_tell_of_it(
    make_systems: MakeSystems, tmp_path: Path
) -> None:
    """A stage that is not found in a log or among metrics would be a hole in the table, or a wrong sum."""
    with make_systems() as stack:
        samples = rounds.run(stack, Numbers(), LENGTHS, 2, lambda _: None)
    assert len(samples) == len(SYSTEMS) * len(LENGTHS) * 2
    assert rounds.faults(samples) == []
    for one in samples:
        if one.system in (SEQUENTIAL.name, CONCURRENT.name):
            stages = [one.stages[name] for name in (*(f"log.{name}" for name in LOGGED), "prefill.computed")]
            assert sum(stages) == pytest.approx(one.first_s, abs=1e-6)
            assert one.stages["prefill.computed"] == pytest.approx(0.5)
            assert min(one.stages["log.way_in"], one.stages["log.to_claim"]) >= 0  # else they are another transfer's
    assert {one.stages["decode.queued"] for one in samples} == {0.25}
    tables = report.tables(Figures(samples))
    about = record(())
    report.write_json(tmp_path / "all.json", about, samples)
    report.write_markdown(tmp_path / "all.md", about, tables)
    assert len(json.loads((tmp_path / "all.json").read_text())["samples"]) == len(samples)
    assert all(table.title in (tmp_path / "all.md").read_text() for table in tables)
    assert [len(plot.series) for plot in report.plots(Figures(samples))] == [len(SYSTEMS), len(SYSTEMS) - 1]


LOGGED = ("way_in", "landed", "to_claim", "copied", "answered")


def test_only_the_servers_whose_turn_it_is_run(make_systems: MakeSystems) -> None:
    """On two cores a server that spins while another is measured takes half of what is measured."""
    with make_systems() as stack:
        for system in (NIXL, SINGLE, SEQUENTIAL):
            with stack.running(system):
                states = {name: state_of(stack, name) for one in SYSTEMS for name in one.engines}
            assert {name for name, state in states.items() if state != "T"} == set(system.engines)
        statuses = stack.stop()
    assert statuses["proxy-nixl"] == statuses["proxy-concurrent"] == statuses["receiver"] == 0


def test_a_system_that_answers_otherwise_is_found_out(
    make_systems: MakeSystems, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong tokens, or a prompt that was computed twice, would look like a fast transfer."""
    monkeypatch.setenv("COMPUTES", "nixl-kv_consumer")
    monkeypatch.setenv("WRONG", "kv_consumer")
    with make_systems() as stack:
        samples = rounds.run(stack, Numbers(), (100,), 1, lambda _: None)
    assert sorted(rounds.faults(samples)) == [
        "NixlConnector: 0 of 100 tokens came from outside, round 1",
        "kvpd concurrent: other tokens than the single server's for 100 tokens, round 1",
        "kvpd sequential: other tokens than the single server's for 100 tokens, round 1",
    ]


def test_what_is_added_is_taken_within_a_turn() -> None:
    """A machine that is slow for a minute is slow for all: between rounds, differences are its moods."""
    samples = [
        sample(system.name, number, slow * (1.0 if system is SINGLE else 1.5), slow)
        for number, slow in enumerate((1.0, 4.0, 2.0))
        for system in SYSTEMS
    ]
    figures = Figures(samples)
    assert figures.added(NIXL, 100) == figures.over_single(NIXL, 100) == Spread(1000.0, 750.0, 1500.0)
    assert figures.added_ratio(SEQUENTIAL, NIXL, 100) == 1.0
    assert figures.wins(SEQUENTIAL, NIXL, 100) == 0
    assert figures.first(SINGLE, 100).median == 2000.0


def test_each_system_begins_and_ends_rounds() -> None:
    """What is always measured right after the same other system is measured with its aftermath."""
    orders = [rounds.turned(SYSTEMS, number) for number in range(8)]
    assert {order[0].name for order in orders[:4]} == {system.name for system in SYSTEMS}
    assert {order[-1].name for order in orders[4:]} == {system.name for system in SYSTEMS}
    followers = {(a.name, b.name) for order in orders for a, b in itertools.pairwise(order)}
    assert all((b, a) in followers for a, b in followers)
