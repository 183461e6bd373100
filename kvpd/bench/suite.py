"""What a subcommand is, what it gets and what it gives back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import attrs
import click

from kvpd.bench.fleet import Fleet
from kvpd.bench.plots import Plot
from kvpd.bench.progress import Progress
from kvpd.bench.tables import Table

ROUNDS: Final = 5
QUICK_ROUNDS: Final = 2


class Result(Protocol):
    """What was measured. An attrs class whose fields are the JSON: numbers, texts, sequences, other such classes."""

    def tables(self) -> Sequence[Table]:
        """What a person reads on a terminal."""

    def plots(self) -> Sequence[Plot]:
        """What a person would rather look at; may be empty."""


@attrs.frozen(kw_only=True)
class Bench:
    """What every subcommand gets besides its own arguments."""

    quick: bool  # small, to see that the benchmark itself is right
    rounds: int  # how often each thing is measured
    settings: tuple[str, ...]  # section.key=value, for every daemon that is started
    progress: Progress
    folder: Path  # temporary; sockets and logs go there

    @contextlib.contextmanager
    def fleet(self) -> Iterator[Fleet]:
        """Daemons and workers, all of which have ended when this is left."""
        with Fleet(self.folder, self.settings) as fleet:
            yield fleet


@attrs.frozen(kw_only=True)
class Subcommand:
    """One kind of measurement.

    `help` is what `--help` prints; its first line stands in the list of subcommands. `run(bench, **arguments)` gets
    what `options` were given. With --quick, `quick` replaces the default of each option that it names, by a value as
    `run` gets it.
    """

    name: str
    help: str
    run: Callable[..., Result]
    options: Sequence[click.Option] = ()
    quick: Mapping[str, Any] = attrs.Factory(dict)
