"""Every decoder meets what was kept and what becomes of it: a value, or one typed error, and nothing else."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

import msgspec
import pytest

from kvpd.core.messages import MESSAGE_BYTES_MAX, AnyMessage, decode, encode
from kvpd.errors import RemoteProtocolError
from kvpd.link import DaemonFrame, DaemonFrameReader, EngineFrame, EngineFrameReader, encode_frame

from .mutation import corpus, mutants

BUDGET: Final = 20_000
SEEDS: Final = (1, 2)


def framed(body: bytes) -> bytes:
    """A frame of the engine link with this body."""
    return len(body).to_bytes(4, "little") + body


@pytest.mark.parametrize("seed", SEEDS)
def test_a_message_is_one_of_ours_or_a_typed_error(seed: int) -> None:
    """Whatever else it raised would end the task that hears all senders."""
    understood = 0
    for data in mutants("messages", seed=seed, count=BUDGET):
        try:
            message = decode(data)
        except RemoteProtocolError:
            continue
        understood += 1
        assert decode(encode(message)) == message or "nan" in repr(message), data.hex()
        assert len(encode(message)) <= MESSAGE_BYTES_MAX
    assert understood > BUDGET / 100, "too few mutants are well-formed: nothing behind the decoder is reached"


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("kind", "reader"), [("engine_frames", EngineFrameReader), ("daemon_frames", DaemonFrameReader)]
)
def test_a_frame_is_one_of_its_direction_s_or_a_typed_error(
    kind: str, reader: type[EngineFrameReader] | type[DaemonFrameReader], seed: int
) -> None:
    """Whatever else it raised would end a daemon, or the thread that completes an engine's calls."""
    understood = 0
    for body in mutants(kind, seed=seed, count=BUDGET):
        try:
            (frame,) = reader().feed(framed(body))
        except RemoteProtocolError:
            continue
        understood += 1
        (again,) = reader().feed(encode_frame(frame))
        assert again == frame or "nan" in repr(frame), body.hex()
    assert understood > BUDGET / 100


@pytest.mark.parametrize("seed", SEEDS)
def test_a_stream_of_frames_ends_at_the_same_place_however_it_is_cut(seed: int) -> None:
    """The kernel cuts where it likes. What came whole with the first bad frame ends with the connection, too."""
    rng = random.Random(seed)
    bodies = list(mutants("engine_frames", seed=seed, count=400))
    for _ in range(300):
        data = b"".join(framed(rng.choice(bodies)) for _ in range(rng.randint(1, 6)))
        byte_by_byte, error = read(data, lambda: 1)
        in_pieces, same_error = read(data, lambda: rng.randint(1, 90))
        assert same_error == error, data.hex()
        assert repr(in_pieces) == repr(byte_by_byte[: len(in_pieces)]), data.hex()
        assert error or in_pieces == byte_by_byte or "nan" in repr(in_pieces), data.hex()


def read(data: bytes, size: Callable[[], int]) -> tuple[list[EngineFrame], str]:
    """The frames, and the error in the end, of a stream that comes in pieces of these sizes."""
    reader = EngineFrameReader()
    frames: list[EngineFrame] = []
    start = 0
    while start < len(data):
        end = start + size()
        try:
            frames += reader.feed(data[start:end])
        except RemoteProtocolError as exc:
            return frames, str(exc)
        start = end
    return frames, ""


@pytest.mark.parametrize(
    ("kind", "union"),
    [("messages", None), ("engine_frames", EngineFrame), ("daemon_frames", DaemonFrame)],
)
def test_the_corpus_has_every_kind(kind: str, union: object) -> None:
    """A kind that is not in the corpus is a kind that is not fuzzed."""
    tags = set()
    for data in corpus(kind):
        try:
            value = msgspec.msgpack.decode(data)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
            continue
        if isinstance(value, list) and value and isinstance(value[0], str):
            tags.add(value[0])
    members = getattr(union or AnyMessage, "__args__", ())
    assert {member.__name__ for member in members} <= tags
