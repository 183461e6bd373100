"""The engine link, daemon's side: real sockets and the real client."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import trio

from kvpd import client
from kvpd.errors import ErrorCode, TransferCancelled, TransferError
from kvpd.link import Attached, Claim, Open

from .links import Rig, in_thread, open_rig, raw_engine, send_with, take_with
from .worlds import CHUNK_BYTES, Request, send, take


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
