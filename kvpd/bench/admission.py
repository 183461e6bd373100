"""`kvpd bench admission`: what waiting for room costs, and how soon it ends when there is room.

A full buffer is the normal state of a busy decode host, so neither the length of the queue nor the number of live
transfers may make an event dearer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import attrs
import click

from kvpd.bench import arguments, cores
from kvpd.bench.control import CHUNK_BYTES, PEER, connect
from kvpd.bench.cores import EventCost
from kvpd.bench.failure import BenchmarkFailed
from kvpd.bench.fleet import Daemon
from kvpd.bench.plots import Plot, Series
from kvpd.bench.processes import cores_used
from kvpd.bench.rounds import Measured, alternate, percentile
from kvpd.bench.suite import Bench, Subcommand
from kvpd.bench.tables import Cell, Table
from kvpd.bench.workers import Worker

_FOR_EVER_S: Final = 3600  # nobody's wait may end but by admission
_QUEUE_DEPTH_LEAST: Final = 16

_HELP = """Waking the next in line, waiting, and the cost of an event as transfers grow in number.

Wake-up: a real receiver has one slot, and --waiting transfers of a peer wait for it. The peer gives the slot up with a
CancelNotif, and the time runs from before that is encoded until the AllocResponse of the next in line has been
decoded: both processes' loops and ZMQ both ways are in it.

