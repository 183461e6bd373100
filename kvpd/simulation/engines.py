"""Simulated engines: they open, stage, fill and claim, and misbehave, stop and die like anybody else.

An engine writes into the slots that it was granted and reads those that it has claimed for as long as its process
lives, whatever has become of its connection: that is what the cores must reckon with.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from random import Random

from kvpd.core.events import RequestCancelled
from kvpd.core.receiver import events as rev
from kvpd.core.sender import events as sev
from kvpd.errors import ErrorCode, TransferError
from kvpd.simulation.in_place import Filling
from kvpd.simulation.places import Places
from kvpd.simulation.plane import Memory, content_of
from kvpd.simulation.receiver import SimulatedReceiver
from kvpd.simulation.scenario import CancelBy, Claim, Misuse, Request, Style
from kvpd.simulation.schedule import Call, Process
from kvpd.simulation.sender import SimulatedSender
from kvpd.simulation.truth import Truth

_LINK_S = 0.0005


class Pipe:
    """One way of an engine's socket: in order."""

    def __init__(self, reader: Process, random: Random) -> None:
        self._reader = reader
        self._random = random
        self._arrival = 0.0
        self.is_closed = False

    def send(self, call: Call) -> None:
        """Have the reader make a call, in its turn."""
        if self.is_closed:
            return
        schedule = self._reader.schedule
        self._arrival = max(self._arrival, schedule.now + self._random.random() * _LINK_S)
        schedule.at(self._arrival, lambda: self._reader.run(call))


class PrefillTransfer:
    """One transfer, as its engine sees it."""

    def __init__(self, engine: PrefillEngine, plan: Request) -> None:
        self.engine = engine
        self.plan = plan
        self.number = -1
        self.is_over = False
        self.has_left = False
        self._next_batch = 0
        self._firsts: dict[int, int] = {}  # stage → position of its first chunk
        self._staged = 0  # chunks
        self._pieces_open = 0
        self._fillings: dict[int, tuple[Memory, Filling]] = {}  # by piece

    # -------------------------------------------------------------- called in the sender's process

    def granted(self, grant: sev.GrantPiece) -> None:
        memory = self.engine.sender.memory_at(grant.place) if grant.place else None
        self.engine.hear(lambda: self._fill_later(grant, memory))

    def deferred(self, deferral: sev.DeferStage) -> None:
        pass

    def ended(self, error: TransferError | None) -> None:
        self.engine.hear(lambda: self._ended())

    # -------------------------------------------------------------- in the engine's

    def begin(self) -> None:
        """Opened: stage."""
        plan, engine = self.plan, self.engine
        if plan.cancel_by is not CancelBy.NOBODY:
            engine.process.soon(plan.cancel_after_s, self._cancel)
        if plan.touch_s is not None:
            engine.process.soon(plan.touch_s, self._touch)
        if plan.style is Style.EAGER:
            for _ in plan.batches[self._next_batch :]:
                self._stage_next()
        elif plan.style is not Style.NEVER:
            engine.process.soon(plan.compute_s, self._stage_next)

    def _stage_next(self) -> None:
        if not self.is_over and self._next_batch < len(self.plan.batches):
            event = self.next_stage()
            self.engine.say(lambda sender: sender.feed(event))

    def next_stage(self) -> sev.StageRequested:
        """It has the keys of one more batch."""
        plan = self.plan
        stage, self._next_batch = self._next_batch, self._next_batch + 1
        first, count = self._staged, plan.batches[stage]
        keys = plan.keys[first : first + count]
        is_last = stage == len(plan.batches) - 1
        length = plan.last_chunk_bytes if is_last else self.engine.chunk_bytes
        match plan.misuse if is_last else Misuse.NONE:
            case Misuse.OVERFLOW:
                keys += (b"one too many",)
            case Misuse.UNDERFLOW:
                keys = keys[:-1]
            case Misuse.BAD_LENGTH:
                length = self.engine.chunk_bytes + 1
            case _:
                pass
        self._firsts[stage] = first
        self._staged += count
        return sev.StageRequested(self.number, stage, keys, is_last, length)

    def _fill_later(self, grant: sev.GrantPiece, memory: Memory | None) -> None:
        if memory is not None and not self.has_left:
            if not self.engine.places.use(grant.place, memory, self.number):
                self.engine.exercised("writer_refused")
                self._leave()
                return
            first = self.engine.rank * memory.slots_per_rank
            places = tuple(first + entry.remote for entry in grant.entries if entry is not None)
            filling = Filling(self.engine.sender.identity(self.number), places)
            self._fillings[grant.piece] = memory, filling
            memory.fillings[filling] = None
        self._pieces_open += 1
        if self.plan.style is Style.EARLY:
            self.engine.process.soon(self.plan.fill_s * 0.5, self._stage_next)
        self.engine.process.soon(self.plan.fill_s, lambda: self._fill(grant))

    def _fill(self, grant: sev.GrantPiece) -> None:
        if self.has_left:
            return
        plan = self.plan
        self._write(grant)
        self._pieces_open -= 1
        piece = grant.piece + 100 if plan.misuse is Misuse.BAD_PIECE else grant.piece
        self.engine.say(lambda sender: sender.feed(sev.PieceFilled(self.number, piece)))
        if plan.style is Style.STEADY and grant.is_last_piece:
            self.engine.process.soon(plan.compute_s, self._stage_next)

    def _write(self, grant: sev.GrantPiece) -> None:
        truth, rank, number = self.engine.truth, self.engine.rank, self.number
        keys = self.plan.keys[self._firsts[grant.stage] + grant.first :]
        entries = [(entry, key) for entry, key in zip(grant.entries, keys, strict=False) if entry is not None]
        if not grant.place:
            for entry, key in entries:
                content = content_of(key, entry.length, rank)
                truth.filled(self.engine.sender, number, grant.piece, rank, entry.local, content)
            return
        memory, filling = self._fillings.pop(grant.piece)
        for (entry, key), place in zip(entries, filling.places, strict=True):
            if truth.filled_in_place(memory, filling.transfer, place, content_of(key, entry.length, rank)):
                self.engine.exercised("late_filling")
        del memory.fillings[filling]

    def write_no_more(self) -> None:
        """It has left, or its process is dead."""
        for memory, filling in self._fillings.values():
            del memory.fillings[filling]
        self._fillings.clear()

    def _touch(self) -> None:
        if not self.is_over and self.plan.touch_s is not None:
            self.engine.say(lambda sender: sender.feed(sev.TransferTouched(self.number)))
            self.engine.process.soon(self.plan.touch_s, self._touch)

    def _cancel(self) -> None:
        plan, engine = self.plan, self.engine
        if self.is_over:
            return
        match plan.cancel_by:
            case CancelBy.TRANSFER:
                engine.exercised("prefill_cancel")
                engine.say(lambda sender: sender.feed(sev.CancelRequested(self.number)))
            case CancelBy.LABEL:
                engine.exercised("prefill_cancel")
                engine.say(lambda sender: sender.feed(RequestCancelled(plan.req_id)))
            case CancelBy.LEAVING:
                engine.exercised("prefill_cancel")
                self._leave()
            case _:
                pass

    def link_lost(self) -> None:
        """Its sender is dead: the engine sees that, and leaves."""
        self._ended()

    def _ended(self) -> None:
        self.is_over = True
        self.engine.process.soon(self.plan.leave_s, self._leave)

    def _leave(self) -> None:
        if self.has_left:
            return
        self.is_over = self.has_left = True
        self.engine.transfers.pop(self.number, None)
        self.write_no_more()
        self.engine.places.left(self.number)
        self.engine.say(lambda sender: sender.feed(sev.EngineLetGo(self.number)))


