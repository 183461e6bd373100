"""Chunks are named by everything that their bytes depend on, and by nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpd.integrations.vllm.keys import Chunking, chunk_keys
from kvpd.integrations.vllm.layout import Layout
from kvpd.integrations.vllm.settings import Settings

from .parts import LAYOUT

COUNTS = st.integers(0, 4000)


@given(prompt=st.integers(1, 4000), computed=COUNTS)
def test_p43_no_count_of_tokens_is_negative(prompt: int, computed: int) -> None:
    """After a preemption the engine may have computed more than came from outside."""
    chunking = Chunking(16, 64)
    loadable = chunking.loadable(prompt, computed)
    assert 0 <= loadable < prompt
    assert 0 <= chunking.complete_chunks(prompt, computed) <= chunking.chunks(prompt)


@given(prompt=st.integers(1, 4000))
def test_a_prompts_chunks_are_its_blocks_each_once_and_in_order(prompt: int) -> None:
    """A block that is in no chunk is never sent; one that is in two is sent to two places."""
    chunking = Chunking(16, 64)
    blocks = [block for chunk in range(chunking.chunks(prompt)) for block in chunking.chunk_blocks(prompt, chunk)]
    assert blocks == list(range(chunking.blocks(prompt)))
    assert chunking.complete_chunks(prompt, prompt) == chunking.chunks(prompt)


def test_chunks_are_whole_blocks() -> None:
    """The inside of a block is private to the kernel: half of one is nothing."""
    with pytest.raises(ValueError, match="chunk_tokens = 100 must be a multiple of vLLM's block size, 16"):
        Chunking(16, 100)


def test_p50_no_two_inputs_are_hashed_as_the_same_bytes() -> None:
    """A tenant must never be given another's KV because of how two names were joined."""
    tokens = list(range(40))
    extras: list[list[object]] = [
        ["a%b", "c"],
        ["a", "b%c"],
        ["a%bc"],
        ["a", "b", "c"],
        [None, "abc"],
        ["None", "abc"],
        [["a"], "bc"],
    ]
    keys = [tuple(chunk_keys(b"", tokens, 32, extra)) for extra in extras]
    assert len(set(keys)) == len(extras)
    assert chunk_keys(b"", [1, 2, 3], 2, [])[1] != chunk_keys(b"", [1, 2, 3, 0], 2, [])[1]


def test_p51_p52_keys_depend_on_content_alone() -> None:
    """Seeded per process, two nodes would never agree, and no restart would find anything again."""
    code = (
        "from kvpd.integrations.vllm.keys import chunk_keys;"
        "print([key.hex() for key in chunk_keys(b'x', list(range(100)), 32, [None, 'salt', []])])"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1


def test_a_key_covers_all_tokens_before_it() -> None:
    """KV depends on the whole prefix, not on the chunk's own tokens."""
    one = chunk_keys(b"", [1, 2, 3, 4], 2, [])
    other = chunk_keys(b"", [9, 2, 3, 4], 2, [])
    assert one[1] != other[1]
    assert chunk_keys(b"", [1, 2, 3, 4, 5], 2, [])[:2] == one


def test_keys_fit_the_engine_link() -> None:
    """It takes 96 bytes."""
    assert len(chunk_keys(LAYOUT.digest, [1], 32, [])[0]) <= 96


@pytest.mark.parametrize("field", [field.name for field in attrs.fields(Layout)])
def test_p48_every_difference_is_named(field: str) -> None:
    """dtype, heads, kernel, ranks: whatever differs, the message says so, from the text and from the digests alike."""
    value = getattr(LAYOUT, field)
    changed: dict[str, Any] = {field: value + 1 if isinstance(value, int) else f"{value};x=%y"}
    other = attrs.evolve(LAYOUT, **changed)
    assert Layout.parse(other.text) == other
    difference = LAYOUT.difference(other)
    assert difference is not None
    assert f"{field} is {value} here" in difference
    assert LAYOUT.text in difference
    assert other.text in difference
    assert f"differ in {field};" in str(LAYOUT.digest_difference(other.digest))
    assert LAYOUT.difference(LAYOUT) is None
    assert LAYOUT.digest_difference(LAYOUT.digest) is None


@pytest.mark.parametrize("text", ["", "model", "model=a;model=b", "model=a", "x" * 5000])
def test_what_is_no_fingerprint_is_refused(text: str) -> None:
    """It comes from another program's answer."""
    with pytest.raises(ValueError, match="fingerprint"):
        Layout.parse(text)
    assert "another form" in str(LAYOUT.digest_difference(b"short"))


def test_settings_name_everything_that_is_wrong() -> None:
    """A typo that is ignored is found in production."""
    extra = {"reciever_socket": "/r", "chunk_tokens": "256", "load_timeout_s": 0}
    with pytest.raises(ValueError, match="reciever_socket is no setting") as raised:
        Settings.read(extra, is_producer=True, is_consumer=True)
    for part in ("chunk_tokens = '256'", "load_timeout_s = 0.0", "sender_socket must", "receiver_socket must"):
        assert part in str(raised.value)
    read = Settings.read({"sender_socket": "/s", "load_timeout_s": 5}, is_producer=True, is_consumer=False)
    assert read == Settings(sender_socket="/s", load_timeout_s=5.0)
