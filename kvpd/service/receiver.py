"""The receiver as a trio object: it carries out what its core decides.

    async with kvpd.Receiver(config) as receiver:
        async with receiver.claim("req-1", timeout_s=5) as chunks:
            ...

One nursery: a task that hears the senders, one that keeps time, and one per session while its worker is being made or
its process watched. Where a thing is decided is kvpd.core.receiver's business, never this module's.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final, Protocol

import attrs
import trio

from kvpd.config import ReceiverConfig, validate
from kvpd.core.events import Report, RequestCancelled
from kvpd.core.messages import HostIdentity, Region, decode, encode
from kvpd.core.receiver import ReceiverCore, ReceiverSettings
from kvpd.core.receiver import events as ev
from kvpd.errors import ErrorCode, LocalProtocolError, RemoteProtocolError, TransferCancelled, TransportError
from kvpd.log import get_logger
from kvpd.metrics import Health, ReceiverMetrics
from kvpd.service.buffer import Buffer
from kvpd.service.checksums import checksums_of
from kvpd.service.defaults import DataPlaneFactory, data_plane_factory
from kvpd.service.driver import Driver
from kvpd.service.host import open_process, own_host, wait_dead
from kvpd.service.lifetime import Lifetime
from kvpd.service.reports import ReceiverReports
from kvpd.service.sharing import SenderStart, Writers
from kvpd.service.turns import MESSAGES_TOGETHER_MAX, together
from kvpd.transports.base import ControlServer, ControlTransport, DataPlane, Target
from kvpd.transports.zmq import open_zmq_control

log = get_logger()

_HEARD_AT_ONCE_MAX: Final = 256  # messages in one turn of the loop


class EngineSink(Protocol):
    """Whom the answers to an engine's claims go to. Called from the loop; must not block."""

    def granted(self, grant: ev.GrantClaim) -> None: ...

    def refused(self, refusal: ev.RefuseClaim) -> None: ...

    def announced(self, announcement: ev.AnnounceTransfer) -> None: ...

    def cut_off(self, detail: str) -> None: ...


@attrs.frozen
class Chunk:
    """One chunk in place: its key, its slot, and its bytes, read-only and valid until the claim is left."""

    key: bytes
    index: int
    view: memoryview


