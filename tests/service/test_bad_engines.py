"""Engines that break the rules of their link, fall silent, or are too many: they harm nobody but themselves."""

from __future__ import annotations

import socket
import struct
from pathlib import Path
from typing import Any

import pytest
import trio

from kvpd import client
from kvpd.errors import ErrorCode, LocalProtocolError
from kvpd.link import (
    FRAME_BYTES_MAX,
    LINK_VERSION,
    Attach,
    Cancel,
    Claim,
    ClaimFailed,
    Close,
    Ended,
    Filled,
    Frame,
    Open,
    Rejected,
    Release,
    Stage,
    Staged,
    StatsRequest,
    Touch,
    encode_frame,
)
from kvpd.service import engine_link

from .links import in_thread, open_rig, raw_engine
from .worlds import CHUNK_BYTES, Request

ROLES = pytest.mark.parametrize("role", ["receiver", "sender"])
LONG = struct.pack("<I", FRAME_BYTES_MAX + 1)


def _attach(role: str, /, **changes: Any) -> Attach:
    return Attach(**{"version": LINK_VERSION, "role": role, **changes})


@ROLES
@pytest.mark.parametrize(
    "data", [b"\xff" * 64, LONG, struct.pack("<I", 4) + b"\xc1\xc1\xc1\xc1", b"GET / HTTP/1.1\r\n"]
)
async def test_rubbish_ends_the_connection_and_nothing_else(tmp_path: Path, role: str, data: bytes) -> None:
    """Before it attached and after: the engine is told why, and the others work on."""
    async with open_rig(tmp_path) as rig:
        for attached in (None, role):
            async with raw_engine(rig.socket_of(role), attached) as engine:
                await engine.say(data)
                await engine.hear_kind(Rejected)
                await engine.hear_end()
        await rig.transfer(Request("next", 4))


@ROLES
@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"version": 99}, "99"), ({"rank": 1}, "rank 1"), ({"role": "other"}, "wants a")],
)
async def test_an_attach_that_does_not_fit_is_rejected_with_the_reason(
    tmp_path: Path, role: str, changes: dict[str, Any], reason: str
) -> None:
    """An engine of another release, or one that was given the other daemon's socket."""
    if "role" in changes:
        changes = {"role": "sender" if role == "receiver" else "receiver"}
    async with open_rig(tmp_path) as rig, raw_engine(rig.socket_of(role)) as engine:
        await engine.say(_attach(role, **changes))
        assert reason in (await engine.hear_kind(Rejected)).detail
        await engine.hear_end()


async def test_the_client_says_what_the_daemon_said(tmp_path: Path) -> None:
    """A prefill engine with the decode side's path in its configuration."""
    async with open_rig(tmp_path) as rig:
        with pytest.raises(LocalProtocolError, match="wants a sender, this is a receiver"):
            await in_thread(client.connect_sender, rig.receiver_socket)


@ROLES
@pytest.mark.parametrize(
    "frame",
    [
        Stage(5, 0, (b"k",), True, 1),
        Filled(5, 0, 0),
        Touch(5),
        Cancel(5),
        Close(5),
        Claim(1, "r", 3, 1.0),
        Attach(LINK_VERSION, "sender"),
    ],
)
async def test_frames_that_no_correct_engine_sends(tmp_path: Path, role: str, frame: Frame) -> None:
    """Unknown numbers, the other role's frames, a second Attach."""
    async with open_rig(tmp_path) as rig:
        async with raw_engine(rig.socket_of(role), role) as engine:
            await engine.say(frame)
            await engine.hear_kind(Rejected)
            await engine.hear_end()
        await rig.transfer(Request("next", 4))


async def test_one_number_for_two_transfers_is_rejected(tmp_path: Path) -> None:
    """Answers would go to either."""
    async with open_rig(tmp_path) as rig:
        async with raw_engine(rig.sender_socket, "sender") as engine:
            await engine.say(Open(1, "a", rig.receiver.address, 2), Open(1, "b", rig.receiver.address, 2))
            await engine.hear_kind(Rejected)
        await rig.world.until_clean(rig.sender, rig.receiver)


@pytest.mark.parametrize(
    ("stage", "code"),
    [
        (Stage(1, 0, (b"k",) * 3, False, CHUNK_BYTES), ErrorCode.OVERFLOW),
        (Stage(1, 0, (b"k",), True, CHUNK_BYTES), ErrorCode.UNDERFLOW),
        (Stage(1, 0, (b"k",), False, 1), ErrorCode.PROTOCOL_ERROR),
        (Stage(1, 0, (b"k", b"l"), True, CHUNK_BYTES + 1), ErrorCode.PROTOCOL_ERROR),
        (Stage(1, 0, (), False, CHUNK_BYTES), ErrorCode.PROTOCOL_ERROR),
    ],
)
async def test_a_stage_that_does_not_fit_ends_its_transfer_alone(tmp_path: Path, stage: Stage, code: ErrorCode) -> None:
    """The engine keeps its connection and its other transfers."""
    async with open_rig(tmp_path) as rig:
        async with raw_engine(rig.sender_socket, "sender") as engine:
            await engine.say(Open(1, "a", rig.receiver.address, 2), Open(2, "b", rig.receiver.address, 1), stage)
            ended = await engine.hear_kind(Ended)
            assert (ended.transfer, ended.error and ended.error.code) == (1, code)
            await engine.say(Close(1), Stage(2, 0, (b"k",), True, CHUNK_BYTES))
            staged = await engine.hear_kind(Staged)
            await engine.say(Filled(2, 0, staged.piece))
            assert await engine.hear_kind(Ended) == Ended(2)
            await engine.say(Close(2))
        await rig.world.until(rig.sender, lambda: rig.sender.core.is_clean)


