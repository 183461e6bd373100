"""What a campaign tells its reader: how it goes, what it has exercised, and how a failure is seen again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from kvpd.simulation.coverage import Coverage, expected_codes, expected_faults, expected_transitions
from kvpd.simulation.run import Tally
from kvpd.simulation.scenario import Scenario
from kvpd.simulation.shrink import Selection
from kvpd.simulation.world import Outcome


def summary(tally: Tally, seconds: float) -> str:
    """One line: how much has been run."""
    rate = tally.steps / max(seconds, 1e-9)
    return (
        f"{tally.seeds:,} seeds, {tally.steps:,} events ({rate:,.0f} a second), "
        f"{tally.virtual_s / 3600:,.1f} simulated hours, {tally.finished:,} of {tally.requests:,} requests arrived "
        f"whole, {tally.bytes_verified:,} bytes verified"
    )


def coverage_table(coverage: Coverage, *, service: bool = False) -> Iterator[str]:
    """What was exercised, and how often."""
    yield from _section("faults", coverage.faults, expected_faults(service=service))
    if service:
        return
    yield from _section("transitions", coverage.transitions, expected_transitions())
    yield from _section("errors", coverage.codes, expected_codes())


def _section(title: str, counts: Counter[str], expected: Iterable[str]) -> Iterator[str]:
    yield f"{title}:"
    for name in expected:
        count = counts[name]
        yield f"  {name:<44} {f'{count:,}' if count else 'NEVER':>12}"


def replay_command(scenario: Scenario, selection: Selection | None = None, *, service: bool = False) -> str:
    """What shows this run again."""
    command = f"scripts/simulate --seed {scenario.seed} --workload {scenario.workload}{' --service' * service}"
    if selection is not None:
        command += f" --only-requests {_numbers(selection.requests)} --only-faults {_numbers(selection.faults)}"
    return command


def _numbers(indexes: tuple[int, ...] | None) -> str:
    return ",".join(map(str, indexes or ())) or "none"


def failure_lines(outcome: Outcome) -> Iterator[str]:
    """A failing run, to be read: what is asked, what goes wrong, the last events, and the rule that does not hold."""
    failure, scenario = outcome.failure, outcome.scenario
    assert failure is not None
    for request in scenario.requests:
        cancelled = "" if request.cancel_by == "nobody" else f", cancelled by {request.cancel_by}"
        yield (
            f"  request {request.req_id} at {request.at:.3f} s: {len(request.keys)} chunks in batches of "
            f"{list(request.batches)}, sender-{request.sender} to receiver-{request.receiver}, "
            f"{request.style}{cancelled}"
        )
    for fault in scenario.faults:
        yield f"  fault {fault.kind} #{fault.target} at {fault.at:.3f} s for {fault.duration_s:.2f} s"
    yield f"  the last {len(failure.trace)} lines:"
    yield from (f"    {line}" for line in failure.trace)
    yield f"  at {failure.at:.4f} s: {failure.rule}: {failure.detail}"


def counterexample(outcome: Outcome, shrunk: Outcome, selection: Selection, *, service: bool = False) -> Iterator[str]:
    """A failing seed, how to see it again, and its smallest form."""
    failure = outcome.failure
    assert failure is not None
    yield f"seed {outcome.scenario.seed} ({outcome.scenario.workload}) fails: {failure.rule}: {failure.detail}"
    yield f"see it again:    {replay_command(outcome.scenario, service=service)}"
    yield f"and in short:    {replay_command(outcome.scenario, selection, service=service)}"
    kept = f"{len(shrunk.scenario.requests)} of {len(outcome.scenario.requests)} requests"
    yield f"shrunk to {kept} and {len(shrunk.scenario.faults)} of {len(outcome.scenario.faults)} faults:"
    yield from failure_lines(shrunk)
