"""A simulated sender: the real core, and its actions carried out as kvpd/service/sender.py and requests.py do."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import attrs

from kvpd.core.events import Report, ReportName, TransferId
from kvpd.core.messages import AnyMessage, Notification, ProxyAck, Verify
from kvpd.core.sender import SenderCore, SenderSettings
from kvpd.core.sender import events as ev
from kvpd.errors import TransferError
from kvpd.simulation.network import Line, Network, Way
from kvpd.simulation.plane import Batch, Content, Endpoint, Memory, Plane, Target, checksum_of
from kvpd.simulation.schedule import Process
from kvpd.simulation.shell import Shell

CUT_OFF_S = 1.0  # see kvpd.service.requests


class TransferSink(Protocol):
    """The engine's side of a transfer."""

    def granted(self, grant: ev.GrantPiece) -> None: ...

    def deferred(self, deferral: ev.DeferStage) -> None: ...

    def ended(self, error: TransferError | None) -> None: ...


class Outside(Protocol):
    """What a sender reaches in the world beyond its network."""

    def target(self, worker_address: bytes) -> Target | None: ...

    def notify(self, sender: SimulatedSender, proxy: str, notif: Notification) -> None: ...


@attrs.frozen(eq=False)
class Posted:
    """A piece whose puts are on their way."""

    piece: int
    batch: Batch
    endpoint: Endpoint
    posted_at: float
    checksums: tuple[int, ...]


class Request:
    """The task of one transfer: it waits for its puts in order, and for their end once it is cancelled."""

    def __init__(self, sender: SimulatedSender, number: int) -> None:
        self._sender = sender
        self._number = number
        self._in_flight: deque[Posted] = deque()
        self.is_cancelled = False
        self._is_waiting = True  # for puts, none of which has failed
        self._is_cut_off = False

    def post(self, piece: int, endpoint: Endpoint, puts: tuple[ev.StagedSlot, ...], verify: Verify) -> None:
        """Begin a piece's puts."""
        staging = self._sender.staging
        checksums = () if verify == "off" else tuple(checksum_of(staging[put.local]) for put in puts)
        process = self._sender.process
        batch = Batch(self._sender.identity(self._number), len(puts), lambda: process.soon(0.0, self._check))
        self._sender.batches[self._number, piece] = batch
        self._in_flight.append(Posted(piece, batch, endpoint, process.schedule.now, checksums))
        endpoint.post(batch, puts)

    def cancel(self, put_deadline_s: float) -> None:
        """Begin no more puts, let those in flight end within the deadline, then report PutsDrained."""
        self.is_cancelled, self._is_waiting = True, False
        self._sender.process.soon(0.0, lambda: self._drain(put_deadline_s))

    def _check(self) -> None:
        """A batch has ended."""
        if self.is_cancelled:
            self._drained_if_ended()
        while self._is_waiting and self._in_flight and self._in_flight[0].batch.is_done:
            posted = self._in_flight[0]
            if posted.batch.failed is not None:
                self._is_waiting = False
                self._sender.feed(ev.PutsFailed(self._number, posted.piece, posted.batch.failed))
                return
            self._in_flight.popleft()
            seconds = self._sender.schedule.now - posted.posted_at
            self._sender.feed(ev.PutsCompleted(self._number, posted.piece, seconds, posted.checksums))

    def _drain(self, put_deadline_s: float) -> None:
        for posted in self._in_flight:
            posted.endpoint.abandon(posted.batch)
        if not self._drained_if_ended():
            self._sender.process.soon(put_deadline_s, self._cut_off)

    def _cut_off(self) -> None:
        if self._number in self._sender.requests:
            self._sender.exercised("cut_off")
            for posted in list(self._in_flight):
                posted.endpoint.force_close()
            self._sender.process.soon(CUT_OFF_S, self._give_up)

    def _give_up(self) -> None:
        """Not even that has ended them: they may be writing for ever."""
        if self._number in self._sender.requests:
            for posted in self._in_flight:
                posted.batch.given_up = True
            self._drained(drained=False, ended=False)

    def _drained_if_ended(self) -> bool:
        if self._number not in self._sender.requests:
            return True
        if not all(posted.batch.is_done for posted in self._in_flight):
            return False
        self._drained(drained=all(posted.batch.failed is None for posted in self._in_flight), ended=True)
        return True

    def _drained(self, *, drained: bool, ended: bool) -> None:
        del self._sender.requests[self._number]
        self._sender.feed(ev.PutsDrained(self._number, drained, ended))


class Joins:
    """Which transfers opens have come to belong to: known before anything is judged that an open causes at once."""

    def __init__(self) -> None:
        self.transfer_of: dict[int, int] = {}  # by the open's number

    def before(self, event: ev.SenderEvent) -> None:
        pass

    def after(self, event: ev.SenderEvent, actions: Sequence[ev.SenderAction]) -> None:
        for action in actions:
            match event, action:
                case ev.OpenRequested(number), Report(ReportName.TRANSFER_JOINED, TransferId(transfer_no=transfer_no)):
                    self.transfer_of[number] = transfer_no


