"""Requests that go well: every byte arrives, whatever the sizes, the order and the number of requests at once."""

from __future__ import annotations

import pickle

import pytest
import trio

from kvpd.errors import ErrorCode, LocalProtocolError
from kvpd.service.sender import Sender

from .worlds import CHUNK_BYTES, Request, World, fill, in_virtual_time, refused, send, stage, take, transfer


@in_virtual_time
async def test_every_byte_arrives_and_nothing_is_left(world: World) -> None:
    """The whole point."""
    async with world.receiver() as receiver, world.sender() as sender:
        await transfer(sender, receiver, Request("one", 8, batch=3))
        await world.until_clean(sender, receiver)


@in_virtual_time
async def test_several_senders_share_a_buffer_that_cannot_hold_them_all(world: World) -> None:
    """Three of 8 chunks into 10: with admission by chunk, each could hold three and wait for the others for ever."""
    async with (
        world.receiver(slots=10) as receiver,
        world.sender(name="a") as a,
        world.sender(name="b") as b,
        world.sender(name="c") as c,
        trio.open_nursery() as nursery,
    ):
        for sender in (a, b, c):
            for number in range(3):
                nursery.start_soon(transfer, sender, receiver, Request(f"{sender.config.name}{number}", 8, batch=2))
    # Left in order: the daemons outlived every request.


@pytest.mark.parametrize("staging", [1, 3])
@in_virtual_time
async def test_a_batch_larger_than_the_staging_goes_in_pieces(world: World, staging: int) -> None:
    """Fault 5: the reference waits for ever for room that its own batch fills."""
    async with world.receiver() as receiver, world.sender(staging=staging) as sender:
        await transfer(sender, receiver, Request("one", 10))
        await world.until_clean(sender, receiver)


@pytest.mark.parametrize("last_bytes", [1, CHUNK_BYTES - 1, CHUNK_BYTES])
@in_virtual_time
async def test_a_shorter_last_chunk_arrives_at_its_own_length(world: World, last_bytes: int) -> None:
    """A prompt is hardly ever a multiple of the chunk; what is behind its end belongs to somebody else."""
    async with world.receiver() as receiver, world.sender() as sender:
        await transfer(sender, receiver, Request("one", 5, last_bytes=last_bytes, batch=2))
        await world.until_clean(sender, receiver)


@in_virtual_time
async def test_chunks_that_the_receiver_holds_do_not_travel_again(world: World) -> None:
    """Prompts begin alike; the second of two costs neither its bytes nor its room, and outlives the first."""
    first, second = Request("first", 6, shared_keys="prompt"), Request("second", 6, shared_keys="prompt")
    async with world.receiver(slots=13) as receiver, world.sender() as sender:
        assert await send(sender, receiver.address, first) == 0
        assert await send(sender, receiver.address, second) == 6
        assert receiver.core.counts.ready == 6
        await take(receiver, first)
        await take(receiver, second)
        await world.until_clean(sender, receiver)


@in_virtual_time
async def test_a_common_beginning_is_shared_and_the_rest_travels(world: World) -> None:
    """None stands in the place of the chunks that are there, in order, in pieces too."""
    first = Request("first", 4, shared_keys="prompt")
    second = Request("second", 9, shared_keys="prompt")
    async with world.receiver(slots=13) as receiver, world.sender(staging=2) as sender:
        await send(sender, receiver.address, first)
        assert await send(sender, receiver.address, second) == 4
        await take(receiver, second)
        await take(receiver, first)
        await world.until_clean(sender, receiver)


@in_virtual_time
async def test_a_thousand_small_requests_at_once(transport: str) -> None:
    """Small requests are bound by round trips: a thousand in flight must cost no more than the buffer allows."""
    requests = [Request(f"small-{number}", 1 + number % 3) for number in range(1000)]
    async with (
        World(transport, audited=False) as world,
        world.receiver(slots=64) as receiver,
        world.sender(staging=16) as sender,
    ):
        await transfer(sender, receiver, *requests)
        await world.until_clean(sender, receiver)


