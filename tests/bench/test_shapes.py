"""Bytes of KV cache a token, by the model's shape."""

from __future__ import annotations

import pytest

from kvpd.bench.shapes import PRESETS, ModelShape

KIB = 1024


@pytest.mark.parametrize(
    ("name", "bytes_per_token"),
    [
        # 128 KiB is what Llama 3 8B is known for, 320 KiB what Llama 3 70B is; Mistral 7B has the 8B's shape.
        ("llama-3.1-8b", 128 * KIB),
        ("mistral-7b", 128 * KIB),
        ("llama-3.1-70b", 320 * KIB),
        ("qwen2.5-72b", 320 * KIB),
        # 126 layers with the same 8 heads of 128.
        ("llama-3.1-405b", 504 * KIB),
        # k_proj and v_proj have 512 rows each, in 28 layers of bfloat16.
        ("qwen2.5-7b", 28 * 2 * 512 * 2),
        # hidden_size 576 in 9 heads, 3 of them for keys and values, 30 layers.
        ("smollm2-135m", 30 * 2 * 3 * 64 * 2),
    ],
)
def test_a_preset_has_the_published_size(name: str, bytes_per_token: int) -> None:
    """A capacity that is planned with a wrong size is wrong by as much."""
    assert PRESETS[name].bytes_per_token == bytes_per_token


def test_every_preset_is_checked_against_something() -> None:
    """A new one needs a published number."""
    marks = test_a_preset_has_the_published_size.pytestmark  # type: ignore[attr-defined]
    assert {name for name, _ in marks[0].args[1]} == PRESETS.keys()


def test_a_shape_can_be_written_out() -> None:
    """For models that have no name here."""
    shape = ModelShape.parse("layers=2, kv_heads=3, head_dim=64, dtype=fp8")
    assert shape == ModelShape(2, 3, 64, "fp8")
    assert shape.bytes_per_token == 2 * 2 * 3 * 64


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("llama-9", "give each of layers"),
        ("layers=2,layers=3,head_dim=64,dtype=fp8", "once"),
        ("layers=2,kv_heads=3,dtype=fp8", "head_dim: missing"),
        ("layers=2,kv_heads=3,head_dim=64,dtype=fp3", "dtype 'fp3' is none of"),
        ("layers=2,kv_heads=-3,head_dim=64,dtype=fp8", "kv_heads=-3"),
        ("layers=0,kv_heads=3,head_dim=64,dtype=fp8", "layers=0"),
    ],
)
def test_an_impossible_shape_is_refused_with_the_reason(text: str, reason: str) -> None:
    """It was typed by a person."""
    with pytest.raises(ValueError, match=reason):
        ModelShape.parse(text)
