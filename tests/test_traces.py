"""Reading public traces, and what a user's own file may get wrong."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from kvpd.traces import EXCERPTS, Request, excerpt, read, read_file

MOONCAKE = """\
{"timestamp": 2000, "input_length": 600, "output_length": 5, "hash_ids": [0, 7]}
{"timestamp": 1500, "input_length": 512, "output_length": 6, "hash_ids": [0]}
"""
AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.4799600,3180,8
"""


def test_mooncakes_lines_are_requests_in_the_order_of_their_arrival() -> None:
    """Time counts from the first of them, in seconds."""
    assert read(MOONCAKE) == (Request(0.0, 512, 6, (0,)), Request(0.5, 600, 5, (0, 7)))


def test_azures_rows_are_requests_without_blocks() -> None:
    """Nothing is known of what they share."""
    assert read(AZURE) == (Request(0.0, 4808, 10, None), Request(0.5, 3180, 8, None))


@pytest.mark.parametrize("name", EXCERPTS)
def test_the_excerpts_can_be_read(name: str) -> None:
    """They come with kvpd, so that a replay needs no file."""
    requests = excerpt(name)
    assert len(requests) == 500
    assert all(before.at <= after.at for before, after in itertools.pairwise(requests))


def test_a_file_is_read_by_what_it_holds_not_by_its_name(tmp_path: Path) -> None:
    """People rename files."""
    file = tmp_path / "trace.txt"
    file.write_text(AZURE)
    assert len(read_file(file)) == 2


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "neither a JSON object nor a header"),
        ("a,b\n1,2\n", "neither a JSON object nor a header"),
        (AZURE.splitlines()[0], "no request"),
        (AZURE + "yesterday,1,1\n", "line 4"),
        (AZURE + "2023-11-16 18:17:05.0000000,,1\n", "line 4"),
        (AZURE + "2023-11-16 18:17:05.0000000,0,1\n", "line 4: 0 tokens"),
        (AZURE + "2023-11-16 18:17:05.0000000\n", "line 4"),
        (MOONCAKE + "{}\n", "line 3"),
        (MOONCAKE + '{"timestamp": 1, "input_length": 513, "output_length": 1, "hash_ids": [1]}\n', "513 tokens in 1"),
        (MOONCAKE + '{"timestamp": 1, "input_length": 0, "output_length": 1, "hash_ids": [1]}\n', "0 tokens in 1"),
    ],
)
def test_what_is_no_trace_is_refused_with_the_line(text: str, reason: str) -> None:
    """The file is the user's own, and long."""
    with pytest.raises(ValueError, match=reason):
        read(text)
