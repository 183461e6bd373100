"""What a network and its peers can do to requests: lose, delay, cut, restart. Everything held comes back."""

from __future__ import annotations

import random

import pytest
import trio

from kvpd.errors import ErrorCode, TransferError
from kvpd.service.receiver import Receiver
from kvpd.service.sender import Sender

from .worlds import Request, World, fill, in_virtual_time, refused, send, stage, take, transfer

LOST = ErrorCode.PEER_LOST


def channel_of(sender: Sender, receiver: Receiver) -> bytes:
    """The identity that the sender's channel to the receiver bears now."""
    session = receiver.core._sessions.of_sender(sender.config.name)
    assert session is not None
    return session.peer


@in_virtual_time
async def test_a_failed_put_costs_that_session_and_no_other(memory_world: World) -> None:
    """One put that failed proves nothing of the others on its endpoint; the other receiver does not notice."""
    world = memory_world
    async with (
        world.receiver(name="bad") as bad,
        world.receiver(name="good") as good,
        world.sender(staging=8) as sender,
    ):
        await transfer(sender, bad, Request("warm-bad", 1))
        await transfer(sender, good, Request("warm-good", 1))
        before = sender.core.peer_of(good.address)
        world.fabric.fail_next_puts(1, "the wire hiccuped")
        with refused(ErrorCode.TRANSPORT_FAILED, match="hiccuped"):
            await send(sender, bad.address, Request("victim", 4))
        await transfer(sender, good, Request("other", 6))
        assert sender.core.peer_of(good.address) is before
        await transfer(sender, bad, Request("again", 10))
        await world.until_clean(sender, bad, good)


@in_virtual_time
async def test_requests_of_a_session_whose_put_failed_end_together_and_those_behind_go_on(memory_world: World) -> None:
    """Nothing on that endpoint can be trusted; whoever opens next gets a new one."""
    world = memory_world
    world.fabric.put_s = lambda _: 1.0
    async with world.receiver(slots=20) as receiver, world.sender(staging=20) as sender:
        outcomes: list[str] = []

        async def one(number: int) -> None:
            try:
                await send(sender, receiver.address, Request(f"r{number}", 4))
                outcomes.append("done")
            except TransferError as exc:
                outcomes.append(exc.code)

        world.fabric.fail_next_puts(1)
        async with trio.open_nursery() as nursery:
            for number in range(4):
                nursery.start_soon(one, number)
        assert set(outcomes) == {ErrorCode.TRANSPORT_FAILED}
        await world.until_clean(sender, receiver)
        await transfer(sender, receiver, *(Request(f"next-{number}", 4) for number in range(8)))
        await world.until_clean(sender, receiver)


@in_virtual_time
async def test_a_receiver_whose_worker_vanishes_ends_its_requests(memory_world: World) -> None:
    """The transport reports the peer's death before any lease runs out."""
    world = memory_world
    world.fabric.put_s = lambda _: 1.0
    async with world.receiver() as receiver, world.sender() as sender:
        with refused(ErrorCode.TRANSPORT_FAILED):
            async with sender.open("victim", receiver=receiver.address, total_chunks=8) as moving:
                await stage(moving, Request("victim", 8), range(4))
                for target in receiver._targets.values():
                    assert target is not None
                    world.fabric.break_target(target.worker_address, "its process died")
                await moving.wait_ended()
        await world.until_clean(sender, receiver)
        await transfer(sender, receiver, Request("next", 10))


@pytest.mark.parametrize("seed", range(12))
@in_virtual_time
async def test_messages_lost_at_any_moment_are_repeated(seed: int) -> None:
    """Connections break again and again, and with them what is on its way: every request still gets through, once."""
    chance = random.Random(seed)
    # With a short put deadline a sender has two heartbeats, and not one, in which to hear that its lease goes on.
    async with (
        World(delay_s=0.01) as world,
        world.receiver(slots=12) as receiver,
        world.sender() as sender,
    ):
        requests = [Request(f"r{number}", 1 + number % 7, batch=2) for number in range(10)]

        async def disturb(count: int) -> None:
            for _ in range(count):
                await trio.sleep(chance.uniform(0.0, 0.2))
                for client in list(world.network._clients):
                    world.network.disconnect(client.identity)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(disturb, 40)
            await transfer(sender, receiver, *requests)
        await world.until_clean(sender, receiver)


@in_virtual_time
async def test_a_slow_network_only_takes_longer() -> None:
    """A second each way, in a lease of ten."""
    async with World(delay_s=1.0) as world, world.receiver() as receiver, world.sender() as sender:
        await transfer(sender, receiver, *(Request(f"r{number}", 8, batch=3) for number in range(3)))
        await world.until_clean(sender, receiver)


