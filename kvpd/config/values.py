"""What a setting's value may be, and how it is written.

A kind turns what a source gives (a TOML value, or text from the environment or a flag) into the value the program
uses, or raises ValueError with a reason that names the limit and the remedy. Values of the right Python type pass
through, so that a configuration built by a program is judged by the same code as one read from a file.
"""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Final, Protocol

import attrs

from kvpd.transports.addresses import parse_endpoint, parse_peer_address, parse_peer_endpoint

SOCKET_PATH_BYTES_MAX: Final = 107  # sun_path holds 108 bytes, one of them the final zero
SECONDS_MAX: Final = 1_000_000.0
BYTES_MAX: Final = (1 << 62) - 1
ENGINES_MAX: Final = 1024
RECEIVER_MARK: Final = "+"  # between a decode engine's URL and its receiver's address

_UNITS: Final = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SIZE = re.compile(r"(?P<number>[0-9][0-9_]*(\.[0-9]+)?)\s*(?P<unit>[A-Za-z]*)")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class Kind(Protocol):
    """One sort of value."""

    def from_text(self, text: str) -> object:
        """What a file would have given for `text`; text that is none is handed on for `check` to refuse."""

    def check(self, value: object) -> object:
        """The value to use.

        Raises:
            ValueError: why this one cannot be used, and what can.
        """


@attrs.frozen
class Text:
    """Free text of at most `length_max` characters."""

    length_max: int

    def from_text(self, text: str) -> object:
        return text

    def check(self, value: object) -> object:
        text = _expect_text(value)
        if len(text) > self.length_max:
            raise ValueError(f"is {len(text)} characters long; the limit is {self.length_max}, shorten it")
        return text


@attrs.frozen
class Name:
    """A daemon's name: it becomes part of a file name and of an identity on the wire."""

    def from_text(self, text: str) -> object:
        return text

    def check(self, value: object) -> object:
        text = _expect_text(value)
        if _NAME.fullmatch(text) is None:
            raise ValueError(
                "is no name; use 1 to 64 letters, digits, dots, underscores and dashes, the first a letter or a digit"
            )
        return text


@attrs.frozen
class Choice:
    """One of a few words; `remark` follows the refusal of any other."""

    words: tuple[str, ...]
    remark: str = ""

    def from_text(self, text: str) -> object:
        return text

    def check(self, value: object) -> object:
        if value not in self.words:
            raise ValueError(f"is not supported; use {_any_of(self.words)}{self.remark}")
        return value


@attrs.frozen
class Flag:
    """Yes or no."""

    def from_text(self, text: str) -> object:
        return {"true": True, "false": False}.get(text.strip().lower(), text)

    def check(self, value: object) -> object:
        if not isinstance(value, bool):
            raise ValueError("is neither true nor false; write one of them, without quotes")
        return value


@attrs.frozen
class Count:
    """A whole number of things."""

    least: int
    most: int

    def from_text(self, text: str) -> object:
        try:
            return int(text)
        except ValueError:
            return text

    def check(self, value: object) -> object:
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"is no whole number; write one from {self.least} to {self.most}, without quotes")
        if not self.least <= value <= self.most:
            raise ValueError(f"is out of range; use {self.least} to {self.most}")
        return value


@attrs.frozen
class Seconds:
    """A duration, as a number of seconds. Zero is allowed only where it means something, which `zero` tells."""

    zero: str | None = None

    def from_text(self, text: str) -> object:
        try:
            return float(text)
        except ValueError:
            return text

    def check(self, value: object) -> object:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError("is no number of seconds; write the number alone, without a unit or quotes, as in 0.5")
        if not math.isfinite(value) or value < 0 or value > SECONDS_MAX:
            raise ValueError(f"is out of range; use seconds from 0 to {SECONDS_MAX:,.0f}")
        if value == 0 and self.zero is None:
            raise ValueError("would never give anything its time, and does not mean `off`; use more than 0 seconds")
        return float(value)


