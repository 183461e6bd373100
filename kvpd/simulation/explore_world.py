"""A small world: the real cores of its senders and its receiver, their first states, and what holds in every state."""

from __future__ import annotations

from typing import Any, Final

from kvpd.core.messages import HostIdentity
from kvpd.core.pool import SlotState
from kvpd.core.receiver import ReceiverCore, ReceiverSettings
from kvpd.core.sender import SenderCore, SenderSettings
from kvpd.core.sender.events import StagedSlot
from kvpd.core.states import ReceiverState
from kvpd.simulation.explore_cores import (
    Copier,
    Cores,
    ExploredReceiver,
    ExploredSender,
    name_receiver_ids,
    name_sender_ids,
)
from kvpd.simulation.explore_state import (
    CHUNK_BYTES,
    FAULTS,
    PROXY,
    RECEIVER,
    Decode,
    Messages,
    Prefill,
    Request,
    State,
    TransferKey,
    WorldConfig,
    transfer_key,
)

_FREE: Final = (SlotState.FREE, ())


class World:
    """One small world: everything about it but what may happen in it."""

    def __init__(self, config: WorldConfig) -> None:
        self.config = config
        self.messages = Messages()
        # A chunk's checksum is the number of its key.
        self.checksums = {key: at for at, key in enumerate(sorted({k for r in config.requests for k in r.keys}))}
        self.labels = list(dict.fromkeys(request.req_id for request in config.requests))
        # Who may claim: each rank of the decode engine, by label; also how it numbers its claims.
        ranks = range(config.ranks)
        self.claimants = [f"{label}#{rank}" if rank else label for label in self.labels for rank in ranks]
        self.sender_cores: Cores[Any] = Cores(name_sender_ids, _audit_sender)
        self.receiver_cores: Cores[Any] = Cores(name_receiver_ids, self._audit_receiver)
        self.budgeted = [name for name in FAULTS if config.budget.get(name, 0)]

    def initial(self) -> State:
        """Everybody has just started; nobody has spoken."""
        config = self.config
        return State(
            senders=tuple(self._new_sender(number, 1) for number in range(config.senders)),
            receiver=self._new_receiver(1),
            connections=(),
            tasks=(),
            endpoints=(),
            loose=(),
            sessions=(),
            memory=(b"",) * (config.slots * config.ranks),
            prefill=(Prefill(),) * len(config.requests),
            decode=(Decode(),) * len(self.claimants),
            decode_engine=1,
            queue=(),
            opened=(),
            complete=(),
            verifying=(),
            notifications=(),
            budget=tuple(config.budget[name] for name in self.budgeted),
        )

    def _new_sender(self, number: int, incarnation: int) -> int:
        host = HostIdentity("host", "ns", 1, 1) if self.config.same_host else HostIdentity("other", "ns", 1, 1)
        proxy = PROXY if self.config.has_proxy else None
        settings = SenderSettings(
            f"s{number}",
            incarnation,
            self.config.staging_slots,
            CHUNK_BYTES,
            ranks=self.config.ranks,
            host=host,
            proxy_address=proxy,
        )
        return self.sender_cores.add(Copier().copy(ExploredSender(settings)))

    def _new_receiver(self, incarnation: int) -> int:
        host = HostIdentity("host", "ns", 2, 2)
        settings = ReceiverSettings(
            RECEIVER,
            incarnation,
            self.config.slots,
            CHUNK_BYTES,
            ranks=self.config.ranks,
            host=host,
            verify="xxh3" if self.config.verifies else "off",
            share="share" if self.config.in_place else "",
        )
        return self.receiver_cores.add(Copier().copy(ExploredReceiver(settings)))

    def _audit_receiver(self, core: ReceiverCore) -> Any:
        """Invariants 1 to 5 of one state; and, by slot, what it is used for and who may write it."""
        core.audit()
        slots: list[Any] = [_FREE] * self.config.slots
        for index in range(self.config.slots):
            slots[index] = (core._book.pool.slot(index).state, ())
        reserved = core._book.ledger._reserved
        for transfer in core._book.in_state(*ReceiverState):
            if transfer.state is ReceiverState.ADMITTED:
                assert reserved[transfer.id] + len(transfer.slots) == transfer.total_chunks, "admitted, but not whole"
            for index in [*transfer.slots.values(), *transfer.quarantined]:
                state, owners = slots[index]
                if state in (SlotState.WRITING, SlotState.QUARANTINED):
                    slots[index] = (state, (*owners, transfer_key(transfer.id)))
        assert all(len(owners) <= 1 for _, owners in slots), "a slot has two writers"
        return tuple(slots)

    def places(self, entry: StagedSlot, rank: int) -> tuple[int, int]:
        """A rank's slots, here and there, as they are counted through all ranks."""
        return entry.local + rank * self.config.staging_slots, entry.remote + rank * self.config.slots

    def request_of(self, transfer: TransferKey, req_id: str) -> Request:
        """The request of this label that this sender has."""
        return next(r for r in self.config.requests if (r.sender, r.req_id) == (transfer[0], req_id))

    def is_clean(self, state: State) -> bool:
        """Invariant 10, all over: nothing runs, nothing is on its way, everything is free."""
        return (
            not state.tasks
            and not state.loose
            and not state.notifications
            and not state.verifying
            and not any(connection.up or connection.down for connection in state.connections)
            and not any(prefill.holds for prefill in state.prefill)
            and self.receiver_cores.entries[state.receiver].core.is_clean
            and all(self.sender_cores.entries[number].core.is_clean for number in state.senders)
        )

    def leftovers(self, state: State) -> str:
        """What is not as it should be in the end."""
        core = self.receiver_cores.entries[state.receiver].core
        counts = core.counts
        parts = [f"{len(core._book)} transfers at the receiver ({counts.quarantined} slots in quarantine)"]
        for number, sender in enumerate(state.senders):
            sender_core = self.sender_cores.entries[sender].core
            states = ", ".join(f"{t.number} is {t.state.value}" for t in sender_core._transfers.values())
            held = ", ".join(f"{one.total_slots - one.free_count} of {one.total_slots}" for one in sender_core.staging)
            parts.append(f"s{number}: transfers {states or 'none'}; {held} staging slots held")
        return "; ".join(parts)


def _audit_sender(core: SenderCore) -> None:
    """Every staging slot has one holder, and nobody waits for what is free."""
    core.audit()
