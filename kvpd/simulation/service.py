"""The same scenarios over the real service: kvpd.Sender and kvpd.Receiver, the memory transports, a virtual clock.

What is real here and is not in the simulated world: tasks, cancel scopes, channels, and every order in which trio may
run them, drawn from the seed. What is left out: processes that stop or are killed with writes in their kernel (a crash
here is a daemon that is cancelled), clocks that jump, rogues, endpoints and workers that cannot be made, and engines in
processes of their own. Faults of those kinds are passed over.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final

import trio
from trio.testing import MockClock

from kvpd.core.messages import FailNotif, ProxyAck, ProxyNotif, decode, encode
from kvpd.errors import KvpdError, TransferError
from kvpd.service.receiver import Chunk
from kvpd.service.sender import Sender
from kvpd.service.staging import Transfer
from kvpd.simulation.coverage import Coverage
from kvpd.simulation.rules import Rule, Violation
from kvpd.simulation.scenario import SERVICE_KINDS, CancelBy, Claim, Fault, FaultKind, Misuse, Request, Scenario, Style
from kvpd.simulation.service_daemons import PROXY_ADDRESS, Daemon, Daemons, receiver_address
from kvpd.simulation.world import Failure, Outcome
from kvpd.transports.memory_control import MemoryNetwork
from kvpd.transports.memory_data import MemoryFabric

_LIMIT_S: Final = 3600.0  # of virtual time, for a whole run
_PROBE_S: Final = 30.0


@contextmanager
def _schedule_from(seed: int) -> Iterator[None]:
    """Trio shuffles those who can run: have it do so in an order that the seed decides, as hypothesis has it."""
    runner: Any = trio._core._run
    before = runner._ALLOW_DETERMINISTIC_SCHEDULING, runner._r
    runner._ALLOW_DETERMINISTIC_SCHEDULING, runner._r = True, random.Random(seed)  # noqa: S311
    try:
        yield
    finally:
        runner._ALLOW_DETERMINISTIC_SCHEDULING, runner._r = before


def run_service(scenario: Scenario) -> Outcome:
    """One run of a scenario over the real service."""
    world = ServiceWorld(scenario)
    failure = None
    try:
        with _schedule_from(scenario.seed):
            trio.run(world.run, clock=MockClock(autojump_threshold=0))
    except* Violation as group:
        violation = _first(group)
        assert isinstance(violation, Violation)
        failure = world.failure(violation.rule.value, violation.detail)
    except* (AssertionError, KvpdError, LookupError, TypeError, ValueError, AttributeError, trio.TooSlowError) as group:
        failure = world.failure(type(_first(group)).__name__, str(_first(group)))
    return Outcome(scenario, failure, world.coverage, world.steps, world.ended_at, world.finished, world.bytes_verified)


def _first(group: BaseExceptionGroup[Any]) -> BaseException:
    """One of those that were raised together."""
    exc: BaseException = group
    while isinstance(exc, BaseExceptionGroup):
        exc = exc.exceptions[0]
    return exc


def content(key: bytes, length: int) -> bytes:
    """The bytes of a chunk, which its key and its length decide."""
    return random.Random(key).randbytes(length)  # noqa: S311


class ServiceWorld:
    """One run."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.coverage = Coverage()
        self.steps = 0
        self.finished = 0
        self.bytes_verified = 0
        self.ended_at = 0.0
        self._random = random.Random(f"{scenario.seed}/service")  # noqa: S311
        self.arrived: set[str] = set()  # labels of what was read whole
        self._sending: dict[trio.CancelScope, None] = {}
        self._reading: dict[trio.CancelScope, None] = {}
        self._stepped = trio.Event()
        self._proxy_is_silent = False
        self._notes: list[str] = []

    def failure(self, rule: str, detail: str) -> Failure:
        """What is told of a run that failed."""
        return Failure(rule, detail, self.ended_at, tuple(self._notes[-60:]))

    def _step(self) -> None:
        self.steps += 1
        self._stepped.set()

    def _note(self, text: str) -> None:
        self._notes.append(f"{trio.current_time() - self._started:10.4f} s  {text}")

    # -------------------------------------------------------------- the run

    async def run(self) -> None:
        """From the first request until everything is clean."""
        self._started = trio.current_time()
        scenario = self.scenario
        self._network = MemoryNetwork(delay_s=scenario.latency_s)
        self._fabric = MemoryFabric(lambda _length: scenario.put_s * (0.2 + self._random.random()))
        self._fabric.late_landing = True
        self._daemons = Daemons(scenario, self._network, self._fabric, self._step)
        try:
            with trio.fail_after(_LIMIT_S):
                async with trio.open_nursery() as daemons:
                    daemons.start_soon(self._run_proxy)
                    await self._daemons.start(daemons)
                    await self._all_requests()
                    await self._settle()
                    daemons.cancel_scope.cancel()
        finally:
            self.ended_at = trio.current_time() - self._started

    # -------------------------------------------------------------- rest

    async def _settle(self) -> None:
        """Nothing goes wrong any more: all comes to rest, and a new request from everybody to everybody arrives."""
        limits = self.scenario.limits
        await self._until_clean(limits.request_timeout_s + limits.ready_ttl_s + limits.notify_give_up_s)
        await trio.sleep(limits.lease_s + 1.0)
        pairs = [(sender, receiver) for sender in self._daemons.senders for receiver in self._daemons.receivers]
        probes = [self._probe(sender, receiver) for sender, receiver in pairs]
        with trio.move_on_after(_PROBE_S):
            async with trio.open_nursery() as nursery:
                for probe in probes:
                    nursery.start_soon(self._request, probe)
        lost = [probe.req_id for probe in probes if probe.req_id not in self.arrived]
        if lost:
            raise Violation(Rule.PROGRESS, f"{', '.join(lost)} did not arrive, and nothing was wrong")
        await self._until_clean(limits.lease_s)

    def _probe(self, sender: int, receiver: int) -> Request:
        name = f"probe-{sender}-{receiver}"
        return Request(
            req_id=name,
            at=0.0,
            sender=sender,
            receiver=receiver,
            engine=0,
            keys=(name.encode(),),
            last_chunk_bytes=self.scenario.chunk_bytes,
            batches=(1,),
            claims=(Claim(engine=0, at=0.0, timeout_s=_PROBE_S, read_s=0.0),),
        )

    async def _until_clean(self, seconds: float) -> None:
        with trio.move_on_after(seconds):
            while not self._daemons.are_clean:
                self._stepped = trio.Event()
                await self._stepped.wait()
        if not self._daemons.are_clean:
            counts = {receiver.config.name: receiver.core.counts for receiver in self._daemons.receivers.values()}
            raise Violation(Rule.QUIET_MEANS_CLEAN, f"after {seconds:g} s of rest: {counts}")

    # -------------------------------------------------------------- requests

    async def _all_requests(self) -> None:
        async with trio.open_nursery() as nursery:
            for request in self.scenario.requests:
                nursery.start_soon(self._request, request)
            for fault in self.scenario.faults:
                if fault.kind in SERVICE_KINDS:
                    nursery.start_soon(self._fault, fault)
        self._fabric.resume()
        self._fabric._failures.clear()  # that nobody has met
        self._network.heal()
        self._fabric.land_late()

    async def _request(self, request: Request) -> None:
        await trio.sleep(request.at)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._send, request)
            for claim in request.claims:
                nursery.start_soon(self._read, request, claim)
            if request.cancel_by is not CancelBy.NOBODY:
                nursery.start_soon(self._cancel, request)

    @contextmanager
    def _surviving(self, daemon: Daemon, tasks: dict[trio.CancelScope, None], what: str) -> Iterator[None]:
        """A task that ends with its engine, and with its daemon; that it was refused is no surprise."""
        with trio.CancelScope() as scope:
            tasks[scope] = daemon.users[scope] = None
            try:
                yield
            except TransferError as exc:
                self.coverage.codes[exc.code] += 1
                self._note(f"{what} ended: {exc}")
            finally:
                del tasks[scope], daemon.users[scope]

    async def _send(self, request: Request) -> None:
        daemon = self._daemons.named(f"sender-{request.sender}")
        await daemon.up.wait()
        with self._surviving(daemon, self._sending, request.req_id):
            await self._send_through(self._daemons.senders[request.sender], request)

    async def _send_through(self, sender: Sender, request: Request) -> None:
        receiver = receiver_address(request.receiver)
        total = 0 if request.misuse is Misuse.NO_TOTAL else len(request.keys)
        async with sender.open(request.req_id, receiver=receiver, total_chunks=total) as transfer:
            self._note(f"{request.req_id} opened at sender-{request.sender}")
            if request.style is Style.NEVER:
                await transfer.wait_ended()
            else:
                first = 0
                for count in request.batches:
                    await trio.sleep(request.compute_s)
                    await self._stage(transfer, request, first, count)
                    first += count
        self.finished += 1
        self._note(f"{request.req_id} is done")

    async def _stage(self, transfer: Transfer, request: Request, first: int, count: int) -> None:
        is_last = first + count == len(request.keys)
        keys = request.keys[first : first + count]
        if is_last and request.misuse is Misuse.OVERFLOW:
            keys += (b"one too many",)
        length = request.last_chunk_bytes if is_last else None
        async with transfer.stage(keys, last=is_last, last_chunk_bytes=length) as slots:
            position = first
            async for slot in slots:
                if slot is not None:
                    slot[:] = content(keys[position - first], len(slot))
                position += 1
            await trio.sleep(request.fill_s)

    async def _read(self, request: Request, claim: Claim) -> None:
        if claim.at is not None:
            await trio.sleep_until(self._started + claim.at)
        daemon = self._daemons.named(f"receiver-{request.receiver}")
        await daemon.up.wait()
        receiver = self._daemons.receivers[request.receiver]
        sender_id = f"sender-{request.sender}" if claim.names_sender else None
        with self._surviving(daemon, self._reading, f"the claim of {request.req_id}"):
            async with receiver.claim(request.req_id, timeout_s=claim.timeout_s, sender_id=sender_id) as chunks:
                self._verify(request, chunks)
                await trio.sleep(claim.read_s)
                self._verify(request, chunks)
                self.arrived.add(request.req_id)

    def _verify(self, request: Request, chunks: Sequence[Chunk]) -> None:
        lengths = [self.scenario.chunk_bytes] * (len(request.keys) - 1) + [request.last_chunk_bytes]
        if [chunk.key for chunk in chunks] != list(request.keys):
            raise Violation(Rule.TRUTH, f"{request.req_id} was granted other keys than its own")
        for chunk, length in zip(chunks, lengths, strict=True):
            if bytes(chunk.view) != content(chunk.key, length):
                raise Violation(Rule.TRUTH, f"slot {chunk.index} does not hold {chunk.key!r} of {request.req_id}")
            self.bytes_verified += length

    async def _cancel(self, request: Request) -> None:
        await trio.sleep(request.cancel_after_s)
        if request.cancel_by is CancelBy.DECODE:
            self._daemons.receivers[request.receiver].cancel(request.req_id)
        else:
            self._daemons.senders[request.sender].cancel(request.req_id)

    # -------------------------------------------------------------- faults

    async def _fault(self, fault: Fault) -> None:
        await trio.sleep(fault.at)
        self.coverage.faults[fault.kind] += 1
        self._note(f"fault {fault.kind} #{fault.target} for {fault.duration_s:.2f} s")
        victims = self._daemons.of(fault.kind.partition("_")[0])
        victim = victims[fault.target % len(victims)]
        match fault.kind:
            case FaultKind.DISCONNECT | FaultKind.PARTITION:
                await self._break_network(fault)
            case FaultKind.PUT_STALL:
                self._fabric.stall()
                await trio.sleep(fault.duration_s)
                self._fabric.resume()
                self._fabric.land_late()
            case FaultKind.PUT_FAILURE:
                self._fabric.fail_next_puts(1 + fault.target % 3)
            case FaultKind.SENDER_DRAIN | FaultKind.RECEIVER_DRAIN if victim.up.is_set():
                number = int(victim.name.rpartition("-")[2])
                sides: Any = self._daemons.senders if fault.kind is FaultKind.SENDER_DRAIN else self._daemons.receivers
                scope = victim.scope
                await sides[number].drain(min(fault.duration_s, 5.0))
                if victim.scope is scope:
                    await self._daemons.end(victim, down_s=0.1)
            case FaultKind.SENDER_CRASH | FaultKind.RECEIVER_CRASH if victim.up.is_set():
                await self._daemons.end(victim, down_s=fault.duration_s)
            case FaultKind.PREFILL_CRASH | FaultKind.DECODE_CRASH:
                tasks = self._sending if fault.kind is FaultKind.PREFILL_CRASH else self._reading
                for task in list(tasks)[::2]:
                    task.cancel()
            case FaultKind.PROXY_SILENCE:
                self._proxy_is_silent = True
                await trio.sleep(fault.duration_s)
                self._proxy_is_silent = False

    async def _break_network(self, fault: Fault) -> None:
        clients = list(self._network._clients)
        if not clients:
            return
        identity = clients[fault.target % len(clients)].identity
        if fault.kind is FaultKind.DISCONNECT:
            self._network.disconnect(identity)
            return
        everybody = fault.target % 3 == 0
        self._network.partition(None if everybody else identity)
        await trio.sleep(fault.duration_s)
        self._network.heal(None if everybody else identity)

    async def _run_proxy(self) -> None:
        async with self._network.serve(PROXY_ADDRESS) as server:
            while True:
                peer, frame = await server.receive()
                message = decode(frame)
                if not isinstance(message, ProxyNotif | FailNotif) or self._proxy_is_silent:
                    continue
                with suppress(trio.BrokenResourceError):  # it has gone, and asks again when it is back
                    server.send_nowait(peer, encode(ProxyAck(message.sender_incarnation, message.message_id)))
