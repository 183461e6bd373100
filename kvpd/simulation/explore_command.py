"""The command behind scripts/explore."""

from __future__ import annotations

import sys

import click
from rich.console import Console
from rich.table import Table

from kvpd.simulation.explore import Progress, Result, search
from kvpd.simulation.explore_state import WorldConfig
from kvpd.simulation.explore_worlds import GROWTH, WORLDS

_CHECKED = """\
held in every state: conservation and every other count of the cores (their own audits), whole or nothing, one
writer a slot, no write into a slot that is free or another's, every claimed chunk holds exactly its own bytes and
keeps them while it is read, nothing announced before it is complete, every end told to the proxy as it is and once,
first in first out, no staging slot used twice, nothing ended twice or opened again; and from every state a clean
ending is reached without any fault."""


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option("--world", "names", multiple=True, type=click.Choice(list(WORLDS)), metavar="NAME", help="Only this one.")
@click.option("--list", "is_listing", is_flag=True, help="Say which worlds there are, and search none.")
@click.option("--ci", is_flag=True, help="Every world that is not large, two minutes in all.")
@click.option("--all", "is_all", is_flag=True, help="Every world.")
@click.option("--max-states", type=click.IntRange(1), default=2_000_000, show_default=True, help="Of one world.")
@click.option("--seconds", type=click.FloatRange(0, min_open=True), default=600.0, show_default=True, help="For one.")
def main(names: tuple[str, ...], is_listing: bool, ci: bool, is_all: bool, max_states: int, seconds: float) -> None:
    """Search every state that kvpd's real cores can reach in small worlds, breadth first.

    Messages arrive in order within a connection and in any order between connections; puts land in any order, and
    after their endpoint was cut off too. What may go wrong is said by each world's budget; it happens at any moment.

    Without options, three worlds that differ in the number of requests alone: how the search grows. Exit status 1 if
    anything that must be impossible was found, with the fewest steps to it; 2 if a limit ended a search of --ci.
    """
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    if is_listing:
        console.print(_listing())
        return
    if ci or is_all:
        names = tuple(name for name, world in WORLDS.items() if is_all or not world.is_large)
    results = []
    for name in names or GROWTH:
        result = _search(console, WORLDS[name], max_states, seconds)
        results.append(result)
        if result.counterexample is not None:
            console.print(f"{name}: {len(result.counterexample.steps)} steps to what must be impossible", style="red")
            console.print(str(result.counterexample), markup=False, soft_wrap=True)
    console.print(_results(results))
    console.print(_CHECKED)
    if any(result.counterexample is not None for result in results):
        sys.exit(1)
    if ci and not all(result.is_exhausted for result in results):
        sys.exit(2)


def _search(console: Console, world: WorldConfig, max_states: int, seconds: float) -> Result:
    """One search, its progress on the terminal; where there is none, in the table only."""
    with console.status(world.name) as status:

        def on_progress(progress: Progress) -> None:
            status.update(
                f"{world.name}: {progress.states:,} states, {progress.waiting:,} to be expanded, "
                f"depth {progress.depth}, {progress.seconds:.0f} s"
            )

        return search(world, states_max=max_states, seconds_max=seconds, on_progress=on_progress)


def _listing() -> Table:
    listing = Table("world", "what is in it", "what may go wrong, and how often", box=None, pad_edge=False)
    for name, world in WORLDS.items():
        faults = ", ".join(f"{fault} {times}" for fault, times in world.budget.items())
        listing.add_row(name, world.about + (" (large)" if world.is_large else ""), faults)
    return listing


def _results(results: list[Result]) -> Table:
    heads = ["world", "states", "transitions", "depth", "seconds", "states/s", "core states", "clean", "result"]
    table = Table(*heads, box=None, pad_edge=False)
    for column in table.columns[1:-1]:
        column.justify = "right"
    for result in results:
        verdict = "[green]holds" if result.is_exhausted else "[yellow]holds so far: a limit was reached"
        table.add_row(
            result.world,
            f"{result.states:,}",
            f"{result.transitions:,}",
            str(result.depth),
            f"{result.seconds:.1f}",
            f"{result.states_per_s:,.0f}",
            f"{result.sender_states:,} + {result.receiver_states:,}",
            f"{result.clean:,}",
            "[red]VIOLATION" if result.counterexample is not None else verdict,
        )
    if len(results) > 1:
        total = sum(result.seconds for result in results)
        states, steps = sum(r.states for r in results), sum(r.transitions for r in results)
        table.add_row("in all", f"{states:,}", f"{steps:,}", "", f"{total:.1f}", f"{states / total:,.0f}", "", "", "")
    return table


if __name__ == "__main__":
    main()
