"""What the demo shows when it is over: a table, the generated text, and one JSON object as the last line."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Callable, Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from demo_app.chunks import KvShape
from demo_app.conductor import TRANSPORT, Verdict
from demo_app.requests import Request


def show(
    console: Console,
    requests: Sequence[Request],
    shape: KvShape,
    decode: Callable[[tuple[int, ...]], str],
    verdict: Verdict,
) -> None:
    """For people."""
    console.print()
    console.print(_table(requests, shape))
    for request in requests:
        assert request.decoded is not None
        question = f"{request.prompt.title}: {request.prompt.question}".removesuffix(": ")
        console.print(f"\n[bold]{request.prompt.req_id}[/]  {escape(question)}", soft_wrap=True)
        console.print(textwrap.indent(escape(decode(request.decoded).strip()), "  "), soft_wrap=True)
        console.print("  " + _comparison(request))
    console.print(
        f"\nslots free at the end: {verdict.slots_free} of {verdict.slots_total}; exit statuses: {_statuses(verdict)}"
    )


def _table(requests: Sequence[Request], shape: KvShape) -> Table:
    room = max(request.chunks for request in requests)
    table = Table(title=f"a buffer of {room} chunks of {shape.chunk_bytes / 1e6:.1f} MB", box=box.SIMPLE_HEAD)
    table.add_column("request")
    for heading in ("tokens", "chunks", "MB", "wait s", "transfer ms", "GB/s", "tail ms"):
        table.add_column(heading, justify="right")
    for request in requests:
        table.add_row(
            request.prompt.req_id,
            str(len(request.prompt.tokens)),
            str(request.chunks),
            f"{request.bytes_in(shape) / 1e6:.1f}",
            _number(request.admission_wait_s, 3),
            _number(request.put_s, 1, scale=1e3),
            _number(goodput_gb_s([request]), 2),
            _number(request.tail_s, 0, scale=1e3),
        )
    table.caption = (
        "wait: for admission. transfer: chunks on the wire.\n"
        "tail: from the last chunk's computation, or admission, until all had landed."
    )
    return table


def _number(value: float | None, places: int, scale: float = 1.0) -> str:
    return "-" if value is None else f"{value * scale:.{places}f}"


def _comparison(request: Request) -> str:
    if request.identical:
        return "[green]identical to one process alone[/]"
    pairs = zip(request.decoded or (), request.alone or (), strict=False)
    place = next((number for number, (ours, alone) in enumerate(pairs) if ours != alone), "its end")
    return f"[red]differs from one process alone, from token {place} on[/]"


def _statuses(verdict: Verdict) -> str:
    return ", ".join(f"{name} {status}" for name, status in sorted(verdict.statuses.items()))


def goodput_gb_s(requests: Sequence[Request]) -> float | None:
    """Bytes over the time in which chunks were on the wire, in GB/s; None where no time was measured."""
    seconds = sum(request.put_s or 0.0 for request in requests)
    return sum(request.copied_bytes or 0 for request in requests) / 1e9 / seconds if seconds > 0 else None


def faults(requests: Sequence[Request], verdict: Verdict) -> list[str]:
    """What was not as it should be, a sentence each: a token that differs, or anything left behind."""
    differing = [
        f"{request.prompt.req_id}: the tokens differ from those of one process alone"
        for request in requests
        if not request.identical
    ]
    missing = verdict.slots_total - verdict.slots_free
    held = [f"{missing} of the receiver's {verdict.slots_total} slots were not free at the end"] if missing else []
    unclean = [f"{name} ended with status {status}" for name, status in verdict.statuses.items() if status != 0]
    return differing + held + unclean


def print_last_line(requests: Sequence[Request]) -> None:
    """For programs."""
    goodput = goodput_gb_s(requests)
    summary = {
        "identical": all(request.identical for request in requests),
        "requests": len(requests),
        "chunks": sum(request.chunks for request in requests),
        "bytes": sum(request.copied_bytes or 0 for request in requests),
        "admission_wait_s": [round(request.admission_wait_s or 0.0, 4) for request in requests],
        "goodput_gb_s": None if goodput is None else round(goodput, 3),
        "transport": TRANSPORT,
    }
    sys.stdout.flush()
    print(json.dumps(summary), flush=True)