async def test_a_piece_that_is_filled_twice_ends_its_transfer(tmp_path: Path) -> None:
    """The second time its slots may be another's."""
    async with open_rig(tmp_path) as rig, raw_engine(rig.sender_socket, "sender") as engine:
        await engine.say(Open(1, "a", rig.receiver.address, 2), Stage(1, 0, (b"k",), False, CHUNK_BYTES))
        await engine.hear_kind(Staged)
        await engine.say(Filled(1, 0, 0), Filled(1, 0, 0))
        ended = await engine.hear_kind(Ended)
        assert ended.error is not None
        assert ended.error.code is ErrorCode.PROTOCOL_ERROR
        await engine.say(Close(1))
        await rig.world.until_clean(rig.sender, rig.receiver)


async def test_a_claim_number_that_is_in_use_is_refused(tmp_path: Path) -> None:
    """And releasing what was never claimed is harmless."""
    async with open_rig(tmp_path) as rig, raw_engine(rig.receiver_socket, "receiver") as engine:
        await engine.say(Release(9), Claim(1, "a", 0, 100.0), Claim(1, "b", 0, 100.0))
        failed = await engine.hear_kind(ClaimFailed)
        assert failed.error.code is ErrorCode.PROTOCOL_ERROR
        await engine.say(Release(1), Release(1))
        await rig.world.until(rig.receiver, lambda: rig.receiver.core.is_clean)


# ------------------------------------------------------------------ engines that fall silent, or are too many


@ROLES
async def test_whoever_does_not_attach_in_time_is_sent_away(
    tmp_path: Path, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection that says nothing costs nothing; half an Attach is nothing."""
    monkeypatch.setattr(engine_link, "_ATTACH_TIMEOUT_S", 0.05)
    async with open_rig(tmp_path) as rig:
        for data in (b"", encode_frame(_attach(role))[:7]):
            async with raw_engine(rig.socket_of(role)) as engine:
                await engine.say(data)
                assert "no Attach" in (await engine.hear_kind(Rejected)).detail
                await engine.hear_end()


@ROLES
async def test_half_a_frame_and_then_nothing(tmp_path: Path, role: str) -> None:
    """An engine that dies while it writes."""
    async with open_rig(tmp_path) as rig:
        async with raw_engine(rig.socket_of(role), role) as engine:
            await engine.say(encode_frame(StatsRequest(1))[:-1])
            await engine.stream.send_eof()
            await engine.hear_end()
        await rig.transfer(Request("next", 4))


@ROLES
async def test_whoever_attaches_and_is_gone_before_the_answer(tmp_path: Path, role: str) -> None:
    """The daemon writes to a socket that nobody has open any more: that is no error of the daemon's."""
    async with open_rig(tmp_path) as rig:
        for _ in range(20):
            with socket.socket(socket.AF_UNIX) as raw:
                raw.connect(str(rig.socket_of(role)))
                raw.sendall(encode_frame(_attach(role)))
        await rig.transfer(Request("next", 4))


@ROLES
async def test_an_engine_that_does_not_read_is_cut_off(
    tmp_path: Path, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answers pile up to a bound, and then it is gone; what others are told waits for nobody."""
    monkeypatch.setattr(engine_link, "_FRAMES_QUEUED_MAX", 16)
    async with open_rig(tmp_path) as rig:
        async with raw_engine(rig.socket_of(role), role) as engine:

            async def talk() -> None:
                while True:
                    await engine.say(StatsRequest(1))

            with pytest.raises(trio.BrokenResourceError):
                await talk()
        await rig.transfer(Request("next", 4))


async def test_news_for_an_engine_whose_last_words_are_being_written(tmp_path: Path) -> None:
    """It has said its last and does not read: what is announced meanwhile is lost to it and harms nobody."""
    async with open_rig(tmp_path) as rig, raw_engine(rig.receiver_socket, "receiver") as engine:
        await engine.say(*[StatsRequest(1)] * 2000)
        await engine.stream.send_eof()
        await rig.transfer(*(Request(f"r{number}", 2) for number in range(5)))
        await engine.hear_end()


async def test_too_many_engines_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bound on everything; those who are attached do not notice."""
    monkeypatch.setattr(engine_link, "_CONNECTIONS_MAX", 2)
    async with open_rig(tmp_path) as rig:
        async with (
            raw_engine(rig.sender_socket, "sender"),
            raw_engine(rig.sender_socket, "sender"),
            raw_engine(rig.sender_socket) as third,
        ):
            assert await third.hear() is None
        await rig.world.until(rig.sender, lambda: True)
