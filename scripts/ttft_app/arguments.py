"""What the benchmark can be asked on its command line. Only the standard library: this runs before anything is
installed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

_DESCRIPTION = """\
Measure the time to first token over HTTP of SmolLM2-135M-Instruct (float32) served in four ways on this machine:

  single            one vLLM server
  kvpd sequential   a prefill and a decode server with kvpd between, behind `kvpd serve proxy`
  kvpd concurrent   the same servers behind a proxy with mode = "concurrent"
  NixlConnector     a prefill and a decode server with vLLM's own connector, behind the same proxy code

All are up at once and take turns, in an order that changes from round to round; the servers whose turn it is not are
stopped (SIGSTOP). A turn is one short request that is not measured, and for each length a request that is, a stream of
8 tokens at temperature 0, and the same request to the system's own prefill server, alone. The prompts are new in every
round and the same for all four, and all answers must have the single server's tokens. All servers have the same flags:
one thread each, not bound to a core, no prefix caching.
"""

_EPILOG = """\
NixlConnector on CPUs needs kv_buffer_device = "cpu" and two changes, both in scripts/ttft_app/nixl_connector.py: the
worker's main thread is not pinned to a core, and NIXL's progress thread, which never sleeps, is off.
--nixl-progress-thread puts it back.

output:
  Tables: the time to first token, what is added to the single server's, and where the time goes. A request's stages
  are those that the proxies' metrics, vLLM's metrics and kvpd's log lines tell. Medians, with quartiles in
  parentheses. What a system adds is the difference to its own prefill server asked alone, in the same turn: two
  processes of one program need not be equally fast.

exit status:
  0   all of it was measured, and all tokens were the single server's
  1   not so: standard error says what
  2   the command line is wrong

examples:
  scripts/bench-ttft --quick
  scripts/bench-ttft --json ttft.json --markdown ttft.md --plot ttft.svg
"""
ROUNDS = 16
ROUNDS_QUICK = 4
LENGTHS = (100, 500, 1_000)


def _length(text: str) -> tuple[int, ...]:
    lengths = tuple(int(part) for part in text.split(","))
    if not all(2 <= length <= 1_900 for length in lengths):
        raise argparse.ArgumentTypeError("prompts of 2 to 1900 tokens")
    return lengths


def _rounds(text: str) -> int:
    rounds = int(text)
    if rounds < 1:
        raise argparse.ArgumentTypeError("one round at least")
    return rounds


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line; says what is wrong with it and exits with 2."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench-ttft",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help=f"{ROUNDS_QUICK} rounds instead of {ROUNDS}")
    parser.add_argument("--rounds", type=_rounds, metavar="N", help="so many rounds")
    parser.add_argument(
        "--lengths", type=_length, default=LENGTHS, metavar="N,…", help="tokens of the prompts (100,500,1000)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all that was measured")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it, as .svg or .png; needs matplotlib")
    parser.add_argument("--keep-logs", type=Path, metavar="DIR", help="keep the parts' logs there")
    parser.add_argument(
        "--transport", choices=("ucx", "local"), default="ucx", help="of kvpd's receiver; NIXL goes over UCX (ucx)"
    )
    parser.add_argument("--nixl-progress-thread", action="store_true", help="give NIXL its progress thread")
    parser.add_argument("--nixl-threads", type=int, default=4, metavar="N", help="vLLM's num_threads of NIXL (4)")
    parser.add_argument("--install-only", action="store_true", help="make the environments and stop")
    options = parser.parse_args(arguments)
    options.rounds = options.rounds or (ROUNDS_QUICK if options.quick else ROUNDS)
    return options


if __name__ == "__main__":
    parse()
