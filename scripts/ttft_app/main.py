"""The benchmark: `python -m ttft_app.main`, normally by way of `scripts/bench-ttft`.

It asserts no time. What must hold is that every answer has the single server's tokens, and that every prompt but the
single server's came from another engine; a run where that is not so says it and fails.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path

import click
from demo_app import model
from demo_app.main import prepared_smollm2
from rich.console import Console
from vllm_app.parts import PartFailed
from vllm_app.stack import ROOT, Served

from kvpd.bench.plots import check_plot_file, draw
from kvpd.bench.record import record
from ttft_app import report, rounds
from ttft_app.arguments import parse
from ttft_app.figures import Figures
from ttft_app.measuring import BenchFailed, Sample
from ttft_app.systems import Systems

_CONTEXT = 2_048
_FLAGS = ("--no-enable-prefix-caching",)


def measured(
    options: argparse.Namespace, console: Console, logs: Path, keep: Callable[[list[Sample]], None]
) -> list[Sample]:
    """Start everything, measure, end everything; `keep` gets all samples so far after each round.

    Raises:
        ModelUnavailable: there is no model.
        PartFailed: a process ended, or did not get ready.
        BenchFailed: a request was not answered.
    """
    folder = prepared_smollm2(console)
    began = time.monotonic()

    def say(text: str) -> None:
        console.print(f"[dim]{time.monotonic() - began:7.1f} s[/]  {text}", soft_wrap=True, highlight=False)

    name = model.SMOLLM2_NAME
    served = Served(
        folder,
        name,
        model.read_shape(folder),
        context=_CONTEXT,
        room=2 * _CONTEXT,
        flags=_FLAGS,
        settings={"receiver.transport": options.transport},
    )
    nixl = {"progress_thread": options.nixl_progress_thread, "num_threads": options.nixl_threads}
    console.print("Starting five vLLM servers, a receiver, a sender and three proxies; on few cores this takes minutes")
    with Systems(served, logs, say, nixl=nixl) as stack:
        return rounds.run(stack, rounds.Texts(ROOT, folder), options.lengths, options.rounds, say, keep)


def run(options: argparse.Namespace, console: Console, logs: Path) -> list[str]:
    """Do it all, and say what was not as it must be."""
    thread = "its progress thread" if options.nixl_progress_thread else "no progress thread"
    about = record(
        (
            f"kvpd's receiver has transport = {options.transport!r}",
            f"NIXL has {thread} and num_threads = {options.nixl_threads}",
        )
    )

    def keep(samples: list[Sample]) -> None:
        if options.json is not None:  # after each round: what was measured before an interruption is not lost
            report.write_json(options.json, about, samples)

    samples = measured(options, console, logs, keep)
    figures = Figures(samples)
    found = report.tables(figures)
    for line in about.lines():
        console.print(line, soft_wrap=True, highlight=False)
    for table in found:
        table.show(console)
    if options.markdown is not None:
        report.write_markdown(options.markdown, about, found)
    if options.plot is not None:
        draw(report.plots(figures), options.plot)
    return rounds.faults(samples)


def main() -> int:
    """Exit status 0, 1 or (by argparse) 2; 130 after Ctrl-C."""
    options = parse()
    console = Console(highlight=False)
    complaints = Console(stderr=True, highlight=False, markup=False)
    if options.plot is not None:
        try:
            check_plot_file(options.plot)
        except click.UsageError as error:
            complaints.print(f"scripts/bench-ttft: {error.message}", soft_wrap=True)
            return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds, and so ends every process
    logs: Path = options.keep_logs or Path(tempfile.mkdtemp(prefix="kvpd-bench-ttft-logs-"))
    try:
        logs.mkdir(parents=True, exist_ok=True)
        faults = run(options, console, logs)
    except (model.ModelUnavailable, PartFailed, BenchFailed, HTTPException, EOFError, OSError) as error:
        faults = [str(error) or repr(error)]
    except KeyboardInterrupt:
        complaints.print("scripts/bench-ttft: interrupted; every process that it started is gone")
        return 130
    for fault in faults:
        complaints.print(f"scripts/bench-ttft: {fault}", soft_wrap=True)
    if faults:
        complaints.print(f"scripts/bench-ttft: the logs are in {logs}", soft_wrap=True)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
