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
    transfer_key,
)

if TYPE_CHECKING:
    from kvpd.simulation.explore_world import World

# What a wrong core raises, by an assertion of its own or by tables that contradict each other.
_BUGS: Final = (AssertionError, LookupError, ValueError, TypeError, AttributeError)
_MAY_BE_WRITTEN: Final = (SlotState.WRITING, SlotState.QUARANTINED)


def _in_order(items: list[Any]) -> tuple[Any, ...]:
    return tuple(items) if len(items) < 2 else tuple(sorted(items))


class Step:
    """A state while it is being changed."""

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
        self.filled: dict[TransferKey, tuple[Put, ...]] = {}  # (sender, transfer, piece): what an engine just filled
        self._events: deque[tuple[int, Any]] = deque()  # sender or -1, event
        self._hearing: Connection | None = None

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
                self.memory[index] = b""

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
                hellos = self.world.sender_cores.entries[self.senders[sender]].core.hellos
                self.connections.append(Connection(sender, self.incarnation(sender), hellos))
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
        if tuple((p.local, p.slot) for p in puts) != tuple((p.local, p.remote) for p in action.puts):
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
        incarnation = self.incarnation(sender)
        for task in [t for t in self.tasks if t.sender == sender]:
            hit = [p for p in task.pieces if p.endpoint == endpoint and p.puts]
            if not hit:
                continue
            owner = (sender, incarnation, task.transfer_no)
            self.loose += [Loose(owner, p.worker, put) for p in hit for put in p.puts if self.can_land(p.worker)]
            pieces = tuple(p._replace(puts=()) if p in hit else p for p in task.pieces)
            self.change_task(sender, task.transfer_no, pieces=pieces, is_cut=True)

    def _granted(self, sender: int, grant: sev.GrantPiece) -> None:
        at = self._request_of(sender, grant.transfer_no)
        if at is None:
            raise Violation(f"a piece is granted to transfer {grant.transfer_no}, which no engine has open")
        prefill = self.prefill[at]
        batch = self.world.config.requests[at].batches[grant.stage]
        keys = batch[grant.first : grant.first + len(grant.entries)]
        puts = tuple(Put(e.local, e.remote, key) for e, key in zip(grant.entries, keys, strict=True) if e is not None)
        taken = {p.local for f in self._of_sender(sender) for granted in f.filling for p in granted.puts}
        taken |= {p.local for t in self.tasks if t.sender == sender for piece in t.pieces for p in piece.puts}
        if any(put.local in taken for put in puts):
            raise Violation(f"a staging slot of transfer {grant.transfer_no} is still read or written for another")
        self.prefill[at] = prefill._replace(filling=(*prefill.filling, Granted(grant.piece, puts)))

    def _of_sender(self, sender: int) -> list[Prefill]:
        requests = self.world.config.requests
        return [p for p, request in zip(self.prefill, requests, strict=True) if request.sender == sender]

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
        if not failed and (sender, self.incarnation(sender), number) not in self.complete:
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
                self._claim_granted(self.world.labels.index(str(claim)), transfer_key(transfer), chunks)
            case rev.RefuseClaim(_, claim):
                label = self.world.labels.index(str(claim))
                self.decode[label] = self.decode[label]._replace(is_waiting=False)
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
        state, owners = self.world.receiver_cores.entries[self.receiver].detail[put.slot]
        if state not in _MAY_BE_WRITTEN or owners != (owner,):
            whose = f" of transfer {owners[0]}" if owners else ""
            raise Violation(f"a late write of transfer {owner} lands in slot {put.slot}, {state.value}{whose}")
        self.memory[put.slot] = put.key

    def _claim_granted(self, label: int, transfer: TransferKey, chunks: tuple[rev.ClaimedSlot, ...]) -> None:
        request = self.world.request_of(transfer, self.world.labels[label])
        if tuple(chunk.key for chunk in chunks) != request.keys:
            raise Violation(f"the claim of {request.req_id} gets other chunks than were sent")
        for chunk in chunks:
            if self.memory[chunk.index] != chunk.key:
                held = self.memory[chunk.index]
                what = held.decode() or "nothing that has landed"
                raise Violation(f"{chunk.key.decode()} is read from slot {chunk.index}, which holds {what}")
        reading = tuple((chunk.index, chunk.key) for chunk in chunks)
        self.decode[label] = self.decode[label]._replace(is_waiting=False, reading=reading)

    def _announced(self, outcome: rev.Outcome, transfer: TransferKey, label: int) -> None:
        decode = self.decode[label]
        if outcome is rev.Outcome.READY:
            self.complete.append(transfer)
            self.decode[label] = decode._replace(ready=tuple(sorted((*decode.ready, transfer))))
        else:
            self.decode[label] = decode._replace(ready=tuple(t for t in decode.ready if t != transfer))

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
        for label, decode in zip(self.world.labels, self.decode, strict=True):
            if decode.reading and any(self.memory[index] != key for index, key in decode.reading):
                raise Violation(f"the chunks of {label} are taken away under their reader")
