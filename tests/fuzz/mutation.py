"""The corpus, and inputs made from it: everything is drawn from a seed, so that a failure can be repeated.

The corpus is what has been found worth keeping: a file per input, by the decoder that it is for. An input on which a
test fails belongs there.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

CORPUS: Final = Path(__file__).with_name("corpus")
_ODD_VALUES: Final[tuple[Any, ...]] = (
    None, True, -1, 0, 1 << 24, (1 << 62) - 1, 1 << 62, (1 << 64) - 1, -(1 << 63), 0.0, -1.0, float("nan"),
    float("inf"), "", "x" * 5000, "\x00", b"", b"k" * 97, [], [[]], {}, {"a": 1}, ["Hello"],
)  # fmt: skip


def corpus(kind: str) -> list[bytes]:
    """The kept inputs for one decoder, in a fixed order."""
    return [path.read_bytes() for path in sorted((CORPUS / kind).iterdir())]


def mutants(kind: str, *, seed: int, count: int) -> Iterator[bytes]:
    """The corpus itself, and then what becomes of it: bytes changed, cut, spliced; values replaced by odd ones."""
    inputs = corpus(kind)
    yield from inputs
    rng = random.Random(seed)
    for _ in range(count):
        data = rng.choice(inputs)
        for _ in range(rng.choice((1, 1, 2, 4))):
            data = _mutated(data, rng, inputs)
        yield data


def _mutated(data: bytes, rng: random.Random, inputs: list[bytes]) -> bytes:
    match rng.randrange(6):
        case 0:  # some bytes are others
            changed = bytearray(data or b"\x00")
            for _ in range(rng.randint(1, 4)):
                changed[rng.randrange(len(changed))] = rng.randrange(256)
            return bytes(changed)
        case 1:  # it ends early
            return data[: rng.randrange(len(data) + 1)]
        case 2:  # something was put in between
            at = rng.randrange(len(data) + 1)
            return data[:at] + rng.randbytes(rng.randint(1, 9)) + data[at:]
        case 3:  # two were joined
            other = rng.choice(inputs)
            return data[: rng.randrange(len(data) + 1)] + other[rng.randrange(len(other) + 1) :]
        case _:
            return _with_odd_value(data, rng)


def _with_odd_value(data: bytes, rng: random.Random) -> bytes:
    """One value, at any depth, is another one: what a decoder of types must notice."""
    try:
        value = msgspec.msgpack.decode(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return data + rng.randbytes(1)
    if not isinstance(value, list) or not value:
        return msgspec.msgpack.encode([value])
    place = value
    while True:
        index = rng.randrange(len(place))
        inner = place[index]
        if not isinstance(inner, list) or not inner or rng.random() < 0.4:
            break
        place = inner
    match rng.randrange(4):
        case 0:
            del place[index]
        case 1:
            place.insert(index, rng.choice(_ODD_VALUES))
        case _:
            place[index] = rng.choice(_ODD_VALUES)
    return msgspec.msgpack.encode(value)
