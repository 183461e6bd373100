"""What the benchmark can be asked. Only the standard library: this runs before anything is installed."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

PARTS: Final = ("raw", "jobs", "control", "scenarios")

_DESCRIPTION = """\
kvpd beside the systems that its users could pick instead: NIXL, Mooncake's transfer engine, LMCache's PD backend, bare
UCX puts, a plain TCP socket. Real processes on this machine, the same sizes, all in one run: each round measures every
system once, every other round backwards, and the tables show medians. Every byte that was moved is compared.
"""

_EPILOG = """\
parts (--only; all of them unless given):
  raw        bytes from one process's memory into another's: memcpy, bare UCX puts through kvpd's binding, NIXL with
             and without its progress thread, Mooncake, a socket; over CMA and over TCP where a system has both
  jobs       requests of several chunks from engine to engine. kvpd: real daemons, engines on kvpd.client. The others:
             the nearest that each can do, with slots asked for and a notice behind the bytes; a table says what is
             missing
  control    kvpd's receiver and LMCache's PDBackendAsync, one driver for both: allocations one at a time and 64 at a
             time, the time from freed room to the next grant with 100 waiting, CPU while many wait
  scenarios  situations in which requests may be stuck, starved or leaked, played on both, each with a time limit

what the figures mean:
  GB/s         10^9 bytes a second, the median of the rounds, and in brackets the ratio to bare UCX puts over the same
               path in the same run (jobs: to the same). Read ratios: on a shared machine GB/s vary by the hour.
  CPU s/GB     CPU seconds of all processes of the system together, for each GB moved
  kvpd         with the engines' own copies into and out of the shared buffers; and without them

output:
  Progress on standard error, tables on standard output. --markdown writes the same tables for a document, --json
  everything that was measured, with machine, versions and sizes; both after each part.

exit status:
  0   everything was measured, all bytes were right, and kvpd came through every scenario
  1   something of that is not so; the tables say what. A system that cannot run here is left out, by name.
  2   the command line is wrong

needs:
  Linux on x86-64. The first run makes .venv-peers: 2 GB, some minutes. Mooncake needs libibverbs.so.1 (Debian and
  Ubuntu: libibverbs1). LMCache's transfer channel is its own `mock_memory`, so its part needs no GPU and no NIXL.

examples:
  scripts/bench-peers --quick
  scripts/bench-peers --only raw --only jobs --markdown peers.md --json peers.json
"""


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench-peers",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--quick", action="store_true", help="two sizes, one round: whether it all works")
    parser.add_argument("--only", choices=PARTS, action="append", help="this part, and others so named")
    parser.add_argument(
        "--rounds", type=_positive, metavar="N", help="rounds of every part but the scenarios (5; control: 3)"
    )
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables as Markdown")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured")
    parser.add_argument("--install-only", action="store_true", help="make .venv-peers and stop")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return number


if __name__ == "__main__":
    make_parser().parse_args()