@in_virtual_time
async def test_a_partition_shorter_than_the_lease_goes_unnoticed(memory_world: World) -> None:
    """A switch that restarts costs seconds, not requests."""
    world = memory_world
    async with world.receiver() as receiver, world.sender() as sender:
        async with sender.open("r", receiver=receiver.address, total_chunks=6) as moving:
            await stage(moving, Request("r", 6), range(3))
            world.network.partition()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(stage, moving, Request("r", 6), range(3, 6))
                await trio.sleep(2.0)
                world.network.heal()
        await take(receiver, Request("r", 6))
        await world.until_clean(sender, receiver)
        assert sender.core.peer_count == 1


@in_virtual_time
async def test_a_partition_longer_than_the_lease_ends_the_requests_on_both_sides(memory_world: World) -> None:
    """Fault 6: nobody waits for ever, nothing stays reserved; what had landed whole can still be read."""
    world = memory_world
    async with world.receiver() as receiver, world.sender() as sender:
        landed = Request("landed", 2)
        await send(sender, receiver.address, landed)
        async with trio.open_nursery() as nursery:

            async def wait_for_it() -> None:
                with refused(LOST):
                    await take(receiver, Request("victim", 6))

            with refused(LOST):
                async with sender.open("victim", receiver=receiver.address, total_chunks=6) as moving:
                    await stage(moving, Request("victim", 6), range(3))
                    nursery.start_soon(wait_for_it)
                    await trio.sleep(0.1)
                    world.network.partition()
                    begun = trio.current_time()
                    await moving.wait_ended()
            config = receiver.config
            assert trio.current_time() - begun <= config.lease_s - config.put_deadline_s + 0.1, "before the receiver"
        await take(receiver, landed)
        await world.until_clean(sender, receiver)
        world.network.heal()
        await transfer(sender, receiver, Request("next", 10))


@in_virtual_time
async def test_a_sender_that_is_cut_off_while_queued_leaves_the_queue(memory_world: World) -> None:
    """A dead sender's place in the line must not hold up those behind it until its request's own deadline."""
    world = memory_world
    async with (
        world.receiver(slots=6) as receiver,
        world.sender(name="holder") as holder,
        world.sender(name="dying") as dying,
        world.sender(name="living") as living,
        trio.open_nursery() as nursery,
    ):

        async def die() -> None:
            with refused(LOST):
                await send(dying, receiver.address, Request("dying", 6))

        async with holder.open("holder", receiver=receiver.address, total_chunks=4) as held:
            await world.until(receiver, lambda: receiver.core.counts.reserved == 4)
            nursery.start_soon(die)
            await world.until(receiver, lambda: receiver.core.queue_depth == 1)
            world.network.partition(channel_of(dying, receiver))
            nursery.start_soon(transfer, living, receiver, Request("living", 2))
            await world.until(receiver, lambda: receiver.core.queue_depth == 2)
            await world.until(receiver, lambda: receiver.core.queue_depth == 0)
            assert trio.current_time() <= receiver.config.lease_s + 0.1
            await stage(held, Request("holder", 4), range(4))
        await take(receiver, Request("holder", 4))


@in_virtual_time
async def test_a_receiver_that_restarts_at_its_address(world: World) -> None:
    """Faults 15 and 18: what it had is lost, and said to be; nothing goes to the old one's memory."""
    address = "127.0.0.1:7300" if world.transport == "memory" else "inproc://decode"
    async with world.sender() as sender:
        async with world.receiver(address=address) as first:
            await transfer(sender, first, Request("before", 4))
            broken = sender.open("broken", receiver=first.address, total_chunks=6)
            moving = await broken.__aenter__()
            await stage(moving, Request("broken", 6), range(3))
            target = first.address
        async with world.receiver(address=address) as second:
            with refused(LOST, ErrorCode.TRANSPORT_FAILED):
                await moving.wait_ended()
            error = None
            try:
                moving.check_staged()
            except TransferError as exc:
                error = exc
            assert error is not None
            await broken.__aexit__(type(error), error, None)
            await transfer(sender, second, Request("after", 8))
            assert second.address == target
            await world.until_clean(sender, second)


@in_virtual_time
async def test_an_idle_sender_finds_out_that_its_receiver_has_restarted(world: World) -> None:
    """The first request after the restart must not be the one that fails, when a heartbeat came between."""
    address = "127.0.0.1:7300" if world.transport == "memory" else "inproc://decode"
    async with world.sender() as sender:
        async with world.receiver(address=address) as first:
            await transfer(sender, first, Request("before", 4))
        async with world.receiver(address=address) as second:
            await trio.sleep(20)
            await transfer(sender, second, Request("after", 4))
            await world.until_clean(sender, second)