Waiting: the CPU that the receiver uses for --seconds in which nothing happens but the peer's heartbeats. `kvpd bench
idle` measures the same with a real sender, and both daemons.

Cores: what the receiver's and the sender's core cost an event, alone, while --live transfers exist: in the lives of
transfers that are sent, read and cancelled, one at a time. A table for each core; `queue` is a receiver's core with so
many transfers in its queue.

\b
Examples:
  kvpd bench admission --waiting 100 --samples 5000
  kvpd bench admission --live 1,100000
"""


@attrs.frozen(kw_only=True)
class Waiting:
    """So many transfers wait. Times in seconds."""

    waiting: int
    samples: int  # in each round
    p50: Measured
    p99: Measured
    receiver_cores: Measured  # CPU time per second while nothing happens


@attrs.frozen(kw_only=True)
class AdmissionResult:
    """The receiver as a process, and the cores alone."""

    seconds: float  # in which nothing happened, in each round
    waiting: tuple[Waiting, ...]
    live: tuple[int, ...]
    costs: tuple[EventCost, ...]

    def tables(self) -> Sequence[Table]:
        """One of the processes, one of each core."""
        rows = [
            (each.waiting, each.p50.times(1e6), each.p99.times(1e6), each.receiver_cores.times(100))
            for each in self.waiting
        ]
        columns = ("waiting", "wake-up p50, µs", "p99, µs", f"receiver, % of a core over {self.seconds:g} s")
        tables = [Table(title="From room that is given up to the next in line", columns=columns, rows=rows)]
        names = dict.fromkeys(cost.core for cost in self.costs)
        return tables + [_core_table(name, self._of(name), self.live) for name in names]

    def _of(self, core: str) -> list[EventCost]:
        return [cost for cost in self.costs if cost.core == core]

    def plots(self) -> Sequence[Plot]:
        """The cores' mean event over the number of live transfers."""
        series = []
        for core in dict.fromkeys(cost.core for cost in self.costs):
            costs = self._of(core)
            means = [sum(cost.seconds[live] for cost in costs) / len(costs) * 1e6 for live in self.live]
            series.append(Series(name=core, x=list(self.live), y=means))
        return [
            Plot(
                title="What an event costs a core, mean of all kinds",
                x_label="live transfers",
                y_label="µs",
                series=series,
                x_log=True,
            )
        ]


def _core_table(core: str, costs: Sequence[EventCost], live: Sequence[int]) -> Table:
    first, last = live[0], live[-1]

    def row(name: str, seconds: Mapping[int, float]) -> list[Cell]:
        growth = seconds[last] / seconds[first]
        return [name, *(seconds[count] * 1e6 for count in live), growth]

    total = {count: sum(cost.seconds[count] for cost in costs) for count in live}
    return Table(
        title=f"{core}: µs an event, by live transfers",
        columns=("event", *(f"{count:,}" for count in live), f"{last:,} ÷ {first:,}"),
        rows=[*(row(cost.event, cost.seconds) for cost in costs), row("each of them once", total)],
    )


def _run(
    bench: Bench, *, waiting: tuple[int, ...], samples: int, seconds: float, live: tuple[int, ...], lives: int
) -> AdmissionResult:
    bench.progress.plan(len(waiting) * (1 + bench.rounds) + len(live) * len(cores.WORLDS))
    return AdmissionResult(
        seconds=seconds,
        waiting=_wake_ups(bench, waiting, samples, seconds),
        live=live,
        costs=cores.measure(
            live, rounds=bench.rounds, lives=lives, progress=lambda what: bench.progress.step(f"admission: {what}")
        ),
    )


def _wake_ups(bench: Bench, waiting: Sequence[int], samples: int, seconds: float) -> tuple[Waiting, ...]:
    with bench.fleet() as fleet:
        queues: dict[int, tuple[Daemon, Worker]] = {}
        for count in waiting:
            bench.progress.step(f"admission: {count:,} join a queue")
            receiver = fleet.receiver(
                chunk_bytes=CHUNK_BYTES,
                slots=1,
                queue_depth_max=max(count + 1, _QUEUE_DEPTH_LEAST),
                allocation_timeout_s=_FOR_EVER_S,
                progress_timeout_s=_FOR_EVER_S,
            )
            peer = fleet.worker(PEER)
            connect(peer, receiver, 1)
            queued = peer.call("queue_up", count, int)
            if queued != count:
                raise BenchmarkFailed(f"{queued} of {count} transfers wait")
            queues[count] = receiver, peer

        def measure(count: int) -> Callable[[], tuple[list[float], float]]:
            receiver, peer = queues[count]

            def once() -> tuple[list[float], float]:
                bench.progress.step(f"admission: {count:,} waiting")
                times = peer.call("wake_ups", samples, list[float])
                return times, cores_used([receiver], seconds)[0]

            return once

        results = alternate(bench.rounds, {str(count): measure(count) for count in waiting})
    return tuple(_waiting(count, samples, results[str(count)]) for count in waiting)


def _waiting(count: int, samples: int, rounds: Sequence[tuple[list[float], float]]) -> Waiting:
    return Waiting(
        waiting=count,
        samples=samples,
        p50=Measured.of(percentile(times, 50) for times, _ in rounds),
        p99=Measured.of(percentile(times, 99) for times, _ in rounds),
        receiver_cores=Measured.of(used for _, used in rounds),
    )


SUBCOMMAND: Final = Subcommand(
    name="admission",
    help=_HELP,
    run=_run,
    options=(
        arguments.counts("--waiting", "1,100,10000", "How many transfers wait."),
        click.Option(
            ["--samples"],
            type=click.IntRange(1, 1_000_000),
            default=1000,
            show_default=True,
            help="Wake-ups of each measurement.",
        ),
        click.Option(
            ["--seconds"],
            type=click.FloatRange(0.1, 3600),
            default=5.0,
            show_default=True,
            help="How long a receiver is looked at while nothing happens.",
        ),
        arguments.counts(
            "--live", "100,1000,10000,100000", "How many transfers a core has while its events are timed."
        ),
        click.Option(
            ["--lives"],
            type=click.IntRange(1, 1_000_000),
            default=200,
            show_default=True,
            help="Lives of each measurement of a core.",
        ),
    ),
    quick={"waiting": (1, 100), "samples": 50, "seconds": 0.2, "live": (1, 1000), "lives": 20},
)
