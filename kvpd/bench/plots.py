"""Plots, where somebody would rather look. matplotlib is needed for them and for nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import attrs
import click

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUFFIXES: Final = (".svg", ".png")
_WIDTH_IN: Final = 8.0
_HEIGHT_IN: Final = 4.0  # of each plot


@attrs.frozen(kw_only=True)
class Series:
    """One line of a plot. `low` and `high`, where given, are the ends of error bars."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()


@attrs.frozen(kw_only=True)
class Plot:
    """Lines over two axes; axes may be logarithmic. `x_ticks` names places on the x axis."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    x_log: bool = False
    y_log: bool = False
    x_ticks: Sequence[tuple[float, str]] = ()
    steps: bool = False  # a value holds until the next one, as an occupancy does
    markers: bool = True


def check_plot_file(file: Path) -> None:
    """Before anything is measured: whether plots can be drawn into this file.

    Raises:
        click.UsageError: the file's name says no known format, or matplotlib is missing; it names the remedy.
    """
    if file.suffix not in SUFFIXES:
        raise click.UsageError(f"--plot {file}: a plot is written as {' or '.join(SUFFIXES)}, as its name ends")
    try:
        import matplotlib.figure  # noqa: F401, PLC0415
    except ModuleNotFoundError as exc:
        if (exc.name or "").partition(".")[0] != "matplotlib":
            raise
        raise click.UsageError("--plot needs matplotlib, which is not installed; install kvpd[bench]") from exc


def draw(plots: Sequence[Plot], file: Path) -> None:
    """Draw them below each other. `check_plot_file` must have been content with the file."""
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(_WIDTH_IN, _HEIGHT_IN * len(plots)), layout="constrained")
    for number, plot in enumerate(plots, 1):
        _draw_one(plot, figure.add_subplot(len(plots), 1, number))
    figure.savefig(file, dpi=150)


def _draw_one(plot: Plot, axes: Axes) -> None:
    marker = "o" if plot.markers else ""
    for line in plot.series:
        if plot.steps:
            axes.step(line.x, line.y, where="post", label=line.name, marker=marker)
        elif line.low:
            below = [y - low for y, low in zip(line.y, line.low, strict=True)]
            above = [high - y for y, high in zip(line.y, line.high, strict=True)]
            axes.errorbar(line.x, line.y, yerr=[below, above], label=line.name, marker=marker, capsize=3)
        else:
            axes.plot(line.x, line.y, label=line.name, marker=marker)
    axes.set(title=plot.title, xlabel=plot.x_label, ylabel=plot.y_label)
    if plot.x_log:
        axes.set_xscale("log", base=2)
    if plot.y_log:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    if plot.x_ticks:
        axes.set_xticks([at for at, _ in plot.x_ticks], [text for _, text in plot.x_ticks])
        axes.minorticks_off()
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize="small")