class PrefillEngine:
    """One connection of a prefill engine's rank to one start of a sender; see kvpd.service.engines.PrefillEngine."""

    def __init__(
        self,
        process: Process,
        sender: SimulatedSender,
        truth: Truth,
        random: Random,
        exercised: Callable[[str], None],
        number: int,
    ) -> None:
        # The ranks of one engine have numbers in a row.
        self._group, self.rank = divmod(number, sender.settings.ranks)
        self.process = process
        self.sender = sender
        self.truth = truth
        self.exercised = exercised
        self.chunk_bytes = sender.settings.chunk_bytes
        self.transfers: dict[int, PrefillTransfer] = {}  # that it has not left
        self._opened: list[PrefillTransfer] = []  # as the sender knows it
        self._to_sender = Pipe(sender.process, random)
        self._to_engine = Pipe(process, random)
        self._random = random
        self.places = Places(sender, truth)
        self._watch = process.watch(self._died)
        sender.on_place_gone.append(lambda place: self.hear(lambda: self.places.gone(place)))
        if sender.process.is_alive:
            sender.process.watch(lambda: process.soon(random.uniform(0.0, 0.02), self._link_lost))

    @property
    def is_connected(self) -> bool:
        """Whether both ends live and speak."""
        return self.process.is_alive and self.sender.process.is_alive and not self._to_sender.is_closed

    def say(self, tell: Callable[[SimulatedSender], None]) -> None:
        """Have the sender do something."""
        self._to_sender.send(lambda: tell(self.sender))

    def hear(self, call: Call) -> None:
        """The sender has the engine do something."""
        self._to_engine.send(call)

    def open(self, plan: Request, receiver: str, notify: str | None) -> None:
        """Begin a request."""
        self._to_sender.send(lambda: self._open(plan, receiver, notify))

    def _open(self, plan: Request, receiver: str, notify: str | None) -> None:
        transfer = PrefillTransfer(self, plan)
        total = 0 if plan.misuse is Misuse.NO_TOTAL else len(plan.keys)
        self._opened.append(transfer)
        number = transfer.number = self.sender.new_number()
        self.transfers[number] = transfer
        self.truth.opened(self.sender, number, plan)
        event = sev.OpenRequested(
            *(number, 1, plan.req_id, receiver, total, notify),
            rank=self.rank,
            group=f"engine-{self._group}",
            in_place=True,
            first=transfer.next_stage() if plan.style is Style.EAGER and number % 2 else None,
        )
        self.sender.open(event, transfer)
        self.hear(transfer.begin)

    def hang_up(self) -> None:
        """Close the connection, and go on living."""
        if self._to_sender.is_closed:
            return
        self._to_sender.send(self._closed)
        self._to_sender.is_closed = self._to_engine.is_closed = True

    def _link_lost(self) -> None:
        """The sender has died. Who has hung up before goes on with what it had, as a program does that is not ours."""
        if self._to_sender.is_closed:
            return
        for transfer in list(self.transfers.values()):
            transfer.link_lost()
        self.places.all_gone()

    def _died(self) -> None:
        for transfer in self.transfers.values():
            transfer.write_no_more()
        self.places.process_died(self._random.uniform(0.001, 0.02))
        self.hang_up()
        if self.sender.process.is_alive:
            self.sender.process.soon(self._random.uniform(0.001, 0.02), self._buried)

    # -------------------------------------------------------------- in the sender's process

    def _closed(self) -> None:
        for transfer in self._opened:
            detail = "the engine's connection ended"
            self.sender.feed(sev.CancelRequested(transfer.number, ErrorCode.CANCELLED, detail))
        if not any(self.sender.core.is_filling(transfer.number) for transfer in self._opened):
            self._buried()

    def _buried(self) -> None:
        opened, self._opened = self._opened, []
        for transfer in opened:
            self.sender.feed(sev.EngineLetGo(transfer.number))


