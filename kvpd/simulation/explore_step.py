"""One step of a small world: an event goes into a real core, and what the core decides is carried out.

What is done about each action is what kvpd.service does, without trio: what an action causes at once is a new event,
handled after the current one. Beside that the world keeps its own truth, and every step is held against it: who may
write which slot, what every slot holds, who came first, what was complete before it was announced.
"""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from kvpd.core.events import Report, ReportName, TimePassed
from kvpd.core.messages import ProxyNotif
from kvpd.core.pool import SlotState
from kvpd.core.receiver import events as rev
from kvpd.core.sender import events as sev
from kvpd.simulation.explore_state import (
    RECEIVER,
    Connection,
    Endpoint,
    Granted,
    Loose,
    Piece,
    Prefill,
    Put,
    Session,
    State,
    Task,
    TransferKey,
    Verifying,
    Violation,
    Worker,
    content,
    transfer_key,
)
from kvpd.simulation.explore_unfrozen import Unfrozen

if TYPE_CHECKING:
    from kvpd.simulation.explore_world import World

# What a wrong core raises, by an assertion of its own or by tables that contradict each other.
_BUGS: Final = (AssertionError, LookupError, ValueError, TypeError, AttributeError)
_MAY_BE_WRITTEN: Final = (SlotState.WRITING, SlotState.QUARANTINED)


