"""Cancelling by name, by handle and by leaving, wherever the request stands."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager

import pytest
import trio

from kvpd.core.messages import HostIdentity
from kvpd.errors import ErrorCode, TransferCancelled, TransferError
from kvpd.service.host import _start_time, own_host
from kvpd.service.staging import Transfer

from .worlds import Request, World, fill, in_virtual_time, refused, send, stage, take, transfer

ALL_SLOTS = 6
VICTIM = Request("victim", ALL_SLOTS, batch=3)


def cancel(how: str, world_sender: object, receiver: object, moving: Transfer) -> None:
    """One of the three ways."""
    match how:
        case "handle":
            moving.cancel()
        case "sender":
            world_sender.cancel("victim")  # type: ignore[attr-defined]
        case "receiver":
            receiver.cancel("victim")  # type: ignore[attr-defined]


HOWS = pytest.mark.parametrize("how", ["handle", "sender", "receiver"])


@HOWS
@in_virtual_time
async def test_while_it_waits_for_admission(world: World, how: str) -> None:
    """Fault 8: it is never admitted afterwards, and those behind it move up at once."""
    async with (
        world.receiver(slots=ALL_SLOTS) as receiver,
        world.sender() as sender,
        sender.open("holder", receiver=receiver.address, total_chunks=4) as holder,
    ):
        await world.until(receiver, lambda: receiver.core.counts.reserved == 4)
        with refused(ErrorCode.CANCELLED):
            async with sender.open("victim", receiver=receiver.address, total_chunks=ALL_SLOTS) as moving:
                await world.until(receiver, lambda: receiver.core.queue_depth == 1)
                async with sender.open("behind", receiver=receiver.address, total_chunks=2) as behind:
                    await world.until(receiver, lambda: receiver.core.queue_depth == 2)
                    cancel(how, sender, receiver, moving)
                    await stage(behind, Request("behind", 2), range(2))
                await moving.wait_ended()
        await stage(holder, Request("holder", 4), range(4))
        await take(receiver, Request("holder", 4))
        await take(receiver, Request("behind", 2))
        await world.until(receiver, lambda: receiver.core.is_clean)


@HOWS
@in_virtual_time
async def test_while_its_slots_are_being_filled(world: World, how: str) -> None:
    """The room at the receiver is free at once; the staging slots when the engine has left them."""
    async with world.receiver(slots=ALL_SLOTS) as receiver, world.sender(staging=4) as sender:
        keys = [VICTIM.key(number) for number in range(3)]
        with refused(ErrorCode.CANCELLED):
            async with (
                sender.open("victim", receiver=receiver.address, total_chunks=ALL_SLOTS) as moving,
                moving.stage(keys) as slots,
            ):
                slot = await anext(aiter(slots))
                assert slot is not None
                cancel(how, sender, receiver, moving)
                await world.until(receiver, lambda: receiver.core.is_clean)
                assert sender.core.staging[0].free_count == 1, "the engine may still be writing"
                await fill(slots, VICTIM, first=1)
        await world.until_clean(sender, receiver)
        await transfer(sender, receiver, Request("next", ALL_SLOTS))


@HOWS
@in_virtual_time
async def test_while_its_puts_are_stuck(world: World, how: str) -> None:
    """Fault 12: what was cut off may still land, so its slots wait for the fence, and nobody else gets them."""
    world.fabric.late_landing = True
    async with world.receiver(slots=ALL_SLOTS) as receiver, world.sender() as sender:
        await transfer(sender, receiver, Request("warm", 1))
        world.fabric.stall()
        with refused(ErrorCode.CANCELLED):
            async with sender.open("victim", receiver=receiver.address, total_chunks=ALL_SLOTS) as moving:
                await stage(moving, VICTIM, range(3))
                begun = trio.current_time()
                cancel(how, sender, receiver, moving)
                await moving.wait_ended()
        assert trio.current_time() - begun < 1.0, "the engine is told at once"
        await world.until_clean(sender, receiver)
        assert trio.current_time() - begun <= receiver.config.put_deadline_s + 0.1
        world.fabric.resume()
        assert world.fabric.land_late() == 0, "the session's worker is destroyed: nothing lands any more"
        await transfer(sender, receiver, Request("next", ALL_SLOTS))


@in_virtual_time
async def test_puts_that_end_within_the_deadline_keep_the_session(world: World) -> None:
    """A cancel in the middle of healthy puts drains them: no session is rebuilt, nobody else notices."""
    world.fabric.put_s = lambda _: 1.0
    async with world.receiver(slots=ALL_SLOTS) as receiver, world.sender() as sender:
        with refused(ErrorCode.CANCELLED):
            async with sender.open("victim", receiver=receiver.address, total_chunks=ALL_SLOTS) as moving:
                await stage(moving, VICTIM, range(3))
                moving.cancel()
                await moving.wait_ended()
        await world.until_clean(sender, receiver)
        peer = sender.core.peer_of(receiver.address)
        await transfer(sender, receiver, Request("next", ALL_SLOTS))
        assert peer is not None
        assert sender.core.peer_of(receiver.address) is peer


@in_virtual_time
async def test_puts_that_have_not_begun_never_do(world: World) -> None:
    """A cancel drains what is on the wire, not all that was queued behind it: hence the window."""
    request = Request("victim", 4, chunk_bytes=4096, last_bytes=4096)
    world.fabric.put_s = lambda _: 1.0
    async with (
        world.receiver(slots=4, chunk_bytes=4096) as receiver,
        world.sender(chunk_bytes=4096, put_window_bytes=4096) as sender,
    ):
        with refused(ErrorCode.CANCELLED):
            async with sender.open("victim", receiver=receiver.address, total_chunks=4) as moving:
                await stage(moving, request, range(4))
                moving.cancel()
                await moving.wait_ended()
        await world.until_clean(sender, receiver)
        assert trio.current_time() == pytest.approx(1.0, abs=0.1)


@in_virtual_time
async def test_slots_of_a_silent_sender_on_this_host_wait_for_its_death(memory_world: World) -> None:
    """On one host the sender's own kernel writes: only the end of its process proves that nothing lands."""
    world = memory_world
    with living_process() as process:
        here = own_host()
        host = HostIdentity(here.boot_id, here.pid_namespace, process.pid, _start_time(process.pid) or 0)
        async with world.receiver(slots=ALL_SLOTS) as receiver:
            with refused(ErrorCode.CANCELLED):
                async with AsyncExitStack() as stack:
                    sender = await stack.enter_async_context(world.sender(host=host))
                    world.fabric.stall()
                    opened = sender.open("victim", receiver=receiver.address, total_chunks=3)
                    await stage(await stack.enter_async_context(opened), Request("victim", 3), range(3))
                    leave()  # with the puts in flight
            await world.until(receiver, lambda: receiver.core.counts.quarantined == 3)
            await trio.sleep(600)
            assert receiver.core.counts.quarantined == 3, "time alone frees nothing"
            process.kill()
            process.wait()
            await world.until_clean(receiver)


