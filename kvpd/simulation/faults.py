"""Faults: what each kind does to the world, and what ends it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from kvpd.core.events import DrainExpired, DrainRequested
from kvpd.simulation.network import Way
from kvpd.simulation.population import Population
from kvpd.simulation.rogue import Rogue
from kvpd.simulation.scenario import Fault, FaultKind
from kvpd.simulation.schedule import Call, Process

T = TypeVar("T")
_WAYS = {
    FaultKind.PARTITION: frozenset(Way),
    FaultKind.PARTITION_TO_RECEIVER: frozenset({Way.TO_RECEIVER}),
    FaultKind.PARTITION_TO_SENDER: frozenset({Way.TO_SENDER}),
}


class Faults:
    """Applies a scenario's faults."""

    def __init__(self, world: Population) -> None:
        self._world = world
        self._schedule = world.schedule
        self._random = world.random_for("faults")
        self._rogues = 0

    def plan(self, faults: tuple[Fault, ...]) -> None:
        """Have each happen at its time."""
        for fault in faults:
            self._schedule.at(fault.at, lambda fault=fault: self._apply(fault))  # type: ignore[misc]

    def heal(self) -> None:
        """Nothing goes wrong any more."""
        plane = self._world.plane
        plane.slow_until = 0.0
        plane.failing.clear()
        plane.corrupting.clear()
        plane.refusing.clear()
        for receiver in self._world.receivers:
            receiver.workers_failing = 0

    def _apply(self, fault: Fault) -> None:
        apply = self._table()[fault.kind]
        if apply(fault):
            self._world.exercised(fault.kind)
            self._world.trace.note("fault", f"{fault.kind} #{fault.target} for {fault.duration_s:.2f} s")

    def _later(self, fault: Fault, call: Call) -> None:
        self._schedule.at(fault.at + fault.duration_s, call)

    def _table(self) -> dict[FaultKind, Callable[[Fault], bool]]:
        world = self._world
        return {
            FaultKind.DISCONNECT: lambda fault: self._cut(fault, repeats=False),
            FaultKind.DUPLICATION: lambda fault: self._cut(fault, repeats=True),
            FaultKind.CONGESTION: self._congest,
            FaultKind.PARTITION: self._partition,
            FaultKind.PARTITION_TO_RECEIVER: self._partition,
            FaultKind.PARTITION_TO_SENDER: self._partition,
            FaultKind.PUT_SLOW: self._slow_puts,
            FaultKind.PUT_STALL: self._stall_puts,
            FaultKind.PUT_FAILURE: self._fail_puts,
            FaultKind.PUT_CORRUPTION: self._corrupt_puts,
            FaultKind.ENDPOINT_BROKEN: self._break_endpoint,
            FaultKind.ENDPOINT_REFUSED: self._refuse_endpoint,
            FaultKind.WORKER_REFUSED: self._refuse_worker,
            FaultKind.SENDER_CRASH: self._crash_sender,
            FaultKind.SENDER_PAUSE: lambda fault: self._pause(fault, pick(world.senders, fault).process),
            FaultKind.SENDER_DRAIN: self._drain_sender,
            FaultKind.RECEIVER_CRASH: self._crash_receiver,
            FaultKind.RECEIVER_PAUSE: lambda fault: self._pause(fault, pick(world.receivers, fault).process),
            FaultKind.RECEIVER_DRAIN: self._drain_receiver,
            FaultKind.HOST_SUSPEND: self._suspend,
            FaultKind.PREFILL_CRASH: lambda fault: self._end_prefill(fault, at_once=True),
            FaultKind.PREFILL_PAUSE: lambda fault: self._pause(fault, pick_value(world.prefill, fault).process),
            FaultKind.PREFILL_HANG_UP: lambda fault: self._end_prefill(fault, at_once=False),
            FaultKind.DECODE_CRASH: lambda fault: self._end_decode(fault, at_once=True),
            FaultKind.DECODE_PAUSE: lambda fault: self._pause(fault, pick_value(world.decode, fault).process),
            FaultKind.DECODE_HANG_UP: lambda fault: self._end_decode(fault, at_once=False),
            FaultKind.PROXY_CRASH: self._crash_proxy,
            FaultKind.PROXY_SILENCE: self._silence_proxy,
            FaultKind.ROGUE: self._let_rogue,
        }

    # -------------------------------------------------------------- network

    def _cut(self, fault: Fault, *, repeats: bool) -> bool:
        lines = list(self._world.network.lines)
        if not lines:
            return False
        lines[fault.target % len(lines)].cut(repeats=repeats)
        return not repeats

    def _congest(self, fault: Fault) -> bool:
        lines = list(self._world.network.lines)
        if lines:
            lines[fault.target % len(lines)].congest(fault.at + fault.duration_s)
        return False  # counted when a message is dropped

    def _partition(self, fault: Fault) -> bool:
        """Between one receiver and one sender, or every sender."""
        world = self._world
        address = pick(world.receivers, fault).address
        victim = f"sender-{fault.target // len(world.receivers) % (len(world.senders) + 1)}"
        everybody = victim == f"sender-{len(world.senders)}"

        def applies(process: Process, to: str) -> bool:
            return to == address and (everybody or process.name == victim)

        number = world.network.block(applies, _WAYS[fault.kind])
        self._later(fault, lambda: world.network.unblock(number))
        return True

    # -------------------------------------------------------------- data plane

    def _slow_puts(self, fault: Fault) -> bool:
        self._world.plane.slow_until = fault.at + fault.duration_s
        return False  # counted put by put

    def _stall_puts(self, fault: Fault) -> bool:
        self._world.plane.stall(pick(self._world.receivers, fault).process, fault.at + fault.duration_s)
        return True

    def _fail_puts(self, fault: Fault) -> bool:
        self._world.plane.failing[pick(self._world.senders, fault).process] = 1 + fault.target % 3
        return False  # counted put by put

    def _corrupt_puts(self, fault: Fault) -> bool:
        if self._world.scenario.limits.verify != "off":
            self._world.plane.corrupting[pick(self._world.senders, fault).process] = 1 + fault.target % 3
        return False  # counted put by put

    def _break_endpoint(self, fault: Fault) -> bool:
        endpoints = list(self._world.plane.endpoints)
        if not endpoints:
            return False
        endpoints[fault.target % len(endpoints)].fail("connection reset")
        return True

    def _refuse_endpoint(self, fault: Fault) -> bool:
        self._world.plane.refusing[pick(self._world.senders, fault).process] = 1
        return False  # counted when it happens

    def _refuse_worker(self, fault: Fault) -> bool:
        pick(self._world.receivers, fault).workers_failing = 1
        return False  # counted when it happens

    # -------------------------------------------------------------- processes

    def _pause(self, fault: Fault, process: Process) -> bool:
        if not process.is_alive:
            return False
        process.stop()
        timers_first = self._random.random() < 0.5
        self._later(fault, lambda: process.proceed(timers_first=timers_first))
        return True

    def _suspend(self, fault: Fault) -> bool:
        """Of one machine, with everybody on it; what is started there meanwhile is none of ours."""
        host = self._world.hosts[fault.target % len(self._world.hosts)]
        host.suspended_until = max(host.suspended_until, fault.at + fault.duration_s)
        for process in self._world.processes:
            if process.host is host and process.is_alive:
                self._pause(fault, process)
        return True

    def _crash_sender(self, fault: Fault) -> bool:
        world, number = self._world, fault.target % len(self._world.senders)
        process = world.senders[number].process
        if not process.is_alive:
            return False
        process.kill()
        self._later(fault, lambda: world.start_sender(number))
        return True

    def _crash_receiver(self, fault: Fault) -> bool:
        world, number = self._world, fault.target % len(self._world.receivers)
        process = world.receivers[number].process
        if not process.is_alive:
            return False
        process.kill()
        self._later(fault, lambda: world.start_receiver(number))
        return True

    def _drain_sender(self, fault: Fault) -> bool:
        """A restart with good manners."""
        world, number = self._world, fault.target % len(self._world.senders)
        sender = world.senders[number]
        if not sender.process.is_alive:
            return False
        sender.process.soon(0.0, lambda: sender.feed(DrainRequested()))

        def exit_and_start() -> None:
            if sender.process.is_alive:
                sender.process.kill()
                world.start_sender(number)

        sender.process.soon(fault.duration_s * 0.8, lambda: sender.feed(DrainExpired()))
        self._later(fault, exit_and_start)
        return True

    def _drain_receiver(self, fault: Fault) -> bool:
        world, number = self._world, fault.target % len(self._world.receivers)
        receiver = world.receivers[number]
        if not receiver.process.is_alive:
            return False
        receiver.process.soon(0.0, lambda: receiver.feed(DrainRequested()))

        def exit_and_start() -> None:
            if receiver.process.is_alive:
                receiver.process.kill()
                world.start_receiver(number)

        receiver.process.soon(fault.duration_s * 0.8, lambda: receiver.feed(DrainExpired()))
        self._later(fault, exit_and_start)
        return True

    # -------------------------------------------------------------- engines and proxies

    def _end_prefill(self, fault: Fault, *, at_once: bool) -> bool:
        world = self._world
        key = sorted(world.prefill)[fault.target % len(world.prefill)]
        engine = world.prefill[key]
        if not engine.process.is_alive or not engine.sender.process.is_alive:
            return False
        if at_once:
            engine.process.kill()
        else:
            engine.process.run(engine.hang_up)

        def restart() -> None:
            engine.process.kill()
            if not world.prefill[key].process.is_alive:
                world.attach_prefill(*key)

        self._later(fault, restart)
        return True

    def _end_decode(self, fault: Fault, *, at_once: bool) -> bool:
        world = self._world
        key = sorted(world.decode)[fault.target % len(world.decode)]
        engine = world.decode[key]
        if not engine.process.is_alive or not engine.receiver.process.is_alive:
            return False
        if at_once:
            engine.process.kill()
        else:
            engine.process.run(engine.hang_up)

        def restart() -> None:
            engine.process.kill()
            if not world.decode[key].process.is_alive:
                world.attach_decode(*key)
                for req_id, claim, sender_id in engine.unread:
                    world.decode[key].claim(req_id, claim, sender_id)

        self._later(fault, restart)
        return True

    def _crash_proxy(self, fault: Fault) -> bool:
        world = self._world
        if not world.proxies:
            return False
        number = fault.target % len(world.proxies)
        if not world.proxies[number].process.is_alive:
            return False
        world.proxies[number].process.kill()
        self._later(fault, lambda: world.start_proxy(number))
        return True

    def _silence_proxy(self, fault: Fault) -> bool:
        if not self._world.proxies:
            return False
        proxy = pick(self._world.proxies, fault)
        proxy.is_silent = True

        def speak() -> None:
            proxy.is_silent = False

        self._later(fault, speak)
        return True

    def _let_rogue(self, fault: Fault) -> bool:
        self._rogues += 1
        number = fault.target % len(self._world.receivers)
        Rogue(self._world, number, self._rogues, fault.at + fault.duration_s)
        return True


def pick(parties: list[T], fault: Fault) -> T:
    """The one that a fault is meant for."""
    return parties[fault.target % len(parties)]


def pick_value(parties: dict[tuple[int, int], T], fault: Fault) -> T:
    """The one that a fault is meant for, in the order of their numbers."""
    return parties[sorted(parties)[fault.target % len(parties)]]
