"""`python -m kvpd.bench.watched FILE ARGUMENTS...`: the `kvpd` command, with the turns of its loop counted in FILE."""

from __future__ import annotations

import functools
import runpy
import sys
from pathlib import Path

import trio

from kvpd.bench.loopwatch import LoopWatch, TurnInstrument


def main(file: str, *arguments: str) -> None:
    """Run the command; whatever loop it starts is watched."""
    watched = functools.partial(trio.run, instruments=[TurnInstrument(LoopWatch(Path(file)))])
    trio.run = watched  # type: ignore[assignment]  # it takes the same arguments
    sys.argv = ["kvpd", *arguments]
    runpy.run_module("kvpd", run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
