"""What may happen in each state of a small world.

Some things happen by themselves: a message arrives, a put lands, an engine goes on. When none of these can change
anything, the world is quiet, and only then do the deadlines pass that a clean ending may need: a repeat of what was
lost, a heartbeat, the lease of a sender that is gone. Everything else is a fault, possible anywhere, as often as the
world's budget says: a cancel, a crash, a lost connection, a deadline that passes although nothing stands still. No
clean ending may need one of those: a timeout that breaks a deadlock must not hide it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvpd.simulation.explore_cores import FAR, NEAR
from kvpd.simulation.explore_state import Request, State
from kvpd.simulation.explore_step import Step
from kvpd.simulation.explore_world import World

Move = tuple[Any, ...]  # a kind and its arguments


class Moves(World):
    """The moves of a world."""

    def moves(self, state: State) -> tuple[list[Move], list[Move]]:
        """What may happen by itself, and what may go wrong."""
        return list(self._natural(state)), list(self._faults(state))

    def _natural(self, state: State) -> Iterator[Move]:
        for at, connection in enumerate(state.connections):
            if connection.up:
                yield ("up", at)
            if connection.down:
                yield ("down", at)
        for at, session in enumerate(state.sessions):
            if session.is_alive and not session.is_made:
                yield ("worker", at)
            if (
                session.is_watched
                and session.is_made
                and session.incarnation < self._incarnation(state, session.sender)
                and not any(
                    item.by_engine and item.owner[:2] == (session.sender, session.incarnation) for item in state.loose
                )
            ):
                yield ("died", at)
        for at, endpoint in enumerate(state.endpoints):
            if not endpoint.is_made:
                yield ("endpoint", at)
        yield from self._natural_puts(state)
        for at, request in enumerate(self.config.requests):
            yield from self._natural_engine(state, at, request)
        for at, decode in enumerate(state.decode):
            if decode.reading:
                yield ("release", at)
            elif decode.ready and not decode.is_waiting:
                yield from (("claim", at, sender) for sender in sorted({transfer[0] for transfer in decode.ready}))
        yield from (("verified", at) for at in range(len(state.verifying)))
        if state.notifications:
            yield ("proxy",)

    def _natural_puts(self, state: State) -> Iterator[Move]:
        if not state.tasks and not state.loose:
            return
        step = Step(self, state)
        for at, task in enumerate(state.tasks):
            for place, piece in enumerate(task.pieces):
                if piece.puts and not step.can_land(piece.worker):
                    yield ("failed", at)
                    break
                yield from (("land", at, place, number) for number in range(len(piece.puts)))
            if task.is_cancelled:
                # On one host a put that was cut off has ended only when the sender's kernel has done with it.
                writes = self.config.same_host and any(
                    item.owner == step.owner(task) and not item.by_engine for item in state.loose
                )
                if not writes and not any(piece.puts for piece in task.pieces):
                    yield ("drained", at)
            elif not task.is_cut and not task.pieces[0].puts:
                yield ("completed", at)
        yield from (("late", at) for at in range(len(state.loose)))
        yield from (("lets_go", at) for at, item in enumerate(state.loose) if item.by_engine)

    def _natural_engine(self, state: State, at: int, request: Request) -> Iterator[Move]:
        prefill = state.prefill[at]
        if not prefill.is_opened:
            # One after another, each rank by itself: numbers grow in the order in which an engine opens.
            mine = request.sender, request.rank
            before = zip(state.prefill[:at], self.config.requests, strict=False)
            earlier = [p for p, r in before if (r.sender, r.rank) == mine]
            if all(p.is_opened for p in earlier):
                yield ("open", at)
        if prefill.holds:
            if at not in self.config.stalled or prefill.is_over:
                yield from (("fill", at, place) for place in range(len(prefill.filling)))
            if prefill.is_over:
                yield ("leave", at)
            elif prefill.staged < len(request.batches):
                yield ("stage", at)

    def _incarnation(self, state: State, sender: int) -> int:
        incarnation: int = self.sender_cores.entries[state.senders[sender]].core.settings.incarnation
        return incarnation

    def ticks(self, state: State) -> list[Move]:
        """The deadlines that pass when nothing else happens, as far as a clean ending may need them."""
        ticks: list[Move] = []
        for sender, number in enumerate(state.senders):
            wanted = ("repeat", "heartbeat", "notify", "reconnect")
            timers = self.sender_cores.entries[number].timers
            ticks += [("tick", sender, key, NEAR) for key in timers if key[0] in wanted]
        book = self.receiver_cores.entries[state.receiver].core._book
        for at in self.config.stalled:
            label = self.config.requests[at].req_id
            if book.bearing(label):
                ticks.append(("gives_up", self.labels.index(label)))
        bound = {c.identity for c in state.connections if c.is_open}
        core = self.receiver_cores.entries[state.receiver].core
        for key in self.receiver_cores.entries[state.receiver].timers:
            if key[0] == "repeat":
                ticks.append(("tick", -1, key, NEAR))
            elif key[0] in ("claim", "ready") or (
                key[0] == "lease" and core._sessions.numbered(key[1]).peer not in bound
            ):
                ticks.append(("tick", -1, key, FAR))
        return ticks

    def _faults(self, state: State) -> Iterator[Move]:
        for name, left in zip(self.budgeted, state.budget, strict=True):
            if left:
                yield from ((name, *arguments) for arguments in getattr(self, f"_where_{name}")(state))

    def _where_cancel(self, state: State) -> Iterator[Move]:
        yield from ((at,) for at, prefill in enumerate(state.prefill) if prefill.holds and not prefill.is_over)

    def _where_retry(self, state: State) -> Iterator[Move]:
        yield from ((at,) for at, prefill in enumerate(state.prefill) if prefill.has_failed and not prefill.holds)

    def _where_cancel_claim(self, state: State) -> Iterator[Move]:
        yield from ((at,) for at in range(len(self.labels)))

    def _where_early(self, state: State) -> Iterator[Move]:
        for at, decode in enumerate(state.decode):
            if not decode.is_waiting and not decode.reading:
                yield (at,)

    def _where_prefill_dies(self, state: State) -> Iterator[Move]:
        holding = {r.sender for r, p in zip(self.config.requests, state.prefill, strict=True) if p.holds}
        yield from ((sender,) for sender in holding)

    def _where_decode_dies(self, state: State) -> Iterator[Move]:
        if any(decode.is_waiting or decode.reading for decode in state.decode):
            yield ()

    def _where_sender_restarts(self, state: State) -> Iterator[Move]:
        yield from ((sender,) for sender in range(len(state.senders)))

    def _where_receiver_restarts(self, _state: State) -> Iterator[Move]:
        yield ()

    def _where_loss(self, state: State) -> Iterator[Move]:
        yield from ((at,) for at, connection in enumerate(state.connections) if connection.up or connection.down)

    def _where_force(self, state: State) -> Iterator[Move]:
        for at, task in enumerate(state.tasks):
            if task.is_cancelled and any(piece.puts for piece in task.pieces):
                yield (at,)

    def _where_fail(self, state: State) -> Iterator[Move]:
        for at, task in enumerate(state.tasks):
            if not task.is_cancelled and any(piece.puts for piece in task.pieces):
                yield (at,)

    def _where_slow(self, state: State) -> Iterator[Move]:
        for sender, number in enumerate(state.senders):
            for key in self.sender_cores.entries[number].timers:
                if key[0] not in ("repeat", "heartbeat") and key[0] not in self.config.patient:
                    yield (sender, key)
        yield from ((-1, key) for key in self.receiver_cores.entries[state.receiver].timers)

    def _where_corrupt(self, state: State) -> Iterator[Move]:
        yield from ((at,) for at in range(len(state.verifying)))

    def _where_repeat(self, state: State) -> Iterator[Move]:
        for sender, number in enumerate(state.senders):
            for key in self.sender_cores.entries[number].timers:
                if key[0] in ("repeat", "heartbeat", "notify"):
                    yield (sender, key)
        for key in self.receiver_cores.entries[state.receiver].timers:
            if key[0] == "repeat":
                yield (-1, key)
