"""Whatever happens in whatever order: nobody is stuck, every byte is right, and in the end nothing is left."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import attrs
import trio
from hypothesis import example, given
from hypothesis import strategies as st

from kvpd.errors import TransferError
from kvpd.service.receiver import Receiver
from kvpd.service.sender import Sender

from .worlds import LIMIT_S, Request, World, run_in_virtual_time, send, take, transfer

SLOTS = 8
SENDERS = 2


@attrs.frozen
class Ask:
    """A request begins: sent by one sender, and claimed; its engine may stop half-way or take its time."""

    sender: int
    chunks: int
    batch: int
    last_bytes: int
    shared: bool
    give_up_s: float | None
    read_s: float


@attrs.frozen
class Fault:
    """Something happens to everybody."""

    kind: str


@attrs.frozen
class Wait:
    """Time passes."""

    seconds: float


SECONDS = st.sampled_from([0.0, 0.01, 0.1, 0.5, 1.0, 3.0, 7.0])
ASKS = st.builds(
    Ask,
    sender=st.integers(0, SENDERS - 1),
    chunks=st.integers(1, SLOTS),
    batch=st.integers(1, SLOTS),
    last_bytes=st.integers(1, 64),
    shared=st.booleans(),
    give_up_s=st.none() | SECONDS,
    read_s=SECONDS,
)
FAULTS = st.builds(
    Fault,
    st.sampled_from(
        [
            "disconnect",
            "partition",
            "heal",
            "stall",
            "resume",
            "fail a put",
            "break the targets",
            "cancel at the senders",
            "cancel at the receiver",
        ]
    ),
)
OPERATIONS = st.lists(st.one_of(ASKS, ASKS, FAULTS, st.builds(Wait, SECONDS)), min_size=1, max_size=25)


@attrs.define
class Run:
    """One world and what happens in it."""

    world: World
    receiver: Receiver
    senders: list[Sender]
    nursery: trio.Nursery
    asked: int = 0
    names: list[str] = attrs.field(factory=list)

    async def perform(self, operation: Ask | Fault | Wait) -> None:
        match operation:
            case Ask():
                self._ask(operation)
            case Fault(kind):
                self._fault(kind)
            case Wait(seconds):
                await trio.sleep(seconds)

    def _ask(self, ask: Ask) -> None:
        self.asked += 1
        request = Request(
            f"r{self.asked}", ask.chunks, ask.last_bytes, ask.batch, shared_keys="prompt" if ask.shared else ""
        )
        self.names.append(request.req_id)
        sender = self.senders[ask.sender]

        async def sending() -> None:
            with trio.move_on_after(float("inf") if ask.give_up_s is None else ask.give_up_s):
                await send(sender, self.receiver.address, request)

        async def taking() -> None:
            await take(self.receiver, request, timeout_s=100)

        self.nursery.start_soon(_survive, sending)
        self.nursery.start_soon(_survive, taking)

    def _fault(self, kind: str) -> None:
        network, fabric = self.world.network, self.world.fabric
        match kind:
            case "disconnect":
                for client in list(network._clients):
                    network.disconnect(client.identity)
            case "partition":
                network.partition()
            case "heal":
                network.heal()
            case "stall":
                fabric.stall()
            case "resume":
                fabric.resume()
            case "fail a put":
                fabric.fail_next_puts(1)
            case "break the targets":
                for target in list(fabric._targets):
                    fabric.break_target(target)
            case "cancel at the senders":
                for sender in self.senders:
                    for name in self.names[-2:]:
                        sender.cancel(name)
            case "cancel at the receiver":
                for name in self.names[-2:]:
                    self.receiver.cancel(name)


async def _survive(operation: Callable[[], Awaitable[None]]) -> None:
    try:
        await operation()
    except TransferError:
        return  # it may fail; what it must not do is get stuck, or deliver wrong bytes


@example([Fault("stall"), Ask(0, 8, 3, 64, False, 0.5, 0.0), Wait(0.1), Fault("partition"), Wait(7.0), Fault("heal")])
@example([Ask(0, 6, 2, 64, True, None, 3.0), Ask(1, 6, 2, 64, True, None, 0.0), Wait(0.5), Fault("break the targets")])
@given(OPERATIONS)
def test_whatever_happens_nothing_is_stuck_wrong_or_left(operations: list[Ask | Fault | Wait]) -> None:
    """Two senders and one receiver, with every fault that a network and impatient engines can make."""

    async def main() -> None:
        with trio.fail_after(LIMIT_S):
            async with (
                World(delay_s=0.01) as world,
                world.receiver(slots=SLOTS, ready_ttl_s=20) as receiver,
                world.sender(name="a", staging=3) as a,
                world.sender(name="b", staging=3) as b,
            ):
                world.fabric.put_s = lambda length: length / 640
                async with trio.open_nursery() as nursery:
                    run = Run(world, receiver, [a, b], nursery)
                    for operation in operations:
                        await run.perform(operation)
                    world.network.heal()
                    world.fabric.resume()
                    world.fabric._failures.clear()
                await world.until_clean(a, b, receiver)
                for sender in (a, b):
                    await transfer(sender, receiver, Request(f"last of {sender.config.name}", SLOTS))
                await world.until_clean(a, b, receiver)

    run_in_virtual_time(main)
