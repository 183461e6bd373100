"""A request that is cancelled at every step of its life, one step after the other, and what is left of it: nothing.

A step is one turn of any task: the request's own, the daemons', the wire's. The first run cancels before step one, the
next before step two, and so on, until a run gets through: no state, no await and no moment in between is left out.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
import trio

from kvpd.errors import ErrorCode, LocalProtocolError, TransferError
from kvpd.service.receiver import Receiver
from kvpd.service.sender import Sender

from .worlds import LIMIT_S, Request, World, run_in_virtual_time, send, take, transfer

REQUEST = Request("victim", 5, last_bytes=7, batch=3)
RIVAL = Request("rival", 4, batch=2)


class CancelAtStep(trio.abc.Instrument):
    """Calls `cancel` before the n-th step from now on."""

    def __init__(self, step: int, cancel: Callable[[], None]) -> None:
        self.error: BaseException | None = None
        self._steps_left = step
        self._cancel = cancel

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self._steps_left -= 1
        if self._steps_left == 0:
            try:
                self._cancel()
            except BaseException as exc:  # noqa: BLE001  trio would only log it: raised again by the test
                self.error = exc


class Victim:
    """One request, both sides of it, and the many ways to end it."""

    def __init__(self, world: World) -> None:
        self.receiver = world.receiver(slots=6, ready_ttl_s=10)
        self.sender = world.sender(staging=2)
        self.sending = trio.CancelScope()
        self.taking = trio.CancelScope()
        self.over = 0
        self.was_cancelled = False

    def cancel(self, how: str) -> None:
        self.was_cancelled = self.over < 2
        if not self.was_cancelled:
            return
        match how:
            case "send":
                self.sending.cancel()
            case "claim":
                self.taking.cancel()
            case "sender":
                self.sender.cancel(REQUEST.req_id)
            case "receiver":
                self.receiver.cancel(REQUEST.req_id)

    async def _survive(self, scope: trio.CancelScope, operation: Callable[[], Awaitable[object]]) -> None:
        with scope:
            try:
                await operation()
            except TransferError:
                assert self.was_cancelled, "it failed, and nobody had cancelled it"
        self.over += 1

    async def run(self, step: int, how: str, *, rival: bool) -> bool:
        """Both sides at once, cancelled before a step; whether they had not ended by then."""
        instrument = CancelAtStep(step, lambda: self.cancel(how))
        async with trio.open_nursery() as nursery:
            if rival:  # the one waits for the other's room
                nursery.start_soon(transfer, self.sender, self.receiver, RIVAL)
            trio.lowlevel.add_instrument(instrument)
            async with trio.open_nursery() as both:
                both.start_soon(self._survive, self.sending, lambda: send(self.sender, self.receiver.address, REQUEST))
                both.start_soon(self._survive, self.taking, lambda: take(self.receiver, REQUEST, timeout_s=20))
            trio.lowlevel.remove_instrument(instrument)
        if instrument.error is not None:
            raise instrument.error
        return self.was_cancelled


@pytest.mark.parametrize("how", ["send", "claim", "sender", "receiver"])
@pytest.mark.parametrize(
    ("transport", "rival", "stride"),
    [("memory", False, 1), ("memory", True, 2), ("zmq", True, 4)],
    ids=["alone", "queued", "zmq"],
)
def test_a_request_cancelled_at_any_step_leaves_nothing(transport: str, rival: bool, stride: int, how: str) -> None:
    """Faults 3, 8, 10, 14: wherever it stands, everything it held is free and the next request works."""

    async def main(step: int) -> bool:
        async with World(transport, delay_s=0.01) as world:
            world.fabric.put_s = lambda _: 0.02 if transport == "memory" else 0.0
            with trio.fail_after(LIMIT_S):
                victim = Victim(world)
                async with victim.receiver as receiver, victim.sender as sender:
                    reached = await victim.run(step, how, rival=rival)
                    await world.until_clean(sender, receiver)
                    await transfer(sender, receiver, Request("next", 6))
                    await world.until_clean(sender, receiver)
        return reached

    step = 1
    while run_in_virtual_time(main, step):
        step += stride
    assert step > 50, "a request takes more steps than that"


async def live(
    daemon: Receiver | Sender, scope: trio.CancelScope, ended: trio.Event, *, task_status: trio.TaskStatus[None]
) -> None:
    """A daemon's life, until its scope is cancelled."""
    with scope:
        async with daemon:
            task_status.started()
            await trio.sleep_forever()
    ended.set()


