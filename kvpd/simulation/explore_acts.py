"""What comes of each move: the events that the cores are told, and what changes beside them."""

from __future__ import annotations

from typing import Any

from kvpd.core.events import RequestCancelled, TimePassed, TransferId
from kvpd.core.messages import Region
from kvpd.core.receiver import events as rev
from kvpd.core.sender import events as sev
from kvpd.simulation.explore_cores import FAR, NEAR
from kvpd.simulation.explore_moves import Move, Moves
from kvpd.simulation.explore_state import CHUNK_BYTES, PROXY, RECEIVER, Decode, Loose, Prefill, State
from kvpd.simulation.explore_step import Step


class Acts(Moves):
    """The consequences."""

    def after(self, state: State, move: Move) -> State:
        """The state that a move leads to.

        Raises:
            Violation: what happens on the way must be impossible.
        """
        step = Step(self, state)
        if move[0] in self.budgeted:
            step.budget[self.budgeted.index(move[0])] -= 1
        getattr(self, f"_do_{move[0]}")(step, *move[1:])
        step.check_readers()
        return step.frozen()

    def _do_up(self, step: Step, at: int) -> None:
        connection = step.connections[at]
        step.connections[at] = connection._replace(up=connection.up[1:])
        event = rev.MessageReceived(connection.identity, self.messages[connection.up[0]])
        step.tell_receiver(event, connection=connection)

    def _do_down(self, step: Step, at: int) -> None:
        connection = step.connections[at]
        step.connections[at] = connection._replace(down=connection.down[1:])
        event = sev.PeerMessageReceived(RECEIVER, self.messages[connection.down[0]])
        step.tell_sender(connection.sender, event)

    def _do_worker(self, step: Step, at: int) -> None:
        session = step.sessions[at]
        step.sessions[at] = session._replace(is_made=True)
        address = f"{step.receiver_incarnation}/{session.number}".encode()
        size = self.config.slots * CHUNK_BYTES
        regions = [Region(rank, address, 4096 + rank * size, size, b"rkey") for rank in range(self.config.ranks)]
        step.tell_receiver(rev.SessionOpened(session.number, tuple(regions)))

    def _do_died(self, step: Step, at: int) -> None:
        session = step.sessions[at]
        step.sessions[at] = session._replace(is_watched=False)
        step.tell_receiver(rev.ProcessDied(session.number))

    def _do_endpoint(self, step: Step, at: int) -> None:
        endpoint = step.endpoints[at]
        if endpoint.worker[0] == step.receiver_incarnation and any(
            s.number == endpoint.worker[1] and s.is_alive for s in step.sessions
        ):
            step.endpoints[at] = endpoint._replace(is_made=True)
            event = sev.EndpointOpened(RECEIVER, endpoint.number, in_place=self.config.in_place)
            step.tell_sender(endpoint.sender, event)
        else:
            step.tell_sender(endpoint.sender, sev.EndpointBroken(RECEIVER, endpoint.number, "the worker is gone"))

    def _do_land(self, step: Step, at: int, place: int, number: int) -> None:
        task = step.tasks[at]
        piece = task.pieces[place]
        put = piece.puts[number]
        puts = piece.puts[:number] + piece.puts[number + 1 :]
        pieces = (*task.pieces[:place], piece._replace(puts=puts), *task.pieces[place + 1 :])
        step.tasks[at] = task._replace(pieces=pieces)
        step.land(step.owner(task), put)

    def _do_late(self, step: Step, at: int) -> None:
        item = step.loose.pop(at)
        step.land(item.owner, item.put)

    def _do_lets_go(self, step: Step, at: int) -> None:
        """An engine whose sender is dead leaves without another word to anybody but the receiver."""
        step.loose.pop(at)

    def _do_completed(self, step: Step, at: int) -> None:
        task = step.tasks[at]
        step.change_task(task.sender, task.transfer_no, pieces=task.pieces[1:])
        piece = task.pieces[0]
        checksums = tuple([self.checksums[key] for key in piece.keys]) if self.config.verifies else ()
        step.tell_sender(task.sender, sev.PutsCompleted(task.transfer_no, piece.number, checksums=checksums))

    def _do_drained(self, step: Step, at: int) -> None:
        task = step.tasks.pop(at)
        step.tell_sender(task.sender, sev.PutsDrained(task.transfer_no, not task.is_cut))

    def _do_failed(self, step: Step, at: int) -> None:
        """A put failed: the task reports it, and the endpoint is cut off with whatever else is on it."""
        task = step.tasks[at]
        piece = next(piece for piece in task.pieces if piece.puts)
        step.cut(task.sender, piece.endpoint)
        if not task.is_cancelled:
            step.tell_sender(task.sender, sev.PutsFailed(task.transfer_no, piece.number, "a put failed"))

    _do_fail = _do_failed

    def _do_force(self, step: Step, at: int) -> None:
        """The put deadline passes: the endpoint is cut off, with whatever else is on it."""
        task = step.tasks[at]
        step.cut(task.sender, next(piece.endpoint for piece in task.pieces if piece.puts))

    def _do_open(self, step: Step, at: int) -> None:
        request = self.config.requests[at]
        core = self.sender_cores.entries[step.senders[request.sender]].core
        number = max(1, core._highest_no + 1)
        step.prefill[at] = Prefill(is_opened=True, holds=True, transfer_no=number)
        first = self._next_stage(step, at) if self.config.opens_with_batch else None
        event = sev.OpenRequested(
            *(number, 1, request.req_id, RECEIVER, len(request.keys)),
            rank=request.rank,
            in_place=self.config.in_place,
            first=first,
        )
        step.tell_sender(request.sender, event)
        if step.prefill[at].holds:
            step.prefill[at] = step.prefill[at]._replace(joined=step.transfer_of(request.sender, number))
        if not self.config.stages_late:
            for _ in request.batches[first is not None :]:
                self._do_stage(step, at)

    _do_retry = _do_open

    def _do_stage(self, step: Step, at: int) -> None:
        prefill = step.prefill[at]
        if prefill.holds and not prefill.is_over:
            step.tell_sender(self.config.requests[at].sender, self._next_stage(step, at))

    def _next_stage(self, step: Step, at: int) -> sev.StageRequested:
        """Its engine has the keys of one more batch."""
        request, prefill = self.config.requests[at], step.prefill[at]
        stage = prefill.staged
        step.prefill[at] = prefill._replace(staged=stage + 1)
        is_last = stage + 1 == len(request.batches)
        return sev.StageRequested(prefill.transfer_no, stage, request.batches[stage], is_last, CHUNK_BYTES)

    def _do_fill(self, step: Step, at: int, place: int) -> None:
        sender, prefill = self.config.requests[at].sender, step.prefill[at]
        granted = prefill.filling[place]
        filling = prefill.filling[:place] + prefill.filling[place + 1 :]
        step.prefill[at] = prefill._replace(filling=filling)
        # What a receiver left behind that has restarted is nobody's memory any more.
        if granted.owner is not None and granted.worker[0] == step.receiver_incarnation:
            for put in granted.puts:
                step.land(granted.owner, put)
        step.filled[sender, prefill.transfer_no, granted.number] = granted.puts
        step.tell_sender(sender, sev.PieceFilled(prefill.transfer_no, granted.number))

    def _do_leave(self, step: Step, at: int) -> None:
        number = step.prefill[at].transfer_no
        step.prefill[at] = Prefill(is_opened=True, has_failed=step.prefill[at].has_failed)
        step.tell_sender(self.config.requests[at].sender, sev.EngineLetGo(number))

    def _do_cancel(self, step: Step, at: int) -> None:
        number = step.prefill[at].transfer_no
        step.tell_sender(self.config.requests[at].sender, sev.CancelRequested(number))

    def _do_prefill_dies(self, step: Step, sender: int) -> None:
        mine = [at for at, request in enumerate(self.config.requests) if request.sender == sender]
        for at in mine:
            if step.prefill[at].holds:
                step.tell_sender(sender, sev.CancelRequested(step.prefill[at].transfer_no))
            if step.prefill[at].holds:
                self._do_leave(step, at)

    def _do_claim(self, step: Step, at: int, sender: int | None) -> None:
        step.decode[at] = step.decode[at]._replace(is_waiting=True)
        name = None if sender is None else f"s{sender}"
        # An engine's number for its claim is anything to the core: its label, for a mirror image to exchange.
        number: Any = self.claimants[at]
        label, rank = divmod(at, self.config.ranks)
        step.tell_receiver(rev.ClaimRequested(step.decode_engine, number, self.labels[label], rank, 5.0, name))

    def _do_early(self, step: Step, at: int) -> None:
        self._do_claim(step, at, None)

    def _do_release(self, step: Step, at: int) -> None:
        step.decode[at] = step.decode[at]._replace(reading=())
        number: Any = self.claimants[at]
        step.tell_receiver(rev.ClaimReleased(step.decode_engine, number))

    def _do_cancel_claim(self, step: Step, at: int) -> None:
        step.tell_receiver(RequestCancelled(self.labels[at]))

    _do_gives_up = _do_cancel_claim

    def _do_decode_dies(self, step: Step) -> None:
        engine = step.decode_engine
        step.decode = [decode._replace(is_waiting=False, reading=()) for decode in step.decode]
        step.decode_engine += 1
        step.tell_receiver(rev.EngineClosed(engine))
        step.tell_receiver(rev.EngineDied(engine))

    def _do_verified(self, step: Step, at: int, mismatched: int = 0) -> None:
        item = step.verifying.pop(at)
        for slot, checksum in item.expected:
            mismatched += self.checksums.get(step.memory[slot]) != checksum
        sender, incarnation, number = item.transfer
        transfer = TransferId(f"s{sender}", incarnation, number)
        step.tell_receiver(rev.ChunksVerified(transfer, self.messages[item.message], mismatched))

    def _do_corrupt(self, step: Step, at: int) -> None:
        self._do_verified(step, at, mismatched=1)

    def _do_proxy(self, step: Step) -> None:
        sender, number = step.notifications.pop(0)
        notif = self.messages[number]
        step.tell_sender(sender, sev.ProxyAcknowledged(PROXY, notif.sender_incarnation, notif.message_id))

    def _do_sender_restarts(self, step: Step, sender: int) -> None:
        _kill_sender(step, sender, self._new_sender(sender, step.incarnation(sender) + 1))

    def _do_receiver_restarts(self, step: Step) -> None:
        _kill_receiver(step, self._new_receiver(step.receiver_incarnation + 1))

    def _do_loss(self, step: Step, at: int) -> None:
        step.connections[at] = step.connections[at]._replace(up=(), down=())

    def _do_tick(self, step: Step, side: int, key: Any, now: float) -> None:
        if side < 0:
            step.tell_receiver(TimePassed(), timer=key, now=now)
        else:
            step.tell_sender(side, TimePassed(), timer=key, now=now)

    def _do_slow(self, step: Step, side: int, key: Any) -> None:
        self._do_tick(step, side, key, FAR)

    def _do_repeat(self, step: Step, side: int, key: Any) -> None:
        self._do_tick(step, side, key, NEAR)


