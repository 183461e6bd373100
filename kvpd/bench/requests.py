"""`kvpd bench requests`: what a request costs beyond its bytes, in time and in CPU."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Final

import attrs
import click

from kvpd.bench.arguments import counts, size_text
from kvpd.bench.pair import Flow, Pair
from kvpd.bench.plots import Plot, Series
from kvpd.bench.rounds import Measured, alternate, percentile
from kvpd.bench.suite import Bench, Subcommand
from kvpd.bench.tables import Cell, Table

_CHUNK_BYTES: Final = 4096
_SLOTS_PER_OPEN_CHUNK: Final = 2  # those that are read hold nobody up

_HELP = """What a request costs, whatever its size: requests per second, latency and CPU.

Chunks are of 4 KiB, so their bytes cost next to nothing. --depths says how many requests are open at once; the prefill
engine opens the next one when the oldest has ended and the decode engine has given one back. Latency runs from open to
the moment when the decode engine holds the chunks. CPU is that of each of the four processes, user and kernel, divided
by the requests.

\b
Example:
  kvpd bench requests --chunks 1 --depths 1,32 --rounds 9
"""


@attrs.frozen(kw_only=True)
class RequestsCase:
    """One size of requests at one depth."""

    chunks: int  # of each request
    depth: int
    requests: int  # of each measurement
    rate: Measured  # per second
    latency_p50_s: Measured
    latency_p99_s: Measured
    cpu_s: dict[str, Measured]  # per request, by process
    cpu_total_s: Measured  # per request, of all four


@attrs.frozen(kw_only=True)
class RequestsResult:
    """All cases."""

    cases: tuple[RequestsCase, ...]

    def tables(self) -> Sequence[Table]:
        """Time, and CPU."""
        times = [
            (
                f"{case.chunks}, {case.depth}",
                case.rate,
                Measured.of(1e6 / rate for rate in case.rate.values),
                case.latency_p50_s.times(1e3),
                case.latency_p99_s.times(1e3),
            )
            for case in self.cases
        ]
        cpu: list[list[Cell]] = [
            [
                f"{case.chunks}, {case.depth}",
                *(used.times(1e6).median for used in case.cpu_s.values()),
                case.cpu_total_s.times(1e6),
            ]
            for case in self.cases
        ]
        processes = list(self.cases[0].cpu_s)
        return [
            Table(
                title=f"Requests of {size_text(_CHUNK_BYTES)} chunks",
                columns=("chunks, depth", "requests/s", "µs each", "latency p50, ms", "latency p99, ms"),
                rows=times,
            ),
            Table(title="CPU, µs per request", columns=("chunks, depth", *processes, "all four"), rows=cpu),
        ]

    def plots(self) -> Sequence[Plot]:
        """Rate and CPU over the depth, a line for each number of chunks."""
        groups = {chunks: list(cases) for chunks, cases in itertools.groupby(self.cases, key=lambda case: case.chunks)}
        rate = [_series(n, cases, [case.rate for case in cases]) for n, cases in groups.items()]
        cpu = [_series(n, cases, [case.cpu_total_s.times(1e6) for case in cases]) for n, cases in groups.items()]
        depths = sorted({case.depth for case in self.cases})
        return [
            _plot("Requests", "requests/s", rate, depths),
            _plot("CPU of all four processes", "µs per request", cpu, depths),
        ]


def _plot(title: str, y_label: str, series: Sequence[Series], depths: Sequence[int]) -> Plot:
    ticks = [(depth, str(depth)) for depth in depths]
    return Plot(title=title, x_label="requests open at once", y_label=y_label, series=series, x_log=True, x_ticks=ticks)


def _series(chunks: int, cases: Sequence[RequestsCase], values: Sequence[Measured]) -> Series:
    return Series(
        name=f"{chunks} chunk{'s' * (chunks != 1)}",
        x=[case.depth for case in cases],
        y=[each.median for each in values],
        low=[each.low for each in values],
        high=[each.high for each in values],
    )


def _run(bench: Bench, *, chunks: tuple[int, ...], depths: tuple[int, ...], requests: int) -> RequestsResult:
    cases = []
    bench.progress.plan(len(chunks))
    for number in chunks:
        bench.progress.step(f"requests: {number} chunks, {len(depths)} depths in turns")
        cases += _cases(bench, number, depths, requests)
    return RequestsResult(cases=tuple(cases))


def _cases(bench: Bench, chunks: int, depths: tuple[int, ...], requests: int) -> list[RequestsCase]:
    staging_slots = chunks * max(depths)
    # A measurement takes a second or so whatever the depth: requests that follow each other take longer.
    counts_of = {depth: max(2 * depth, requests // (4 if depth == 1 else 1)) for depth in depths}
    with bench.fleet() as fleet:
        pair = Pair(
            fleet,
            chunk_bytes=_CHUNK_BYTES,
            slots=_SLOTS_PER_OPEN_CHUNK * staging_slots,
            staging_slots=staging_slots,
        )

        def flow(depth: int) -> Flow:
            return pair.run(requests=counts_of[depth], chunks=chunks, depth=depth, mode="in_place")

        pair.run(requests=2 * max(depths), chunks=chunks, depth=max(depths), mode="check")
        flows = alternate(bench.rounds, {str(depth): functools.partial(flow, depth) for depth in depths})
    return [_case_of(chunks, int(depth), measured) for depth, measured in flows.items()]


def _case_of(chunks: int, depth: int, flows: Sequence[Flow]) -> RequestsCase:
    requests = flows[0].requests
    return RequestsCase(
        chunks=chunks,
        depth=depth,
        requests=requests,
        rate=Measured.of(requests / flow.seconds for flow in flows),
        latency_p50_s=Measured.of(percentile(flow.latencies_s, 50) for flow in flows),
        latency_p99_s=Measured.of(percentile(flow.latencies_s, 99) for flow in flows),
        cpu_s={name: Measured.of(flow.cpu_s[name] / requests for flow in flows) for name in flows[0].cpu_s},
        cpu_total_s=Measured.of(sum(flow.cpu_s.values()) / requests for flow in flows),
    )


SUBCOMMAND: Final = Subcommand(
    name="requests",
    help=_HELP,
    run=_run,
    options=(
        counts("--chunks", "1,8,64", "Chunks in a request."),
        counts("--depths", "1,8,32,256", "Requests open at once."),
        click.Option(
            ["--requests"],
            type=click.IntRange(1, 1_000_000),
            default=4000,
            show_default=True,
            help="Requests of each measurement; a quarter of it at depth 1.",
        ),
    ),
    quick={"chunks": (8,), "depths": (1, 32), "requests": 100},
)