class Step(Unfrozen):
    """A state while it is being changed, and held against the world's own truth."""

    def __init__(self, world: World, state: State) -> None:
        super().__init__(world, state)
        self.filled: dict[TransferKey, tuple[Put, ...]] = {}  # (sender, transfer, piece): what an engine just filled
        self._events: deque[tuple[int, Any]] = deque()  # sender or -1, event
        self._hearing: Connection | None = None

    # -------------------------------------------------------------- events

    def tell_sender(self, sender: int, event: Any, *, timer: Any = None, now: float = 0.0) -> None:
        """An event for a sender, and all that follows at once."""
        self._events.append((sender, event))
        self._run(timer, now)

    def tell_receiver(
        self, event: Any, *, timer: Any = None, now: float = 0.0, connection: Connection | None = None
    ) -> None:
        """An event for the receiver, and all that follows at once."""
        self._hearing = connection
        self._events.append((-1, event))
        self._run(timer, now)

    def _run(self, timer: Any, now: float) -> None:
        while self._events:
            sender, event = self._events.popleft()
            try:
                if sender < 0:
                    self._receiver_step(event, timer, now)
                else:
                    self._sender_step(sender, event, timer, now)
            except _BUGS as exc:
                where = traceback.extract_tb(exc.__traceback__)[-1]
                raise Violation(f"the core ended in {type(exc).__name__} ({exc or where.line}), {where.name}") from exc
            timer, now = None, 0.0

    def _sender_step(self, sender: int, event: Any, timer: Any, now: float) -> None:
        number, actions = self.world.sender_cores.step(self.senders[sender], event, timer=timer, now=now)
        self.senders[sender] = number
        is_repeat = isinstance(event, TimePassed)
        for action in actions:
            self._perform_sender(sender, action, is_repeat=is_repeat)
        if self.world.config.has_proxy:
            self._check_told(sender, actions, is_repeat=is_repeat)
        mine = self.incarnation(sender)
        live = self.world.sender_cores.entries[self.senders[sender]].core._transfers
        self.complete = [k for k in self.complete if k[0] != sender or (k[1] == mine and k[2] in live)]

    def _receiver_step(self, event: Any, timer: Any, now: float) -> None:
        before = self.world.receiver_cores.entries[self.receiver].detail
        self.receiver, actions = self.world.receiver_cores.step(self.receiver, event, timer=timer, now=now)
        self.blank(before, self.world.receiver_cores.entries[self.receiver].detail)
        for action in actions:
            self._perform_receiver(action)

    def blank(self, before: Any, after: Any) -> None:
        """What a slot held for its last owner counts for nothing: whoever relies on it must be found out."""
        for index, (was, is_) in enumerate(zip(before, after, strict=True)):
            if is_[0] is SlotState.FREE or (is_[0] is SlotState.WRITING and is_ != was):
                for place in range(index, len(self.memory), self.world.config.slots):
                    self.memory[place] = b""

    # -------------------------------------------------------------- what a sender's service does

    def _perform_sender(self, sender: int, action: Any, *, is_repeat: bool) -> None:
        match action:
            case sev.SendToPeer(_, message):
                at = self._open_connection(sender)
                if at is not None:
                    connection = self.connections[at]
                    number = self.world.messages.number(message)
                    self.connections[at] = connection._replace(up=(*connection.up, number))
            case sev.PostPuts():
                self._post(sender, action)
            case sev.GrantPiece():
                self._granted(sender, action)
            case sev.FinishTransfer(number, error):
                self._finished(sender, number, failed=error is not None)
            case sev.CancelTransfer(number):
                self.change_task(sender, number, is_cancelled=True)
            case sev.NotifyProxy(_, message):
                key = (sender, message.sender_incarnation, message.transfer_no)
                if isinstance(message, ProxyNotif) and not is_repeat and key not in self.complete:
                    raise Violation(f"the proxy is told of transfer {key}, which is not complete at the receiver")
                self.notifications.append((sender, self.world.messages.number(message)))
            case sev.ConnectPeer():
                core = self.world.sender_cores.entries[self.senders[sender]].core
                # The Hello of this connection has been counted, unless it waits for puts that have not ended.
                number = 2 * core.hellos + (RECEIVER in core._undrained)
                self.connections.append(Connection(sender, self.incarnation(sender), number))
            case sev.DisconnectPeer():
                at = self._open_connection(sender)
                assert at is not None
                self.connections[at] = self.connections[at]._replace(is_open=False, down=())
            case sev.OpenEndpoint(_, number, regions):
                incarnation, session_no = map(int, regions[0].worker_address.split(b"/"))
                self.endpoints.append(Endpoint(sender, number, (incarnation, session_no), is_made=False))
            case sev.CloseEndpoint(_, number):
                self.endpoints = [e for e in self.endpoints if (e.sender, e.number) != (sender, number)]
                self.cut(sender, number)

    def _check_told(self, sender: int, actions: Sequence[Any], *, is_repeat: bool) -> None:
        """The proxy hears of every end in the step that brings it, and of how it is: never twice, never otherwise."""
        ended = {a.transfer_no: a.error is None for a in actions if isinstance(a, sev.FinishTransfer)}
        notifs = [a.message for a in actions if isinstance(a, sev.NotifyProxy)]
        told = {notif.transfer_no: isinstance(notif, ProxyNotif) for notif in notifs}
        wrong = [number for number, well in ended.items() if told.get(number) is not well]
        wrong += [number for number in told if number not in ended and not is_repeat]
        if wrong or len(told) != len(notifs):
            raise Violation(f"the proxy is told otherwise than transfers {wrong} of s{sender} have ended")

    def _open_connection(self, sender: int) -> int | None:
        for at, connection in enumerate(self.connections):
            if connection.sender == sender and connection.is_open:
                return at
        return None

    def _post(self, sender: int, action: sev.PostPuts) -> None:
        number, piece_no = action.transfer_no, action.piece
        endpoint = next((e for e in self.endpoints if (e.sender, e.number) == (sender, action.endpoint)), None)
        if endpoint is None or not endpoint.is_made:
            self._events.append((sender, sev.PutsFailed(number, piece_no, "the endpoint is closed")))
            return
        # What the engine has filled; the core names the slots anew, and they must be those.
        puts = self.filled.get((sender, number, piece_no), ())
        if tuple((p.local, p.slot) for p in puts) != tuple(self.world.places(p, action.rank) for p in action.puts):
            raise Violation(f"piece {piece_no} of transfer {number} is put from or to other slots than were granted")
        task = self.task(sender, number)
        piece = Piece(piece_no, endpoint.number, endpoint.worker, puts, tuple([put.key for put in puts]))
        self.change_task(sender, number, pieces=(*task.pieces, piece))

    def task(self, sender: int, number: int) -> Task:
        """The task of a transfer; one that does nothing is not remembered."""
        for task in self.tasks:
            if task.sender == sender and task.transfer_no == number:
                return task
        return Task(sender, number)

    def change_task(self, sender: int, number: int, **changes: Any) -> None:
        old = self.task(sender, number)
        self.drop_task(sender, number)
        new = old._replace(**changes)
        if new.pieces or new.is_cancelled:
            self.tasks.append(new)

    def drop_task(self, sender: int, number: int) -> None:
        """The task has ended."""
        self.tasks = [t for t in self.tasks if (t.sender, t.transfer_no) != (sender, number)]

    def cut(self, sender: int, endpoint: int) -> None:
        """The endpoint is force-closed: its puts are over here, and may land there all the same."""
        for task in [t for t in self.tasks if t.sender == sender]:
            hit = [p for p in task.pieces if p.endpoint == endpoint and p.puts]
            if not hit:
                continue
            owner = self.owner(task)
            self.loose += [Loose(owner, p.worker, put) for p in hit for put in p.puts if self.can_land(p.worker)]
            pieces = tuple(p._replace(puts=()) if p in hit else p for p in task.pieces)
            self.change_task(sender, task.transfer_no, pieces=pieces, is_cut=True)

    def _granted(self, sender: int, grant: sev.GrantPiece) -> None:
        at = self._request_of(sender, grant.transfer_no)
        if at is None:
            raise Violation(f"a piece is granted to transfer {grant.transfer_no}, which no engine has open")
        prefill, request = self.prefill[at], self.world.config.requests[at]
        keys = request.batches[grant.stage][grant.first : grant.first + len(grant.entries)]
        chunks = [(e, content(key, request.rank)) for e, key in zip(grant.entries, keys, strict=True) if e is not None]
        puts = tuple(Put(*self.world.places(entry, request.rank), chunk) for entry, chunk in chunks)
        granted = Granted(grant.piece, puts)
        if grant.place:
            (worker,) = (e.worker for e in self.endpoints if (e.sender, e.number) == (sender, grant.place))
            granted = granted._replace(owner=self.owner_of(sender, grant.transfer_no), worker=worker)
        elif any(put.local in self._staged(sender) for put in puts):
            raise Violation(f"a staging slot of transfer {grant.transfer_no} is still read or written for another")
        self.prefill[at] = prefill._replace(filling=(*prefill.filling, granted))

    def _staged(self, sender: int) -> set[int]:
        """The staging slots that are read or written."""
        requests = self.world.config.requests
        mine = [p for p, request in zip(self.prefill, requests, strict=True) if request.sender == sender]
        taken = {p.local for f in mine for granted in f.filling if granted.owner is None for p in granted.puts}
        return taken | {p.local for t in self.tasks if t.sender == sender for piece in t.pieces for p in piece.puts}

    def _request_of(self, sender: int, number: int) -> int | None:
        for at, request in enumerate(self.world.config.requests):
            prefill = self.prefill[at]
            if request.sender == sender and prefill.holds and prefill.transfer_no == number:
                return at
        return None

    def _finished(self, sender: int, number: int, *, failed: bool) -> None:
        at = self._request_of(sender, number)
        if at is None or self.prefill[at].is_over:
            raise Violation(f"transfer {number} of s{sender} ended twice")
        if not failed and (sender, self.incarnation(sender), self.prefill[at].joined) not in self.complete:
            raise Violation(f"transfer {number} of s{sender} is done, but was never complete at the receiver")
        prefill = self.prefill[at] = self.prefill[at]._replace(is_over=True, has_failed=failed)
        if not prefill.filling:
            self.let_go(at)

    def let_go(self, at: int) -> None:
        """The engine leaves a transfer."""
        sender, prefill = self.world.config.requests[at].sender, self.prefill[at]
        self.prefill[at] = Prefill(has_failed=prefill.has_failed, is_opened=True)
        self._events.append((sender, sev.EngineLetGo(prefill.transfer_no)))

    # -------------------------------------------------------------- what the receiver's service does

    def _perform_receiver(self, action: Any) -> None:
        match action:
            case rev.SendMessage(peer, message):
                for at, connection in enumerate(self.connections):
                    if connection.is_open and connection.identity == peer:
                        number = self.world.messages.number(message)
                        self.connections[at] = connection._replace(down=(*connection.down, number))
            case rev.OpenSession(number, process):
                assert self._hearing is not None
                sender, incarnation = self._hearing.sender, self._hearing.incarnation
                self.sessions.append(Session(number, sender, incarnation, False, True, process is not None))
            case rev.CloseSession(number):
                self.sessions = [s._replace(is_alive=False) if s.number == number else s for s in self.sessions]
                self._drop_loose()
                self._events.append((-1, rev.SessionClosed(number)))
            case rev.ForgetSession(number):
                self.sessions = [s for s in self.sessions if s.number != number]
            case rev.GrantClaim(_, claim, transfer, chunks):
                self._claim_granted(self.world.claimants.index(str(claim)), transfer_key(transfer), chunks)
            case rev.RefuseClaim(_, claim):
                at = self.world.claimants.index(str(claim))
                self.decode[at] = self.decode[at]._replace(is_waiting=False)
            case rev.AnnounceTransfer(outcome, transfer, req_id):
                self._announced(outcome, transfer_key(transfer), self.world.labels.index(req_id))
            case rev.VerifyChunks(transfer, message, written):
                expected = tuple((chunk.index, chunk.checksum) for chunk in written)
                number = self.world.messages.number(message)
                self.verifying.append(Verifying(transfer_key(transfer), number, expected))
            case Report(name, transfer) if transfer is not None:
                self._reported(name, transfer_key(transfer))

    def can_land(self, worker: Worker) -> bool:
        """Whether a put into this worker can still land: on one host only the sender's death prevents it."""
        if worker[0] != self.receiver_incarnation:
            return False
        return self.world.config.same_host or any(s.number == worker[1] and s.is_alive for s in self.sessions)

    def _drop_loose(self) -> None:
        self.loose = [item for item in self.loose if self.can_land(item.worker)]

    def land(self, owner: TransferKey, put: Put) -> None:
        """A chunk's bytes arrive, whoever owns the slot by now.

        Raises:
            Violation: it is not the one that may be written for this transfer.
        """
        slot = put.slot % self.world.config.slots
        state, owners = self.world.receiver_cores.entries[self.receiver].detail[slot]
        if state not in _MAY_BE_WRITTEN or owners != (owner,):
            whose = f" of transfer {owners[0]}" if owners else ""
            raise Violation(f"a late write of transfer {owner} lands in slot {slot}, {state.value}{whose}")
        self.memory[put.slot] = put.key

    def _claim_granted(self, at: int, transfer: TransferKey, chunks: tuple[rev.ClaimedSlot, ...]) -> None:
        config = self.world.config
        label, rank = divmod(at, config.ranks)
        request = self.world.request_of(transfer, self.world.labels[label])
        if tuple(chunk.key for chunk in chunks) != request.keys:
            raise Violation(f"the claim of {request.req_id} gets other chunks than were sent")
        reading = tuple((chunk.index + rank * config.slots, content(chunk.key, rank)) for chunk in chunks)
        for chunk, (place, expected) in zip(chunks, reading, strict=True):
            held = self.memory[place]
            if held != expected:
                what = held.decode() or "nothing that has landed"
                raise Violation(f"{chunk.key.decode()} is read from slot {chunk.index}, which holds {what}")
        decode = self.decode[at]._replace(is_waiting=False, reading=reading)
        if config.ranks > 1:  # it is not over with this rank's reading, and not to be read by it twice
            decode = decode._replace(ready=tuple(t for t in decode.ready if t != transfer))
        self.decode[at] = decode

    def _announced(self, outcome: rev.Outcome, transfer: TransferKey, label: int) -> None:
        ranks = self.world.config.ranks
        if outcome is rev.Outcome.READY:
            self.complete.append(transfer)
        for at in range(label * ranks, (label + 1) * ranks):
            decode = self.decode[at]
            ready = tuple(t for t in decode.ready if t != transfer)
            if outcome is rev.Outcome.READY:
                ready = tuple(sorted((*ready, transfer)))
            self.decode[at] = decode._replace(ready=ready)

    def _reported(self, name: ReportName, transfer: TransferKey) -> None:
        if name is ReportName.TRANSFER_QUEUED:
            if transfer in self.opened:
                raise Violation(f"transfer {transfer} has ended, and is taken for a new one")
            self.queue.append(transfer)
            self.opened.append(transfer)
        elif name is ReportName.TRANSFER_ADMITTED:
            if not self.queue or self.queue[0] != transfer:
                raise Violation(f"transfer {transfer} is admitted, but the queue is {self.queue}")
            self.queue.pop(0)
        elif name is ReportName.TRANSFER_REVOKED and transfer in self.queue:
            self.queue.remove(transfer)

    def check_readers(self) -> None:
        """What engines read stays what it was.

        Raises:
            Violation: a slot was taken away, or written over.
        """
        for name, decode in zip(self.world.claimants, self.decode, strict=True):
            if decode.reading and any(self.memory[place] != key for place, key in decode.reading):
                raise Violation(f"the chunks of {name} are taken away under their reader")
