"""How receivers and senders begin and end: whole or not at all, within a deadline, and nothing stays behind."""

from __future__ import annotations

import errno
import os
from typing import Any

import pytest
import trio
import trio.lowlevel

from kvpd.config import ReceiverConfig, SenderConfig
from kvpd.errors import ConfigError, ErrorCode, LocalProtocolError, TransferError
from kvpd.service.host import own_host
from kvpd.service.receiver import Receiver
from kvpd.service.sender import Sender
from kvpd.transports.zmq import open_zmq_control

from .worlds import Announcements, Request, World, in_virtual_time, refused, send, stage, take, transfer


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


# ------------------------------------------------------------------ beginning


@pytest.mark.parametrize(
    ("make", "config"),
    [
        (Receiver, ReceiverConfig(name="r")),
        (Receiver, ReceiverConfig(name="r", buffer_size=10, chunk_bytes=64)),
        (Receiver, ReceiverConfig(name="r", buffer_size=640, chunk_bytes=64, lease_s=4, put_deadline_s=2)),
        (Sender, SenderConfig(name="s")),
        (Sender, SenderConfig(name="s", staging_size=10, chunk_bytes=64)),
    ],
)
def test_what_cannot_work_is_refused_before_anything_begins(make: Any, config: Any) -> None:
    """All problems at once, and no event loop is needed to hear them."""
    with pytest.raises(ConfigError):
        make(config)


@in_virtual_time
async def test_a_receiver_that_nobody_has_spoken_to_shows_its_free_slots(memory_world: World) -> None:
    """No free slot is what an alarm is set to, and a fresh receiver would ring it."""
    async with memory_world.receiver(slots=4) as receiver:
        assert receiver.metrics.snapshot()['kvpd_slots{state="free"}'] == 4


@pytest.mark.parametrize("kind", ["receiver", "sender"])
@in_virtual_time
async def test_more_memory_than_there_is_is_a_plain_error(memory_world: World, kind: str) -> None:
    """Not a group, not a traceback from mmap: a sentence that says what to change; and nothing stays open."""
    world, chunk_bytes = memory_world, 1 << 58
    daemon = (
        world.receiver(slots=4, chunk_bytes=chunk_bytes)
        if kind == "receiver"
        else world.sender(staging=4, chunk_bytes=chunk_bytes)
    )
    before = open_descriptors()
    with pytest.raises(ConfigError, match="smaller size"):
        await daemon.__aenter__()
    assert open_descriptors() == before


@in_virtual_time
async def test_an_address_in_use_is_a_plain_oserror_that_names_it(world: World) -> None:
    """And the receiver that holds it does not notice."""
    address = "127.0.0.1:7300" if world.transport == "memory" else "inproc://decode"
    async with world.receiver(address=address) as receiver, world.sender() as sender:
        with pytest.raises(OSError, match=address) as caught:
            await world.receiver(name="second", address=address).__aenter__()
        assert caught.value.errno == errno.EADDRINUSE
        await transfer(sender, receiver, Request("r", 3))


async def test_an_address_of_another_machine_is_a_plain_oserror() -> None:
    """The commonest mistake in a configuration that was copied from one host to another."""
    with trio.fail_after(10):
        async with World() as world, open_zmq_control() as control:
            world.control = control
            with pytest.raises(OSError, match=r"192\.0\.2\.1"):
                await world.receiver(address="192.0.2.1:7300").__aenter__()


@in_virtual_time
async def test_a_data_plane_that_cannot_be_opened_closes_what_was_open(memory_world: World) -> None:
    """Start-up is all or nothing: the address is free again."""
    world = memory_world
    receiver = world.receiver(address="127.0.0.1:7300")

    def broken(*_: Any) -> Any:
        raise ConfigError(["libucp cannot be loaded"])

    receiver._data_plane = broken
    with pytest.raises(ConfigError, match="libucp"):
        await receiver.__aenter__()
    async with world.receiver(address="127.0.0.1:7300"):
        pass


@in_virtual_time
async def test_memory_that_is_no_whole_number_of_chunks_is_rounded_down(memory_world: World) -> None:
    """The rest could hold nothing."""
    config = ReceiverConfig(name="r", control_address="127.0.0.1:0", buffer_size=64 * 3 + 63, chunk_bytes=64)
    async with Receiver(config, control=memory_world.control, data_plane=memory_world.plane) as receiver:
        assert receiver.core.settings.total_slots == 3
        assert receiver.buffer.length == 192