@in_virtual_time
async def test_an_engine_that_computes_slot_in_hand_does_not_stop_the_other_receiver(world: World) -> None:
    """While two receivers are served, either has its share of the staging and no more: the others still pass."""
    slow, warm = Request("slow", 10), Request("warm", 1)
    async with (
        world.receiver(name="a") as a,
        world.receiver(name="b", slots=20) as b,
        world.sender(staging=4) as sender,
    ):
        async with (
            sender.open("warm", receiver=b.address, total_chunks=1) as to_b,
            to_b.stage([warm.key(0)], last=True) as warm_slots,
        ):
            held = await anext(aiter(warm_slots))
            assert held is not None
            held[:] = warm.chunk(0)
            async with (
                sender.open("slow", receiver=a.address, total_chunks=10) as to_a,
                to_a.stage([slow.key(n) for n in range(10)], last=True) as slow_slots,
            ):
                slot = await anext(aiter(slow_slots))
                assert slot is not None
                slot[:] = slow.chunk(0)
                await fill(warm_slots, warm)
                await transfer(sender, b, *(Request(f"other-{n}", 6) for n in range(5)))
                await fill(slow_slots, slow, first=1)
        await take(a, slow)
        await take(b, warm)


@in_virtual_time
async def test_slow_puts_to_two_receivers_run_side_by_side(memory_world: World) -> None:
    """Ten chunks of a second each to either receiver take as long as to one alone."""
    world = memory_world
    world.fabric.put_s = lambda _: 1.0
    async with (
        world.receiver(name="a") as a,
        world.receiver(name="b") as b,
        world.sender(staging=4) as sender,
    ):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(transfer, sender, a, Request("to-a", 10, batch=2))
            nursery.start_soon(transfer, sender, b, Request("to-b", 10, batch=2))
        assert trio.current_time() <= 5.0, "batches of two, each in a second"


@in_virtual_time
async def test_reservation_overlaps_computing(world: World) -> None:
    """An open without keys waits for its room at once, so that the wait is over when the first batch is computed."""
    async with world.receiver(slots=4) as receiver, world.sender() as sender:
        async with sender.open("r", receiver=receiver.address, total_chunks=3) as moving:
            await world.until(receiver, lambda: receiver.core.counts.reserved == 3)
            await stage(moving, Request("r", 3), range(3))
        await take(receiver, Request("r", 3))


@in_virtual_time
async def test_an_early_stage_gets_staging_that_is_free(world: World) -> None:
    """The engine asks for its next batch while it fills this one: a round trip less per batch."""
    request = Request("early", 4, batch=2)
    async with world.receiver() as receiver, world.sender(staging=4) as sender:
        first, second = ([request.key(n) for n in batch] for batch in request.batches)
        async with (
            sender.open("early", receiver=receiver.address, total_chunks=4) as moving,
            moving.stage(first) as early,
            moving.stage(second, last=True) as late,
        ):
            await fill(early, request)
            await fill(late, request, first=2)
        await take(receiver, request)


@in_virtual_time
async def test_an_early_stage_that_finds_no_staging_is_granted_when_the_first_is_filled(world: World) -> None:
    """Deferred is not refused: filled in order, the second stage goes on as if it had been asked for later."""
    request = Request("early", 8, batch=4)
    async with world.receiver() as receiver, world.sender(staging=4) as sender:
        first, second = ([request.key(n) for n in batch] for batch in request.batches)
        async with (
            sender.open("early", receiver=receiver.address, total_chunks=8) as moving,
            moving.stage(first) as early,
            moving.stage(second, last=True) as late,
        ):
            await world.until(sender, lambda: sender.core.staging[0].free_count == 0)
            await trio.sleep(1)  # the answer to the second is here too, and finds no staging
            await fill(early, request)
            await fill(late, request, first=4)
        await take(receiver, request)
        await world.until_clean(sender, receiver)


@in_virtual_time
async def test_waiting_for_an_early_stage_with_slots_in_hand_is_refused(world: World) -> None:
    """Nobody waits while holding: it could be for ever. The error says what to do."""
    request = Request("early", 8, batch=4)
    async with world.receiver() as receiver, world.sender(staging=4) as sender:
        first, second = ([request.key(n) for n in batch] for batch in request.batches)

        async def wait_holding() -> None:
            async with (
                sender.open("early", receiver=receiver.address, total_chunks=8) as moving,
                moving.stage(first) as early,
                moving.stage(second, last=True) as late,
            ):
                assert await anext(aiter(early)) is not None
                await anext(aiter(late))

        with pytest.raises(LocalProtocolError, match="fill the earlier stage first"):
            await wait_holding()
        await world.until_clean(sender, receiver)
        await transfer(sender, receiver, Request("next", 8))


