"""Public request traces: real sizes, real arrivals, and, in Mooncake's, real sharing of prefixes.

Two formats are read: Mooncake's JSON lines (`timestamp` in ms, `input_length`, `output_length`, `hash_ids`) and the CSV
of Azure's LLM inference traces (`TIMESTAMP`, `ContextTokens`, `GeneratedTokens`). Requests come in the order of their
arrival, which counts from the first of them. Excerpts of both are here; README.md says whose they are.
"""

from __future__ import annotations

import csv
import datetime
import functools
from importlib import resources
from pathlib import Path
from typing import Final

import attrs
import msgspec

EXCERPTS: Final = {"mooncake": "mooncake_conversation.jsonl", "azure": "azure_llm_2023_code.csv"}
BLOCK_TOKENS: Final = 512  # of one of Mooncake's hash_ids
_CSV_COLUMNS: Final = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_MICROSECONDS_END: Final = 26  # Azure writes a digit more


@attrs.frozen
class Request:
    """One request of a trace.

    `block_ids`, where the trace knows them, has one for every 512 tokens of the input. Equal ids stand for equal tokens
    from the beginning of the input to the block's end.
    """

    at: float  # seconds since the trace began
    input_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...] | None


class _MooncakeLine(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


def read(text: str) -> tuple[Request, ...]:
    """The requests of a trace in either format.

    Raises:
        ValueError: it is in neither, or holds none; the text names the line.
    """
    lines = text.splitlines()
    first = lines[0].lstrip() if lines else ""
    requests = _read_mooncake(lines) if first.startswith("{") else _read_azure(lines)
    if not requests:
        raise ValueError("the trace holds no request")
    requests.sort(key=lambda request: request.at)
    begins = requests[0].at
    return tuple(attrs.evolve(request, at=request.at - begins) for request in requests)


def read_file(path: Path) -> tuple[Request, ...]:
    """The requests of a file.

    Raises:
        ValueError: see `read`.
        OSError: it cannot be read.
    """
    return read(path.read_text())


@functools.cache
def excerpt(name: str) -> tuple[Request, ...]:
    """The excerpt of this name, out of EXCERPTS."""
    return read(resources.files(__name__).joinpath(EXCERPTS[name]).read_text())


def _read_mooncake(lines: list[str]) -> list[Request]:
    decoder = msgspec.json.Decoder(_MooncakeLine)
    requests = []
    for number, line in enumerate(lines, 1):
        try:
            row = decoder.decode(line)
        except msgspec.MsgspecError as exc:
            raise ValueError(f"line {number}: {exc}") from exc
        if not 0 < row.input_length <= BLOCK_TOKENS * len(row.hash_ids):
            raise ValueError(f"line {number}: {row.input_length} tokens in {len(row.hash_ids)} blocks")
        requests.append(Request(row.timestamp / 1000, row.input_length, row.output_length, tuple(row.hash_ids)))
    return requests


def _read_azure(lines: list[str]) -> list[Request]:
    rows = csv.DictReader(lines)
    if not set(_CSV_COLUMNS) <= set(rows.fieldnames or ()):
        raise ValueError(f"line 1: neither a JSON object nor a header with {', '.join(_CSV_COLUMNS)}")
    began: datetime.datetime | None = None
    requests = []
    for row in rows:
        try:
            moment = datetime.datetime.fromisoformat(row["TIMESTAMP"][:_MICROSECONDS_END])
            tokens, generated = int(row["ContextTokens"]), int(row["GeneratedTokens"])
        except (TypeError, ValueError) as exc:
            raise ValueError(f"line {rows.line_num}: {exc}") from exc
        if tokens < 1:
            raise ValueError(f"line {rows.line_num}: {tokens} tokens")
        began = began or moment
        requests.append(Request((moment - began).total_seconds(), tokens, generated, None))
    return requests
