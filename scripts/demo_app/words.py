"""All that the conductor and its processes say to each other: one JSON object a line, commands in, events out.

Times are durations in seconds, measured by the process that reports them.
"""

from __future__ import annotations

import sys

import msgspec


class Command(msgspec.Struct, frozen=True, tag=True):
    """From the conductor to an engine, on its standard input."""


class Prefill(Command, frozen=True):
    """Compute the prompt's KV cache in chunks, and stream each to the receiver while the next one is computed."""

    req_id: str
    tokens: tuple[int, ...]
    socket: str
    receiver: str


class Continue(Command, frozen=True):
    """Claim the prompt's KV cache, copy it out, release it, and generate from the first token on."""

    req_id: str
    prompt_tokens: int
    first_token: int
    count: int
    socket: str


class Alone(Command, frozen=True):
    """Do both phases in this process, with the same chunks; nothing is sent anywhere."""

    req_id: str
    tokens: tuple[int, ...]
    count: int


class Event(msgspec.Struct, frozen=True, tag=True):
    """From a process to the conductor, on its standard output."""


class Loaded(Event, frozen=True):
    """The engine's model is in memory."""

    seconds: float


class Admitted(Event, frozen=True):
    """The receiver has room for the whole request; it took `wait_s` from `open` to the first slot."""

    req_id: str
    wait_s: float


class Prefilled(Event, frozen=True):
    """All chunks are computed; the prompt's first new token is known."""

    req_id: str
    first_token: int
    seconds: float


class Sent(Event, frozen=True):
    """Everything has landed and the proxy knows, `tail_s` after there was nothing left to compute or wait for."""

    req_id: str
    chunks: int
    bytes: int
    tail_s: float


class Listening(Event, frozen=True):
    """The stand-in proxy is bound."""

    address: str


class Notified(Event, frozen=True):
    """A sender told the stand-in proxy that a request is whole."""

    req_id: str
    sender_id: str
    receiver_id: str


class Claimed(Event, frozen=True):
    """The decode engine has copied a request's chunks out and released them."""

    req_id: str
    chunks: int
    bytes: int
    seconds: float


class Generated(Event, frozen=True):
    """The tokens generated for a request, by the decode engine or (`alone`) by one process that did both phases."""

    req_id: str
    tokens: tuple[int, ...]
    seconds: float
    alone: bool


AnyCommand = Prefill | Continue | Alone
AnyEvent = Loaded | Admitted | Prefilled | Sent | Listening | Notified | Claimed | Generated

_encoder = msgspec.json.Encoder()
_commands: msgspec.json.Decoder[AnyCommand] = msgspec.json.Decoder(AnyCommand)
_events: msgspec.json.Decoder[AnyEvent] = msgspec.json.Decoder(AnyEvent)


def encode(word: Command | Event) -> bytes:
    """One line."""
    return _encoder.encode(word) + b"\n"


def decode_command(line: bytes) -> AnyCommand:
    """A line of an engine's standard input.

    Raises:
        msgspec.MsgspecError: it is no command.
    """
    return _commands.decode(line)


def decode_event(line: bytes) -> AnyEvent:
    """A line of a process's standard output.

    Raises:
        msgspec.MsgspecError: it is no event.
    """
    return _events.decode(line)


def say(event: Event) -> None:
    """Tell the conductor. One write, so that two threads' lines never mix."""
    sys.stdout.buffer.write(encode(event))
    sys.stdout.buffer.flush()