@in_virtual_time
async def test_a_sender_that_restarts_under_its_name(world: World) -> None:
    """Its earlier life's requests are rolled back at once, without waiting for the lease."""
    async with world.receiver(slots=6) as receiver:
        first = world.sender()
        await first.__aenter__()
        broken = first.open("broken", receiver=receiver.address, total_chunks=6)
        moving = await broken.__aenter__()
        await stage(moving, Request("broken", 6), range(3))
        await world.until(receiver, lambda: receiver.core.counts.ready == 3)
        await first.__aexit__(None, None, None)
        with refused(ErrorCode.CANCELLED, match="closed"):
            await moving.wait_ended()
        async with world.sender() as second:
            begun = trio.current_time()
            await transfer(second, receiver, Request("after", 6))
            assert trio.current_time() - begun < 1.0
            await world.until_clean(second, receiver)


@in_virtual_time
async def test_two_senders_of_one_name_do_not_corrupt_each_other(memory_world: World) -> None:
    """A copied configuration: the newer one counts, the older is told so, and no byte goes astray."""
    world = memory_world
    async with world.receiver() as receiver, world.sender(name="twin") as older, world.sender(name="twin") as newer:
        await transfer(older, receiver, Request("one", 3))
        await transfer(newer, receiver, Request("two", 3))
        for number in range(3):
            for sender in (older, newer):
                try:
                    await transfer(sender, receiver, Request(f"{number}-{id(sender)}", 3))
                except* TransferError as group:
                    for exc in group.exceptions:
                        assert LOST in str(exc) or ErrorCode.TRANSPORT_FAILED in str(exc)
        await world.until(receiver, lambda: receiver.core.is_clean)


@in_virtual_time
async def test_a_request_has_a_deadline_of_its_own(world: World) -> None:
    """An engine that forgets a transfer does not hold its room for ever."""
    async with world.receiver() as receiver, world.sender(request_timeout_s=20) as sender:
        with refused(ErrorCode.REQUEST_TIMEOUT):
            async with sender.open("r", receiver=receiver.address, total_chunks=4) as moving:
                await stage(moving, Request("r", 4), range(2))
                await moving.wait_ended()
        assert trio.current_time() == pytest.approx(20, abs=1)
        await world.until_clean(sender, receiver)


@in_virtual_time
async def test_an_idle_request_gives_way_to_those_who_wait(world: World) -> None:
    """Nobody holds room by doing nothing while others wait; an engine that still computes says so."""
    async with (
        world.receiver(slots=6, progress_timeout_s=20, allocation_timeout_s=200) as receiver,
        world.sender() as sender,
        trio.open_nursery() as nursery,
    ):
        with refused(ErrorCode.NO_PROGRESS):
            async with sender.open("idle", receiver=receiver.address, total_chunks=4) as moving:
                await world.until(receiver, lambda: receiver.core.counts.reserved == 4)
                nursery.start_soon(transfer, sender, receiver, Request("waits", 4))
                for _ in range(5):
                    await trio.sleep(15)
                    moving.touch()
                touched_until = trio.current_time()
                await moving.wait_ended()
        assert trio.current_time() - touched_until >= 19


@in_virtual_time
async def test_nobody_claims_it(world: World) -> None:
    """A decode side that has died must not fill the buffer with what it will never read."""
    async with world.receiver(ready_ttl_s=30) as receiver, world.sender() as sender:
        await send(sender, receiver.address, Request("unread", 8))
        assert receiver.core.counts.ready == 8
        await world.until_clean(sender, receiver)
        assert trio.current_time() == pytest.approx(30, abs=1)


@in_virtual_time
async def test_a_sender_that_stood_still_puts_nothing_more_into_its_old_sessions(world: World) -> None:
    """Suspended for longer than the put deadline: the receiver may have given its slots to others meanwhile."""
    suspended_s = 0.0
    request = Request("r", 4)
    async with world.receiver() as receiver, world.sender(now=lambda: trio.current_time() + suspended_s) as sender:
        with refused(LOST, match="stood still"):
            async with (
                sender.open("r", receiver=receiver.address, total_chunks=4) as moving,
                moving.stage([request.key(number) for number in range(4)], last=True) as slots,
            ):
                slot = await anext(aiter(slots))
                assert slot is not None
                slot[:] = b"\xee" * len(slot)
                suspended_s = 1000.0
                await fill(slots, request, first=1)
        assert b"\xee" not in receiver.buffer.memory[:]
        await world.until_clean(sender, receiver)
        await transfer(sender, receiver, Request("next", 10))
        await world.until_clean(sender, receiver)
