"""`kvpd bench transfer`: goodput from engine to engine, beside memcpy and beside bare UCX puts in the same run."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final, Literal

import attrs
import click

from kvpd.bench.arguments import counts, size_text, sizes, words
from kvpd.bench.failure import BenchmarkFailed
from kvpd.bench.fleet import Fleet
from kvpd.bench.memcpy import Memcpy
from kvpd.bench.pair import Pair, requests_of
from kvpd.bench.payload import Mode
from kvpd.bench.plots import Plot, Series
from kvpd.bench.rounds import Measured, in_turn
from kvpd.bench.suite import Bench, Subcommand
from kvpd.bench.tables import Table
from kvpd.bench.ucx_source import Opened, OpenSource, PutAll
from kvpd.bench.ucx_target import LookAt, OpenTarget
from kvpd.bench.wires import BINDINGS, TRANSPORTS, UCX_TLS, Binding, Transport, check_bindings
from kvpd.transports.base import RemoteRegion

_QUICK_BYTES: Final = 16 << 20
_BYTES: Final = 1 << 30
Kind = Literal["bare", "in_place", "copying"]
_KINDS: Final[tuple[Kind, ...]] = ("bare", "in_place", "copying")
_SIZES: Final = "chunk, batch, in flight"

_HELP = """Goodput from engine to engine, and what bounds it.

For each chunk size, batch, number of requests in flight and transport, four things take turns on the same sizes:

\b
  memcpy      one thread copies blocks of a chunk's size
  bare puts   kvpd's UCX data plane between two processes, no daemons: the wire
  in place    prefill engine, sender, receiver, decode engine; the engines write
              and read only the first and last 16 bytes of each chunk
  copying     the same, and each engine copies every chunk to or from memory of its own

With the transport "local" the prefill engine writes into the receiver's slot; the bare puts beside it are CMA's.
With two bindings the last three take turns through either of them; over "local" there is nothing to compare.
A request is one batch. Goodput counts chunks that the decode engine holds; the time runs from the first open to the
last release. Before it is measured, every byte of a load is compared; while it is measured, both ends of every chunk.
Every round starts its processes anew: which memory they get from the kernel makes a difference of a third.

\b
Examples:
  kvpd bench transfer --transports cma --chunk-bytes 1MiB,8MiB,32MiB
  kvpd bench transfer --batches 1,8,32 --in-flight 4 --json transfer.json --plot transfer.svg
  kvpd bench transfer --transports cma,tcp --bindings ucx,ucx-py