class SimulatedSender(Shell[ev.SenderEvent, ev.SenderAction]):
    """One start of a sender."""

    def __init__(
        self,
        process: Process,
        settings: SenderSettings,
        network: Network,
        plane: Plane,
        outside: Outside,
        exercised: Callable[[str], None],
    ) -> None:
        self.core = SenderCore(settings)
        super().__init__(process, self.core)
        self.settings = settings
        self.exercised = exercised
        # First all slots of rank 0, then all of rank 1.
        self.staging: list[Content | None] = [None] * (settings.staging_slots * settings.ranks)
        self.requests: dict[int, Request] = {}
        self.lines: dict[str, Line] = {}
        self.batches: dict[tuple[int, int], Batch] = {}  # every piece that was ever put
        self.endpoints: dict[int, Endpoint | None] = {}
        self.sinks: dict[int, TransferSink] = {}
        self.on_place_gone: list[Callable[[int], None]] = []  # its engines', which fill in place
        self._joins = Joins()
        self.observers.append(self._joins)
        self._network = network
        self._plane = plane
        self._outside = outside
        self._numbers = itertools.count(1)
        self._channels = itertools.count(1)
        self._random = network.random_for(process.name)
        process.on_continued = self._continued

    def _continued(self, gap_s: float) -> None:
        """That it stood still is noticed at once, or after what came meanwhile has been met, or never."""
        delay_s = self._random.choice((0.0, 1e-6, None))
        if delay_s is not None:
            self.process.soon(delay_s, lambda: self.feed(ev.ClockJumped(gap_s)))

    def identity(self, number: int) -> TransferId:
        """A transfer of this start of the sender, by the number of any rank's open of it."""
        number = self._joins.transfer_of.get(number, number)
        return TransferId(self.settings.sender_id, self.settings.incarnation, number)

    def new_number(self) -> int:
        """A number for a transfer."""
        return next(self._numbers)

    def open(self, event: ev.OpenRequested, sink: TransferSink) -> None:
        """Open a transfer whose events go to `sink`."""
        number = event.transfer_no
        self.sinks[number] = sink
        self.requests[number] = Request(self, number)
        self.feed(event)
        if number not in self.sinks and not self.requests[number].is_cancelled:  # refused at once: nothing will end
            del self.requests[number]

    def proxy_acknowledged(self, proxy: str, ack: ProxyAck) -> None:
        """A proxy's answer has arrived."""
        self.feed(ev.ProxyAcknowledged(proxy, ack.sender_incarnation, ack.message_id))

    # -------------------------------------------------------------- actions

    def perform(self, action: ev.SenderAction) -> None:
        match action:
            case Report():
                pass
            case ev.SendToPeer(receiver, message):
                self.lines[receiver].send(Way.TO_RECEIVER, message)
            case ev.PostPuts():
                self._post(action)
            case ev.GrantPiece(number):
                if number in self.sinks:
                    self.sinks[number].granted(action)
            case ev.DeferStage(number):
                if number in self.sinks:
                    self.sinks[number].deferred(action)
            case ev.FinishTransfer(number, error):
                if error is None:
                    self.requests.pop(number, None)
                if (sink := self.sinks.pop(number, None)) is not None:
                    sink.ended(error)
            case ev.CancelTransfer(number, put_deadline_s):
                self.requests[number].cancel(put_deadline_s)
            case ev.NotifyProxy(proxy, notif):
                self._outside.notify(self, proxy, notif)
            case ev.ConnectPeer(receiver):
                self._connect(receiver)
            case ev.DisconnectPeer(receiver):
                self.lines.pop(receiver).close()
            case ev.OpenEndpoint(_, endpoint_no):
                self.endpoints[endpoint_no] = None
                self.process.soon(self._random.uniform(0.0001, 0.05), lambda: self._open_endpoint(action))
            case ev.CloseEndpoint(_, endpoint_no):
                if (endpoint := self.endpoints.pop(endpoint_no)) is not None:
                    endpoint.force_close()
                for place_gone in self.on_place_gone:
                    place_gone(endpoint_no)

    def _post(self, action: ev.PostPuts) -> None:
        endpoint = self.endpoints.get(action.endpoint)
        if endpoint is None or endpoint.is_broken:
            self.feed(ev.PutsFailed(action.transfer_no, action.piece, "the endpoint is closed"))
            return
        here, there = action.rank * self.settings.staging_slots, action.rank * endpoint.target.memory.slots_per_rank
        puts = tuple(ev.StagedSlot(here + put.local, there + put.remote, put.length) for put in action.puts)
        self.requests[action.transfer_no].post(action.piece, endpoint, puts, action.verify)

    def _connect(self, receiver: str) -> None:
        settings = self.settings
        identity = f"{settings.sender_id}/{settings.incarnation:x}/{next(self._channels)}".encode()

        def hear(message: AnyMessage) -> None:
            self.feed(ev.PeerMessageReceived(receiver, message))

        self.lines[receiver] = self._network.connect(self.process, receiver, identity, hear)

    def memory_at(self, place: int) -> Memory:
        """The memory that slots of this place are in."""
        endpoint = self.endpoints[place]
        assert endpoint is not None
        return endpoint.target.memory

    def _open_endpoint(self, action: ev.OpenEndpoint) -> None:
        receiver, endpoint_no, worker_address = action.receiver, action.endpoint, action.regions[0].worker_address

        def on_broken(detail: str) -> None:
            self.feed(ev.EndpointBroken(receiver, endpoint_no, detail))

        target = self._outside.target(worker_address)
        if target is None:
            on_broken("no target has that worker address")
            return
        endpoint = self._plane.connect(self.process, self.staging, target, on_broken)
        if isinstance(endpoint, str):
            self.exercised("endpoint_refused")
            on_broken(endpoint)
        elif endpoint_no not in self.endpoints:  # the session ended meanwhile
            endpoint.force_close()
        else:
            self.endpoints[endpoint_no] = endpoint
            self.feed(ev.EndpointOpened(receiver, endpoint_no, in_place=bool(action.share)))
