"""The simulation itself: it repeats to the letter, holds every rule, shrinks what fails, and says what it did."""

from __future__ import annotations

import os
import subprocess
import sys

import attrs
import msgspec
import pytest
from click.testing import CliRunner

from kvpd.core.ledger import Ledger
from kvpd.core.messages import ErrorInfo, FailNotif, ProxyNotif
from kvpd.errors import ErrorCode
from kvpd.simulation.command import main
from kvpd.simulation.coverage import Coverage, expected_codes, expected_faults, expected_transitions
from kvpd.simulation.proxy import Heard
from kvpd.simulation.rules import Rule, Violation
from kvpd.simulation.run import Kind, Tally, campaign
from kvpd.simulation.scenario import Scenario
from kvpd.simulation.shrink import Selection
from kvpd.simulation.trace import describe
from kvpd.simulation.workload import WORKLOADS, draw
from kvpd.simulation.world import World

from .planted_entries import ENTRIES
from .planted_invariants import INVARIANTS

_WHOLE_TRACE = """
import hashlib, sys
from kvpd.simulation.trace import describe
from kvpd.simulation.workload import draw
from kvpd.simulation.world import World

digest = hashlib.sha256()
for seed in range(14):
    World(draw(seed), on_entry=lambda entry: digest.update("\\n".join(describe(entry)).encode())).run()
sys.stdout.write(digest.hexdigest())
"""


def _trace_digest(hash_seed: str) -> str:
    environment = os.environ | {"PYTHONHASHSEED": hash_seed}
    command = [sys.executable, "-c", _WHOLE_TRACE]
    return subprocess.run(command, env=environment, capture_output=True, check=True, text=True, timeout=100).stdout


def test_a_seed_is_the_same_run_in_every_process() -> None:
    """A failing seed that cannot be repeated is an anecdote: no order may depend on hashes."""
    assert _trace_digest("1") == _trace_digest("2")


@pytest.mark.parametrize("workload", WORKLOADS)
def test_every_rule_holds(workload: str) -> None:
    """The point of it all; scripts/simulate runs many more. With the product's own lines, nothing is found."""
    for seed in range(5):
        outcome = World(draw(seed, workload), audit_every=1).run()
        assert outcome.failure is None, f"seed {seed}: {outcome.failure}"


@pytest.mark.parametrize("workload", WORKLOADS)
def test_something_arrives(workload: str) -> None:
    """A world in which nothing works proves nothing: bytes are verified in every workload."""
    outcomes = [World(draw(seed, workload)).run() for seed in range(3)]
    assert sum(outcome.finished for outcome in outcomes) > 0
    assert sum(outcome.bytes_verified for outcome in outcomes) > 0


@pytest.mark.parametrize("workload", WORKLOADS)
def test_the_real_service_holds_too(workload: str) -> None:
    """The same scenarios through tasks, scopes and channels."""
    kind = Kind(workload, service=True)
    outcome = kind.run(kind.scenario(1))
    assert outcome.failure is None
    assert outcome.bytes_verified > 0


def test_over_the_real_service_too_a_seed_is_the_same_run() -> None:
    """The seed decides in which order trio runs its tasks."""
    kind = Kind("slow-wire", service=True)
    outcome, again = kind.run(kind.scenario(0)), kind.run(kind.scenario(0))
    assert (again.steps, again.seconds, again.finished) == (outcome.steps, outcome.seconds, outcome.finished)


