"""A simulated receiver: the real core, and its actions carried out as kvpd/service/receiver.py does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvpd.core.events import Report
from kvpd.core.messages import AnyMessage, HostIdentity, Region
from kvpd.core.receiver import ReceiverCore, ReceiverSettings
from kvpd.core.receiver import events as ev
from kvpd.simulation.in_place import Writers
from kvpd.simulation.network import Line, Listener, Network
from kvpd.simulation.plane import Landing, Memory, Target, checksum_of
from kvpd.simulation.schedule import Process
from kvpd.simulation.shell import Shell


class EngineSink(Protocol):
    """A decode engine's ears."""

    def granted(self, grant: ev.GrantClaim) -> None: ...

    def refused(self, refusal: ev.RefuseClaim) -> None: ...

    def announced(self, announcement: ev.AnnounceTransfer) -> None: ...

    def cut_off(self) -> None: ...


class Outside(Protocol):
    """What a receiver reaches in the world beyond its network."""

    def new_target(self, memory: Memory) -> tuple[bytes, Target]: ...

    def process_at(self, host: HostIdentity) -> Process | None: ...


class SimulatedReceiver(Shell[ev.ReceiverEvent, ev.ReceiverAction]):
    """One start of a receiver."""

    def __init__(
        self,
        process: Process,
        settings: ReceiverSettings,
        address: str,
        network: Network,
        outside: Outside,
        landing: Landing,
        exercised: Callable[[str], None],
    ) -> None:
        self.core = ReceiverCore(settings)
        super().__init__(process, self.core)
        self.settings = settings
        self.exercised = exercised
        self.address = address
        self.memory = Memory(process, landing, [None] * (settings.total_slots * settings.ranks), settings.total_slots)
        self.engines: dict[int, EngineSink] = {}
        self.writers = Writers()
        self.workers_failing = 0
        self._engine_count = 0
        self._outside = outside
        self._targets: dict[int, Target | None] = {}
        self._watches: dict[int, tuple[Process, int]] = {}
        self._random = network.random_for(process.name)
        self._listener: Listener = network.listen(address, process, self._heard)
        process.watch(self._died)

    def _heard(self, peer: bytes, _line: Line, message: AnyMessage) -> None:
        self.feed(ev.MessageReceived(peer, message))

    def attach(self, engine: EngineSink) -> int:
        """A new engine: its number."""
        self._engine_count += 1
        self.engines[self._engine_count] = engine
        return self._engine_count

    def detach(self, engine: int) -> None:
        """The engine's connection has ended."""
        del self.engines[engine]
        self.feed(ev.EngineClosed(engine))

    def _died(self) -> None:
        """Its memory is gone, and so is everything on its way there."""
        for target in self._targets.values():
            if target is not None:
                target.close()
        for flights in self.memory.flights.values():
            for flight in list(flights):
                flight.vanish()
        for process, watch in self._watches.values():
            process.unwatch(watch)

    # -------------------------------------------------------------- actions

    def perform(self, action: ev.ReceiverAction) -> None:
        match action:
            case Report():
                pass
            case ev.SendMessage(peer, message):
                self._listener.send(peer, message)
            case ev.OpenSession(session_no, process, sender_id, incarnation):
                self._targets[session_no] = None
                if process is not None:
                    self.writers.session_began(session_no, (sender_id, incarnation))
                self.process.soon(self._random.uniform(0.0001, 0.1), lambda: self._open_session(session_no, process))
            case ev.CloseSession(session_no):
                if (target := self._targets.pop(session_no)) is not None:
                    target.close()
                self.feed(ev.SessionClosed(session_no))
            case ev.ForgetSession(session_no):
                if (watch := self._watches.pop(session_no, None)) is not None:
                    watch[0].unwatch(watch[1])
                self.writers.session_forgotten(session_no)
            case ev.VerifyChunks():
                self.process.soon(self._random.uniform(0.0, 0.02), lambda: self._verify(action))
            case ev.CutEngine(engine):
                if engine in self.engines:
                    self.engines[engine].cut_off()
            case ev.GrantClaim(engine):
                if engine in self.engines:
                    self.engines[engine].granted(action)
            case ev.RefuseClaim(engine):
                if engine in self.engines:
                    self.engines[engine].refused(action)
            case ev.AnnounceTransfer():
                for sink in list(self.engines.values()):
                    sink.announced(action)

    def _open_session(self, session_no: int, process: HostIdentity | None) -> None:
        if self.workers_failing > 0:
            self.workers_failing -= 1
            self.exercised("worker_refused")
            self.feed(ev.SessionFailed(session_no, "no worker can be made"))
            return
        worker_address, target = self._outside.new_target(self.memory)
        if session_no not in self._targets:  # it was closed meanwhile
            target.close()
            return
        self._targets[session_no] = target
        length = self.settings.total_slots * self.settings.chunk_bytes
        ranks = range(self.settings.ranks)
        regions = tuple(Region(rank, worker_address, rank * length, length, b"rkey") for rank in ranks)
        self.feed(ev.SessionOpened(session_no, regions))
        if process is not None:
            self._watch_process(session_no, process)

    def _verify(self, action: ev.VerifyChunks) -> None:
        first = action.message.rank * self.settings.total_slots
        sums = (checksum_of(self.memory.slots[first + chunk.index]) for chunk in action.chunks)
        mismatched = sum(found != chunk.checksum for found, chunk in zip(sums, action.chunks, strict=True))
        self.feed(ev.ChunksVerified(action.transfer, action.message, mismatched))

    def _watch_process(self, session_no: int, identity: HostIdentity) -> None:
        process = self._outside.process_at(identity)

        def gone() -> None:
            self.feed(ev.ProcessDied(session_no))

        def died() -> None:
            self._watches.pop(session_no, None)
            self.process.soon(self._random.uniform(0.0, 0.01), lambda: self.writers.when_gone(session_no, gone))

        if process is None:
            self.writers.when_gone(session_no, gone)
        else:
            self._watches[session_no] = (process, process.watch(died))
