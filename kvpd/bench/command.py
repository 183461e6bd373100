"""The command behind `kvpd bench`."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Final

import attrs
import click
import msgspec
from click.core import ParameterSource
from rich.console import Console

from kvpd.bench import admission, control, idle, requests, stall, trace, transfer
from kvpd.bench.plots import check_plot_file, draw
from kvpd.bench.progress import Progress
from kvpd.bench.record import Record, record
from kvpd.bench.suite import QUICK_ROUNDS, ROUNDS, Bench, Result, Subcommand
from kvpd.bench.tables import show

SUBCOMMANDS: Final[tuple[Subcommand, ...]] = (
    transfer.SUBCOMMAND,
    requests.SUBCOMMAND,
    control.SUBCOMMAND,
    admission.SUBCOMMAND,
    trace.SUBCOMMAND,
    idle.SUBCOMMAND,
    stall.SUBCOMMAND,
)
_WIDTH: Final = 140
_FOLDER_BYTES_MAX: Final = 80  # sockets in it have names of up to 20 bytes, and Unix a limit of 107


@attrs.frozen(kw_only=True)
class Run:
    """One subcommand's run, as it stands in the JSON."""

    subcommand: str
    arguments: Mapping[str, Any]
    rounds: int
    quick: bool
    seconds: float
    result: Result


@attrs.frozen(kw_only=True)
class Report:
    """The JSON document."""

    record: Record
    runs: Sequence[Run]


@attrs.frozen(kw_only=True)
class _Common:
    """The options that every subcommand has."""

    quick: bool
    rounds: int
    settings: tuple[str, ...]
    json_file: Path | None
    plot_file: Path | None


def _common_options() -> list[click.Option]:
    file = click.Path(dir_okay=False, path_type=Path)
    return [
        click.Option(["--quick"], is_flag=True, help="Small: shows that the benchmark is right, not how fast kvpd is."),
        click.Option(
            ["--rounds"],
            type=click.IntRange(1, 1000),
            help=f"How often each thing is measured, in turns with the others; {ROUNDS}, with --quick {QUICK_ROUNDS}.",
        ),
        click.Option(
            ["--set", "settings"],
            multiple=True,
            metavar="SECTION.KEY=VALUE",
            help="A setting for every daemon that is started, as for kvpd serve; may be repeated.",
        ),
        click.Option(["--json", "json_file"], type=file, help="Write everything measured, and the machine, as JSON."),
        click.Option(["--plot", "plot_file"], type=file, help="Draw it, as .svg or .png; needs kvpd[bench]."),
    ]


def _take_common(arguments: dict[str, Any]) -> _Common:
    rounds = arguments.pop("rounds") or (QUICK_ROUNDS if arguments["quick"] else ROUNDS)
    names = ("quick", "settings", "json_file", "plot_file")
    return _Common(rounds=rounds, **{name: arguments.pop(name) for name in names})


def _command(subcommand: Subcommand) -> click.Command:
    def invoke(**arguments: Any) -> None:  # each subcommand has options of its own
        common = _take_common(arguments)
        if common.quick:
            source_of = click.get_current_context().get_parameter_source
            named = {name for name in subcommand.quick if source_of(name) is not ParameterSource.DEFAULT}
            arguments |= {name: value for name, value in subcommand.quick.items() if name not in named}
        _run_all([(subcommand, arguments)], common)

    return click.Command(
        subcommand.name,
        callback=invoke,
        params=[*subcommand.options, *_common_options()],
        help=subcommand.help,
    )


def _main(**arguments: Any) -> None:
    context = click.get_current_context()
    if context.invoked_subcommand is not None:
        given = [name for name in arguments if context.get_parameter_source(name) is not ParameterSource.DEFAULT]
        if given:
            raise click.UsageError(f"options stand behind the subcommand: {context.invoked_subcommand} --quick, say")
        return
    if not arguments["quick"]:
        click.echo(context.get_help())
        return
    common = _take_common(arguments)
    _run_all([(subcommand, _quick_arguments(subcommand)) for subcommand in SUBCOMMANDS], common)


def _quick_arguments(subcommand: Subcommand) -> dict[str, Any]:
    arguments = _command(subcommand).make_context(subcommand.name, []).params
    _take_common(arguments)
    return {**arguments, **subcommand.quick}


_HELP = """Measure kvpd on this machine, beside what bounds it.

Real daemons and engines run as processes, here, and end with the benchmark. Whatever is compared takes turns in one
run, each of them several times; tables show medians, and in parentheses the least and the greatest. Nothing fails for
being slow; a benchmark fails where bytes or counts are wrong.

For figures worth keeping, run it on a machine that does nothing else, and keep the JSON: it says what the machine was
and how fast its memory was at that moment. docs/PERFORMANCE.md says what each number means.

--quick without a subcommand runs a small version of all of them, in less than a minute.

\b
Examples:
  kvpd bench --quick
  kvpd bench transfer --json transfer.json --plot transfer.svg
  kvpd bench requests --depths 1,32 --chunks 1 --rounds 9
"""

main = click.Group(
    "bench",
    commands=[_command(subcommand) for subcommand in SUBCOMMANDS],
    callback=_main,
    params=list(_common_options()),
    invoke_without_command=True,
    help=_HELP,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


def _run_all(work: Sequence[tuple[Subcommand, Mapping[str, Any]]], common: _Common) -> None:
    if common.plot_file is not None:
        check_plot_file(common.plot_file)
    for file in (common.json_file, common.plot_file):
        if file is not None and not file.absolute().parent.is_dir():
            raise click.UsageError(f"{file}: there is no folder {file.absolute().parent}")
    console = Console()
    if not console.is_terminal:
        console.width = _WIDTH  # in a file nothing says how wide
    machine = record(common.settings)
    for line in machine.lines():
        console.print(line, highlight=False, markup=False)
    runs = []
    with _ended_by_sigterm(), tempfile.TemporaryDirectory(prefix="kvpd-bench-") as folder:
        if len(os.fsencode(folder)) > _FOLDER_BYTES_MAX:
            limit = f"{_FOLDER_BYTES_MAX} bytes of path are allowed, because it holds Unix sockets"
            raise click.UsageError(f"the temporary folder {folder} is too deep: {limit}; set TMPDIR to a shorter one")
        for subcommand, arguments in work:
            run = _run(subcommand, arguments, common, Path(folder))
            for table in run.result.tables():
                show(table, console)
            runs.append(run)
    report = Report(record=machine, runs=runs)
    if common.json_file is not None:
        common.json_file.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    plots = [plot for run in runs for plot in run.result.plots()]
    if common.plot_file is not None and plots:
        draw(plots, common.plot_file)


def _run(subcommand: Subcommand, arguments: Mapping[str, Any], common: _Common, folder: Path) -> Run:
    began = time.monotonic()
    with Progress(Console(stderr=True)) as progress:
        bench = Bench(
            quick=common.quick, rounds=common.rounds, settings=common.settings, progress=progress, folder=folder
        )
        result = subcommand.run(bench, **arguments)
    return Run(
        subcommand=subcommand.name,
        arguments=arguments,
        rounds=common.rounds,
        quick=common.quick,
        seconds=time.monotonic() - began,
        result=result,
    )


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM unwinds as Ctrl-C does, so that children end and the folder goes."""

    def stop(number: int, _frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