async def vanish(world: World, step: int, who: str) -> bool:
    """Both daemons live, one of them goes before a step; whether the request had not ended by then."""
    address = "127.0.0.1:7300"
    receiver, sender = world.receiver(slots=6, address=address, ready_ttl_s=10), world.sender(staging=2)
    scopes = {"receiver": trio.CancelScope(), "sender": trio.CancelScope()}
    over = 0
    vanished = False

    def go() -> None:
        nonlocal vanished
        vanished = over < 2
        scopes[who].cancel()

    async def survive(operation: Callable[[], Awaitable[object]]) -> None:
        nonlocal over
        try:
            await operation()
        except (TransferError, LocalProtocolError):
            assert vanished
        over += 1

    async with trio.open_nursery() as nursery:
        lives = {"receiver": trio.Event(), "sender": trio.Event()}
        await nursery.start(live, receiver, scopes["receiver"], lives["receiver"])
        await nursery.start(live, sender, scopes["sender"], lives["sender"])
        instrument = CancelAtStep(step, go)
        trio.lowlevel.add_instrument(instrument)
        async with trio.open_nursery() as both:
            both.start_soon(survive, lambda: send(sender, address, REQUEST))
            both.start_soon(survive, lambda: take(receiver, REQUEST, timeout_s=20))
        trio.lowlevel.remove_instrument(instrument)
        scopes[who].cancel()
        await lives[who].wait()
        if who == "sender":
            await world.until_clean(receiver)
            async with world.sender() as successor:
                await transfer(successor, receiver, Request("next", 6))
        else:
            await world.until_clean(sender)
            async with world.receiver(slots=6, address=address) as heir:
                await send_when_noticed(sender, heir)
                await world.until_clean(sender, heir)
        nursery.cancel_scope.cancel()
    return vanished


async def send_when_noticed(sender: Sender, heir: Receiver) -> None:
    """A sender that had no transfer with the receiver that has gone learns of it by its next one, which may fail."""
    try:
        await send(sender, heir.address, Request("first", 2))
    except TransferError as exc:
        assert exc.code in (ErrorCode.PEER_LOST, ErrorCode.TRANSPORT_FAILED)  # noqa: PT017
    else:
        await take(heir, Request("first", 2))
    await transfer(sender, heir, Request("next", 6))


@pytest.mark.parametrize("who", ["sender", "receiver"])
def test_a_daemon_that_vanishes_at_any_step_leaves_nothing_at_the_other(who: str) -> None:
    """Faults 6, 15, 18: the other side's slots come back, and a successor under the same name works."""

    async def main(step: int) -> bool:
        async with World(delay_s=0.01) as world:
            world.fabric.put_s = lambda _: 0.02
            with trio.fail_after(LIMIT_S):
                return await vanish(world, step, who)

    step = 1
    while run_in_virtual_time(main, step):
        step += 1
    assert step > 50, "a request takes more steps than that"


def test_a_program_that_is_cancelled_at_any_step_ends_cleanly() -> None:
    """Ctrl-C around both daemons and their requests: whichever task is cancelled first, none falls over another."""

    async def main(step: int) -> bool:
        scope = trio.CancelScope()
        instrument = CancelAtStep(step, scope.cancel)
        with trio.fail_after(LIMIT_S):
            async with World(delay_s=0.01) as world:
                world.fabric.put_s = lambda _: 0.02
                with scope:
                    trio.lowlevel.add_instrument(instrument)
                    async with world.receiver() as receiver, world.sender() as sender:
                        await transfer(sender, receiver, REQUEST, RIVAL)
                trio.lowlevel.remove_instrument(instrument)
        return scope.cancelled_caught

    step = 1
    while run_in_virtual_time(main, step):
        step += 1
    assert step > 50, "they take more steps than that"