class DecodeEngine:
    """One connection of a decode engine's rank to one start of a receiver; see kvpd.service.engines.DecodeEngine."""

    def __init__(
        self,
        process: Process,
        receiver: SimulatedReceiver,
        truth: Truth,
        random: Random,
        exercised: Callable[[str], None],
        number: int,
    ) -> None:
        self.rank = number % receiver.settings.ranks
        self.process = process
        self.receiver = receiver
        self.truth = truth
        self.exercised = exercised
        self.is_closed = False
        self.on_cut_off: Call = lambda: None
        self.unread: list[tuple[str, Claim, str | None]] = []  # what a successor may want to claim again
        self._numbers = itertools.count(1)
        self._plans: dict[int, tuple[str, Claim, str | None]] = {}
        self._to_receiver = Pipe(receiver.process, random)
        self._to_engine = Pipe(process, random)
        self._random = random
        self._number = receiver.attach(self)
        self._watch = process.watch(self._died)

    @property
    def is_connected(self) -> bool:
        """Whether both ends live and speak."""
        return self.process.is_alive and self.receiver.process.is_alive and not self.is_closed

    def claim(self, req_id: str, plan: Claim, sender_id: str | None) -> None:
        """Ask for a request's chunks."""
        number = next(self._numbers)
        self._plans[number] = (req_id, plan, sender_id)
        event = rev.ClaimRequested(self._number, number, req_id, self.rank, plan.timeout_s, sender_id)
        self._tell(event)

    def cancel(self, req_id: str) -> None:
        """End every transfer of this label."""
        self.exercised("decode_cancel")
        self._tell(RequestCancelled(req_id))

    def _tell(self, event: rev.ReceiverEvent) -> None:
        self._to_receiver.send(lambda: self.receiver.feed(event))

    def hang_up(self) -> None:
        """Close the connection, and go on living and reading."""
        if self.is_closed:
            return
        self.is_closed = True
        self.unread = list(self._plans.values())
        self._to_receiver.send(lambda: self.receiver.detach(self._number))
        self._to_receiver.is_closed = self._to_engine.is_closed = True

    def _died(self) -> None:
        self.hang_up()
        if self.receiver.process.is_alive:
            self.receiver.process.soon(self._random.uniform(0.001, 0.02), self._buried)

    def _buried(self) -> None:
        self.truth.reader_died(self.receiver, self._number)
        if self.receiver.core.holds(self._number):
            self.receiver.feed(rev.EngineDied(self._number))

    # -------------------------------------------------------------- called in the receiver's process

    def granted(self, grant: rev.GrantClaim) -> None:
        plan = self._plans[grant.claim][1]
        self._to_engine.send(lambda: self.process.soon(plan.read_s, lambda: self._read(grant)))

    def refused(self, refusal: rev.RefuseClaim) -> None:
        self._plans.pop(refusal.claim, None)

    def announced(self, announcement: rev.AnnounceTransfer) -> None:
        pass

    def cut_off(self) -> None:
        """The receiver ends the connection; what hangs there is killed in the end."""
        self.exercised("claim_overdue")
        self.hang_up()
        self.on_cut_off()

    # -------------------------------------------------------------- in the engine's

    def _read(self, grant: rev.GrantClaim) -> None:
        """It has been reading until now: what it saw must be what it was promised."""
        self.truth.read(self.receiver, grant.engine, grant.claim)
        self._plans.pop(grant.claim, None)
        self._tell(rev.ClaimReleased(self._number, grant.claim))
