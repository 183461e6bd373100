"""The engine link, daemon's side: real sockets, the real client, and engines that misbehave in every way they can."""

from __future__ import annotations

import itertools
import socket
import struct
from pathlib import Path
from typing import Any

import pytest
import trio

from kvpd import client
from kvpd.errors import ErrorCode, LocalProtocolError, TransferCancelled, TransferError
from kvpd.link import (
    FRAME_BYTES_MAX,
    LINK_VERSION,
    Attach,
    Attached,
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

from .links import Rig, in_thread, open_rig, raw_engine, send_with, take_with
from .worlds import CHUNK_BYTES, Request, send, take

ROLES = pytest.mark.parametrize("role", ["receiver", "sender"])


async def test_a_request_from_engine_to_engine(tmp_path: Path) -> None:
    """The main job, through the client, the sockets and both daemons."""
    async with open_rig(tmp_path) as rig:
        await rig.transfer(*(Request(f"r{n}", 3 + n, last_bytes=5, batch=2) for n in range(5)))
        await rig.world.until_clean(rig.sender, rig.receiver)


async def test_chunks_that_are_there_already_need_not_be_written(tmp_path: Path) -> None:
    """None crosses the link as well."""
    first, second = Request("first", 4, shared_keys="prompt"), Request("second", 6, shared_keys="prompt")
    async with open_rig(tmp_path, slots=12) as rig:
        await send(rig.sender, rig.receiver.address, first)
        await rig.transfer(second)
        await take(rig.receiver, first)
        await rig.world.until_clean(rig.sender, rig.receiver)


async def test_twenty_engines_on_one_daemon(tmp_path: Path) -> None:
    """Ranks, replicas and tools: each has its own numbers, and nobody gets another's frames."""
    async with open_rig(tmp_path, slots=24, staging=8) as rig, trio.open_nursery() as nursery:
        for number in range(20):
            nursery.start_soon(rig.transfer, Request(f"r{number}", 1 + number % 5, batch=2))
    # Leaving the rig's own nursery last: every engine had left.


async def test_engines_are_counted(tmp_path: Path) -> None:
    """An operator sees who is attached."""
    async with (
        open_rig(tmp_path) as rig,
        raw_engine(rig.sender_socket, "sender"),
        raw_engine(rig.sender_socket, "sender"),
    ):
        assert rig.sender.metrics.snapshot()["kvpd_engines"] == 2


async def test_a_client_hears_of_errors_cancels_and_counters(tmp_path: Path) -> None:
    """Every typed error crosses the link whole."""

    def prefill(rig: Rig) -> None:
        with client.connect_sender(rig.sender_socket) as link:
            with pytest.raises(TransferError) as caught:
                send_with(link, rig.receiver.address, Request("large", 11))
            assert caught.value.code is ErrorCode.TOO_LARGE
            with pytest.raises(TransferError, match="no port"):
                send_with(link, "nowhere", Request("r", 1))
            assert link.stats()["kvpd_engines"] == 1

    def decode(rig: Rig) -> None:
        with client.connect_receiver(rig.receiver_socket) as link:
            with pytest.raises(TransferError) as caught:
                take_unknown(link)
            assert caught.value.code is ErrorCode.CLAIM_TIMEOUT

    def take_unknown(link: client.ReceiverLink) -> None:
        with link.claim("unknown", timeout=0.01):
            pass

    async with open_rig(tmp_path) as rig:
        await in_thread(prefill, rig)
        await in_thread(decode, rig)
        await rig.world.until_clean(rig.sender, rig.receiver)


async def test_an_engine_that_goes_rolls_back_what_it_was_sending(tmp_path: Path) -> None:
    """Its slots were not being filled, so nobody has to wait for its death."""
    async with open_rig(tmp_path) as rig:
        async with raw_engine(rig.sender_socket, "sender") as engine:
            await engine.say(Open(1, "r", rig.receiver.address, 8))
            await rig.world.until(rig.receiver, lambda: rig.receiver.core.counts.reserved == 8)
        await rig.world.until_clean(rig.sender, rig.receiver)


async def test_an_engine_that_goes_stops_waiting_for_its_claims(tmp_path: Path) -> None:
    """The request it waited for is another's to claim."""
    async with open_rig(tmp_path) as rig:
        async with raw_engine(rig.receiver_socket, "receiver") as engine:
            await engine.say(Claim(1, "r", 0, 1000.0))
            await rig.world.until(rig.receiver, lambda: rig.receiver.core._desk.waiting_count == 1)
        await rig.world.until(rig.receiver, lambda: rig.receiver.core.is_clean)
        await rig.transfer(Request("r", 4))


# ------------------------------------------------------------------ engines that break the rules

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


# ------------------------------------------------------------------ engines that fall silent


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


async def test_a_link_that_is_closed_in_the_middle_cancels(tmp_path: Path) -> None:
    """`with link.open(...)` left by an exception: the receiver's room is free, the staging too."""

    def break_off(rig: Rig) -> None:
        with (
            client.connect_sender(rig.sender_socket) as link,
            link.open("r", receiver=rig.receiver.address, total_chunks=6),
        ):
            raise ZeroDivisionError

    async with open_rig(tmp_path) as rig:
        with pytest.raises(ZeroDivisionError):
            await in_thread(break_off, rig)
        await rig.world.until_clean(rig.sender, rig.receiver)


async def test_cancelling_by_name_from_another_engine(tmp_path: Path) -> None:
    """A proxy's helper may end what an engine has begun."""

    def cancelled(rig: Rig) -> None:
        with (
            client.connect_sender(rig.sender_socket) as link,
            client.connect_sender(rig.sender_socket) as other,
            link.open("r", receiver=rig.receiver.address, total_chunks=6) as transfer,
            transfer.stage([b"k"]) as slots,
        ):
            slot = next(slots)
            assert slot is not None
            other.cancel("r")
            slot[:] = bytes(CHUNK_BYTES)
            with transfer.connection.lock:
                transfer.wait(lambda: False)

    async with open_rig(tmp_path) as rig:
        with pytest.raises(TransferCancelled):
            await in_thread(cancelled, rig)
        await rig.world.until_clean(rig.sender, rig.receiver)


async def test_closing_the_daemons_ends_their_engines(tmp_path: Path) -> None:
    """An engine that waits learns that its daemon is gone; it does not wait for ever."""
    outcomes: list[ErrorCode] = []

    def wait(rig: Rig) -> None:
        try:
            with client.connect_receiver(rig.receiver_socket) as link:
                take_with(link, Request("never", 4))
        except TransferError as exc:
            outcomes.append(exc.code)

    with trio.fail_after(30):
        async with trio.open_nursery() as nursery, open_rig(tmp_path) as rig:
            nursery.start_soon(in_thread, wait, rig)
            await rig.world.until(rig.receiver, lambda: rig.receiver.core._desk.waiting_count == 1)
    assert len(outcomes) == 1


def test_attached_tells_all_that_an_engine_needs() -> None:
    """The wire types are shared with the client: a change on one side is a change on both."""
    fields = {"version", "name", "chunk_bytes", "chunk_tokens", "regions", "layout", "ranks"}
    assert set(Attached.__struct_fields__) == fields


async def test_an_engine_that_attaches_late_is_told_what_is_ready(tmp_path: Path) -> None:
    """Events are pushed once: a decode engine that restarts must not wait for one that was pushed before it came."""

    def late(rig: Rig) -> None:
        request = Request("early", 3)
        with client.connect_sender(rig.sender_socket) as link:
            send_with(link, rig.receiver.address, request)
        with client.connect_receiver(rig.receiver_socket) as link:
            (event,) = itertools.islice(link.events(timeout=10), 1)
            assert (event.state, event.req_id, event.total_chunks) == ("ready", "early", 3)
            take_with(link, request)

    with trio.fail_after(30):
        async with open_rig(tmp_path) as rig:
            await in_thread(late, rig)