@pytest.mark.parametrize(
    "name", ["fault-09-error-after-admission", "fault-20-never-landed", "fault-13-dedupe-against-unwritten"]
)
def test_the_real_service_does_not_hide_a_planted_fault(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its checks can fail as well."""
    (plant,) = (plant for plant in [*INVARIANTS, *ENTRIES] if plant.name == name)
    plant.patch(monkeypatch)
    kind = Kind(plant.workload, service=True)
    assert any(kind.run(kind.scenario(seed)).failure is not None for seed in range(10))


def test_a_proxy_that_hears_both_of_one_transfer_has_found_a_violation() -> None:
    """Over all its starts: a sender may say the one before the proxy dies, and the other to its successor."""
    heard = Heard()
    ready = ProxyNotif("r", 1, "receiver", "sender", 7, 3)
    failed = FailNotif("r", 2, "receiver", "sender", 7, 3, ErrorInfo(ErrorCode.PEER_LOST))
    for notif in (ready, ready, msgspec.structs.replace(failed, sender_incarnation=8)):
        heard.note(notif)
    assert ("sender", 7, 3) in heard
    with pytest.raises(Violation, match=Rule.ONE_END):
        heard.note(failed)


def test_a_selection_keeps_the_places_that_it_names() -> None:
    """What is printed for a shrunk run must replay that very run."""
    scenario = draw(3, "anything")
    chosen = Selection((0, 2), (1,)).of(scenario)
    assert chosen.requests == (scenario.requests[0], scenario.requests[2])
    assert chosen.faults == (scenario.faults[1],)
    assert Selection().of(scenario) == scenario


def test_a_failing_run_is_shrunk_and_its_replay_fails_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three requests are read sooner than two hundred."""
    monkeypatch.setattr(Ledger, "admit_next", _newest_first)
    kind = Kind("huge-among-small")
    outcome = next(o for o in (kind.run(kind.scenario(seed)) for seed in range(10)) if o.failure is not None)
    smallest, selection = kind.shrink(outcome, runs_max=100)
    assert smallest.failure is not None
    assert outcome.failure is not None
    assert smallest.failure.rule == outcome.failure.rule
    assert len(smallest.scenario.requests) < len(outcome.scenario.requests) / 4
    again = kind.run(selection.of(outcome.scenario))
    assert again.failure == smallest.failure


def _newest_first(self: Ledger) -> object:
    for transfer in reversed(self._waiting):
        if self._waiting[transfer] <= self._pool.unreserved:
            self._reserved[transfer] = self._waiting.pop(transfer)
            self._pool.reserve(self._reserved[transfer])
            return transfer
    return None


# ------------------------------------------------------------------ the command


def test_the_command_says_what_it_ran() -> None:
    """Whoever reads CI's log must see that something was tested."""
    result = CliRunner().invoke(main, ["--seeds", "12", "--workload", "hot-prefixes"])
    assert result.exit_code == 0, result.output
    assert result.output.startswith("12 seeds, ")
    for name in [*expected_faults(), *expected_transitions(), *expected_codes()]:
        assert f"  {name} " in result.output
    assert result.output.endswith("every rule held\n")


def test_the_command_prints_a_counterexample_and_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failing seed comes with the command that shows it again, its last events, and exit status 1."""
    monkeypatch.setattr(Ledger, "admit_next", _newest_first)
    result = CliRunner().invoke(main, ["--seeds", "5", "--workload", "huge-among-small"])
    assert result.exit_code == 1
    assert "fails: invariant 7: no overtaking" in result.output
    assert "scripts/simulate --seed 0 --workload huge-among-small --only-requests" in result.output
    assert "AllocRequest" in result.output


def test_the_command_replays_one_seed_event_by_event() -> None:
    """Every event, for whoever debugs."""
    result = CliRunner().invoke(
        main, ["--seed", "1", "--workload", "calm", "--only-requests", "0", "--only-faults", "none"]
    )
    assert result.exit_code == 0, result.output
    assert "OpenRequested" in result.output
    assert "every rule held" in result.output


def test_what_never_happened_is_named() -> None:
    """A kind of fault that is never injected was never survived either."""
    assert len(Coverage().missing()) == len(expected_faults()) + len(expected_transitions()) + len(expected_codes())
    full = Coverage()
    full.faults.update(expected_faults())
    full.transitions.update(expected_transitions())
    full.codes.update(expected_codes())
    assert full.missing() == []
    full.codes["claimed"] = 0
    assert full.missing() == ["error claimed"]


def test_several_processes_find_what_one_finds() -> None:
    """Seeds are independent: who runs them changes nothing."""

    def run(jobs: int) -> Tally:
        return campaign(Kind("calm"), range(30), seconds=None, jobs=jobs, on_progress=lambda tally: None)

    assert attrs.asdict(run(1)) == attrs.asdict(run(2))


def test_a_note_is_readable() -> None:
    """Words for events and actions, without what only fills lines."""
    scenario = draw(0, "calm")
    lines: list[str] = []
    World(_first_request(scenario), on_entry=lambda entry: lines.extend(describe(entry))).run()
    text = "\n".join(lines)
    assert "MessageReceived" in text
    assert "→ PostPuts" in text
    assert "HostIdentity" not in text


def _first_request(scenario: Scenario) -> Scenario:
    return attrs.evolve(scenario, requests=scenario.requests[:1])