def _kill_receiver(step: Step, core: int) -> None:
    """The receiver's process dies and starts anew: new memory, nothing known."""
    step.receiver = core
    step.sessions.clear()
    step.loose.clear()
    step.queue.clear()
    step.opened.clear()
    step.verifying.clear()
    step.memory = [b""] * len(step.memory)
    step.decode = [Decode() for _ in step.decode]


def _kill_sender(step: Step, sender: int, core: int) -> None:
    """A sender's process dies and starts anew. What it had put on a network may land; its kernel's copies end."""
    dead = step.incarnation(sender)
    if not step.world.config.same_host:
        step.loose += [
            Loose(step.owner(t), piece.worker, put)
            for t in step.tasks
            if t.sender == sender
            for piece in t.pieces
            for put in piece.puts
            if step.can_land(piece.worker)
        ]
    else:
        step.loose = [item for item in step.loose if item.owner[:2] != (sender, dead) or item.by_engine]
    # Its engines live on, and what they fill in place they may yet write.
    mine = [p for p, r in zip(step.prefill, step.world.config.requests, strict=True) if r.sender == sender]
    step.loose += [
        Loose(granted.owner, granted.worker, put, by_engine=True)
        for prefill in mine
        for granted in prefill.filling
        if granted.owner is not None and step.can_land(granted.worker)
        for put in granted.puts
    ]
    step.tasks = [t for t in step.tasks if t.sender != sender]
    step.endpoints = [e for e in step.endpoints if e.sender != sender]
    step.notifications = [n for n in step.notifications if n[0] != sender]
    step.connections = [c._replace(is_open=False, down=()) if c.sender == sender else c for c in step.connections]
    step.complete = [k for k in step.complete if k[0] != sender]
    for at, request in enumerate(step.world.config.requests):
        if request.sender == sender and step.prefill[at].holds:
            step.prefill[at] = Prefill(has_failed=True, is_opened=True)
    step.senders[sender] = core
