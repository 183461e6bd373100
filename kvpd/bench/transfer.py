"""`kvpd bench transfer`: goodput from engine to engine, beside memcpy and beside bare UCX puts in the same run."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final

import attrs
import click

from kvpd.bench.arguments import counts, size_text, sizes, words
from kvpd.bench.failure import BenchmarkFailed
from kvpd.bench.fleet import Fleet
from kvpd.bench.memcpy import Memcpy
from kvpd.bench.pair import TRANSPORTS, UCX_TLS, Pair, Transport, requests_of
from kvpd.bench.plots import Plot, Series
from kvpd.bench.rounds import Measured, alternate
from kvpd.bench.suite import Bench, Subcommand
from kvpd.bench.tables import Table
from kvpd.bench.ucx_source import OpenSource, PutAll
from kvpd.bench.ucx_target import LookAt, OpenTarget
from kvpd.transports.base import RemoteRegion

_QUICK_BYTES: Final = 16 << 20
_BYTES: Final = 1 << 30

_HELP = """Goodput from engine to engine, and what bounds it.

For each chunk size, batch, number of requests in flight and transport, four things take turns on the same sizes:

\b
  memcpy      one thread copies blocks of a chunk's size
  bare puts   kvpd's UCX data plane between two processes, no daemons: the wire
  in place    prefill engine, sender, receiver, decode engine; the engines write
              and read only the first and last 16 bytes of each chunk
  copying     the same, and each engine copies every chunk to or from memory of its own

With the transport "local" the prefill engine writes into the receiver's slot; the bare puts beside it are CMA's.
A request is one batch. Goodput counts chunks that the decode engine holds; the time runs from the first open to the
last release. Before it is measured, every byte of a load is compared; while it is measured, both ends of every chunk.

\b
Examples:
  kvpd bench transfer --transports cma --chunk-bytes 1MiB,8MiB,32MiB
  kvpd bench transfer --batches 1,8,32 --in-flight 4 --json transfer.json --plot transfer.svg
