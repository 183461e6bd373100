"""`kvpd bench control`: the receiver's control path, from AllocRequest to AllocResponse.

A benchmark that moves bytes shows how fast they move; how many requests a second one receiver can admit is decided
here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import attrs
import click

from kvpd.bench import arguments
from kvpd.bench.failure import BenchmarkFailed
from kvpd.bench.fleet import Daemon
from kvpd.bench.peer import Connect, RoundTrips, Times
from kvpd.bench.plots import Plot, Series
from kvpd.bench.rounds import Measured, alternate, percentile
from kvpd.bench.suite import Bench, Subcommand
from kvpd.bench.tables import Table
from kvpd.bench.workers import Worker

PEER: Final = "kvpd.bench.peer"
CHUNK_BYTES: Final = 4096

_HELP = """AllocRequest round trips: their time, and how many a second.

A peer speaks to a real receiver over ZMQ and loopback TCP. It opens transfers of one chunk, whose slot is free, and
cancels each when it has its slot; when that is acknowledged it opens the next. --outstanding says how many transfers
it has on their way at once.

A round trip begins before the AllocRequest is encoded and ends when the AllocResponse has been decoded: it has in it
both processes' loops, ZMQ both ways, the receiver's decision, the reservation, the slot and the lines of the log. The
rate counts transfers, each of which is two round trips: AllocRequest and its answer, CancelNotif and its answer.

\b
Example:
  kvpd bench control --outstanding 1,64 --transfers 20000
"""


@attrs.frozen(kw_only=True)
class Control:
    """One number of outstanding transfers. Times in seconds."""

    outstanding: int
    transfers: int  # in each round
    per_s: Measured
    p50: Measured
    p99: Measured
    receiver_cpu: Measured  # of each transfer


@attrs.frozen(kw_only=True)
class ControlResult:
    """All of them."""

    measured: tuple[Control, ...]

    def tables(self) -> Sequence[Table]:
        """A row each."""
        rows = [
            (each.outstanding, each.per_s, each.p50.times(1e6), each.p99.times(1e6), each.receiver_cpu.times(1e6))
            for each in self.measured
        ]
        columns = ("outstanding", "transfers/s", "round trip p50, µs", "p99, µs", "receiver's CPU a transfer, µs")
        return [Table(title="AllocRequest to AllocResponse", columns=columns, rows=rows)]

    def plots(self) -> Sequence[Plot]:
        """The rate over the number outstanding."""
        each = self.measured
        series = Series(
            name="transfers/s",
            x=[one.outstanding for one in each],
            y=[one.per_s.median for one in each],
            low=[one.per_s.low for one in each],
            high=[one.per_s.high for one in each],
        )
        return [
            Plot(
                title="Admissions of one receiver",
                x_label="transfers outstanding",
                y_label="transfers/s",
                series=[series],
                x_log=True,
            )
        ]


def _run(bench: Bench, *, outstanding: tuple[int, ...], transfers: int) -> ControlResult:
    counts = {depth: max(transfers, 2 * depth) for depth in outstanding}
    bench.progress.plan(bench.rounds * len(counts))
    with bench.fleet() as fleet:
        slots = max(outstanding)
        receiver = fleet.receiver(chunk_bytes=CHUNK_BYTES, slots=slots)
        peer = fleet.worker(PEER)
        connect(peer, receiver, slots)

        def measure(depth: int) -> Callable[[], tuple[Times, float]]:
            def once() -> tuple[Times, float]:
                bench.progress.step(f"control: {depth:,} outstanding")
                before = receiver.cpu_seconds
                times = peer.call("round_trips", RoundTrips(counts[depth], depth), Times)
                return times, receiver.cpu_seconds - before

            return once

        results = alternate(bench.rounds, {str(depth): measure(depth) for depth in counts})
    return ControlResult(measured=tuple(_control(depth, counts[depth], results[str(depth)]) for depth in counts))


def connect(peer: Worker, receiver: Daemon, slots: int) -> None:
    """Open the peer's session with a receiver that should have so many slots.

    Raises:
        BenchmarkFailed: it has another number, or the session cannot be opened.
    """
    found = peer.call("connect", Connect(receiver.address, CHUNK_BYTES), int)
    if found != slots:
        raise BenchmarkFailed(f"the receiver has {found} slots where it should have {slots}")


def _control(outstanding: int, transfers: int, rounds: Sequence[tuple[Times, float]]) -> Control:
    for times, _ in rounds:
        if len(times.each) != transfers:
            raise BenchmarkFailed(f"{len(times.each)} of {transfers} transfers were answered")
    return Control(
        outstanding=outstanding,
        transfers=transfers,
        per_s=Measured.of(transfers / times.seconds for times, _ in rounds),
        p50=Measured.of(percentile(times.each, 50) for times, _ in rounds),
        p99=Measured.of(percentile(times.each, 99) for times, _ in rounds),
        receiver_cpu=Measured.of(cpu / transfers for _, cpu in rounds),
    )


SUBCOMMAND: Final = Subcommand(
    name="control",
    help=_HELP,
    run=_run,
    options=(
        arguments.counts("--outstanding", "1,64,1000,10000", "How many transfers are on their way at once."),
        click.Option(
            ["--transfers"],
            type=click.IntRange(1, 10_000_000),
            default=4000,
            show_default=True,
            help="Transfers of each measurement, or twice those outstanding where that is more.",
        ),
    ),
    quick={"outstanding": (1, 64), "transfers": 200},
)