@in_virtual_time
async def test_nothing_is_open_when_all_is_left(transport: str) -> None:
    """Sockets, memory, pidfds: a program that embeds kvpd may come and go."""
    before = open_descriptors()
    async with World(transport) as world:
        for number in range(3):
            async with world.receiver(name=f"r{number}") as receiver, world.sender(host=own_host()) as sender:
                await transfer(sender, receiver, Request("r", 6, batch=2))
                with pytest.raises(OSError, match="in use"):
                    await world.receiver(address=receiver.address).__aenter__()
                broken = sender.open("broken", receiver=receiver.address, total_chunks=4)
                await stage(await broken.__aenter__(), Request("broken", 4), range(2))
            with refused(ErrorCode.CANCELLED):
                await broken.__aexit__(None, None, None)
    assert open_descriptors() == before


@in_virtual_time
async def test_what_is_not_running_says_so(memory_world: World) -> None:
    """Before it is entered and after it was left there is nobody to wait for."""
    receiver, sender = memory_world.receiver(), memory_world.sender()

    async def try_both() -> None:
        with pytest.raises(LocalProtocolError, match="does not run"):
            await send(sender, "127.0.0.1:1", Request("r", 1))
        with pytest.raises(LocalProtocolError, match="does not run"):
            await take(receiver, Request("r", 1))

    await try_both()
    async with receiver, sender:
        pass
    await try_both()


# ------------------------------------------------------------------ ending


@in_virtual_time
async def test_the_callers_own_exception_comes_out_as_it_is(world: World) -> None:
    """`except` around a receiver or a sender must see what was raised inside, not a group around it."""

    async def fail(kind: str) -> None:
        async with world.receiver(name=kind) if kind == "receiver" else world.sender(name=kind):
            await trio.sleep(1)
            raise ZeroDivisionError

    for kind in ("receiver", "sender"):
        with pytest.raises(ZeroDivisionError):
            await fail(kind)


@in_virtual_time
async def test_a_cancelled_scope_around_both_ends_them(world: World) -> None:
    """Closing by cancellation is as quick and as clean as any other."""
    with trio.move_on_after(1.0) as scope:
        async with world.receiver() as receiver, world.sender() as sender, trio.open_nursery() as nursery:
            nursery.start_soon(send, sender, receiver.address, Request("r", 4))
            nursery.start_soon(take, receiver, Request("never", 4))
            await trio.sleep_forever()
    assert scope.cancelled_caught
    assert trio.current_time() == pytest.approx(1.0)


@pytest.mark.parametrize("stalled", [False, True], ids=["idle", "stalled"])
@in_virtual_time
async def test_leaving_with_requests_in_flight_ends_them_at_once(memory_world: World, stalled: bool) -> None:
    """Fault 22: whoever waits outside is told, whatever it waits for; no put is waited for."""
    world = memory_world
    outcomes: list[ErrorCode] = []

    async def note(operation: Any, *args: Any) -> None:
        try:
            await operation(*args)
        except TransferError as exc:
            outcomes.append(exc.code)

    async with trio.open_nursery() as outside:
        async with world.receiver(slots=8) as receiver:
            async with world.sender(staging=2) as sender:
                if stalled:
                    world.fabric.stall()
                moving = sender.open("open", receiver=receiver.address, total_chunks=2)
                await moving.__aenter__()  # held, so that some wait for admission
                for number in range(5):
                    outside.start_soon(note, send, sender, receiver.address, Request(f"r{number}", 4))
                outside.start_soon(note, take, receiver, Request("never", 4))
                await trio.sleep(1.0)
            assert trio.current_time() == pytest.approx(1.0)
            with refused(ErrorCode.CANCELLED):
                await moving.__aexit__(None, None, None)
            assert len(outcomes) == (5 if stalled else outcomes.count(ErrorCode.CANCELLED))
        world.fabric.resume()
    assert trio.current_time() == pytest.approx(1.0)
    assert set(outcomes) == {ErrorCode.CANCELLED}


@in_virtual_time
async def test_leaving_while_cancelled_puts_drain_waits_for_none_of_them(memory_world: World) -> None:
    """A second signal leaves at once: the wire is cut, whatever is still on it."""
    world = memory_world
    async with world.receiver() as receiver:
        async with world.sender() as sender:
            world.fabric.stall()
            with refused(ErrorCode.CANCELLED):
                async with sender.open("r", receiver=receiver.address, total_chunks=2) as moving:
                    await stage(moving, Request("r", 2), range(2))
                    moving.cancel()
                    await moving.wait_ended()
        assert trio.current_time() < 0.1
        await world.until(receiver, lambda: receiver.core.is_clean)


