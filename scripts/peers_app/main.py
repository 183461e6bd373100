"""The conductor: measures what was asked for, in turns, and writes the tables."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import attrs
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table as ScreenTable

from kvpd.errors import KvpdError
from peers_app.arguments import PARTS, make_parser
from peers_app.children import ChildFailed
from peers_app.control import Figures, measure_allocations, measure_waiting, measure_wake_ups
from peers_app.figures import Pass, Table
from peers_app.jobs import JOB_SYSTEMS, measure_job
from peers_app.machine import describe
from peers_app.raw import SYSTEMS, Environment, System, in_turns, measure_raw
from peers_app.receivers import SYSTEMS as RECEIVERS
from peers_app.results import Results
from peers_app.scenarios import STORIES, Outcome
from peers_app.sizes import FULL, QUICK, Sizes
from peers_app.wire import WireFailed

PYTHON_VARIABLE: Final = "BENCH_PEERS_PYTHON"
NATIVE_VARIABLE: Final = "BENCH_PEERS_NATIVE"
_WIDTH: Final = 140


class Conductor:
    """One run."""

    def __init__(self, environment: Environment, results: Results, progress: Progress) -> None:
        self._environment = environment
        self._results = results
        self._progress = progress

    def run(self, parts: Sequence[str]) -> Iterator[None]:
        """Measure these parts; yields after each, so that what it measured can be kept."""
        results = self._results
        work: dict[str, Callable[[], None]] = {
            "raw": lambda: self._run_passes("raw transfers", SYSTEMS, measure_raw, results.raw),
            "jobs": lambda: self._run_passes("engine to engine", JOB_SYSTEMS, measure_job, results.jobs),
            "control": self._run_control,
            "scenarios": self._run_scenarios,
        }
        for part in PARTS:
            if part in parts:
                work[part]()
                yield

    @contextlib.contextmanager
    def _noting_failure(self, name: str) -> Iterator[None]:
        """Note why something cannot be done, and go on."""
        try:
            yield
        except (ChildFailed, WireFailed, KvpdError) as exc:
            self._results.left_out[name] = str(exc)[-300:].replace("\n", " ")
            self._progress.console.print(f"{name} is left out: {exc}", style="red", highlight=False, markup=False)

    def _is_out(self, name: str) -> bool:
        """Whether it failed before: then it is not tried again in the next round."""
        return name in self._results.left_out

    def _run_passes(
        self,
        title: str,
        systems: Sequence[System],
        measure: Callable[[System, Environment, Sizes], Iterator[Pass]],
        into: list[Pass],
    ) -> None:
        sizes = self._results.sizes
        task = self._progress.add_task(title, total=sizes.rounds * len(systems))
        for number, system in in_turns(systems, sizes.rounds):
            name = f"{title}: {system.name}, {system.path}"
            self._progress.update(task, description=f"{name}, round {number + 1}")
            if not self._is_out(name):
                with self._noting_failure(name):
                    into.extend(measure(system, self._environment, sizes))
            self._progress.advance(task)
        self._progress.update(task, description=title)

    def _run_control(self) -> None:
        results, sizes = self._results, self._results.sizes
        steps: dict[str, Callable[[str, Environment, Sizes], Figures]] = {
            "alloc": measure_allocations,
            "wake": measure_wake_ups,
            **{f"wait {count}": functools.partial(measure_waiting, waiters=count) for count in sizes.idle_waiters},
        }
        task = self._progress.add_task("control", total=sizes.control_rounds * len(steps) * len(RECEIVERS))
        for number, prefix in itertools.product(range(sizes.control_rounds), steps):
            for system in RECEIVERS if number % 2 == 0 else reversed(RECEIVERS):
                name = f"control: {prefix}, {system}"
                self._progress.update(task, description=f"{name}, round {number + 1}")
                if not self._is_out(name):
                    with self._noting_failure(name):
                        results.add_control(prefix, system, steps[prefix](system, self._environment, sizes))
                self._progress.advance(task)
        self._progress.update(task, description="control")

    def _run_scenarios(self) -> None:
        results = self._results
        task = self._progress.add_task("scenarios", total=len(STORIES) * len(RECEIVERS))
        for story in STORIES:
            told: dict[str, Outcome] = {}
            for system in RECEIVERS:
                name = f"scenario: {story.name}, {system}"
                self._progress.update(task, description=name)
                with self._noting_failure(name):
                    told[system] = story.play(system, self._environment, results.sizes)
                self._progress.advance(task)
            results.scenarios.append((story, told))
        self._progress.update(task, description="scenarios")


def main() -> int:
    """Run, and say how it went."""
    arguments = make_parser().parse_args()
    # As an exception, so that every context is left and no daemon stays behind.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    sizes = QUICK if arguments.quick else FULL
    if arguments.rounds:
        sizes = attrs.evolve(sizes, rounds=arguments.rounds, control_rounds=arguments.rounds)
    environment = Environment(Path(os.environ[PYTHON_VARIABLE]), Path(os.environ[NATIVE_VARIABLE]))
    results = Results(sizes, describe(environment.peers_python))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        for _ in Conductor(environment, results, progress).run(arguments.only or PARTS):
            _keep(results, arguments.markdown, arguments.json)
    console = Console()
    if not console.is_terminal:
        console.width = _WIDTH  # in a file nothing says how wide
    for table in results.tables():
        _print(console, table)
    return 0 if results.is_good else 1


def _keep(results: Results, markdown: Path | None, everything: Path | None) -> None:
    """Write what there is so far: a run that is ended early loses only the part that it was in."""
    if markdown:
        markdown.write_text("\n".join(table.markdown() for table in results.tables()))
    if everything:
        everything.write_text(json.dumps(results.as_json(), indent=1) + "\n")


def _print(console: Console, table: Table) -> None:
    screen = ScreenTable(title=table.title, caption=table.note or None, title_justify="left", caption_justify="left")
    for number, column in enumerate(table.columns):
        screen.add_column(column, justify="left" if number == 0 else "right", overflow="fold")
    for row in table.rows:
        screen.add_row(*(cell.replace("**", "") for cell in row))
    console.print(screen)


if __name__ == "__main__":
    sys.exit(main())