@attrs.frozen
class Size:
    """A number of bytes; `zero_word` is how a file may spell 0, where 0 stands for something."""

    least: int = 0
    zero_word: str | None = None

    def from_text(self, text: str) -> object:
        return text

    def check(self, value: object) -> object:
        nbytes = self._bytes_of(value)
        if nbytes == 0 and self.zero_word is not None:
            return 0
        if not self.least <= nbytes <= BYTES_MAX:
            raise ValueError(f"is out of range; use {self.least} to {BYTES_MAX} bytes" + self._or_word)
        return nbytes

    @property
    def _or_word(self) -> str:
        return f", or {self.zero_word}" if self.zero_word else ""

    def shown(self, nbytes: int) -> str | int:
        """The shortest way to write it."""
        if nbytes == 0:
            return self.zero_word or 0
        for unit in ("TiB", "GiB", "MiB", "KiB"):
            if nbytes % _UNITS[unit] == 0:
                return f"{nbytes // _UNITS[unit]}{unit}"
        return nbytes

    def _bytes_of(self, value: object) -> int:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        remedy = f"write bytes, or a number with KiB, MiB, GiB or TiB, as in 8GiB{self._or_word}"
        if not isinstance(value, str):
            raise ValueError(f"is no size; {remedy}")
        if value == self.zero_word:
            return 0
        match = _SIZE.fullmatch(value.strip())
        if match is None:
            raise ValueError(f"is no size; {remedy}")
        if match["unit"] not in _UNITS:
            raise ValueError(f"has a unit that is not known here or means two things; {remedy}")
        # Whole bytes only: 1.5GiB is exact, 0.3KiB is a mistake.
        scaled = float(match["number"]) * _UNITS[match["unit"]]
        if "." not in match["number"]:
            return int(match["number"]) * _UNITS[match["unit"]]
        if not scaled.is_integer():
            raise ValueError(f"is no whole number of bytes; {remedy}")
        return int(scaled)


@attrs.frozen
class Address:
    """Where to bind, or with `peer` where to connect; `word` may stand instead of it, the empty text included."""

    peer: bool = False
    word: str | None = None

    def from_text(self, text: str) -> object:
        return text

    def check(self, value: object) -> object:
        text = _expect_text(value)
        if text == self.word:
            return text
        try:
            parse_peer_endpoint(text) if self.peer else parse_endpoint(text)
        except ValueError as exc:
            raise ValueError(f"{exc}, or {self.word}" if self.word else str(exc)) from exc
        return text


@attrs.frozen
class PrefillEngines:
    """A list of engines: in a file an array, elsewhere their URLs with commas between them."""

    def from_text(self, text: str) -> object:
        return [part.strip() for part in text.split(",") if part.strip()]

    def check(self, value: object) -> object:
        if not isinstance(value, list | tuple) or not all(isinstance(entry, str) for entry in value):
            raise ValueError(f"is no list of engines; write an array of texts, as in {self._example}")
        if len(value) > ENGINES_MAX:
            raise ValueError(f"names {len(value)} engines; the limit is {ENGINES_MAX}")
        engines = tuple(self._checked(entry) for entry in value)
        for engine in engines:
            if engines.count(engine) > 1:
                raise ValueError(f"names {engine} twice; each engine once is enough")
        return engines

    @property
    def _example(self) -> str:
        return '["http://10.0.0.4:8000"]'

    def _checked(self, entry: str) -> str:
        return _checked_url(entry)


@attrs.frozen
class DecodeEngines(PrefillEngines):
    """The same, and behind each URL `+` and the address of the receiver on that engine's host."""

    @property
    def _example(self) -> str:
        return '["http://10.0.0.5:8000+10.0.0.5:7300"]'

    def _checked(self, entry: str) -> str:
        url, mark, receiver = entry.partition(RECEIVER_MARK)
        if not mark:
            raise ValueError(
                f"{entry!r} names no receiver; write the address of its receiver behind it, as in {self._example}"
            )
        return f"{_checked_url(url.strip())}{RECEIVER_MARK}{parse_peer_address(receiver.strip())}"


def _checked_url(url: str) -> str:
    """`http://host:port`, without a path: an engine's own paths are what clients ask for."""
    scheme, mark, rest = url.partition("://")
    if scheme.lower() != "http" or not mark:
        raise ValueError(f"{url!r} is no engine's URL; write http://host:port")
    return f"http://{parse_peer_address(rest.removesuffix('/'))}"


@attrs.frozen
class SocketPath:
    """The absolute path of a Unix socket."""

    def from_text(self, text: str) -> object:
        return text

    def check(self, value: object) -> object:
        text = _expect_text(value)
        if "\0" in text or not Path(text).is_absolute():
            # An engine started in another folder would look somewhere else.
            raise ValueError(f"is no absolute path; write {Path.cwd() / text.replace(chr(0), '') or 'kvpd.sock'}")
        length = len(os.fsencode(text))
        if length > SOCKET_PATH_BYTES_MAX:
            raise ValueError(
                f"is {length} bytes long; a Unix socket's path holds {SOCKET_PATH_BYTES_MAX}, choose a shorter folder"
            )
        return text


def _expect_text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("is no text; put it in quotes")
    return value


def _any_of(words: tuple[str, ...]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
