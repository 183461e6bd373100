"""Engines of two ranks: each rank sends its own bytes under the same keys, and reads its own."""

from __future__ import annotations

import functools
import threading
from pathlib import Path

import pytest
import trio

from kvpd import client
from kvpd.core.messages import WriteDone
from kvpd.core.receiver import events as rev
from kvpd.errors import ErrorCode, LocalProtocolError
from kvpd.service.receiver import Receiver
from kvpd.service.sender import Sender

from .links import engine_process, in_thread, open_rig, send_with, take_with
from .worlds import Request, World, fill, in_virtual_time, refused, send, stage, take

RANKS = 2
REQUEST = Request("r", 6, last_bytes=9, batch=2)


def parts(request: Request) -> list[Request]:
    """Each rank's part."""
    return [request.of_rank(rank) for rank in range(RANKS)]


async def transfer(sender: Sender, receiver: Receiver, *requests: Request) -> None:
    """Every rank sends and takes its part of each, all at once."""
    async with trio.open_nursery() as nursery:
        for request in requests:
            for part in parts(request):
                nursery.start_soon(send, sender, receiver.address, part)
                nursery.start_soon(take, receiver, part)


# ------------------------------------------------------------------ bytes


@pytest.mark.parametrize("verify", ["off", "crc32c", "xxh3"])
@in_virtual_time
async def test_each_rank_gets_its_own_bytes(world: World, verify: str) -> None:
    """Through pieces, short chunks and a buffer that is smaller than all requests together; checked by sums too."""
    requests = [Request(f"r{n}", 6, last_bytes=9, batch=n) for n in range(4)]
    async with (
        world.receiver(slots=12, ranks=RANKS, verify=verify) as receiver,
        world.sender(staging=3, ranks=RANKS) as sender,
    ):
        assert parts(requests[0])[0].payload != parts(requests[0])[1].payload
        await transfer(sender, receiver, *requests)
        await world.until_clean(sender, receiver)
        assert sender.metrics.snapshot()["kvpd_put_bytes_total"] == 4 * RANKS * (5 * 64 + 9)


