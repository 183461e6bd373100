"""What was measured, and the tables that are made of it. No I/O: tests feed it numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import attrs

GB: Final = 1e9


@attrs.frozen
class Pass:
    """One measured pass of one system: how many bytes took how long, and what it cost."""

    system: str
    path: str
    chunk_bytes: int
    bytes_moved: int
    seconds: float
    cpu_s: dict[str, float]  # by process
    verified: bool

    @property
    def gb_s(self) -> float:
        """Goodput."""
        return self.bytes_moved / self.seconds / GB

    @property
    def cpu_s_per_gb(self) -> float:
        """What all processes together burnt."""
        return sum(self.cpu_s.values()) / (self.bytes_moved / GB)

    def cpu_text(self) -> str:
        """The same by process."""
        return ", ".join(f"{name} {seconds / (self.bytes_moved / GB):.2f}" for name, seconds in self.cpu_s.items())


def cpu_since(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """What each process has used in between."""
    return {name: seconds - before[name] for name, seconds in after.items()}


@attrs.frozen
class Table:
    """Rows of text under a heading."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""

    def markdown(self) -> str:
        """As Markdown."""
        lines = [f"### {self.title}", ""]
        lines += [_row(self.columns), _row(["---"] * len(self.columns)), *map(_row, self.rows), ""]
        if self.note:
            lines += [self.note, ""]
        return "\n".join(lines)


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def median_of(passes: Iterable[Pass]) -> Pass | None:
    """The pass of the median goodput (the slower one of the middle two); None where there are none."""
    ordered = sorted(passes, key=lambda one: one.gb_s)
    return ordered[(len(ordered) - 1) // 2] if ordered else None


def percentile(values: Sequence[float], share: float) -> float:
    """The nearest-rank percentile; `share` is 0 to 1."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def systems_of(passes: Iterable[Pass]) -> list[tuple[str, str]]:
    """(system, path), in the order in which they were first measured."""
    return list(dict.fromkeys((one.system, one.path) for one in passes))


def goodput_table(title: str, passes: Sequence[Pass], chunk_names: dict[int, str], base: str, note: str = "") -> Table:
    """GB/s (and CPU seconds per GB) per system and chunk size, medians; ratios are to `base`, same path, same size."""
    columns = ["system", "path", *(f"{name}" for name in chunk_names.values()), "bytes"]
    rows = []
    for system, path in systems_of(passes):
        cells = [system, path]
        mine = [one for one in passes if (one.system, one.path) == (system, path)]
        for chunk_bytes in chunk_names:
            median = median_of(one for one in mine if one.chunk_bytes == chunk_bytes)
            reference = median_of(
                one for one in passes if (one.system, one.path) == (base, path) and one.chunk_bytes == chunk_bytes
            )
            cells.append(_goodput_cell(median, reference))
        cells.append("verified" if all(one.verified for one in mine) else "WRONG BYTES")
        rows.append(tuple(cells))
    return Table(title, tuple(columns), tuple(rows), note)


def cpu_table(passes: Sequence[Pass], chunk_bytes: int, chunk_name: str) -> Table:
    """CPU seconds per GB by process, at one chunk size, of the passes of median goodput."""
    rows = []
    for system, path in systems_of(passes):
        median = median_of(
            one for one in passes if (one.system, one.path, one.chunk_bytes) == (system, path, chunk_bytes)
        )
        if median is not None:
            rows.append((system, path, median.cpu_text()))
    return Table(f"CPU seconds per GB by process, {chunk_name}", ("system", "path", "processes"), tuple(rows))


def _goodput_cell(median: Pass | None, reference: Pass | None) -> str:
    if median is None:
        return "not measured"
    ratio = f" ({median.gb_s / reference.gb_s:.2f})" if reference is not None else ""
    return f"{median.gb_s:.2f}{ratio}, {median.cpu_s_per_gb:.2f} s"