@in_virtual_time
async def test_slots_of_a_sender_on_this_host_come_back_by_its_own_word(memory_world: World) -> None:
    """A sender that lives and was cut off says Hello anew, when its puts have ended: nobody else can know that."""
    world = memory_world
    async with world.receiver(slots=ALL_SLOTS) as receiver, world.sender(host=own_host()) as sender:
        world.fabric.stall()
        with refused(ErrorCode.CANCELLED):
            async with sender.open("victim", receiver=receiver.address, total_chunks=3) as moving:
                await stage(moving, Request("victim", 3), range(3))
                moving.cancel()
                await moving.wait_ended()
        await world.until(receiver, lambda: receiver.core.counts.quarantined == 3)
        await world.until_clean(sender, receiver)
        world.fabric.resume()
        await send(sender, receiver.address, Request("next", 3))
        await take(receiver, Request("next", 3))


def leave() -> None:
    """Give up, as an engine does that is told to."""
    raise TransferCancelled(ErrorCode.CANCELLED)


@contextmanager
def living_process() -> Iterator[subprocess.Popen[bytes]]:
    """A process that stands for the sender's, and is gone afterwards."""
    with subprocess.Popen(["sleep", "1000"]) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("how", ["sender", "receiver"])
@in_virtual_time
async def test_after_it_is_complete_and_before_it_is_claimed(world: World, how: str) -> None:
    """The sender is done with it; the decode side may still say that nobody will read it."""
    async with world.receiver(slots=ALL_SLOTS) as receiver, world.sender() as sender:
        await send(sender, receiver.address, VICTIM)
        (sender if how == "sender" else receiver).cancel("victim")
        await trio.sleep(1)
        if how == "sender":
            await take(receiver, VICTIM)
        else:
            assert receiver.core.is_clean
            with refused(ErrorCode.CLAIM_TIMEOUT):
                await take(receiver, VICTIM, timeout_s=1)
        await world.until_clean(sender, receiver)


