"""The world: one scenario, run to its end and then to rest, with every rule checked on the way.

The cores are the real ones. Everything else is drawn from one seed, so a run can be repeated to the letter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import attrs

from kvpd.core.events import TransferId
from kvpd.core.messages import ProxyNotif
from kvpd.core.receiver import ReceiverCore
from kvpd.core.receiver.sessions import Session, SessionState
from kvpd.errors import KvpdError
from kvpd.simulation.coverage import Coverage
from kvpd.simulation.faults import Faults
from kvpd.simulation.population import Population
from kvpd.simulation.rules import Rule, Violation
from kvpd.simulation.scenario import CancelBy, Claim, Request, Scenario
from kvpd.simulation.schedule import Call, Schedule
from kvpd.simulation.trace import Entry, Trace
from kvpd.simulation.truth import Truth

AUDIT_EVERY: Final = 8  # events of one party
TRACE_ENTRIES: Final = 60
_TICK_S: Final = 1.0
_RETRY_S: Final = 1.0
_RETRIES: Final = 30
_PROBE_S: Final = 30.0


@attrs.frozen
class Failure:
    """How a run failed: what by, in words, and what came before."""

    rule: str  # the same for every run that fails in the same way
    detail: str
    at: float
    trace: tuple[str, ...]


@attrs.frozen
class Outcome:
    """What came of a run."""

    scenario: Scenario
    failure: Failure | None
    coverage: Coverage
    steps: int  # events that cores have handled
    seconds: float  # virtual
    finished: int  # transfers that arrived whole
    bytes_verified: int


class World:
    """One run."""

    def __init__(
        self,
        scenario: Scenario,
        *,
        audit_every: int = AUDIT_EVERY,
        trace_entries: int = TRACE_ENTRIES,
        on_entry: Callable[[Entry], None] | None = None,
    ) -> None:
        self.scenario = scenario
        self.schedule = Schedule()
        self.truth = Truth()
        self.coverage = Coverage()
        self.trace = Trace(self.schedule, trace_entries, on_entry)
        self.people = Population(scenario, self.schedule, self.truth, self.coverage, self.trace, audit_every)
        self.people.on_ready = self._notified
        self._faults = Faults(self.people)
        self._planned = 0  # openings and claims that have not been tried for the last time

    def run(self) -> Outcome:
        """Run to the end, or until a rule is broken."""
        failure = None
        try:
            self._run()
        except Violation as exc:
            failure = self._failure(exc.rule, exc.detail)
        except (AssertionError, KvpdError, LookupError, TypeError, ValueError, AttributeError) as exc:
            failure = self._failure(f"{type(exc).__name__} in {_place(exc)}", str(exc))
        completed = len(self.truth.completed)
        return Outcome(
            self.scenario,
            failure,
            self.coverage,
            self.people.counter.steps,
            self.schedule.now,
            completed,
            self.truth.bytes_verified,
        )

    def _failure(self, rule: str, detail: str) -> Failure:
        return Failure(str(rule), detail, self.schedule.now, tuple(self.trace.lines()))

    def _run(self) -> None:
        people, scenario = self.people, self.scenario
        people.populate()
        for request in scenario.requests:
            self._plan(request)
        self._faults.plan(scenario.faults)
        while self.schedule.now < scenario.ends_at:
            self._tick()
        self.trace.note("world", "the faults are over")
        self._faults.heal()
        self._rest_until(self.schedule.now + self._rest_s())
        self._check_quiet()
        if scenario.all_arrive:
            self._check_arrived(scenario.requests)
        # Sessions that one side has given up already are found out by their leases.
        self.schedule.run_until(self.schedule.now + scenario.limits.lease_s + _TICK_S)
        self._probe()
        self._check_quiet()

    def _rest_until(self, until: float) -> None:
        """Let time pass until nothing is on its way, nor was a moment ago."""
        was_at_rest = False
        while self.schedule.now < until:
            self._tick()
            self._let_restart()
            is_at_rest = self._is_at_rest()
            if is_at_rest and was_at_rest:
                return
            was_at_rest = is_at_rest

    def _tick(self) -> None:
        self.schedule.run_until(self.schedule.now + _TICK_S)
        for sender in self.people.senders:
            if sender.process.is_alive and sender.process.stopped_since is None:
                self.people.sender_checks[sender].check_ages()
        for receiver in self.people.receivers:
            if receiver.process.is_alive and receiver.process.stopped_since is None:
                self.people.receiver_checks[receiver].check_ages()

    # -------------------------------------------------------------- requests

    def _plan(self, request: Request) -> None:
        ranks, skew_s = self.scenario.ranks, request.rank_skew_s
        first = max(0.0, -skew_s * (ranks - 1))
        for rank in range(ranks):
            self._planned += 1
            at = request.at + first + rank * skew_s
            self.schedule.at(at, lambda rank=rank: self._open(request, rank, _RETRIES))  # type: ignore[misc]
        for claim in request.claims:
            if claim.at is not None:
                self.schedule.at(claim.at, lambda claim=claim: self._claim_all(request, claim))  # type: ignore[misc]
                self._planned += ranks
        if request.cancel_by is CancelBy.DECODE:
            self.schedule.at(request.at + request.cancel_after_s, lambda: self._cancel_at_decode(request))

    def _again(self, left: int, call: Call) -> None:
        if left:
            self._planned += 1
            self.schedule.after(_RETRY_S, call)

    def _open(self, request: Request, rank: int, left: int) -> None:
        self._planned -= 1
        number = request.engine % self.scenario.prefill_engines * self.scenario.ranks + rank
        engine = self.people.prefill[request.sender, number]
        if not engine.is_connected:
            self._again(left, lambda: self._open(request, rank, left - 1))
            return
        proxy = f"proxy-{request.proxy}" if request.proxy is not None else None
        receiver = f"receiver-{request.receiver}:7300"
        engine.process.run(lambda: engine.open(request, receiver, proxy))

    def _claim_all(self, request: Request, claim: Claim) -> None:
        for rank in range(self.scenario.ranks):
            self._claim(request, claim, rank, _RETRIES)

    def _claim(self, request: Request, claim: Claim, rank: int, left: int) -> None:
        self._planned -= 1
        number = claim.engine % self.scenario.decode_engines * self.scenario.ranks + rank
        engine = self.people.decode[request.receiver, number]
        if not engine.is_connected:
            self._again(left, lambda: self._claim(request, claim, rank, left - 1))
            return
        sender_id = f"sender-{request.sender}" if claim.names_sender else None
        engine.process.run(lambda: engine.claim(request.req_id, claim, sender_id))

    def _cancel_at_decode(self, request: Request) -> None:
        engine = self.people.decode[request.receiver, 0]
        if engine.is_connected:
            engine.process.run(lambda: engine.cancel(request.req_id))

    def _notified(self, notif: ProxyNotif) -> None:
        """A proxy has heard that a request is ready: its decode engine claims it."""
        request = self.truth.requests.get(TransferId(notif.sender_id, notif.sender_incarnation, notif.transfer_no))
        assert request is not None, "a notification of a transfer that nobody opened"
        for claim in request.claims:
            if claim.at is None:
                self._planned += self.scenario.ranks
                self._claim_all(request, claim)

    # -------------------------------------------------------------- rest

    def _rest_s(self) -> float:
        """How long the longest chain of waits may take, when nothing goes wrong any more."""
        limits = self.scenario.limits
        claims = [claim for request in self.scenario.requests for claim in request.claims]
        reading = max((claim.timeout_s + 2 * claim.read_s for claim in claims), default=0.0)
        ending = limits.request_timeout_s + limits.ready_ttl_s + limits.claim_grace_s + limits.notify_give_up_s
        return ending + reading + 4 * limits.lease_s + 2 * _RETRIES * _RETRY_S

    def _is_at_rest(self) -> bool:
        people = self.people
        if self._planned:
            return False
        return all(s.core.is_clean and not s.requests for s in people.senders) and all(
            r.core.is_clean and not any(session.state is SessionState.CLOSING for session in sessions_of(r.core))
            for r in people.receivers
        )

    def _let_restart(self) -> None:
        """On one host only a process's death fences what its kernel may still write: restart whoever is waited for."""
        people = self.people
        for receiver in people.receivers:
            for session in sessions_of(receiver.core):
                if session.state is not SessionState.CLOSING or not session.worker_destroyed or session.process_dead:
                    continue
                for number, sender in enumerate(people.senders):
                    is_it = sender.settings.incarnation == session.incarnation
                    if is_it and sender.core.is_clean and sender.process.is_alive:
                        self.trace.note("world", f"{sender.process.name} is restarted to fence its slots")
                        sender.process.kill()
                        people.start_sender(number)

    def _probe(self) -> None:
        """Whatever has happened, a new request from everybody to everybody arrives."""
        now = self.schedule.now
        probes = [
            Request(
                req_id=f"probe-{sender}-{receiver}",
                at=now,
                sender=sender,
                receiver=receiver,
                engine=0,
                keys=(f"probe-{sender}-{receiver}".encode(),),
                last_chunk_bytes=self.scenario.chunk_bytes,
                batches=(1,),
                claims=(Claim(engine=0, at=now, timeout_s=_PROBE_S, read_s=0.0),),
            )
            for sender in range(len(self.people.senders))
            for receiver in range(min(len(self.people.receivers), self.scenario.limits.peers_max))
        ]
        if len(self.people.senders) > self.scenario.limits.sessions_max:
            return  # there is no room for everybody
        for probe in probes:
            self._plan(probe)
        self._rest_until(now + _PROBE_S)
        self._check_arrived(probes)

    def _check_arrived(self, requests: Sequence[Request]) -> None:
        arrived = {
            self.truth.requests[transfer].req_id for transfer in self.truth.completed & self.truth.requests.keys()
        }
        lost = [request.req_id for request in requests if request.req_id not in arrived]
        if lost:
            raise Violation(Rule.PROGRESS, f"{', '.join(lost)} did not arrive, and nothing was wrong")

    def _check_quiet(self) -> None:
        for sender in self.people.senders:
            checks = self.people.sender_checks[sender]
            checks.check_quiet()
            for number, proxy in checks.told.items():
                key = (sender.settings.sender_id, sender.settings.incarnation, number)
                if key not in self.people.heard[proxy]:
                    raise Violation(Rule.QUIET_MEANS_CLEAN, f"{proxy} was never told of {sender.identity(number)}")
        for receiver in self.people.receivers:
            self.people.receiver_checks[receiver].check_quiet()


def sessions_of(core: ReceiverCore) -> list[Session]:
    """Every session, open or closing."""
    return list(core._sessions._by_number.values())


def _place(exc: BaseException) -> str:
    """Where in kvpd an exception was raised, without line numbers, which a repair moves."""
    trace = exc.__traceback__
    place = "?"
    while trace is not None:
        code = trace.tb_frame.f_code
        if "kvpd" in code.co_filename:
            place = f"{code.co_filename.rpartition('/kvpd/')[2]}:{code.co_name}"
        trace = trace.tb_next
    return place
