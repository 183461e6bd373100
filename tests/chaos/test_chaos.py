"""A short run of scripts/chaos: it works, it covers what it says, and nothing leaks; CI has a longer one of its own."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from chaos_app import words
from chaos_app.engine import compare
from chaos_app.faults import FAULTS, Deck
from chaos_app.payloads import content_of, request_of
from chaos_app.rounds import Sample, growth
from chaos_app.tally import Tally

ROOT = Path(__file__).parents[2]


def run_chaos(folder: Path, *options: str) -> dict[str, Any]:
    """The summary of a run that must end well."""
    command = [sys.executable, "-m", "chaos_app.main", "--json", str(folder / "summary.json"), *options]
    environment = {"PYTHONPATH": f"{ROOT / 'scripts'}:{ROOT}", "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-8000:]
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    assert summary == json.loads(done.stdout.splitlines()[-1])
    return summary


@pytest.mark.timeout(330)
@pytest.mark.parametrize("transport", ["cma", "local"])
def test_two_rounds_of_chaos_leave_nothing(tmp_path: Path, transport: str) -> None:
    """Real daemons, engines and UCX; what CI does for three minutes, for a moment."""
    summary = run_chaos(tmp_path, "--rounds", "2", "--transport", transport, "--seed", "5")
    assert summary["ok"]
    assert summary["rounds"] == 2
    assert summary["requests_verified"] > 20
    assert summary["bytes_verified"] > 1 << 20
    assert (summary["bytes_filled_in_place"] > 1 << 20) is (transport == "local")
    assert sum(summary["faults"].values()) >= 4


def test_a_wrong_byte_is_a_corruption() -> None:
    """The comparison must be able to fail, or it proves nothing."""
    request = request_of("r-1")
    chunks = [bytearray(content_of(key, request.length(number))) for number, key in enumerate(request.keys)]
    views = [(key, memoryview(chunk)) for key, chunk in zip(request.keys, chunks, strict=True)]
    assert compare(request, views) == []
    chunks[-1][-1] ^= 1
    (wrong,) = compare(request, views)
    assert "r-1" in wrong
    tally = Tally()
    tally.heard("decode", words.Read("r-1", len(views), 1, (wrong,)))
    assert not tally.is_good
    assert tally.summary()["corruptions"] == 1


def test_chunks_of_another_request_are_a_corruption() -> None:
    """Right bytes under the wrong name are wrong bytes."""
    one, other = request_of("r-1"), request_of("r-2")
    views = [(key, memoryview(content_of(key, other.length(number)))) for number, key in enumerate(other.keys)]
    assert compare(one, views)


def test_what_grows_with_the_rounds_is_told_and_what_goes_up_and_down_is_not() -> None:
    """A leak of one descriptor a round ends a daemon in days; a cache that fills is no leak."""
    leaking = [Sample(40 + 2 * number, (30 + 2 * number) << 20) for number in range(30)]
    assert growth(leaking) == ["22 descriptors", "22 MiB"]
    filling = [Sample(40 + min(number, 5), 40 << 20) for number in range(30)]
    assert growth(filling) == []
    assert growth(leaking[:3]) == [], "too few to tell"


def test_faults_come_in_turns() -> None:
    """A run of some rounds must have met every kind."""
    deck = Deck(random.Random(1), list(FAULTS))
    assert {deck.draw() for _ in FAULTS} == set(FAULTS)
    assert {deck.draw() for _ in FAULTS} == set(FAULTS)
