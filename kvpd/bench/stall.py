"""`kvpd bench stall`: how long the daemons' loops go without looking for what has arrived, under load."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final

import attrs
import click

from kvpd.bench.arguments import counts, size_text, sizes, words
from kvpd.bench.loopwatch import Turns
from kvpd.bench.pair import Pair, requests_of
from kvpd.bench.plots import Plot
from kvpd.bench.rounds import Measured
from kvpd.bench.suite import Bench, Subcommand
from kvpd.bench.tables import Table
from kvpd.bench.wires import TRANSPORTS, Transport

_BATCH: Final = 4

_HELP = """How long the daemons' loops are busy before they look for messages, engines and timers again.

Two engines move requests through both daemons, in place, while the turns of each daemon's loop are counted by their
length. A turn runs everything that was ready, and whatever arrives meanwhile waits until it is over; a turn in which
the machine ran something else counts in full. Daemons count their turns for this benchmark alone.

\b
Example:
  kvpd bench stall --transports cma --chunk-bytes 8MiB --in-flight 16
"""


@attrs.frozen(kw_only=True)
class LoopStalls:
    """The turns of one daemon's loop, in seconds."""

    daemon: str
    turns: int  # in all rounds
    p50_s: Measured
    p99_s: Measured
    longest_s: Measured


@attrs.frozen(kw_only=True)
class StallCase:
    """One load and what it did to each loop."""

    transport: Transport
    chunk_bytes: int
    in_flight: int
    gb_s: Measured
    loops: tuple[LoopStalls, ...]


@attrs.frozen(kw_only=True)
class StallResult:
    """All loads."""

    cases: tuple[StallCase, ...]

    def tables(self) -> Sequence[Table]:
        """A row for each loop."""
        rows = [
            (
                f"{case.transport} {size_text(case.chunk_bytes)} {case.in_flight}",
                loop.daemon,
                case.gb_s.median,
                loop.turns,
                loop.p50_s.times(1e3),
                loop.p99_s.times(1e3),
                loop.longest_s.times(1e3),
            )
            for case in self.cases
            for loop in case.loops
        ]
        columns = ("chunk, in flight", "loop of", "GB/s", "turns", "p50, ms", "p99, ms", "longest, ms")
        return [Table(title="Turns of the daemons' loops", columns=columns, rows=rows)]

    def plots(self) -> Sequence[Plot]:
        """None: the table says it."""
        return []


def _run(
    bench: Bench,
    *,
    chunk_bytes: tuple[int, ...],
    in_flight: tuple[int, ...],
    transports: tuple[Transport, ...],
    nbytes: int,
) -> StallResult:
    loads = list(itertools.product(transports, chunk_bytes, in_flight))
    bench.progress.plan(len(loads))
    return StallResult(cases=tuple(_case(bench, nbytes, *load) for load in loads))


def _case(bench: Bench, nbytes: int, transport: Transport, chunk_bytes: int, in_flight: int) -> StallCase:
    bench.progress.step(f"stall: {transport}, {size_text(chunk_bytes)}, {in_flight} in flight")
    slots = _BATCH * in_flight
    requests = requests_of(nbytes, _BATCH * chunk_bytes, least=2 * in_flight)
    with bench.fleet() as fleet:
        pair = Pair(
            fleet, chunk_bytes=chunk_bytes, slots=2 * slots, staging_slots=slots, transport=transport, watched=True
        )
        watches = [watch for watch in (pair.sender.watch, pair.receiver.watch) if watch is not None]
        pair.run(requests=2 * in_flight, chunks=_BATCH, depth=in_flight, mode="check")
        gb_s, turns = [], []
        for _ in range(bench.rounds):
            before = [watch.turns() for watch in watches]
            gb_s.append(pair.run(requests=requests, chunks=_BATCH, depth=in_flight, mode="in_place").gb_s)
            turns.append([watch.turns() - earlier for watch, earlier in zip(watches, before, strict=True)])
    by_daemon = zip(("sender", "receiver"), zip(*turns, strict=True), strict=True)
    loops = tuple(_loop(name, rounds) for name, rounds in by_daemon)
    return StallCase(
        transport=transport, chunk_bytes=chunk_bytes, in_flight=in_flight, gb_s=Measured.of(gb_s), loops=loops
    )


def _loop(daemon: str, rounds: Sequence[Turns]) -> LoopStalls:
    return LoopStalls(
        daemon=daemon,
        turns=sum(turns.total for turns in rounds),
        p50_s=Measured.of(turns.percentile_s(50) for turns in rounds),
        p99_s=Measured.of(turns.percentile_s(99) for turns in rounds),
        longest_s=Measured.of(turns.percentile_s(100) for turns in rounds),
    )


SUBCOMMAND: Final = Subcommand(
    name="stall",
    help=_HELP,
    run=_run,
    options=(
        sizes("--chunk-bytes", "4KiB,1MiB,8MiB", "Sizes of a chunk; a request has four."),
        counts("--in-flight", "32", "Requests open at once."),
        words("--transports", TRANSPORTS, "What carries the bytes."),
        click.Option(
            ["--bytes", "nbytes"],
            type=click.IntRange(1),
            default=1 << 30,
            show_default=True,
            help="Bytes of each measurement, which has 4,000 requests at most.",
        ),
    ),
    quick={"chunk_bytes": (1 << 20,), "in_flight": (4,), "transports": ("cma",), "nbytes": 16 << 20},
)