@in_virtual_time
async def test_two_senders_and_two_receivers_in_one_nursery(world: World) -> None:
    """They share a process and nothing else."""
    async with (
        world.receiver(name="r1") as r1,
        world.receiver(name="r2") as r2,
        world.sender(name="s1") as s1,
        world.sender(name="s2") as s2,
        trio.open_nursery() as nursery,
    ):
        for sender in (s1, s2):
            for receiver in (r1, r2):
                name = f"{sender.config.name}-{receiver.config.name}"
                nursery.start_soon(transfer, sender, receiver, Request(name, 7, batch=3))


# ------------------------------------------------------------------ draining


@pytest.mark.parametrize("kind", ["sender", "receiver"])
@in_virtual_time
async def test_a_drain_lets_what_runs_finish_and_refuses_what_is_new(world: World, kind: str) -> None:
    """SIGTERM costs nobody a request."""
    request = Request("running", 6)
    async with world.receiver() as receiver, world.sender() as sender, trio.open_nursery() as nursery:
        daemon = sender if kind == "sender" else receiver
        results: list[bool] = []

        async def drain() -> None:
            results.append(await daemon.drain(100.0))

        async with sender.open("running", receiver=receiver.address, total_chunks=6) as moving:
            await stage(moving, request, range(3))
            nursery.start_soon(drain)
            await trio.sleep(1.0)
            assert not daemon.health.ready
            with refused(ErrorCode.DRAINING):
                await send(sender, receiver.address, Request("new", 1))
            await stage(moving, request, range(3, 6))
        await take(receiver, request)
    assert results == [True]


@pytest.mark.parametrize("kind", ["sender", "receiver"])
@in_virtual_time
async def test_a_drain_that_times_out_cancels_the_rest(world: World, kind: str) -> None:
    """It is bounded; and the engines are told why their requests ended."""
    async with world.receiver() as receiver, world.sender() as sender, trio.open_nursery() as nursery:
        daemon = sender if kind == "sender" else receiver
        results: list[bool] = []

        async def drain() -> None:
            results.append(await daemon.drain(5.0))
            await daemon.wait_idle()

        with refused(ErrorCode.DRAINING):
            async with sender.open("running", receiver=receiver.address, total_chunks=6) as moving:
                await stage(moving, Request("running", 6), range(3))
                nursery.start_soon(drain)
                await moving.wait_ended()
        assert trio.current_time() == pytest.approx(5.0, abs=0.1)
        await world.until_clean(sender, receiver)
    assert results == [False]


@in_virtual_time
async def test_a_receiver_that_drains_sends_the_queue_away_at_once(world: World) -> None:
    """Whoever waits for room here should ask elsewhere now, and is told when it may come back."""
    async with world.receiver(slots=6) as receiver, world.sender() as sender, trio.open_nursery() as nursery:
        async with sender.open("running", receiver=receiver.address, total_chunks=4) as moving:
            await world.until(receiver, lambda: receiver.core.counts.reserved == 4)

            async def queued() -> None:
                with refused(ErrorCode.DRAINING):
                    await send(sender, receiver.address, Request("queued", 4))

            nursery.start_soon(queued)
            await world.until(receiver, lambda: receiver.core.queue_depth == 1)
            nursery.start_soon(receiver.drain, 100.0)
            await world.until(receiver, lambda: receiver.core.queue_depth == 0)
            await stage(moving, Request("running", 4), range(4))
        await take(receiver, Request("running", 4))


@in_virtual_time
async def test_draining_what_is_idle_is_over_at_once(world: World) -> None:
    """Nobody waits for a daemon that has nothing to do."""
    async with world.receiver() as receiver, world.sender() as sender:
        assert await receiver.drain(100.0)
        assert await sender.drain(100.0)
    assert trio.current_time() == 0.0


@in_virtual_time
async def test_engines_hear_of_every_end(world: World) -> None:
    """Pushed, so that an engine's scheduler never asks."""
    async with world.receiver() as receiver, world.sender() as sender:
        engine = Announcements()
        number = receiver.attach(engine)
        await transfer(sender, receiver, Request("good", 2))
        with refused(ErrorCode.CANCELLED):
            async with sender.open("bad", receiver=receiver.address, total_chunks=2) as moving:
                await world.until(receiver, lambda: receiver.core.counts.reserved == 2)
                moving.cancel()
                await moving.wait_ended()
        await world.until_clean(sender, receiver)
        assert engine.seen == [("good", "ready"), ("good", "released"), ("bad", "failed")]
        receiver.detach(number)
        await transfer(sender, receiver, Request("unheard", 2))
        assert len(engine.seen) == 3
