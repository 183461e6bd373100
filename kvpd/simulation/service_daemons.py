"""The daemons of a simulated service: real senders and receivers, kept running whatever ends them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, Final

import attrs
import trio

from kvpd.config import ReceiverConfig, SenderConfig
from kvpd.core.messages import HostIdentity
from kvpd.service.receiver import Receiver
from kvpd.service.sender import Sender
from kvpd.simulation.scenario import Scenario
from kvpd.transports.base import DataPlane
from kvpd.transports.memory_control import MemoryNetwork
from kvpd.transports.memory_data import MemoryFabric, open_memory_data_plane

PROXY_ADDRESS: Final = "127.0.0.1:7400"
_UNWINDING_S: Final = 1e-3
_ELSEWHERE: Final = HostIdentity("another machine", "its own", 1, 1)


@attrs.define(eq=False)
class Daemon:
    """A party that is started again whenever it ends."""

    name: str
    run: Callable[[Daemon], Awaitable[None]]
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    users: dict[trio.CancelScope, None] = attrs.field(factory=dict)  # tasks that work through it
    down_s: float = 0.0
    up: trio.Event = attrs.field(factory=trio.Event)


def receiver_address(number: int) -> str:
    """Where a receiver binds."""
    return f"127.0.0.1:{7300 + number}"


class Daemons:
    """All senders and receivers. `on_step` is called after every step of any of them, which has been audited."""

    def __init__(
        self, scenario: Scenario, network: MemoryNetwork, fabric: MemoryFabric, on_step: Callable[[], None]
    ) -> None:
        self.scenario = scenario
        self.senders: dict[int, Sender] = {}
        self.receivers: dict[int, Receiver] = {}
        self._all: dict[str, Daemon] = {}
        self._network = network
        self._fabric = fabric
        self._on_step = on_step

    def named(self, name: str) -> Daemon:
        """The daemon of this name."""
        return self._all[name]

    def of(self, side: str) -> list[Daemon]:
        """All senders, or all receivers; for any other word, everybody."""
        daemons = list(self._all.values())
        return [daemon for daemon in daemons if daemon.name.startswith(side)] or daemons

    @property
    def are_clean(self) -> bool:
        """Nothing is on its way, every slot is free."""
        senders = all(sender.core.is_clean for sender in self.senders.values())
        return senders and all(receiver.core.is_clean for receiver in self.receivers.values())

    async def start(self, nursery: trio.Nursery) -> None:
        """Start everybody, and keep them running."""
        for number in range(len(self.scenario.receiver_hosts)):
            self._add(nursery, f"receiver-{number}", partial(self._run_receiver, number))
        for number in range(len(self.scenario.sender_hosts)):
            self._add(nursery, f"sender-{number}", partial(self._run_sender, number))
        for daemon in self._all.values():
            await daemon.up.wait()

    def _add(self, nursery: trio.Nursery, name: str, run: Callable[[Daemon], Awaitable[None]]) -> None:
        daemon = self._all[name] = Daemon(name, run)
        nursery.start_soon(self._keep_running, daemon)

    async def _keep_running(self, daemon: Daemon) -> None:
        while True:
            with trio.CancelScope() as daemon.scope:
                await daemon.run(daemon)
            await trio.sleep(daemon.down_s)

    async def _run_receiver(self, number: int, daemon: Daemon) -> None:
        scenario, limits = self.scenario, self.scenario.limits
        config = ReceiverConfig(
            name=daemon.name,
            control_address=receiver_address(number),
            buffer_size=scenario.slots[number] * scenario.chunk_bytes,
            chunk_bytes=scenario.chunk_bytes,
            ranks=scenario.ranks,
            allocation_timeout_s=limits.allocation_timeout_s,
            queue_depth_max=limits.queue_depth_max,
            progress_timeout_s=limits.progress_timeout_s,
            ready_ttl_s=limits.ready_ttl_s,
            claim_grace_s=limits.claim_grace_s,
            bypass_max=limits.bypass_max,
            verify=limits.verify,
            lease_s=limits.lease_s,
            put_deadline_s=limits.put_deadline_s,
        )
        async with Receiver(config, control=self._network, data_plane=self._plane) as receiver:
            self.receivers[number] = receiver
            self._watch(receiver)
            daemon.up.set()
            await trio.sleep_forever()

    async def _run_sender(self, number: int, daemon: Daemon) -> None:
        scenario, limits = self.scenario, self.scenario.limits
        config = SenderConfig(
            name=daemon.name,
            staging_size=scenario.staging_slots[number] * scenario.chunk_bytes,
            chunk_bytes=scenario.chunk_bytes,
            ranks=scenario.ranks,
            proxy_address=PROXY_ADDRESS,
            request_timeout_s=limits.request_timeout_s,
        )
        async with Sender(config, control=self._network, data_plane=self._plane, host=_ELSEWHERE) as sender:
            self.senders[number] = sender
            self._watch(sender)
            daemon.up.set()
            await trio.sleep_forever()

    def _plane(self, memory: Any, window: int | None) -> AbstractAsyncContextManager[DataPlane]:
        if window is None:
            return open_memory_data_plane(memory, fabric=self._fabric)
        return open_memory_data_plane(memory, fabric=self._fabric, put_window_bytes=window)

    def _watch(self, daemon: Sender | Receiver) -> None:
        def step() -> None:
            daemon._after_step()
            daemon.core.audit()
            self._on_step()

        daemon._driver.on_step(step)

    async def end(self, daemon: Daemon, *, down_s: float) -> None:
        """A daemon ends, and whoever works through it first: nobody holds a view of its memory then."""
        daemon.up = trio.Event()
        daemon.down_s = down_s
        for task in list(daemon.users):
            task.cancel()
        await trio.sleep(_UNWINDING_S)
        daemon.scope.cancel()