"""


@attrs.frozen(kw_only=True)
class Case:
    """One combination of sizes, and its goodputs in GB/s."""

    transport: Transport
    carried_by: tuple[str, ...]  # as UCX names what the bare puts went over
    chunk_bytes: int
    batch: int
    in_flight: int
    memcpy: Measured
    bare: Measured
    in_place: Measured
    copying: Measured


@attrs.frozen(kw_only=True)
class TransferResult:
    """All cases."""

    cases: tuple[Case, ...]

    def tables(self) -> Sequence[Table]:
        """Goodputs, and the ratios between what was measured side by side."""
        rows = [
            (
                f"{case.transport} {size_text(case.chunk_bytes)} {case.batch} {case.in_flight}",
                case.memcpy,
                case.bare,
                case.in_place,
                case.copying,
                case.in_place.ratio_to(case.bare).median,
                case.copying.ratio_to(case.memcpy).median,
            )
            for case in self.cases
        ]
        columns = (
            "chunk, batch, in flight",
            "memcpy",
            "bare puts",
            "in place",
            "copying",
            "in place ÷ bare",
            "copying ÷ memcpy",
        )
        carriers = {case.transport: case.carried_by for case in self.cases}
        notes = [f"{transport}: UCX moves bare puts by {' and '.join(names)}" for transport, names in carriers.items()]
        return [Table(title="Goodput, GB/s", columns=columns, rows=rows, notes=notes)]

    def plots(self) -> Sequence[Plot]:
        """Over the chunk size, a plot for each transport, batch and number in flight."""
        groups = itertools.groupby(self.cases, key=lambda case: (case.transport, case.batch, case.in_flight))
        return [_plot(f"{key[0]}, batches of {key[1]}, {key[2]} in flight", list(cases)) for key, cases in groups]


def _plot(title: str, cases: Sequence[Case]) -> Plot:
    x = [case.chunk_bytes for case in cases]

    def line(name: str, values: Sequence[Measured]) -> Series:
        medians = [each.median for each in values]
        return Series(name=name, x=x, y=medians, low=[each.low for each in values], high=[each.high for each in values])

    return Plot(
        title=title,
        x_label="bytes of a chunk",
        y_label="GB/s",
        series=[
            line("memcpy", [case.memcpy for case in cases]),
            line("bare UCX puts", [case.bare for case in cases]),
            line("kvpd, in place", [case.in_place for case in cases]),
            line("kvpd, engines copy", [case.copying for case in cases]),
        ],
        x_log=True,
        x_ticks=[(size, size_text(size)) for size in x],
    )


class _BarePuts:
    """Two processes and the puts between them."""

    def __init__(self, fleet: Fleet, chunk_bytes: int, slots: int, tls: str) -> None:
        self._chunk_bytes = chunk_bytes
        self._slots = slots
        self._stamps = itertools.count()
        self._target = fleet.worker("kvpd.bench.ucx_target")
        self._source = fleet.worker("kvpd.bench.ucx_source")
        offer = OpenTarget(chunk_bytes=chunk_bytes, slots=slots, tls=tls)
        region = self._target.call("open", offer, RemoteRegion)
        source = OpenSource(chunk_bytes=chunk_bytes, slots=slots, tls=tls, region=region)
        self.transports = self._source.call("open", source, tuple[str, ...])

    def gb_s(self, batches: int, batch: int, in_flight: int, *, whole: bool = False) -> float:
        """Put so much, and see that it has arrived."""
        number = next(self._stamps)
        puts = PutAll(stamp=number, batches=batches, batch=batch, in_flight=in_flight)
        seconds = self._source.call("put", puts, float)
        seen = min(self._slots, batches * batch)
        wrong = self._target.call("look", LookAt(stamp=number, slots=seen, whole=whole), int)
        if wrong:
            raise BenchmarkFailed(f"bare puts left {wrong} of {seen} chunks wrong")
        return batches * batch * self._chunk_bytes / seconds / 1e9


def _run(
    bench: Bench,
    *,
    chunk_bytes: tuple[int, ...],
    batches: tuple[int, ...],
    in_flight: tuple[int, ...],
    transports: tuple[Transport, ...],
    nbytes: int,
) -> TransferResult:
    cases = list(itertools.product(transports, batches, in_flight, chunk_bytes))
    bench.progress.plan(len(cases))
    memcpy = Memcpy()
    return TransferResult(cases=tuple(_case(bench, memcpy, nbytes, *case) for case in cases))


def _case(
    bench: Bench, memcpy: Memcpy, nbytes: int, transport: Transport, batch: int, in_flight: int, chunk_bytes: int
) -> Case:
    bench.progress.step(f"transfer: {transport}, {size_text(chunk_bytes)}, batches of {batch}, {in_flight} in flight")
    requests = requests_of(nbytes, chunk_bytes * batch, least=in_flight)
    slots = batch * in_flight
    with bench.fleet() as fleet:
        # Twice the slots at the receiver: those that the decode engine reads hold nobody up.
        pair = Pair(fleet, chunk_bytes=chunk_bytes, slots=2 * slots, staging_slots=slots, transport=transport)
        bare = _BarePuts(fleet, chunk_bytes, slots, UCX_TLS[transport])
        bare.gb_s(in_flight, batch, in_flight, whole=True)
        pair.run(requests=2 * in_flight, chunks=batch, depth=in_flight, mode="check")
        measured = alternate(
            bench.rounds,
            {
                "memcpy": lambda: memcpy.gb_s(chunk_bytes, nbytes),
                "bare": lambda: bare.gb_s(requests, batch, in_flight),
                "in_place": lambda: pair.run(requests=requests, chunks=batch, depth=in_flight, mode="in_place").gb_s,
                "copying": lambda: pair.run(requests=requests, chunks=batch, depth=in_flight, mode="copy").gb_s,
            },
        )
        return Case(
            transport=transport,
            carried_by=bare.transports,
            chunk_bytes=chunk_bytes,
            batch=batch,
            in_flight=in_flight,
            **{name: Measured.of(values) for name, values in measured.items()},
        )


SUBCOMMAND: Final = Subcommand(
    name="transfer",
    help=_HELP,
    run=_run,
    options=(
        sizes("--chunk-bytes", "256KiB,1MiB,8MiB,32MiB", "Sizes of a chunk."),
        counts("--batches", "4", "Chunks in a request."),
        counts("--in-flight", "1,4", "Requests open at once."),
        words("--transports", TRANSPORTS, "What carries the bytes."),
        click.Option(
            ["--bytes", "nbytes"],
            type=click.IntRange(1),
            default=_BYTES,
            show_default=True,
            help="Bytes of each measurement, which has 4,000 requests at most.",
        ),
    ),
    quick={"chunk_bytes": (1 << 20,), "in_flight": (2,), "nbytes": _QUICK_BYTES},
)
