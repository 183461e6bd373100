"""Options whose values are lists, as `1,8,64` or `256KiB,1MiB`; and sizes as kvpd's settings write them.

Defaults are written as on the command line, so that `--help` shows what can be typed. What `run` gets is a tuple.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

import click

from kvpd.config.values import Size

_SIZE: Final = Size(least=64)  # what the benchmarks write into a chunk, to know it again, fits

T = TypeVar("T")


def counts(name: str, default: str, help_text: str) -> click.Option:
    """An option of whole numbers, each 1 at least: a tuple of int."""
    return _list_option(name, default, help_text, "N,N,...", _count)


def sizes(name: str, default: str, help_text: str) -> click.Option:
    """An option of sizes in bytes: a tuple of int."""
    return _list_option(name, default, help_text, "SIZE,SIZE,...", _size)


def size(name: str, default: str, help_text: str) -> click.Option:
    """An option of one size in bytes: an int."""

    def parse(_context: click.Context, _parameter: click.Parameter, text: str) -> int:
        try:
            return _size(text)
        except ValueError as exc:
            raise click.BadParameter(f"{text!r} {exc}") from exc

    return click.Option([name], default=default, show_default=True, metavar="SIZE", callback=parse, help=help_text)


def words(name: str, choices: tuple[str, ...], help_text: str, *, default: str | None = None) -> click.Option:
    """An option of words, by default all that there are: a tuple of str."""

    def word(text: str) -> str:
        if text not in choices:
            raise ValueError(f"is none of {', '.join(choices)}")
        return text

    everything = ",".join(choices)
    return _list_option(name, default or everything, help_text, everything, word)


def size_text(nbytes: int) -> str:
    """A size as settings write it: `8MiB`."""
    return str(_SIZE.shown(nbytes))


def _list_option(name: str, default: str, help_text: str, metavar: str, parse: Callable[[str], T]) -> click.Option:
    def parse_all(_context: click.Context, _parameter: click.Parameter, text: str) -> tuple[T, ...]:
        parsed = []
        for part in text.split(","):
            try:
                parsed.append(parse(part.strip()))
            except ValueError as exc:
                raise click.BadParameter(f"{part!r} {exc}") from exc
        return tuple(parsed)

    return click.Option([name], default=default, show_default=True, metavar=metavar, callback=parse_all, help=help_text)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError("is no whole number of 1 or more")
    return int(text)


def _size(text: str) -> int:
    return int(str(_SIZE.check(int(text) if text.isdecimal() else text)))
