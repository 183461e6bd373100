"""The world's own books: who wrote what into which slot, who may, and who reads.

They are kept from what the cores say and do, never from what they believe. A chunk's bytes are known by its key and
its length; a slot holds exactly what was last written into it, whoever wrote it and however late.
"""

from __future__ import annotations

import attrs

from kvpd.core.events import TransferId
from kvpd.core.receiver import events as rev
from kvpd.core.sender.events import StagedSlot
from kvpd.simulation.plane import Content, Flight, Memory, content_of
from kvpd.simulation.receiver import SimulatedReceiver
from kvpd.simulation.rules import Rule, Violation
from kvpd.simulation.scenario import Request
from kvpd.simulation.sender import SimulatedSender


@attrs.define(eq=False)
class Use:
    """A staging slot was granted to a piece of a transfer."""

    number: int
    piece: int
    is_filled: bool = False


@attrs.frozen(eq=False)
class Reading:
    """A granted claim whose engine may be reading."""

    grant: rev.GrantClaim
    rank: int
    expected: tuple[Content, ...]


class Truth:
    """What the world knows."""

    def __init__(self) -> None:
        self.requests: dict[TransferId, Request] = {}
        # By buffer and transfer: the slots that it was told to write, each with the pool's record of that use.
        self.told: dict[tuple[Memory, TransferId], dict[int, object]] = {}
        self.completed: set[TransferId] = set()
        self.staged: dict[tuple[SimulatedSender, int], Use] = {}
        self.receivers: dict[Memory, SimulatedReceiver] = {}
        self.bytes_verified = 0
        self._readings: dict[tuple[SimulatedReceiver, int, int], Reading] = {}
        self._readers: dict[tuple[SimulatedReceiver, int], int] = {}  # of a slot, how many

    def expected(self, transfer: TransferId, chunk_bytes: int, rank: int) -> tuple[Content, ...] | None:
        """What a rank has of a transfer's chunks, in order; None for one that no engine of ours has opened."""
        plan = self.requests.get(transfer)
        if plan is None:
            return None
        lengths = [chunk_bytes] * (len(plan.keys) - 1) + [plan.last_chunk_bytes]
        return tuple(content_of(key, length, rank) for key, length in zip(plan.keys, lengths, strict=True))

    # -------------------------------------------------------------- prefill engines

    def opened(self, sender: SimulatedSender, number: int, plan: Request) -> None:
        """An engine opens a transfer."""
        self.requests[sender.identity(number)] = plan

    def filled(self, sender: SimulatedSender, number: int, piece: int, rank: int, local: int, content: Content) -> None:
        """An engine of this rank writes a chunk into a staging slot that it was granted."""
        local += rank * sender.settings.staging_slots
        use = self.staged.get((sender, local))
        if sender.process.is_alive and (use is None or (use.number, use.piece) != (number, piece)):
            detail = f"piece {piece} of transfer {number} fills staging slot {local}, which belongs to {use}"
            raise Violation(Rule.ONE_WRITER, f"{sender.process.name}: {detail}")
        sender.staging[local] = content

    # -------------------------------------------------------------- writes

    def may_put(self, memory: Memory, transfer: TransferId, put: StagedSlot) -> None:
        """A put begins: this very start of the receiver must have told this transfer so."""
        if put.remote not in self.told.get((memory, transfer), ()):
            detail = f"{transfer} puts into slot {put.remote} of {memory.process.name}, which never allocated it"
            raise Violation(Rule.FENCE, detail)

    def allocated(self, receiver: SimulatedReceiver, transfer: TransferId, index: int) -> None:
        """A slot is handed out: nobody may still write it, and nobody read it."""
        memory = receiver.memory
        for flight in memory.in_flight(index):
            detail = (
                f"slot {index} of {memory.process.name} goes to {transfer} while {flight.batch.transfer} may write it"
            )
            raise Violation(Rule.FENCE, detail)
        for filling in memory.being_filled(index):
            detail = (
                f"slot {index} of {memory.process.name} goes to {transfer} while {filling.transfer} is filled there"
            )
            raise Violation(Rule.FENCE, detail)
        if self._readers.get((receiver, index), 0):
            detail = f"slot {index} of {memory.process.name} goes to {transfer} while an engine reads it"
            raise Violation(Rule.CHARGED, detail)
        self.told.setdefault((memory, transfer), {})[index] = receiver.core._book.pool.slot(index)

    def landed(self, flight: Flight) -> None:
        """Bytes have arrived in a slot."""
        self._check_landing(flight.target.memory, flight.batch.transfer, flight.put.remote)

    def filled_in_place(self, memory: Memory, transfer: TransferId, place: int, content: Content) -> bool:
        """An engine has written a chunk into a receiver's slot: whether that was in quarantine.

        What a receiver leaves behind that is dead is nobody's any more.
        """
        memory.slots[place] = content
        return memory.process.is_alive and self._check_landing(memory, transfer, place) == "quarantined"

    def _check_landing(self, memory: Memory, transfer: TransferId, place: int) -> str:
        """It must still be this transfer's slot to write. Its state."""
        rank, index = divmod(place, memory.slots_per_rank)
        slot = self.receivers[memory].core._book.pool.slot(index)
        told = self.told.get((memory, transfer), {})
        if told.get(index) is not slot:
            detail = f"{transfer} wrote slot {index} of {memory.process.name} after it was freed; it is {slot} now"
            raise Violation(Rule.FENCE, detail)
        is_written = slot.state.value == "writing" and rank not in slot.ranks_missing
        if is_written or slot.state.value not in ("writing", "quarantined"):
            detail = f"{transfer} wrote slot {index} of {memory.process.name}, rank {rank}, which is {slot}"
            raise Violation(Rule.NOTIFY_AFTER_LANDING, detail)
        return str(slot.state.value)

    # -------------------------------------------------------------- reads

    def verify(
        self, receiver: SimulatedReceiver, who: str, slots: tuple[int, ...], rank: int, expected: tuple[Content, ...]
    ) -> None:
        """These slots of a rank hold exactly these chunks."""
        memory = receiver.memory.slots
        first = rank * receiver.memory.slots_per_rank
        for index, content in zip((first + slot for slot in slots), expected, strict=True):
            if memory[index] != content:
                detail = f"{who}: slot {index} of {receiver.process.name} holds {memory[index]}, not {content}"
                raise Violation(Rule.TRUTH, detail)
            self.bytes_verified += content[1]

    def granted(self, receiver: SimulatedReceiver, grant: rev.GrantClaim, rank: int) -> None:
        """An engine may read from now on: its own chunks, in order, each with its own bytes."""
        expected = self.expected(grant.transfer, receiver.settings.chunk_bytes, rank)
        promised = tuple(content_of(chunk.key, chunk.length, rank) for chunk in grant.chunks)
        if expected is None or promised != expected:
            raise Violation(Rule.TRUTH, f"{grant.transfer} was granted as {promised}, not {expected}")
        reading = self._readings[receiver, grant.engine, grant.claim] = Reading(grant, rank, expected)
        for chunk in grant.chunks:
            self._readers[receiver, chunk.index] = self._readers.get((receiver, chunk.index), 0) + 1
        self._verify_reading(receiver, reading)

    def _verify_reading(self, receiver: SimulatedReceiver, reading: Reading) -> None:
        grant = reading.grant
        slots = tuple(chunk.index for chunk in grant.chunks)
        self.verify(receiver, f"the claim of {grant.transfer}", slots, reading.rank, reading.expected)

    def read(self, receiver: SimulatedReceiver, engine: int, claim: int) -> None:
        """An engine has read what it claimed until now, and reads it no more."""
        reading = self._readings.get((receiver, engine, claim))
        if reading is not None:
            self._verify_reading(receiver, reading)
            self._stop_reading(receiver, engine, claim)

    def reader_died(self, receiver: SimulatedReceiver, engine: int) -> None:
        """A dead engine reads nothing."""
        for _, _, claim in [key for key in self._readings if key[0] is receiver and key[1] == engine]:
            self._stop_reading(receiver, engine, claim)

    def _stop_reading(self, receiver: SimulatedReceiver, engine: int, claim: int) -> None:
        for chunk in self._readings.pop((receiver, engine, claim)).grant.chunks:
            self._readers[receiver, chunk.index] -= 1