class Receiver(Lifetime[ev.ReceiverEvent]):
    """One receiver. An async context manager: entering binds and makes it ready, leaving ends everything it runs.

    `control`, `data_plane`, `now` and `host` stand for parts of the outside world; by default they are ZMQ, what
    `config.transport` says, trio's clock and this machine. `share` is the path of the socket where an EngineServer
    gives this receiver's memory to engines, for `transport = "local"`; without it nobody may fill slots in place.

    Raises, on entering:
        ConfigError: the configuration cannot work here.
        OSError: the address cannot be bound.
    """

    def __init__(
        self,
        config: ReceiverConfig,
        *,
        control: ControlTransport | None = None,
        data_plane: DataPlaneFactory | None = None,
        metrics: ReceiverMetrics | None = None,
        health: Health | None = None,
        now: Callable[[], float] | None = None,
        host: HostIdentity | None = None,
        share: str = "",
    ) -> None:
        validate(config)
        self.config = config
        self.writers = Writers()
        self.metrics = metrics or ReceiverMetrics(transport=config.transport)
        slots = config.buffer_size // config.chunk_bytes
        self.core = ReceiverCore(_settings(config, slots, host or own_host(), share))
        super().__init__(Driver(self.core, self._perform, now=now), health or Health())
        self._reports = ReceiverReports(self.metrics)
        self._reports.levels(self.core)  # before its first step all of its slots are free, and not none
        self._control_given = control
        self._data_plane = data_plane or data_plane_factory(config.transport, config.ucx_library, config.ucx_tls)
        self._targets: dict[int, Target | None] = {}  # None: being made
        self._opening = trio.Lock()  # a worker is made by one session at a time
        self._watches: dict[int, trio.CancelScope] = {}
        self._outgoing: dict[bytes, list[bytes]] = {}  # messages of this turn of the loop, by peer
        self._engines: dict[int, EngineSink] = {}
        self._engine_numbers = itertools.count(1)
        self._own_claims = _OwnClaims()

    # -------------------------------------------------------------- lifetime

    @asynccontextmanager
    async def _run(self) -> AsyncIterator[None]:
        config = self.config
        async with AsyncExitStack() as stack:
            slots, is_shared = self.core.settings.total_slots, bool(self.core.settings.share)
            self.buffer = stack.enter_context(
                Buffer(config.name, slots, config.chunk_bytes, engines_may_write=is_shared, ranks=config.ranks)
            )
            if self.buffer.length != config.buffer_size:
                log.info("buffer_rounded_down", buffer_size=config.buffer_size, used=self.buffer.length, slots=slots)
            await self.buffer.fault_in(lambda done: log.info("memory_prepared", bytes=done, of=self.buffer.total_bytes))
            control = self._control_given
            if control is None:
                control = await stack.enter_async_context(open_zmq_control())
            self._server: ControlServer = await stack.enter_async_context(control.serve(config.control_address))
            self._plane: DataPlane = await stack.enter_async_context(self._data_plane(self.buffer.memory, None))
            self._own_engine = self.attach(self._own_claims)
            async with trio.open_nursery() as self._nursery:
                self._nursery.start_soon(self._turn_end.run)
                self._nursery.start_soon(self._hear_senders)
                self._nursery.start_soon(self._keep_time)
                try:
                    yield
                finally:
                    self._driver.stop()
                    self._own_claims.close()
                    self._send_messages()
                    self._nursery.cancel_scope.cancel()

    @property
    def address(self) -> str:
        """Where senders reach it: what is advertised, or else where it is bound."""
        return self.config.advertise_address or self._server.address.removeprefix("tcp://")

    # -------------------------------------------------------------- the core

    @property
    def is_idle(self) -> bool:
        """See `Lifetime`."""
        return self.core.is_idle

    def _after_step(self) -> None:
        super()._after_step()
        self._reports.levels(self.core)

    def _perform(self, action: ev.ReceiverAction) -> None:
        match action:
            case ev.SendMessage(peer, message):
                messages = self._outgoing.setdefault(peer, [])
                messages.append(encode(message))
                self._turn_end.call(self._send_messages)
                if len(messages) == MESSAGES_TOGETHER_MAX:
                    self._send_messages()
            case ev.OpenSession(session_no, process, sender_id, incarnation):
                self._targets[session_no] = None
                if process is not None:
                    self.writers.session_began(session_no, SenderStart(sender_id, incarnation))
                self._nursery.start_soon(self._open_session, session_no, process)
            case ev.CloseSession(session_no):
                target = self._targets.pop(session_no)
                if target is not None:
                    target.close()
                self.feed(ev.SessionClosed(session_no))
            case ev.ForgetSession(session_no):
                scope = self._watches.pop(session_no, None)
                if scope is not None:
                    scope.cancel()
                self.writers.session_forgotten(session_no)
            case ev.GrantClaim(engine):
                if engine in self._engines:
                    self._engines[engine].granted(action)
            case ev.RefuseClaim(engine):
                if engine in self._engines:
                    self._engines[engine].refused(action)
            case ev.CutEngine(engine, detail):
                if engine in self._engines:
                    self._engines[engine].cut_off(detail)
            case ev.VerifyChunks():
                self._nursery.start_soon(self._verify, action)
            case ev.AnnounceTransfer():
                for sink in list(self._engines.values()):
                    sink.announced(action)
            case Report():
                self._reports.tell(action)

    def _send_messages(self) -> None:
        """What this turn of the loop has to say, or drop and count it: the cores repeat what matters."""
        outgoing, self._outgoing = self._outgoing, {}
        for peer, messages in outgoing.items():
            for group in together(messages):
                try:
                    self._server.send_nowait(peer, *group)
                except trio.WouldBlock:
                    self.metrics.message_dropped("queue_full", len(group))
                except trio.BrokenResourceError:
                    self.metrics.message_dropped("not_connected", len(group))

    # -------------------------------------------------------------- tasks

    async def _hear_senders(self) -> None:
        with self.health.task("hear_senders"):
            while True:
                peer, message = await self._server.receive()
                self._heard(peer, message)
                self._hear_the_rest()
                self._send_messages()

    def _heard(self, peer: bytes, frame: bytes) -> None:
        try:
            message = decode(frame)
        except RemoteProtocolError as exc:
            self.metrics.message_dropped("malformed")
            self.feed(ev.MessageRejected(peer, str(exc)))
        else:
            self.feed(ev.MessageReceived(peer, message))

    def _hear_the_rest(self) -> None:
        """Some more of what has arrived already: it must count before anybody's silence is judged."""
        for _ in range(_HEARD_AT_ONCE_MAX):
            try:
                peer, message = self._server.receive_nowait()
            except trio.WouldBlock:
                return
            self._heard(peer, message)

    async def _open_session(self, session_no: int, process: HostIdentity | None) -> None:
        # One at a time, and only for who still wants it: a worker takes milliseconds, in which nobody else is heard.
        async with self._opening:
            if session_no not in self._targets:
                return  # it was closed before its turn came
            try:
                target = await self._plane.open_target()
            except TransportError as exc:
                self.feed(ev.SessionFailed(session_no, str(exc)))
                return
        if session_no not in self._targets:  # it was closed meanwhile
            target.close()
            return
        self._targets[session_no] = target
        try:
            pidfd = open_process(process) if process is not None else None
        except OSError as exc:
            # What cannot be watched can never be fenced: nothing may be written through it.
            self.feed(ev.SessionFailed(session_no, f"the sender's process cannot be watched: {exc}"))
            return
        self.feed(ev.SessionOpened(session_no, self._regions(target)))
        if process is not None:
            await self._watch_process(session_no, pidfd)

    def _regions(self, target: Target) -> tuple[Region, ...]:
        """Each rank's window of the one memory that the target reaches."""
        size = self.buffer.window_bytes
        return tuple(
            Region(rank, target.worker_address, target.base_address + rank * size, size, target.rkey)
            for rank in range(self.config.ranks)
        )

    async def _verify(self, action: ev.VerifyChunks) -> None:
        """Compare what landed with what was sent. If the transfer ends meanwhile, the answer counts for nothing."""
        rank = action.message.rank
        views = [self.buffer.slot(chunk.index, chunk.length, rank) for chunk in action.chunks]
        found = await checksums_of(views, self.core.settings.verify)
        mismatched = sum(checksum != chunk.checksum for checksum, chunk in zip(found, action.chunks, strict=True))
        self.feed(ev.ChunksVerified(action.transfer, action.message, mismatched))

    async def _watch_process(self, session_no: int, pidfd: int | None) -> None:
        """Until the sender is dead (None: it is already), and so is every engine that fills slots on its behalf."""
        with trio.CancelScope() as self._watches[session_no]:
            if pidfd is not None:
                await wait_dead(pidfd)
            await self.writers.wait_gone(session_no)
        if self._watches.pop(session_no, None) is not None:  # else it is forgotten, not dead
            self.feed(ev.ProcessDied(session_no))

    # -------------------------------------------------------------- engines

    def attach(self, sink: EngineSink) -> int:
        """A new engine, to be named in its events; `sink` gets the answers, and first what it has missed."""
        number = next(self._engine_numbers)
        self._engines[number] = sink
        for announcement in self.core.ready():
            sink.announced(announcement)
        return number

    def detach(self, engine: int) -> None:
        """The engine's connection has ended; its process may still live, and then still holds its claims."""
        del self._engines[engine]
        self.feed(ev.EngineClosed(engine))

    @asynccontextmanager
    async def claim(
        self, req_id: str, *, timeout_s: float, rank: int = 0, sender_id: str | None = None
    ) -> AsyncIterator[Sequence[Chunk]]:
        """The chunks that `rank` has of `req_id`, in request order, once all have landed; leaving releases them.

        Raises:
            TransferError: it failed, was revoked, claimed before, ambiguous, or not complete within `timeout_s`.
            LocalProtocolError: the receiver does not run.
        """
        if not self.runs:
            raise LocalProtocolError("this receiver does not run: claim while it is entered")
        number, answers = self._own_claims.begin()
        self.feed(ev.ClaimRequested(self._own_engine, number, req_id, rank, timeout_s, sender_id))
        chunks: list[Chunk] = []
        try:
            try:
                answer = await answers.receive()
            except trio.EndOfChannel:
                raise TransferCancelled(ErrorCode.CANCELLED, "the receiver was closed") from None
            if isinstance(answer, ev.RefuseClaim):
                raise answer.error
            chunks += [
                Chunk(slot.key, slot.index, self.buffer.slot(slot.index, slot.length, rank).toreadonly())
                for slot in answer.chunks
            ]
            yield chunks
        finally:
            for chunk in chunks:
                with contextlib.suppress(BufferError):  # an array of the caller's still refers to it
                    chunk.view.release()
            self._own_claims.end(number)
            self.feed(ev.ClaimReleased(self._own_engine, number))

    def cancel(self, req_id: str) -> None:
        """End every transfer of this label that nobody has claimed. Never fails; twice is harmless."""
        self.feed(RequestCancelled(req_id))


