"""A state of a small world while it is being changed: its tuples as lists, and what its cores say of themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvpd.simulation.explore_state import State, Task, TransferKey

if TYPE_CHECKING:
    from kvpd.simulation.explore_world import World


def _in_order(items: list[Any]) -> tuple[Any, ...]:
    return tuple(items) if len(items) < 2 else tuple(sorted(items))


class Unfrozen:
    """Everything that a state has."""

    def __init__(self, world: World, state: State) -> None:
        self.world = world
        self.senders = list(state.senders)
        self.receiver = state.receiver
        self.connections = list(state.connections)
        self.tasks = list(state.tasks)
        self.endpoints = list(state.endpoints)
        self.loose = list(state.loose)
        self.sessions = list(state.sessions)
        self.memory = list(state.memory)
        self.prefill = list(state.prefill)
        self.decode = list(state.decode)
        self.decode_engine = state.decode_engine
        self.queue = list(state.queue)
        self.opened = list(state.opened)
        self.complete = list(state.complete)
        self.verifying = list(state.verifying)
        self.notifications = list(state.notifications)
        self.budget = list(state.budget)

    def frozen(self) -> State:
        """The state that has come out, in one order."""
        return State(
            tuple(self.senders),
            self.receiver,
            _in_order([c for c in self.connections if c.is_open or c.up]),
            _in_order(self.tasks),
            _in_order(self.endpoints),
            _in_order(self.loose),
            _in_order(self.sessions),
            tuple(self.memory),
            tuple(self.prefill),
            tuple(self.decode),
            self.decode_engine,
            tuple(self.queue),
            _in_order(self.opened),
            _in_order(self.complete),
            _in_order(self.verifying),
            tuple(self.notifications),
            tuple(self.budget),
        )

    def incarnation(self, sender: int) -> int:
        """Which start of this sender runs."""
        incarnation: int = self.world.sender_cores.entries[self.senders[sender]].core.settings.incarnation
        return incarnation

    @property
    def receiver_incarnation(self) -> int:
        """Which start of the receiver runs."""
        incarnation: int = self.world.receiver_cores.entries[self.receiver].core.settings.incarnation
        return incarnation

    def transfer_of(self, sender: int, number: int) -> int:
        """The number of the transfer that the open of this number belongs to."""
        share = self.world.sender_cores.entries[self.senders[sender]].core._shares.get(number)
        return share.transfer.number if share is not None else number

    def owner(self, task: Task) -> TransferKey:
        """The transfer that a task's puts are for."""
        return self.owner_of(task.sender, task.transfer_no)

    def owner_of(self, sender: int, number: int) -> TransferKey:
        """The transfer that the open of this number belongs to."""
        return sender, self.incarnation(sender), self.transfer_of(sender, number)
