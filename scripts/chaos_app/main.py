"""scripts/chaos: the stages of a run, its table, and its verdict."""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Final

import trio

from chaos_app.faults import FAULTS
from chaos_app.rounds import Rounds
from chaos_app.site import Site, enter_own_network, missing, open_remote_site
from chaos_app.stage import open_stage
from chaos_app.tally import Tally

# What UCX chooses between processes of one host; TCP there; nothing, where engines fill the receivers' slots in place;
# TCP between two network namespaces.
_TLS: Final = {"cma": "", "tcp": "tcp", "local": "", "namespaces": "tcp"}
_STALL_S: Final = 300.0  # for a round; one that takes longer hangs, whatever hangs it


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


async def run_stage(
    transport: str, tally: Tally, *, seed: str, seconds: float | None, rounds: int | None, folder: Path
) -> None:
    """Rounds over one transport, until the time or the number of rounds is over; at least one."""
    until = trio.current_time() + (seconds or 0.0)
    first = tally.rounds
    async with AsyncExitStack() as stack:
        site = await stack.enter_async_context(open_remote_site()) if transport == "namespaces" else Site()
        if site.is_remote and not site.loses_packets:
            tally.skipped["packets_lost"] = "this kernel has no netem"
        in_place = transport == "local"
        stage = await stack.enter_async_context(
            open_stage(folder, _TLS[transport], seed, tally, site, in_place=in_place)
        )
        judge = Rounds(stage, random.Random(seed))
        while True:
            with trio.move_on_after(_STALL_S) as scope:
                await judge.run_one()
            if scope.cancelled_caught:
                tally.problem("hangs", f"a round took longer than {_STALL_S:g} s")
                break
            done = tally.rounds - first
            _say(
                f"{transport}: round {done}, {tally.read} requests compared, {sum(tally.failed.values())} failed, "
                f"{sum(tally.faults.values())} faults, {len(tally.problems)} problems"
            )
            if (rounds is not None and done >= rounds) or (rounds is None and trio.current_time() >= until):
                break
        judge.judge_growth()


async def run(transports: list[str], *, seed: int, seconds: float | None, rounds: int | None) -> Tally:
    """All stages, one after another."""
    tally = Tally()
    for transport in transports:
        with tempfile.TemporaryDirectory(prefix="kvpd-chaos-") as folder:
            await run_stage(
                transport,
                tally,
                seed=f"{seed}/{transport}",
                seconds=None if seconds is None else seconds / len(transports),
                rounds=None if rounds is None else -(-rounds // len(transports)),
                folder=Path(folder),
            )
    return tally


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="scripts/chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=180.0, help="for so long, all stages together (180)")
    parser.add_argument("--rounds", type=int, help="so many rounds instead, over all stages")
    parser.add_argument("--seed", type=int, help="of every decision; drawn if not given")
    parser.add_argument("--transport", choices=[*_TLS], help="only this one")
    parser.add_argument("--json", type=Path, help="write the summary there too")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """The exit status: 0 only if nothing happened that must not."""
    options = parse(arguments)
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(1 << 32)
    transports = [options.transport] if options.transport else list(_TLS)
    why = ""
    if "namespaces" in transports:
        why = missing()
        if why:
            transports.remove("namespaces")
            _say(f"skipped: partition and packet loss between namespaces: {why}")
        else:
            enter_own_network()
    replay = f"scripts/chaos --seed {seed}" + (f" --transport {options.transport}" if options.transport else "")
    _say(f"seed {seed}; the same decisions again: {replay}")
    seconds = options.seconds if options.rounds is None else None
    tally = trio.run(partial(run, transports, seed=seed, seconds=seconds, rounds=options.rounds))
    for kind in FAULTS:
        tally.faults.setdefault(kind, 0)
    if why:
        tally.skipped["namespaces"] = why
    _say(tally.table())
    for problem in tally.problems:
        _say(f"\n{problem}")
    summary = json.dumps({"seed": seed, **tally.summary()})
    if options.json:
        options.json.write_text(summary + "\n")
    print(summary)
    return 0 if tally.is_good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
