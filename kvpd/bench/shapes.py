"""How many bytes of KV cache a token has, by the shape of a model.

Every layer keeps one key and one value of `head_dim` numbers for each of its KV heads, so a token has
2 * layers * kv_heads * head_dim numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Self

import attrs
import click

DTYPES: Final[Mapping[str, int]] = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8": 1, "int8": 1}
_FIELDS: Final = ("layers", "kv_heads", "head_dim", "dtype")
_COUNT_MAX: Final = 1 << 20


@attrs.frozen
class ModelShape:
    """What of a model decides the size of its KV cache."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str

    @property
    def bytes_per_token(self) -> int:
        """Keys and values, all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * DTYPES[self.dtype]

    @classmethod
    def parse(cls, text: str) -> Self:
        """From `layers=32,kv_heads=8,head_dim=128,dtype=bfloat16`.

        Raises:
            ValueError: something is missing, twice, unknown or impossible; the text says what.
        """
        values: dict[str, str] = {}
        for part in text.split(","):
            name, equals, value = (word.strip() for word in part.partition("="))
            if not equals or name not in _FIELDS or name in values:
                raise ValueError(f"{part.strip()!r}: give each of {', '.join(_FIELDS)} once, as name=value")
            values[name] = value
        missing = [name for name in _FIELDS if name not in values]
        if missing:
            raise ValueError(f"{', '.join(missing)}: missing")
        dtype = values.pop("dtype")
        if dtype not in DTYPES:
            raise ValueError(f"dtype {dtype!r} is none of {', '.join(DTYPES)}")
        return cls(**{name: _count(name, value) for name, value in values.items()}, dtype=dtype)


# From the config.json of each model as its makers published it: num_hidden_layers, num_key_value_heads, head_dim (or
# hidden_size ÷ num_attention_heads), torch_dtype.
PRESETS: Final[Mapping[str, ModelShape]] = {
    "llama-3.1-8b": ModelShape(32, 8, 128, "bfloat16"),
    "llama-3.1-70b": ModelShape(80, 8, 128, "bfloat16"),
    "llama-3.1-405b": ModelShape(126, 8, 128, "bfloat16"),
    "qwen2.5-7b": ModelShape(28, 4, 128, "bfloat16"),
    "qwen2.5-72b": ModelShape(80, 8, 128, "bfloat16"),
    "mistral-7b": ModelShape(32, 8, 128, "bfloat16"),
    "smollm2-135m": ModelShape(30, 3, 64, "bfloat16"),
}


def option(name: str, default: str) -> click.Option:
    """An option whose value is a preset's name, or a shape written out."""

    def parse(_context: click.Context, _parameter: click.Parameter, text: str) -> ModelShape:
        if text in PRESETS:
            return PRESETS[text]
        try:
            return ModelShape.parse(text)
        except ValueError as exc:
            raise click.BadParameter(
                f"it is no model known here ({', '.join(PRESETS)}), and as a shape: {exc}"
            ) from exc

    return click.Option(
        [name],
        default=default,
        show_default=True,
        metavar="SHAPE",
        callback=parse,
        help=f"layers=N,kv_heads=N,head_dim=N,dtype=TYPE, or one of {', '.join(PRESETS)}.",
    )


def _count(name: str, text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= _COUNT_MAX:
        raise ValueError(f"{name}={text}: a whole number from 1 to {_COUNT_MAX} is needed")
    return int(text)