"""


@attrs.frozen(kw_only=True)
class Case:
    """One combination of sizes through one binding, and its goodputs in GB/s. Cases of the same sizes share rounds."""

    transport: Transport
    binding: Binding
    carried_by: tuple[str, ...]  # as UCX names what the bare puts went over
    versions: str  # of what they went through
    chunk_bytes: int
    batch: int
    in_flight: int
    memcpy: Measured
    bare: Measured
    in_place: Measured
    copying: Measured

    @property
    def sizes(self) -> tuple[Transport, int, int, int]:
        """What cases that share rounds have in common."""
        return self.transport, self.chunk_bytes, self.batch, self.in_flight

    @property
    def label(self) -> str:
        """The first cell of its row."""
        by = "" if self.binding == "ucx" else f" by {self.binding}"
        return f"{self.transport}{by} {size_text(self.chunk_bytes)} {self.batch} {self.in_flight}"


@attrs.frozen(kw_only=True)
class TransferResult:
    """All cases."""

    cases: tuple[Case, ...]

    def tables(self) -> Sequence[Table]:
        """Goodputs, and the ratios between what was measured side by side."""
        rows = [
            (
                case.label,
                case.memcpy,
                case.bare,
                case.in_place,
                case.copying,
                case.in_place.ratio_to(case.bare).median,
                case.copying.ratio_to(case.memcpy).median,
            )
            for case in self.cases
        ]
        columns = (_SIZES, "memcpy", "bare puts", "in place", "copying", "in place ÷ bare", "copying ÷ memcpy")
        carriers = {f"{case.transport}, {case.versions}": case.carried_by for case in self.cases}
        notes = [f"{way}: bare puts go by {' and '.join(names)}" for way, names in carriers.items()]
        tables = [Table(title="Goodput, GB/s", columns=columns, rows=rows, notes=notes), self._bindings_table()]
        return [table for table in tables if table.rows]

    def _bindings_table(self) -> Table:
        own = {case.sizes: case for case in self.cases if case.binding == "ucx"}
        rows = [
            (
                case.label,
                case.bare.ratio_to(own[case.sizes].bare),
                case.in_place.ratio_to(own[case.sizes].in_place),
                case.copying.ratio_to(own[case.sizes].copying),
            )
            for case in self.cases
            if case.binding != "ucx" and case.sizes in own
        ]
        columns = (_SIZES, "bare puts", "in place", "copying")
        return Table(title="Goodput through ucx-py ÷ through kvpd's own binding", columns=columns, rows=rows)

    def plots(self) -> Sequence[Plot]:
        """Over the chunk size, a plot for each transport, batch and number in flight."""
        groups = itertools.groupby(self.cases, key=lambda case: (case.transport, case.batch, case.in_flight))
        return [_plot(f"{key[0]}, batches of {key[1]}, {key[2]} in flight", list(cases)) for key, cases in groups]


def _plot(title: str, cases: Sequence[Case]) -> Plot:
    by_binding = {binding: [case for case in cases if case.binding == binding] for binding in BINDINGS}
    present = [(binding, some) for binding, some in by_binding.items() if some]
    x = [case.chunk_bytes for case in present[0][1]]

    def line(name: str, values: Sequence[Measured]) -> Series:
        medians = [each.median for each in values]
        return Series(name=name, x=x, y=medians, low=[each.low for each in values], high=[each.high for each in values])

    series = [line("memcpy", [case.memcpy for case in present[0][1]])]
    for binding, some in present:
        by = "" if binding == "ucx" else f", by {binding}"
        series += [
            line(f"bare UCX puts{by}", [case.bare for case in some]),
            line(f"kvpd, in place{by}", [case.in_place for case in some]),
            line(f"kvpd, engines copy{by}", [case.copying for case in some]),
        ]
    ticks = [(size, size_text(size)) for size in x]
    return Plot(title=title, x_label="bytes of a chunk", y_label="GB/s", series=series, x_log=True, x_ticks=ticks)


class _BarePuts:
    """Two processes and the puts between them."""

    def __init__(self, fleet: Fleet, chunk_bytes: int, slots: int, binding: Binding, tls: str) -> None:
        self._chunk_bytes = chunk_bytes
        self._slots = slots
        self._stamps = itertools.count()
        self._target = fleet.worker("kvpd.bench.ucx_target")
        self._source = fleet.worker("kvpd.bench.ucx_source")
        offer = OpenTarget(chunk_bytes=chunk_bytes, slots=slots, binding=binding, tls=tls)
        region = self._target.call("open", offer, RemoteRegion)
        source = OpenSource(chunk_bytes=chunk_bytes, slots=slots, binding=binding, tls=tls, region=region)
        self.opened = self._source.call("open", source, Opened)

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


@attrs.frozen(kw_only=True)
class _Load:
    """What one case moves, whatever moves it."""

    transport: Transport
    chunk_bytes: int
    batch: int
    in_flight: int
    nbytes: int  # of each measurement

    @property
    def slots(self) -> int:
        """How many are in flight."""
        return self.batch * self.in_flight

    @property
    def requests(self) -> int:
        """How many make up a measurement."""
        return requests_of(self.nbytes, self.chunk_bytes * self.batch, least=self.in_flight)


class _Contenders:
    """What is measured through one binding, ready and seen to move every byte right.

    Whoever takes memory first gets what was freed last, in pieces all over the place, and is the slower for it by a
    third or so: it is the bare puts in one round and the daemons in the next.
    """

    def __init__(self, fleet: Fleet, load: _Load, binding: Binding, number: int) -> None:
        self._load = load
        self._fleet = fleet
        self._binding: Binding = binding
        for start in in_turn(number, (self._start_bare, self._start_pair)):
            start()
        self.opened = self._bare.opened
        self._bare.gb_s(load.in_flight, load.batch, load.in_flight, whole=True)
        self._pair.run(requests=2 * load.in_flight, chunks=load.batch, depth=load.in_flight, mode="check")

    def _start_bare(self) -> None:
        load = self._load
        self._bare = _BarePuts(self._fleet, load.chunk_bytes, load.slots, self._binding, UCX_TLS[load.transport])

    def _start_pair(self) -> None:
        # Twice the slots at the receiver: those that the decode engine reads hold nobody up.
        self._pair = Pair(
            self._fleet,
            chunk_bytes=self._load.chunk_bytes,
            slots=2 * self._load.slots,
            staging_slots=self._load.slots,
            transport=self._load.transport,
            binding=self._binding,
        )

    def gb_s(self, kind: Kind) -> float:
        """Goodput of one measurement."""
        load = self._load
        if kind == "bare":
            return self._bare.gb_s(load.requests, load.batch, load.in_flight)
        mode: Mode = "copy" if kind == "copying" else "in_place"
        return self._pair.run(requests=load.requests, chunks=load.batch, depth=load.in_flight, mode=mode).gb_s


def _run(
    bench: Bench,
    *,
    chunk_bytes: tuple[int, ...],
    batches: tuple[int, ...],
    in_flight: tuple[int, ...],
    transports: tuple[Transport, ...],
    bindings: tuple[Binding, ...],
    nbytes: int,
) -> TransferResult:
    check_bindings(bindings)
    loads = [
        _Load(transport=transport, chunk_bytes=size, batch=batch, in_flight=depth, nbytes=nbytes)
        for transport, batch, depth, size in itertools.product(transports, batches, in_flight, chunk_bytes)
    ]
    bench.progress.plan(len(loads))
    memcpy = Memcpy()
    return TransferResult(cases=tuple(case for load in loads for case in _measure(bench, memcpy, load, bindings)))


def _measure(bench: Bench, memcpy: Memcpy, load: _Load, bindings: tuple[Binding, ...]) -> list[Case]:
    """A case for each binding; they take turns."""
    if load.transport == "local":
        bindings = ("ucx",)  # what ucx-py would carry is what no engine fills in place: nothing
    sizes = f"{size_text(load.chunk_bytes)}, batches of {load.batch}, {load.in_flight} in flight"
    bench.progress.step(f"transfer: {load.transport}, {sizes}")
    memcpys: list[float] = []
    values: dict[Binding, dict[Kind, list[float]]] = {binding: {kind: [] for kind in _KINDS} for binding in bindings}
    opened: dict[Binding, Opened] = {}
    for number in range(bench.rounds):
        with bench.fleet() as fleet:
            order = in_turn(number, bindings)
            contenders = {binding: _Contenders(fleet, load, binding, number) for binding in order}
            memcpys.append(memcpy.gb_s(load.chunk_bytes, load.nbytes))
            for kind, binding in in_turn(number, itertools.product(_KINDS, bindings)):
                values[binding][kind].append(contenders[binding].gb_s(kind))
            opened = {binding: each.opened for binding, each in contenders.items()}
    return [
        Case(
            transport=load.transport,
            binding=binding,
            carried_by=opened[binding].carried_by,
            versions=opened[binding].versions,
            chunk_bytes=load.chunk_bytes,
            batch=load.batch,
            in_flight=load.in_flight,
            memcpy=Measured.of(memcpys),
            **{kind: Measured.of(values[binding][kind]) for kind in _KINDS},
        )
        for binding in bindings
    ]


SUBCOMMAND: Final = Subcommand(
    name="transfer",
    help=_HELP,
    run=_run,
    options=(
        sizes("--chunk-bytes", "256KiB,1MiB,8MiB,32MiB", "Sizes of a chunk."),
        counts("--batches", "4", "Chunks in a request."),
        counts("--in-flight", "1,4", "Requests open at once."),
        words("--transports", TRANSPORTS, "What carries the bytes."),
        words(
            "--bindings",
            BINDINGS,
            "What calls UCX, as the setting transport names it: kvpd itself, or ucx-py where it is installed.",
            default="ucx",
        ),
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
