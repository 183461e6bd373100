"""All that one run has measured, and its tables."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any, Final

import attrs

from peers_app.figures import Pass, Table, cpu_table, goodput_table, median_of
from peers_app.jobs import KVPD, KVPD_IN_PLACE, LOCAL, WHAT_IT_DOES, WHAT_IT_DOES_COLUMNS
from peers_app.scenarios import Outcome, Story
from peers_app.sizes import MIB, Sizes, size_text

BARE: Final = "bare UCX puts"
_COPY: Final = ("memcpy, one thread", "memory")
_NIXL: Final = ("NIXL", "NIXL, no progress thread")
_RAW_NOTE: Final = (
    "GB/s (ratio to bare UCX puts over the same path at the same size), CPU seconds per GB of all processes. "
    "Rounds: {rounds} of {mib} MiB, medians shown; {in_flight} chunks in flight. "
    "Buffers are anonymous memory unless a row says memfd."
)
_JOB_NOTE: Final = (
    "GB/s (ratio to NIXL over the same path at the same size), CPU seconds per GB of all processes. "
    "Rounds: {rounds} of {mib} MiB, medians shown; requests of {job_chunks} chunks, {job_depth} under way. "
    "kvpd's slots are a memfd, as everything that processes share must be; the others' buffers are anonymous memory."
)
_CONTROL_NOTE: Final = (
    "Rounds: {control_rounds}, medians shown. LMCache: PDBackendAsync, unmodified, its own allocator and `mock_memory` "
    "channel."
)
_SCENARIO_NOTE: Final = (
    "Faults are numbered as in docs/RELIABILITY.md. A step that may be stuck is given up after {scenario_s:g} s, the "
    "overtaking after {small_requests} small requests."
)


@attrs.frozen
class Measure:
    """One figure of the control part: how it is called, which key it has, how it is written."""

    title: str
    key: str
    unit: str
    digits: int = 0


ALLOCATIONS: Final = (
    Measure("allocation of 8 chunks, one at a time, p50", "alone_p50_us", "µs"),
    Measure("the same, p99", "alone_p99_us", "µs"),
    Measure("allocations a second, {outstanding} outstanding", "rate_per_s", "/s"),
    Measure("receiver's CPU per allocation", "receiver_cpu_us", "µs"),
)
WAKE_UPS: Final = (
    Measure("from freed room to the next grant, {waiters} waiting, p50", "p50_us", "µs"),
    Measure("the same, p99", "p99_us", "µs"),
)


@attrs.define
class Results:
    """Filled while the run goes on."""

    sizes: Sizes
    machine: dict[str, Any]
    raw: list[Pass] = attrs.field(factory=list)
    jobs: list[Pass] = attrs.field(factory=list)
    control: dict[str, dict[str, list[float]]] = attrs.field(factory=dict)  # measure, system, a value per round
    scenarios: list[tuple[Story, dict[str, Outcome]]] = attrs.field(factory=list)
    left_out: dict[str, str] = attrs.field(factory=dict)

    def add_control(self, prefix: str, system: str, figures: dict[str, float]) -> None:
        """One round's figures of one system."""
        for key, value in figures.items():
            self.control.setdefault(f"{prefix}.{key}", {}).setdefault(system, []).append(value)

    @property
    def is_good(self) -> bool:
        """Whether nothing was left out, all bytes were right and kvpd came through every scenario."""
        verified = all(one.verified for one in (*self.raw, *self.jobs))
        return verified and not self.left_out and all(told["kvpd"].ok for _, told in self.scenarios if "kvpd" in told)

    def as_json(self) -> dict[str, Any]:
        """Everything."""
        return {
            "machine": self.machine,
            "sizes": attrs.asdict(self.sizes),
            "raw": [attrs.asdict(one) for one in self.raw],
            "jobs": [attrs.asdict(one) for one in self.jobs],
            "control": self.control,
            "scenarios": [
                {
                    "fault": story.fault,
                    "name": story.name,
                    "question": story.question,
                    **{system: attrs.asdict(one) for system, one in told.items()},
                }
                for story, told in self.scenarios
            ],
            "left_out": self.left_out,
        }

    # ------------------------------------------------------------------ tables

    def tables(self) -> list[Table]:
        """Those that there is something to say in."""
        made = [self._machine_table()]
        names = {length: size_text(length) for length in self.sizes.chunk_bytes}
        if self.raw:
            made.append(goodput_table("Raw transfers", self.raw, names, BARE, self._note(_RAW_NOTE)))
        if self.jobs:
            made.append(goodput_table("From engine to engine", self.jobs, names, _NIXL[0], self._note(_JOB_NOTE)))
            largest = max(self.sizes.chunk_bytes)
            made.append(cpu_table(self.jobs, largest, names[largest]))
            made.append(Table("What each does of that job", WHAT_IT_DOES_COLUMNS, WHAT_IT_DOES))
        if self.jobs or self.raw:
            made.append(self._ratio_table(names))
        if self.control:
            made.append(self._control_table())
        if self.scenarios:
            made.append(self._scenario_table())
        return [table for table in made if table.rows]

    def _machine_table(self) -> Table:
        said = {**self.machine, **{f"left out: {name}": reason for name, reason in self.left_out.items()}}
        return Table("The run", ("what", "value"), tuple((name, str(value)) for name, value in said.items()))

    def _ratio_table(self, names: dict[int, str]) -> Table:
        rows = []
        for path in ("cma", "tcp"):
            in_place, whole = (KVPD_IN_PLACE, path), (KVPD, path)
            nixl = [(name, path) for name in _NIXL]
            rows += [
                (f"kvpd, no engine copies ÷ bare UCX puts, {path}", in_place, [(BARE, path)], self.raw),
                (f"kvpd, no engine copies ÷ NIXL's job, better setting, {path}", in_place, nixl, self.jobs),
                (f"kvpd, no engine copies ÷ NIXL's raw transfer, better setting, {path}", in_place, nixl, self.raw),
                (f"kvpd with engine copies ÷ memcpy, {path}", whole, [_COPY], self.raw),
            ]
        nixl = [(name, "cma") for name in _NIXL]
        rows += [
            (
                "kvpd, no engine copies, local ÷ NIXL's job, better setting, cma",
                (KVPD_IN_PLACE, LOCAL),
                nixl,
                self.jobs,
            ),
            ("kvpd with engine copies, local ÷ NIXL's job, better setting, cma", (KVPD, LOCAL), nixl, self.jobs),
        ]
        tcp, socket = [("Mooncake", "tcp")], [("TCP socket", "tcp")]
        rows += [
            ("kvpd, no engine copies ÷ the TCP socket's job", (KVPD_IN_PLACE, "tcp"), socket, self.jobs),
            ("kvpd, no engine copies ÷ Mooncake's job, tcp", (KVPD_IN_PLACE, "tcp"), tcp, self.jobs),
            ("kvpd, no engine copies ÷ Mooncake's raw transfer, tcp", (KVPD_IN_PLACE, "tcp"), tcp, self.raw),
        ]
        cells = []
        for title, ours, theirs, among in rows:
            ratios = [self._ratio(ours, theirs, among, length) for length in names]
            if any(ratios):
                cells.append((title, *ratios))
        return Table("Ratios of medians, same run", ("ratio", *names.values()), tuple(cells))

    def _ratio(
        self, ours: tuple[str, str], theirs: Iterable[tuple[str, str]], among: list[Pass], chunk_bytes: int
    ) -> str:
        mine = median_of(one for one in self.jobs if (one.system, one.path, one.chunk_bytes) == (*ours, chunk_bytes))
        others = [
            median_of(one for one in among if (one.system, one.path, one.chunk_bytes) == (*other, chunk_bytes))
            for other in theirs
        ]
        best = max((one.gb_s for one in others if one), default=None)
        return f"{mine.gb_s / best:.2f}" if mine and best else ""

    def _control_table(self) -> Table:
        measures = [("alloc", one) for one in ALLOCATIONS] + [("wake", one) for one in WAKE_UPS]
        measures += [
            (name, Measure(f"CPU of a core while {int(name.split()[1]):,} wait", "cpu_share", "%", 2))
            for name in self._waits()
        ]
        rows = []
        for prefix, measure in measures:
            by_system = self.control.get(f"{prefix}.{measure.key}", {})
            scale = 100.0 if measure.unit == "%" else 1.0
            medians = {system: statistics.median(values) * scale for system, values in by_system.items()}
            title = measure.title.format(outstanding=self.sizes.alloc_outstanding, waiters=self.sizes.waiters)
            cells = [
                f"{medians[system]:,.{measure.digits}f} {measure.unit}" if system in medians else "not measured"
                for system in ("kvpd", "LMCache")
            ]
            both = medians.get("kvpd"), medians.get("LMCache")
            ratio = _ratio_text(both[0] / both[1]) if both[0] is not None and both[1] else ""
            if medians:
                rows.append((title, *cells, ratio))
        columns = ("measure", "kvpd", "LMCache", "kvpd ÷ LMCache")
        return Table("Without moving a byte", columns, tuple(rows), self._note(_CONTROL_NOTE))

    def _waits(self) -> list[str]:
        """`wait N` for every N, in order."""
        found = {name.partition(".")[0] for name in self.control if name.startswith("wait ")}
        return sorted(found, key=lambda name: int(name.split()[1]))

    def _scenario_table(self) -> Table:
        rows = []
        for story, told in self.scenarios:
            cells = [_outcome_cell(told.get(system)) for system in ("kvpd", "LMCache")]
            rows.append((str(story.fault), f"{story.name}: {story.question}", *cells))
        columns = ("fault", "scenario", "kvpd", "LMCache's PDBackendAsync")
        return Table("Stuck, starved or leaked", columns, tuple(rows), self._note(_SCENARIO_NOTE))

    def _note(self, text: str) -> str:
        """With this run's sizes."""
        return text.format(mib=self.sizes.pass_bytes // MIB, **attrs.asdict(self.sizes))


def _ratio_text(ratio: float) -> str:
    return f"{ratio:.3g}" if ratio >= 0.001 else "< 0.001"


def _outcome_cell(outcome: Outcome | None) -> str:
    if outcome is None:
        return "not played"
    return outcome.text if outcome.ok else f"**{outcome.text}**"
