"""The command behind scripts/simulate."""

from __future__ import annotations

import sys
import time

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from kvpd.simulation.report import counterexample, coverage_table, failure_lines, replay_command, summary
from kvpd.simulation.run import Kind, Tally, campaign
from kvpd.simulation.shrink import Selection
from kvpd.simulation.trace import Entry, describe
from kvpd.simulation.workload import WORKLOADS
from kvpd.simulation.world import Outcome, World

_SEEDS = 1000  # by so many seeds of all workloads, everything has happened


def _indexes(_context: click.Context, _parameter: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    if value is None:
        return None
    try:
        return () if value == "none" else tuple(int(number) for number in value.split(","))
    except ValueError as exc:
        raise click.BadParameter("numbers with commas between them, or none") from exc


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option("--seeds", type=click.IntRange(1), help=f"How many seeds to run; {_SEEDS} if nothing is said.")
@click.option("--first", type=click.IntRange(0), default=0, show_default=True, help="The first of them.")
@click.option("--seconds", type=click.FloatRange(0, min_open=True), help="Stop after this long; with --seeds, at most.")
@click.option("--seed", type=click.IntRange(0), help="Replay one seed, and print every event.")
@click.option("--workload", type=click.Choice(list(WORKLOADS)), help="Only this workload; otherwise in turn.")
@click.option("--jobs", type=click.IntRange(1, 64), default=1, show_default=True, help="Processes that run seeds.")
@click.option("--service", is_flag=True, help="Over the real trio service and memory transports; see below.")
@click.option("--only-requests", callback=_indexes, help="With --seed: only these requests, as 0,3,4 or none.")
@click.option("--only-faults", callback=_indexes, help="With --seed: only these faults.")
def main(
    seeds: int | None,
    first: int,
    seconds: float | None,
    seed: int | None,
    workload: str | None,
    jobs: int,
    service: bool,
    only_requests: tuple[int, ...] | None,
    only_faults: tuple[int, ...] | None,
) -> None:
    """Run kvpd's real cores in simulated worlds where everything goes wrong, and check every rule after every event.

    Each seed is one world: senders, receivers, engines and proxies that crash, stop and restart, a network that cuts,
    delays, repeats and partitions, puts that fail, stall or land late, and a workload out of real traces and unkind
    ideas. The first seed that breaks a rule is printed with its last events, made as small as it gets; exit status 1.
    A kind of fault, transition or error that never came in a thousand seeds or more is a failure too.

    With --service the same requests go through kvpd.Sender and kvpd.Receiver themselves, on memory transports and a
    virtual clock, in an order of tasks that the seed decides. Of the faults it knows cancels, cut connections,
    partitions, stalled, failing and late puts, deaf proxies, engines that leave, and daemons that drain, end and start
    again; the others are passed over.
    """
    kind = Kind(workload, service)
    if seed is not None:
        sys.exit(_replay(kind, seed, Selection(only_requests, only_faults)))
    if only_requests is not None or only_faults is not None:
        raise click.UsageError("--only-requests and --only-faults go with --seed")
    if seeds is None and seconds is None:
        seeds = _SEEDS
    sys.exit(_campaign(kind, first, seeds, seconds, jobs))


def _replay(kind: Kind, seed: int, selection: Selection) -> int:
    def show(entry: Entry) -> None:
        for line in describe(entry):
            click.echo(line)

    scenario = selection.of(kind.scenario(seed))
    outcome: Outcome = kind.run(scenario) if kind.service else World(scenario, on_entry=show).run()
    if outcome.failure is None:
        click.echo(f"seed {seed} ({scenario.workload}): every rule held, in {outcome.steps:,} events")
        return 0
    for line in failure_lines(outcome):
        click.echo(line)
    return 1


def _campaign(kind: Kind, first: int, seeds: int | None, seconds: float | None, jobs: int) -> int:
    last = first + seeds if seeds is not None else sys.maxsize
    started = time.monotonic()
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task("simulating", total=seeds or seconds)

        def show(tally: Tally) -> None:
            passed = time.monotonic() - started
            done = tally.seeds if seeds is not None else passed
            progress.update(task, completed=done, description=summary(tally, passed))

        tally = campaign(kind, range(first, last), seconds=seconds, jobs=jobs, on_progress=show)
    click.echo(summary(tally, time.monotonic() - started))
    if tally.failed:
        _show_failure(kind, min(tally.failed))
        return 1
    return _show_coverage(kind, tally)


def _show_coverage(kind: Kind, tally: Tally) -> int:
    """What was exercised; in a full-size run of every workload, everything must have been."""
    for line in coverage_table(tally.coverage, service=kind.service):
        click.echo(line)
    missing = tally.coverage.missing(service=kind.service)
    if missing and kind.workload is None and tally.seeds >= _SEEDS:
        click.echo(f"{len(missing)} kinds never came in {tally.seeds:,} seeds, and were not tested:", err=True)
        for name in missing:
            click.echo(f"  {name}", err=True)
        return 1
    click.echo("every rule held")
    return 0


def _show_failure(kind: Kind, seed: int) -> None:
    outcome = kind.run(kind.scenario(seed))
    if outcome.failure is None:
        again = replay_command(outcome.scenario, service=kind.service)
        click.echo(f"seed {seed} failed once and not again: {again}", err=True)
        return
    for line in counterexample(outcome, *kind.shrink(outcome), service=kind.service):
        click.echo(line, err=True)


if __name__ == "__main__":
    main()