@pytest.mark.parametrize("how", ["sender", "receiver"])
@in_virtual_time
async def test_while_it_is_being_read(world: World, how: str) -> None:
    """Nothing but its engine's release ends a claim: a cancel changes no byte of it."""
    async with world.receiver(slots=ALL_SLOTS) as receiver, world.sender() as sender:
        await send(sender, receiver.address, VICTIM)
        async with receiver.claim("victim", timeout_s=1) as chunks:
            (sender if how == "sender" else receiver).cancel("victim")
            await trio.sleep(10)
            assert receiver.core.counts.ready == ALL_SLOTS
            assert [bytes(chunk.view) for chunk in chunks] == VICTIM.payload
        await world.until_clean(sender, receiver)


@in_virtual_time
async def test_a_waiting_claim_is_told_of_the_cancel(world: World) -> None:
    """The decode engine must not wait for its own deadline to learn that nothing will come."""
    async with world.receiver() as receiver, world.sender() as sender, trio.open_nursery() as nursery:

        async def wait_for_it() -> None:
            with refused(ErrorCode.CANCELLED):
                await take(receiver, VICTIM)

        with refused(ErrorCode.CANCELLED):
            async with sender.open("victim", receiver=receiver.address, total_chunks=6) as moving:
                await world.until(receiver, lambda: receiver.core.counts.reserved == 6)
                nursery.start_soon(wait_for_it)
                await trio.sleep(0.1)
                moving.cancel()
                with pytest.raises(TransferCancelled):
                    await moving.wait_ended()
                with pytest.raises(TransferCancelled):
                    await stage(moving, VICTIM, range(3))


@in_virtual_time
async def test_cancelling_what_is_not_there_does_nothing(world: World) -> None:
    """An abort storm for requests that nobody has seen: no error, no memory, no trace."""
    async with world.receiver() as receiver, world.sender() as sender:
        for number in range(1000):
            sender.cancel(f"unknown-{number}")
            receiver.cancel(f"unknown-{number}")
        await transfer(sender, receiver, Request("unknown-7", 3))
        await world.until_clean(sender, receiver)


@in_virtual_time
async def test_a_storm_of_cancels_is_over_in_one_put_deadline(memory_world: World) -> None:
    """Fault 21: two hundred at once, with puts stuck: they drain side by side, not one after the other."""
    world = memory_world
    async with world.receiver(slots=200) as receiver, world.sender(staging=200) as sender:
        world.fabric.stall()
        ended = 0

        async def one(number: int) -> None:
            nonlocal ended
            request = Request(f"r{number}", 1)
            try:
                await send(sender, receiver.address, request)
            except TransferError:
                ended += 1

        async with trio.open_nursery() as nursery:
            for number in range(200):
                nursery.start_soon(one, number)
            await world.until(sender, lambda: sender.core.staging[0].free_count == 0)
            await trio.sleep(0.1)
            begun = trio.current_time()
            for number in range(200):
                sender.cancel(f"r{number}")
        assert ended == 200
        await world.until_clean(sender, receiver)
        assert trio.current_time() - begun <= receiver.config.put_deadline_s + 0.1
        world.fabric.resume()
        await transfer(sender, receiver, Request("next", 200))


@in_virtual_time
async def test_a_cancelled_label_can_be_used_again_at_once(world: World) -> None:
    """Fault 10: the label is only a label; the second attempt is another transfer."""
    async with world.receiver(slots=ALL_SLOTS) as receiver, world.sender() as sender:
        for _ in range(3):
            with refused(ErrorCode.CANCELLED):
                async with sender.open("victim", receiver=receiver.address, total_chunks=ALL_SLOTS) as moving:
                    await stage(moving, VICTIM, range(3))
                    moving.cancel()
                    await moving.wait_ended()
        await send(sender, receiver.address, VICTIM)
        await take(receiver, VICTIM)
        await world.until_clean(sender, receiver)