async def _leave_early(sender: Sender, receiver: str, *, filled: int) -> None:
    request = Request("hole", 4)
    async with (
        sender.open("hole", receiver=receiver, total_chunks=4) as moving,
        moving.stage([request.key(n) for n in range(4)], last=True) as slots,
    ):
        for _ in range(filled):
            slot = await anext(aiter(slots))
            assert slot is not None
            slot[:] = bytes(len(slot))


@pytest.mark.parametrize("filled", [0, 1, 3])
@in_virtual_time
async def test_a_stage_that_is_left_with_a_hole_is_never_sent(world: World, filled: int) -> None:
    """Fault 20: what an earlier request left in the slot would be announced as this one's."""
    async with world.receiver() as receiver, world.sender() as sender:
        with pytest.raises(LocalProtocolError, match="before all of its slots were filled"):
            await _leave_early(sender, receiver.address, filled=filled)
        with refused(ErrorCode.CLAIM_TIMEOUT, ErrorCode.CANCELLED):
            await take(receiver, Request("hole", 4), timeout_s=1.0)
        await world.until_clean(sender, receiver)


@in_virtual_time
async def test_a_transfer_that_is_left_before_all_was_staged_is_cancelled_at_once(world: World) -> None:
    """It can never complete: waiting for it would hold its room until the request's deadline."""
    async with world.receiver() as receiver, world.sender() as sender:

        async def leave() -> None:
            async with sender.open("r", receiver=receiver.address, total_chunks=4) as moving:
                await stage(moving, Request("r", 4), range(2))

        with pytest.raises(LocalProtocolError, match="2 of 4 chunks"):
            await leave()
        assert trio.current_time() < 1.0
        await world.until_clean(sender, receiver)


@in_virtual_time
async def test_a_stage_after_the_last_one_is_an_error_and_not_a_wait(world: World) -> None:
    """Everything has landed: no slot will ever come."""
    async with world.receiver() as receiver, world.sender() as sender:
        async with sender.open("r", receiver=receiver.address, total_chunks=2) as moving:
            await stage(moving, Request("r", 2), range(2))
            await moving.wait_ended()
            with pytest.raises(LocalProtocolError, match="complete"):
                await stage(moving, Request("r", 3), range(2, 3))
        await take(receiver, Request("r", 2))


@in_virtual_time
async def test_arrays_that_outlive_their_slots_hold_nobody_up(world: World) -> None:
    """An engine's array may refer to a slot after the stage: the transfer goes on, the claim is given back."""
    request = Request("r", 2)
    kept: list[pickle.PickleBuffer] = []
    async with world.receiver() as receiver, world.sender() as sender:
        async with (
            sender.open("r", receiver=receiver.address, total_chunks=2) as moving,
            moving.stage([request.key(0), request.key(1)], last=True) as slots,
        ):
            async for slot in slots:
                assert slot is not None
                slot[:] = request.chunk(len(kept))
                kept.append(pickle.PickleBuffer(slot))
        async with receiver.claim("r", timeout_s=1) as chunks:
            kept += [pickle.PickleBuffer(chunk.view) for chunk in chunks]
        await world.until_clean(sender, receiver)


@in_virtual_time
async def test_chunks_can_only_be_read_and_only_while_claimed(world: World) -> None:
    """Slots are shared by dedupe: a write would change another request's bytes."""
    async with world.receiver() as receiver, world.sender() as sender:
        await send(sender, receiver.address, Request("r", 1))
        async with receiver.claim("r", timeout_s=1) as chunks:
            view = chunks[0].view
            with pytest.raises(TypeError):
                view[0] = 1
        with pytest.raises(ValueError, match="released"):
            bytes(view)


@in_virtual_time
async def test_a_put_that_is_stuck_does_not_stop_the_other_receiver(world: World) -> None:
    """The wire to one host is slow: what goes to the other does not even notice."""
    world.fabric.put_s = lambda length: 50.0 if length == 7 else 0.0
    async with (
        world.receiver(name="slow") as slow,
        world.receiver(name="quick") as quick,
        world.sender(staging=4) as sender,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(transfer, sender, slow, Request("slow", 1, last_bytes=7))
        await world.until(slow, lambda: slow.core.counts.writing == 1)
        await transfer(sender, quick, *(Request(f"quick-{number}", 8, batch=2) for number in range(5)))
        assert trio.current_time() < 1.0
    assert trio.current_time() == pytest.approx(50.0, abs=1.0)