@pytest.mark.parametrize("first", [0, 1])
@in_virtual_time
async def test_ranks_may_come_one_after_the_other(memory_world: World, first: int) -> None:
    """The one that comes first is done with all of it before the other one has opened it, and waits for its end."""
    world = memory_world
    async with (
        world.receiver(ranks=RANKS) as receiver,
        world.sender(staging=2, ranks=RANKS) as sender,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(send, sender, receiver.address, REQUEST.of_rank(first))
        await world.until(sender, lambda: sender.metrics.snapshot()["kvpd_put_bytes_total"] == 5 * 64 + 9)
        nursery.start_soon(send, sender, receiver.address, REQUEST.of_rank(1 - first))
        for part in parts(REQUEST):
            await take(receiver, part)


@pytest.mark.parametrize("garbled", [0, 1])
@in_virtual_time
async def test_what_is_garbled_in_one_rank_is_noticed(memory_world: World, garbled: int) -> None:
    """Sums are compared in the window that they are of, and one rank's wrong bytes make the request wrong."""
    world = memory_world
    async with (
        world.receiver(ranks=RANKS, verify="xxh3") as receiver,
        world.sender(ranks=RANKS) as sender,
        trio.open_nursery() as nursery,
    ):
        feed = receiver.feed

        def garble(event: rev.ReceiverEvent) -> None:
            """Between the last byte's landing and the word that it has landed."""
            if isinstance(event, rev.MessageReceived) and isinstance(event.message, WriteDone):
                receiver.buffer.slot(0, 64, event.message.rank)[5] ^= event.message.rank == garbled
            feed(event)

        async def send_part(part: Request) -> None:
            with refused(ErrorCode.CHECKSUM_MISMATCH):
                await send(sender, receiver.address, part)

        receiver.feed = garble  # type: ignore[method-assign]
        for part in parts(Request("r", 1)):
            nursery.start_soon(send_part, part)


@in_virtual_time
async def test_chunks_that_are_there_are_there_for_every_rank(world: World) -> None:
    """A chunk is known by its key alone: it is ready when every rank's part of it is, and travels for none again."""
    one, two = (Request(name, 4, shared_keys="same") for name in ("one", "two"))
    async with (
        world.receiver(slots=8, ranks=RANKS) as receiver,
        world.sender(ranks=RANKS) as sender,
    ):
        async with trio.open_nursery() as nursery:
            for part in parts(one):
                nursery.start_soon(send, sender, receiver.address, part)
        sent = sender.metrics.snapshot()["kvpd_put_bytes_total"]
        async with trio.open_nursery() as nursery:
            for part in parts(two):
                nursery.start_soon(send, sender, receiver.address, part)
        assert sender.metrics.snapshot()["kvpd_put_bytes_total"] == sent
        assert receiver.core.counts.ready == 4
        for request in (one, two):
            for part in parts(request):
                await take(receiver, part)
        await world.until_clean(sender, receiver)


@in_virtual_time
async def test_room_is_free_when_every_rank_has_read(world: World) -> None:
    """One that is done must not take the bytes from under the other."""
    async with world.receiver(ranks=RANKS) as receiver, world.sender(ranks=RANKS) as sender:
        async with trio.open_nursery() as nursery:
            for part in parts(REQUEST):
                nursery.start_soon(send, sender, receiver.address, part)
        await take(receiver, REQUEST.of_rank(1))
        assert receiver.core.counts.ready == REQUEST.chunks
        await take(receiver, REQUEST.of_rank(0))
        await world.until_clean(sender, receiver)


@in_virtual_time
async def test_ranks_that_stage_two_requests_in_opposite_order(memory_world: World) -> None:
    """Entry 2 of what must be impossible: each rank finishes one, and waits for the other for ever."""
    world = memory_world
    a, b = Request("a", 4, batch=1), Request("b", 4, batch=1)
    async with world.receiver(slots=8, ranks=RANKS) as receiver, world.sender(staging=1, ranks=RANKS) as sender:

        async def one_rank(first: Request, then: Request, rank: int) -> None:
            async with (
                sender.open(first.req_id, receiver=receiver.address, total_chunks=4, rank=rank) as moving,
                sender.open(then.req_id, receiver=receiver.address, total_chunks=4, rank=rank) as next_one,
            ):
                for transfer_of, request in ((moving, first), (next_one, then)):
                    for batch in request.batches:
                        await stage(transfer_of, request.of_rank(rank), batch)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(one_rank, a, b, 0)
            nursery.start_soon(one_rank, b, a, 1)
        for request in (a, b):
            for part in parts(request):
                await take(receiver, part)
        await world.until_clean(sender, receiver)


# ------------------------------------------------------------------ ends


@pytest.mark.parametrize("by", [0, 1])
@pytest.mark.parametrize("state", ["queued", "staging", "filled", "complete but for one"])
@in_virtual_time
async def test_a_cancel_by_either_rank_ends_it_for_both(memory_world: World, state: str, by: int) -> None:
    """In every state, and nothing is left: neither at the receiver nor in either rank's staging."""
    world = memory_world
    async with (
        world.receiver(slots=6, ranks=RANKS) as receiver,
        world.sender(staging=2, ranks=RANKS) as sender,
    ):
        until = {
            "queued": lambda: receiver.core.queue_depth == 1,
            "staging": lambda: all(staging.free_count < 2 for staging in sender.core.staging),
            "filled": lambda: sender.metrics.snapshot()["kvpd_put_bytes_total"] >= 2 * 64,
            "complete but for one": lambda: sender.metrics.snapshot()["kvpd_put_bytes_total"] >= 6 * 64,
        }[state]

        async def one_rank(part: Request) -> None:
            with refused(ErrorCode.CANCELLED):
                async with sender.open("r", receiver=receiver.address, total_chunks=6, rank=part.rank) as moving:
                    if part.rank == by:
                        nursery.start_soon(cancel_when, moving.cancel)
                    if state == "staging":
                        async with moving.stage([part.key(0)]) as slots:
                            slot = await anext(aiter(slots))
                            assert slot is not None
                            await trio.sleep(2.0)
                            await fill(slots, part, first=1)
                    elif state != "complete but for one" or part.rank == 0:
                        for batch in Request("r", 6, batch=2).batches:
                            await stage(moving, part, batch)
                    await moving.wait_ended()

        async def cancel_when(cancel: object) -> None:
            await world.until(sender if state != "queued" else receiver, until)
            cancel()  # type: ignore[operator]

        async with trio.open_nursery() as nursery:
            holders = [
                sender.open("holder", receiver=receiver.address, total_chunks=3, rank=rank) for rank in range(RANKS)
            ]
            if state == "queued":
                async with holders[0] as first, holders[1] as second:
                    await world.until(receiver, lambda: receiver.core.counts.reserved == 3)
                    async with trio.open_nursery() as inner:
                        for part in parts(Request("r", 6)):
                            inner.start_soon(one_rank, part)
                    await stage(first, Request("holder", 3), range(3))
                    await stage(second, Request("holder", 3, rank=1), range(3))
                for part in parts(Request("holder", 3)):
                    await take(receiver, part)
            else:
                for part in parts(Request("r", 6)):
                    nursery.start_soon(one_rank, part)
        await world.until_clean(sender, receiver)
        await transfer(sender, receiver, Request("next", 6))


@in_virtual_time
async def test_other_ranks_than_the_receivers_are_refused_with_both_numbers(world: World) -> None:
    """The remedy is in the text: nobody can guess it from bytes that never came."""
    async with world.receiver(ranks=3) as receiver, world.sender(ranks=2) as sender:
        with refused(ErrorCode.LAYOUT_MISMATCH, match="serves 3 ranks, this sender 2: set ranks"):
            await send(sender, receiver.address, Request("r", 1))


@in_virtual_time
async def test_a_rank_that_never_comes_ends_the_others_wait_in_time(world: World) -> None:
    """And is named."""
    async with world.receiver(ranks=2) as receiver, world.sender(ranks=2, request_timeout_s=20.0) as sender:
        with refused(ErrorCode.REQUEST_TIMEOUT, match="of 2 ranks these have not opened it: 1"):
            await send(sender, receiver.address, REQUEST)
        await world.until_clean(sender, receiver)


# ------------------------------------------------------------------ over the engine link

HOLD_A_SLOT = """
link = client.connect_sender(sys.argv[1], rank=1)
transfer = link.open("r", receiver=sys.argv[2], total_chunks=6)
transfer.__enter__()
slots = transfer.stage([b"r 0", b"r 1"]).__enter__()
slot = next(slots)
"""

HOLD_A_CLAIM = """
link = client.connect_receiver(sys.argv[1], rank=1)
claim = link.claim("r", timeout=30)
chunks = claim.__enter__()
"""


async def test_engines_attach_by_rank_and_get_their_own_window(tmp_path: Path) -> None:
    """Over real sockets and mappings; windows of a size that is no multiple of a page."""
    requests = [Request(f"r{n}", 4, last_bytes=5) for n in range(3)]
    async with open_rig(tmp_path, ranks=RANKS) as rig, trio.open_nursery() as nursery:

        def prefill(rank: int) -> None:
            with client.connect_sender(rig.sender_socket, rank) as link:
                for request in requests:
                    send_with(link, rig.receiver.address, request.of_rank(rank))

        def decode(rank: int) -> None:
            with client.connect_receiver(rig.receiver_socket, rank) as link:
                for request in requests:
                    take_with(link, request.of_rank(rank))

        for rank in range(RANKS):
            nursery.start_soon(in_thread, functools.partial(prefill, rank))
            nursery.start_soon(in_thread, functools.partial(decode, rank))


async def test_two_engines_may_use_one_name_at_once(tmp_path: Path) -> None:
    """Each names itself: the ranks that come second would otherwise join whichever transfer they find first."""
    groups = {name: Request("r", 2, shared_keys=name) for name in ("a", "b")}
    opened = threading.Barrier(4)

    async with open_rig(tmp_path, ranks=RANKS) as rig, trio.open_nursery() as nursery:

        def prefill(name: str, rank: int, turn: threading.Event, next_turn: threading.Event) -> None:
            with client.connect_sender(rig.sender_socket, rank, group=name) as link:
                assert turn.wait(10)
                with link.open("r", receiver=rig.receiver.address, total_chunks=2) as transfer:
                    link.stats()  # its answer says that the open has been heard
                    next_turn.set()
                    opened.wait(10)
                    part = groups[name].of_rank(rank)
                    with transfer.stage([part.key(0), part.key(1)]) as slots:
                        for number, slot in enumerate(slots):
                            assert slot is not None
                            slot[:] = part.chunk(number)

        turns = [threading.Event() for _ in range(5)]
        turns[0].set()
        for at, (name, rank) in enumerate((("a", 0), ("b", 0), ("b", 1), ("a", 1))):
            nursery.start_soon(in_thread, functools.partial(prefill, name, rank, turns[at], turns[at + 1]))
    assert rig.receiver.metrics.snapshot()["kvpd_transfers_completed_total"] == 2


@pytest.mark.parametrize("role", ["sender", "receiver"])
async def test_a_rank_that_the_daemon_does_not_have_cannot_attach(tmp_path: Path, role: str) -> None:
    """The error says which setting is too low."""
    connect = client.connect_sender if role == "sender" else client.connect_receiver
    async with open_rig(tmp_path, ranks=RANKS) as rig:
        with pytest.raises(LocalProtocolError, match="rank 2, and this daemon has ranks = 2: set it higher"):
            await in_thread(connect, rig.socket_of(role), 2)


async def test_a_rank_that_dies_ends_the_transfer_for_the_others(tmp_path: Path) -> None:
    """Without its bytes the request is of no use. What it was filling comes back with its death."""
    async with open_rig(tmp_path, ranks=RANKS) as rig:
        async with engine_process(HOLD_A_SLOT, str(rig.sender_socket), rig.receiver.address) as engine:
            with refused(ErrorCode.CANCELLED, match="the engine of rank 1's connection ended"):
                async with rig.sender.open("r", receiver=rig.receiver.address, total_chunks=6) as moving:
                    await stage(moving, REQUEST, range(2))
                    await engine.kill()
                    await moving.wait_ended()
        await rig.world.until_clean(rig.sender, rig.receiver)


async def test_a_claim_of_one_rank_returns_when_its_engine_dies(tmp_path: Path) -> None:
    """The other rank's is not touched, and the request is whole for whoever comes instead."""
    async with open_rig(tmp_path, ranks=RANKS) as rig:
        async with trio.open_nursery() as nursery:
            for part in parts(REQUEST):
                nursery.start_soon(send, rig.sender, rig.receiver.address, part)
        async with engine_process(HOLD_A_CLAIM, str(rig.receiver_socket)) as engine:
            with refused(ErrorCode.CLAIMED):
                await take(rig.receiver, REQUEST.of_rank(1))
            await take(rig.receiver, REQUEST)
            await engine.kill()
            await rig.world.until(rig.receiver, lambda: not rig.receiver.core._desk._held)
        await take(rig.receiver, REQUEST.of_rank(1))
        await rig.world.until_clean(rig.sender, rig.receiver)
