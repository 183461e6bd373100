"""What the bytes of a chunk mean: two engines may exchange them only if every field here is the same.

The inside of a block is private to the attention kernel that wrote it, so equal byte counts prove nothing. Each chunk
key carries a digest of every field: an engine that is offered foreign chunks can refuse them, and say what differs,
whatever way they came.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Final, Self

import attrs

CONNECTOR_VERSION: Final = "1"
DIGEST_BYTES: Final = 4  # of one field: it is there to notice a mistake, not to withstand an attack


@attrs.frozen
class Layout:
    """The layout fingerprint. `text` is how it is configured, compared between daemons, and shown."""

    version: str = attrs.field(default=CONNECTOR_VERSION, kw_only=True)
    model: str
    dtype: str
    kv_dtype: str
    kind: str  # of attention, as vLLM's cache specification calls it
    block_tokens: int
    chunk_tokens: int
    layers: int
    heads: int  # of one rank
    head_dim: int
    block_bytes: int  # of all layers, in one rank
    backend: str
    isa: str
    ranks: int  # over which the heads are spread

    @property
    def text(self) -> str:
        """One line: `field=value` in a fixed order, values quoted where that is needed to read them back."""
        return ";".join(f"{name}={_escaped(value)}" for name, value in self.fields().items())

    def fields(self) -> Mapping[str, str]:
        """The fields as texts, in order."""
        return {name: str(value) for name, value in attrs.asdict(self).items()}

    @property
    def digest(self) -> bytes:
        """DIGEST_BYTES for each field, in order."""
        return b"".join(_digest(name, value) for name, value in self.fields().items())

    def difference(self, other: Layout) -> str | None:
        """What differs, naming each field with both values, and both fingerprints; None: nothing does."""
        mine, theirs = self.fields(), other.fields()
        fields = [
            f"{name} is {value} here and {theirs[name]} there" for name, value in mine.items() if theirs[name] != value
        ]
        if not fields:
            return None
        return f"{', '.join(fields)}; here: {self.text}; there: {other.text}"

    def digest_difference(self, digest: bytes) -> str | None:
        """As `difference`, where all that is known of the other side is its digest."""
        if digest == self.digest:
            return None
        fields = self.fields()
        if len(digest) != len(fields) * DIGEST_BYTES:
            return f"the other side's fingerprint has another form: {digest.hex()}; here: {self.text}"
        parts = [digest[start : start + DIGEST_BYTES] for start in range(0, len(digest), DIGEST_BYTES)]
        names = [
            name for (name, value), part in zip(fields.items(), parts, strict=True) if part != _digest(name, value)
        ]
        return f"the engines differ in {', '.join(names)}; here: {self.text}; there, digested: {digest.hex()}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read what `text` gave.

        Raises:
            ValueError: it is no fingerprint of this version's form.
        """
        values: dict[str, str] = {}
        for part in text.split(";"):
            name, separator, value = part.partition("=")
            if not separator or name in values:
                raise ValueError(f"no fingerprint: {text[:200]!r}")
            values[name] = _unescaped(value)
        kinds = {field.name: field.type for field in attrs.fields(cls)}
        if set(values) != set(kinds):
            raise ValueError(f"a fingerprint of another form: {text[:200]!r}")
        parsed: dict[str, Any] = {name: int(value) if kinds[name] == "int" else value for name, value in values.items()}
        return cls(**parsed)


_ESCAPES: Final = {"%": "%25", ";": "%3B", "=": "%3D", "\n": "%0A"}


def _escaped(value: str) -> str:
    return "".join(_ESCAPES.get(character, character) for character in value)


def _unescaped(value: str) -> str:
    for character, escape in reversed(_ESCAPES.items()):
        value = value.replace(escape, character)
    return value


def _digest(name: str, value: str) -> bytes:
    return hashlib.blake2b(f"{name}={value}".encode(), digest_size=DIGEST_BYTES).digest()
