"""Tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from kvpd.bench.rounds import Measured

Cell = str | int | float | Measured | None


@attrs.frozen(kw_only=True)
class Table:
    """Rows under a title. A Measured shows its median and, in parentheses, its least and its greatest."""

    title: str
    columns: Sequence[str]  # with their units
    rows: Sequence[Sequence[Cell]]
    notes: Sequence[str] = ()  # what the numbers mean, a sentence each


def show(table: Table, console: Console) -> None:
    """Print it."""
    console.print()
    drawn = RichTable(title=table.title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for number, column in enumerate(table.columns):
        drawn.add_column(column, justify="left" if number == 0 else "right", overflow="fold")
    for row in table.rows:
        drawn.add_row(*map(text, row))
    console.print(drawn)
    for note in table.notes:
        console.print(note, highlight=False, markup=False)


def text(cell: Cell) -> str:
    """A cell as it is printed."""
    match cell:
        case None:
            return "-"
        case Measured(median, low, high):
            return text(median) if low == high else f"{text(median)} ({_rounded(low, 2)}–{_rounded(high, 2)})"  # noqa: RUF001
        case float():
            return _rounded(cell, 3)
        case int():
            return f"{cell:,}"
        case _:
            return cell


def _rounded(value: float, digits: int) -> str:
    if abs(value) >= 10**digits:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}" if abs(value) >= 0.001 or value == 0 else f"{value:.1e}"