class _OwnClaims:
    """The claims of the program that embeds a receiver."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._waiting: dict[int, trio.MemorySendChannel[ev.GrantClaim | ev.RefuseClaim]] = {}

    def begin(self) -> tuple[int, trio.MemoryReceiveChannel[ev.GrantClaim | ev.RefuseClaim]]:
        number = next(self._numbers)
        self._waiting[number], answers = trio.open_memory_channel[ev.GrantClaim | ev.RefuseClaim](1)
        return number, answers

    def end(self, number: int) -> None:
        self._waiting.pop(number).close()

    def close(self) -> None:
        """Nobody will be answered any more."""
        for answers in self._waiting.values():
            answers.close()

    def granted(self, grant: ev.GrantClaim) -> None:
        self._waiting[grant.claim].send_nowait(grant)

    def refused(self, refusal: ev.RefuseClaim) -> None:
        self._waiting[refusal.claim].send_nowait(refusal)

    def announced(self, announcement: ev.AnnounceTransfer) -> None:
        """Whoever embeds a receiver claims by name."""

    def cut_off(self, detail: str) -> None:
        """The embedding program is this one: it has no connection to cut, and its log says that a claim is overdue."""


def _settings(config: ReceiverConfig, slots: int, host: HostIdentity, share: str) -> ReceiverSettings:
    # Nobody sums what engines write by themselves: where chunks are verified they are put.
    is_shared = config.transport == "local" and config.verify == "off"
    return ReceiverSettings(
        receiver_id=config.name,
        incarnation=secrets.randbits(61) + 1,
        total_slots=slots,
        chunk_bytes=config.chunk_bytes,
        layout=config.layout,
        ranks=config.ranks,
        host=host,
        allocation_timeout_s=config.allocation_timeout_s,
        queue_depth_max=config.queue_depth_max,
        progress_timeout_s=config.progress_timeout_s,
        ready_ttl_s=config.ready_ttl_s,
        claim_grace_s=config.claim_grace_s,
        claim_ttl_s=config.claim_ttl_s,
        bypass_max=config.bypass_max,
        verify=config.verify,
        share=share if is_shared else "",
        lease_s=config.lease_s,
        put_deadline_s=config.put_deadline_s,
    )
