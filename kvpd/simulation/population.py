"""Everybody in the world: who runs where, and how each starts, dies and starts again."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from random import Random

from kvpd.core.messages import HostIdentity, Notification, ProxyNotif
from kvpd.core.receiver import ReceiverSettings
from kvpd.core.sender import SenderSettings
from kvpd.simulation.coverage import Coverage
from kvpd.simulation.engines import DecodeEngine, PrefillEngine
from kvpd.simulation.network import Network
from kvpd.simulation.plane import Memory, Plane, Target
from kvpd.simulation.proxy import Heard, SimulatedProxy
from kvpd.simulation.receiver import SimulatedReceiver
from kvpd.simulation.receiver_checks import ReceiverChecks
from kvpd.simulation.rules import Rule, Violation
from kvpd.simulation.scenario import Scenario
from kvpd.simulation.schedule import Host, Process, Schedule
from kvpd.simulation.sender import CUT_OFF_S, SimulatedSender
from kvpd.simulation.sender_checks import SenderChecks
from kvpd.simulation.trace import Trace
from kvpd.simulation.truth import Truth

LAYOUT = "simulated"
_EVENTS_MAX = 2_000_000  # of one run: more is a storm that feeds itself
_PID_NAMESPACE = "pid:1"
_REPLACED_S = 5.0  # until an engine that hangs is killed and started again


class Counter:
    """Counts the events that all cores have handled."""

    def __init__(self) -> None:
        self.steps = 0

    def before(self, _event: object) -> None:
        """One more."""
        self.steps += 1
        if self.steps > _EVENTS_MAX:
            raise Violation(Rule.BOUNDED, f"{_EVENTS_MAX} events in one run, and no end")

    def after(self, _event: object, _actions: object) -> None:
        """Counted already."""


class Population:
    """All processes. Whoever is down is None in its list, or a dead process."""

    def __init__(
        self, scenario: Scenario, schedule: Schedule, truth: Truth, coverage: Coverage, trace: Trace, audit_every: int
    ) -> None:
        self.scenario = scenario
        self.schedule = schedule
        self.truth = truth
        self.coverage = coverage
        self.trace = trace
        self.network = Network(schedule, self.random_for, self.exercised, scenario.latency_s)
        self.plane = Plane(
            schedule, self.random_for("plane"), self.exercised, put_s=scenario.put_s, window=scenario.put_window
        )
        self.hosts = [Host(f"boot-{number}") for number in range(scenario.hosts)]
        self.processes: list[Process] = []
        self.receivers: list[SimulatedReceiver] = []
        self.senders: list[SimulatedSender] = []
        self.receiver_checks: dict[SimulatedReceiver, ReceiverChecks] = {}
        self.sender_checks: dict[SimulatedSender, SenderChecks] = {}
        self.prefill: dict[tuple[int, int], PrefillEngine] = {}  # by sender and number, the ranks of an engine in a row
        self.decode: dict[tuple[int, int], DecodeEngine] = {}  # by receiver and number, likewise
        self.proxies: list[SimulatedProxy] = []
        self.heard: dict[str, Heard] = {}  # by proxy address, over all its starts
        self.on_ready: Callable[[ProxyNotif], None] = lambda notif: None
        self.counter = Counter()
        self._audit_every = audit_every
        self._pids = itertools.count(100)
        self._incarnations = itertools.count(1)
        self._targets: dict[bytes, Target] = {}

    def random_for(self, name: str) -> Random:
        """A source of chance of one's own, so that a request less changes little elsewhere."""
        return Random(f"{self.scenario.seed}/{name}")  # noqa: S311  chance, not secrets

    def exercised(self, kind: str) -> None:
        """A fault has had its effect."""
        self.coverage.faults[kind] += 1

    def populate(self) -> None:
        """Start everybody."""
        for number in range(self.scenario.proxies):
            self.start_proxy(number)
        for number in range(len(self.scenario.receiver_hosts)):
            self.start_receiver(number)
        for number in range(len(self.scenario.sender_hosts)):
            self.start_sender(number)

    def new_process(self, host: int, name: str) -> Process:
        """A process that runs, unless its host is suspended."""
        process = Process(self.schedule, self.hosts[host], name, next(self._pids))
        self.processes.append(process)
        if process.host.suspended_until > self.schedule.now:
            process.stop()
            self.schedule.at(process.host.suspended_until, process.proceed)
        return process

    def _identity(self, process: Process) -> HostIdentity:
        return HostIdentity(process.host.boot_id, _PID_NAMESPACE, process.pid, int(process.started_at * 100) + 1)

    # -------------------------------------------------------------- what the parties reach

    def new_target(self, memory: Memory) -> tuple[bytes, Target]:
        """A worker for a session."""
        address = f"worker-{len(self._targets)}".encode()
        target = self._targets[address] = Target(memory)
        return address, target

    def target(self, worker_address: bytes) -> Target | None:
        """The worker of this address."""
        return self._targets.get(worker_address)

    def process_at(self, host: HostIdentity) -> Process | None:
        """The living process of this identity."""
        for process in self.processes:
            if process.pid == host.pid and process.is_alive and self._identity(process) == host:
                return process
        return None

    def notify(self, sender: SimulatedSender, proxy: str, notif: Notification) -> None:
        """A notification leaves for a proxy; nobody may be there."""
        for candidate in self.proxies:
            if candidate.address == proxy:
                candidate.deliver(sender, notif)

    # -------------------------------------------------------------- starts

    def start_receiver(self, number: int) -> None:
        """A new start of a receiver, and its engines' connections."""
        scenario, limits = self.scenario, self.scenario.limits
        process = self.new_process(scenario.receiver_hosts[number], f"receiver-{number}")
        settings = ReceiverSettings(
            receiver_id=f"receiver-{number}",
            incarnation=next(self._incarnations),
            total_slots=scenario.slots[number],
            chunk_bytes=scenario.chunk_bytes,
            layout=LAYOUT,
            ranks=scenario.ranks,
            host=self._identity(process),
            allocation_timeout_s=limits.allocation_timeout_s,
            queue_depth_max=limits.queue_depth_max,
            progress_timeout_s=limits.progress_timeout_s,
            ready_ttl_s=limits.ready_ttl_s,
            claim_grace_s=limits.claim_grace_s,
            claim_ttl_s=limits.claim_ttl_s,
            bypass_max=limits.bypass_max,
            verify=limits.verify,
            share="share" if scenario.in_place and limits.verify == "off" else "",
            lease_s=limits.lease_s,
            put_deadline_s=limits.put_deadline_s,
            sessions_max=limits.sessions_max,
            claims_max=limits.claims_max,
            outcomes_max=limits.outcomes_max,
        )
        address = f"receiver-{number}:7300"
        receiver = SimulatedReceiver(process, settings, address, self.network, self, self.truth, self.exercised)
        self.truth.receivers[receiver.memory] = receiver
        checks = self.receiver_checks[receiver] = ReceiverChecks(receiver, self.truth, self.coverage, self._audit_every)
        receiver.observers += [self.counter, self.trace.observer(process.name), checks]
        self.receivers[number:] = [receiver, *self.receivers[number + 1 :]]
        for engine in range(scenario.decode_engines * scenario.ranks):
            old = self.decode.get((number, engine))
            self.attach_decode(number, engine, old.process if old is not None else None)

    def start_sender(self, number: int) -> None:
        """A new start of a sender, and its engines' connections."""
        scenario, limits = self.scenario, self.scenario.limits
        process = self.new_process(scenario.sender_hosts[number], f"sender-{number}")
        settings = SenderSettings(
            sender_id=f"sender-{number}",
            incarnation=next(self._incarnations),
            staging_slots=scenario.staging_slots[number],
            chunk_bytes=scenario.chunk_bytes,
            layout=LAYOUT,
            ranks=scenario.ranks,
            host=self._identity(process),
            proxy_address="proxy-0" if scenario.proxies else None,
            request_timeout_s=limits.request_timeout_s,
            peers_max=limits.peers_max,
            transfers_max=limits.transfers_max,
            stages_max=limits.stages_max,
            notifications_max=limits.notifications_max,
            proxies_max=limits.proxies_max,
            notify_give_up_s=limits.notify_give_up_s,
        )
        sender = SimulatedSender(process, settings, self.network, self.plane, self, self.exercised)
        checks = self.sender_checks[sender] = SenderChecks(
            sender, self.truth, self.coverage, self._audit_every, limits.put_deadline_s + CUT_OFF_S + limits.lease_s
        )
        sender.observers += [self.counter, self.trace.observer(process.name), checks]
        self.senders[number:] = [sender, *self.senders[number + 1 :]]
        for engine in range(scenario.prefill_engines * scenario.ranks):
            old = self.prefill.get((number, engine))
            self.attach_prefill(number, engine, old.process if old is not None else None)

    def attach_prefill(self, sender: int, engine: int, process: Process | None = None) -> None:
        """A prefill engine connects; in a new process, if it has none that lives."""
        name = f"prefill-{sender}.{engine}"
        if process is None or not process.is_alive:
            process = self.new_process(self.scenario.sender_hosts[sender], name)
        self.prefill[sender, engine] = PrefillEngine(
            process, self.senders[sender], self.truth, self.random_for(name), self.exercised, engine
        )

    def attach_decode(self, receiver: int, engine: int, process: Process | None = None) -> None:
        """A decode engine connects; in a new process, if it has none that lives."""
        name = f"decode-{receiver}.{engine}"
        if process is None or not process.is_alive:
            process = self.new_process(self.scenario.receiver_hosts[receiver], name)
        connected = self.decode[receiver, engine] = DecodeEngine(
            process, self.receivers[receiver], self.truth, self.random_for(name), self.exercised, engine
        )

        def replace() -> None:
            process.kill()
            if not self.decode[receiver, engine].process.is_alive:
                self.attach_decode(receiver, engine)

        connected.on_cut_off = lambda: self.schedule.after(_REPLACED_S, replace)

    def start_proxy(self, number: int) -> None:
        """A new start of a proxy."""
        address = f"proxy-{number}"
        process = self.new_process(0, address)
        heard = self.heard.setdefault(address, Heard())

        def on_ready(notif: ProxyNotif) -> None:
            self.on_ready(notif)  # whoever listens by then

        proxy = SimulatedProxy(process, address, self.random_for(address), heard, on_ready, self.scenario.latency_s)
        self.proxies[number:] = [proxy, *self.proxies[number + 1 :]]
