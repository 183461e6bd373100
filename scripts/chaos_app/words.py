"""What the conductor and its engines say to each other: one JSON object a line, commands in, events out."""

from __future__ import annotations

from typing import Final

import msgspec

RUN: Final = "run"  # begin, or go on
PAUSE: Final = "pause"  # finish what runs and begin nothing; answered by Paused
ABORT: Final = "abort"  # cancel, by name, whatever runs now


class Event(msgspec.Struct, frozen=True, tag=True):
    """From an engine, on its standard output."""


class Up(Event, frozen=True):
    """The engine is there, and waits for its first command."""


class Sent(Event, frozen=True):
    """A prefill engine has sent a request: everything landed, was acknowledged, and the proxy was told."""

    req_id: str


class Read(Event, frozen=True):
    """A decode engine has claimed a request, compared it and released it."""

    req_id: str
    chunks: int
    nbytes: int
    wrong: tuple[str, ...] = ()  # what was not as it must be


class Failed(Event, frozen=True):
    """A request or a claim ended without success, as it may."""

    req_id: str
    code: str


class Unattached(Event, frozen=True):
    """The daemon does not answer; the engine tries again."""


class Paused(Event, frozen=True):
    """Nothing runs in the engine any more."""


AnyEvent = Up | Sent | Read | Failed | Unattached | Paused

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[AnyEvent] = msgspec.json.Decoder(AnyEvent)


def encode(event: Event) -> bytes:
    """One line."""
    return _encoder.encode(event) + b"\n"


def decode(line: bytes) -> AnyEvent:
    """The event of a line.

    Raises:
        msgspec.MsgspecError: it is none.
    """
    return _decoder.decode(line)
