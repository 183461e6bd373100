"""The sender as a trio object: it carries out what its core decides.

    async with kvpd.Sender(config) as sender:
        async with sender.open("req-1", receiver="decode-0:7300", total_chunks=2) as transfer:
            async with transfer.stage([b"key-0", b"key-1"], last=True) as slots:
                async for slot in slots: ...

One nursery: a task that keeps time, one at the end of a turn (turns.py), one per piece on its way (requests.py), one
per channel (channels.py), one per endpoint while it is being made. Where a thing is decided is kvpd.core.sender's
business, never this module's.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Protocol

import trio

from kvpd.config import SenderConfig, validate
from kvpd.core.events import Report, RequestCancelled
from kvpd.core.messages import HostIdentity, ProxyAck, ProxyNotif, decode, encode, encode_push
from kvpd.core.sender import SenderCore, SenderSettings
from kvpd.core.sender import events as ev
from kvpd.errors import (
    ErrorCode,
    LocalProtocolError,
    RemoteProtocolError,
    TransferCancelled,
    TransferError,
    TransportError,
)
from kvpd.log import get_logger
from kvpd.metrics import Health, SenderMetrics
from kvpd.service.buffer import Buffer
from kvpd.service.channels import Channel, ProxyChannels
from kvpd.service.defaults import DataPlaneFactory, data_plane_factory
from kvpd.service.driver import Driver
from kvpd.service.host import own_host
from kvpd.service.lifetime import Lifetime
from kvpd.service.reports import SenderReports
from kvpd.service.requests import Request
from kvpd.service.staging import Transfer
from kvpd.service.ways import Offer, Ways
from kvpd.transports.addresses import parse_peer_endpoint
from kvpd.transports.base import ControlTransport, DataPlane, Put
from kvpd.transports.zmq import open_zmq_control

log = get_logger()


class TransferSink(Protocol):
    """Whom a transfer's events go to. Called from the loop; must not block."""

    def granted(self, grant: ev.GrantPiece) -> None: ...

    def deferred(self, deferral: ev.DeferStage) -> None: ...

    def ended(self, error: TransferError | None) -> None: ...


class Sender(Lifetime[ev.SenderEvent]):
    """One sender. An async context manager: entering makes it ready, leaving ends everything it runs.

    `control`, `data_plane`, `now` and `host` stand for parts of the outside world; by default they are ZMQ, what
    `config.transport` says, trio's clock and this machine.

    Raises, on entering:
        ConfigError: the configuration cannot work here.
    """

    def __init__(
        self,
        config: SenderConfig,
        *,
        control: ControlTransport | None = None,
        data_plane: DataPlaneFactory | None = None,
        metrics: SenderMetrics | None = None,
        health: Health | None = None,
        now: Callable[[], float] | None = None,
        host: HostIdentity | None = None,
    ) -> None:
        validate(config)
        self.config = config
        self.metrics = metrics or SenderMetrics(transport=config.transport)
        slots = config.staging_size // config.chunk_bytes
        self.core = SenderCore(_settings(config, slots, host or own_host()))
        driver = Driver(self.core, self._perform, now=now, stood_still=ev.ClockJumped)
        super().__init__(driver, health or Health())
        self._reports = SenderReports(self.metrics)
        self.metrics.before_reading(self._show_levels)
        self._control_given = control
        self._data_plane = data_plane or data_plane_factory(config.transport, config.ucx_library, config.ucx_tls)
        self._requests: dict[int, Request] = {}
        self._sinks: dict[int, TransferSink] = {}
        self._channels: dict[str, Channel] = {}
        self._channel_numbers = itertools.count(1)
        self._ways = Ways(self.feed, fills_in_place=config.transport == "auto")
        self._transfer_numbers = itertools.count(1)
        self._engine_numbers = itertools.count(1)
        self._engines: dict[int, Callable[[int], None]] = {}  # those that must hear which places are gone
        self._own_engine = self.new_engine()
        self._is_acknowledged = self.core.settings.notify_is_acknowledged

    # -------------------------------------------------------------- lifetime

    @asynccontextmanager
    async def _run(self) -> AsyncIterator[None]:
        config, settings = self.config, self.core.settings
        async with AsyncExitStack() as stack:
            slots = settings.staging_slots
            self.buffer = stack.enter_context(
                Buffer(config.name, slots, config.chunk_bytes, engines_may_write=True, ranks=config.ranks)
            )
            if self.buffer.length != config.staging_size:
                log.info("staging_rounded_down", staging_size=config.staging_size, used=self.buffer.length, slots=slots)
            await self.buffer.fault_in(lambda done: log.info("memory_prepared", bytes=done, of=self.buffer.total_bytes))
            control = self._control_given
            if control is None:
                control = await stack.enter_async_context(open_zmq_control())
            self._control: ControlTransport = control
            window = config.put_window_bytes or None
            self._plane: DataPlane = await stack.enter_async_context(self._data_plane(self.buffer.memory, window))
            async with trio.open_nursery() as self._nursery:
                self._proxies = ProxyChannels(
                    self._control,
                    self._nursery,
                    self._identity(),
                    acknowledged=self._is_acknowledged,
                    on_message=self._heard_proxy,
                    on_dropped=self.metrics.message_dropped,
                    turn_end=self._turn_end,
                )
                self._nursery.start_soon(self._turn_end.run)
                self._nursery.start_soon(self._keep_time)
                try:
                    yield
                finally:
                    self._close()

    def _close(self) -> None:
        """End everything, now: whoever still waits for a transfer is told, and no put is waited for."""
        self._driver.stop()
        for sink in self._sinks.values():
            sink.ended(TransferCancelled(ErrorCode.CANCELLED, "the sender was closed"))
        self._sinks.clear()
        self._ways.close_all()
        self._nursery.cancel_scope.cancel()

    def _identity(self) -> bytes:
        """What a channel announces itself by: never one that a connection of ours may still bear at the peer."""
        settings = self.core.settings
        return f"{settings.sender_id}/{settings.incarnation:x}/{next(self._channel_numbers)}".encode()

    # -------------------------------------------------------------- the core

    @property
    def is_idle(self) -> bool:
        """See `Lifetime`."""
        return self.core.is_idle

    def _show_levels(self) -> None:
        self.metrics.sessions.set(self.core.peer_count)
        staging = self.core.staging
        free, total = sum(one.free_count for one in staging), sum(one.total_slots for one in staging)
        self.metrics.staging(free=free, total=total)
        self.metrics.in_flight_bytes.set(self._ways.in_flight_bytes)

    def _perform(self, action: ev.SenderAction) -> None:
        match action:
            case ev.SendToPeer(receiver, message):
                self._channels[receiver].send(encode(message))
            case ev.PostPuts():
                self._post(action)
            case ev.GrantPiece(number):
                if number in self._sinks:
                    self._sinks[number].granted(action)
            case ev.DeferStage(number):
                if number in self._sinks:
                    self._sinks[number].deferred(action)
            case ev.FinishTransfer(number, error):
                self._finish(number, error)
            case ev.CancelTransfer(number, put_deadline_s):
                self._requests[number].cancel(put_deadline_s)
            case ev.NotifyProxy(proxy, ProxyNotif() as notif) if not self._is_acknowledged:
                self._proxies.send(proxy, encode_push(notif))
            case ev.NotifyProxy(proxy, notif):
                self._proxies.send(proxy, encode(notif))
            case ev.ConnectPeer(receiver):
                channel = Channel(receiver, self._heard, self.metrics.message_dropped, self._turn_end)
                self._channels[receiver] = channel
                self._nursery.start_soon(channel.run, self._control, self._identity())
            case ev.DisconnectPeer(receiver):
                self._channels.pop(receiver).close()
            case ev.OpenEndpoint(_, endpoint_no):
                self._ways.begin(endpoint_no)
                self._nursery.start_soon(self._ways.open, self._plane, action)
            case ev.CloseEndpoint(_, endpoint_no):
                self._ways.close(endpoint_no)
                for place_gone in self._engines.values():
                    place_gone(endpoint_no)
            case Report():
                self._reports.tell(action)

    def _post(self, action: ev.PostPuts) -> None:
        """Put a piece through the endpoint that its own session opened, never one looked up by address."""
        way, rank, buffer = self._ways.get(action.endpoint), action.rank, self.buffer
        try:
            if way is None:
                raise TransportError("the endpoint is closed")
            there = way.rank_offsets[rank]
            batch = way.endpoint.post(
                [
                    Put(buffer.offset(put.local, rank), there + put.remote * buffer.chunk_bytes, put.length)
                    for put in action.puts
                ]
            )
        except TransportError as exc:
            self.feed(ev.PutsFailed(action.transfer_no, action.piece, str(exc)))
        else:
            chunks = [] if action.verify == "off" else [buffer.slot(put.local, put.length, rank) for put in action.puts]
            self._requests[action.transfer_no].post(action.piece, way.endpoint, batch, chunks, action.verify)

    def _finish(self, number: int, error: TransferError | None) -> None:
        if error is None:
            del self._requests[number]
        sink = self._sinks.pop(number, None)
        if sink is not None:
            sink.ended(error)

    # -------------------------------------------------------------- tasks

    def _heard(self, receiver: str, frame: bytes) -> None:
        try:
            message = decode(frame)
        except RemoteProtocolError as exc:
            self.metrics.message_dropped("malformed")
            self.feed(ev.PeerMessageRejected(receiver, str(exc)))
        else:
            self.feed(ev.PeerMessageReceived(receiver, message))

    def _heard_proxy(self, proxy: str, frame: bytes) -> None:
        """A proxy that talks nonsense costs a counter: nothing of ours depends on what it says but its Acks."""
        try:
            message = decode(frame)
        except RemoteProtocolError as exc:
            self.metrics.message_dropped("malformed")
            log.warning("proxy_message_rejected", peer=proxy, detail=str(exc)[:256], rate_limited=True)
            return
        if isinstance(message, ProxyAck):
            self.metrics.notified("acknowledged")
            self.feed(ev.ProxyAcknowledged(proxy, message.sender_incarnation, message.message_id))

    # -------------------------------------------------------------- engines

    def new_engine(self, place_gone: Callable[[int], None] | None = None) -> int:
        """A number for an engine, to be named when it opens transfers. `place_gone` is told of sessions that are over,
        by their endpoints' numbers.
        """
        number = next(self._engine_numbers)
        if place_gone is not None:
            self._engines[number] = place_gone
        return number

    def engine_left(self, number: int) -> None:
        """The engine's connection has ended."""
        del self._engines[number]

    def offer(self, endpoint_no: int) -> Offer:
        """Where to get the memory of the receiver that a session, which is up, is with."""
        way = self._ways.get(endpoint_no)
        assert way is not None, "slots of a session that is not up"
        return way.offer

    def open_for(
        self,
        sink: TransferSink,
        engine: int,
        req_id: str,
        receiver: str,
        total_chunks: int,
        notify: str | None = None,
        *,
        rank: int = 0,
        group: str = "",
        in_place: bool = False,
        first: Callable[[int], ev.StageRequested] | None = None,
    ) -> int:
        """Open a transfer, or join another rank's, whose events go to `sink`: its number. A refusal comes as an end.

        `in_place`: whoever fills its slots can do so in a receiver's memory. `first` makes the event of its first
        batch, given the number, where that is known by now: the receiver is asked for room and slots in one message.

        Raises:
            LocalProtocolError: `receiver` or `notify` is no address, or the sender does not run.
        """
        self._check_running()
        receiver_address = _peer_address("receiver", receiver)
        notify_address = _peer_address("notify", notify) if notify is not None else None
        number = next(self._transfer_numbers)
        self._sinks[number] = sink
        self._requests[number] = Request(number, self._nursery, self.feed, self._requests.__delitem__)
        self.feed(
            ev.OpenRequested(
                number,
                engine,
                req_id,
                receiver_address,
                total_chunks,
                notify_address,
                rank=rank,
                group=group,
                in_place=in_place,
                first=None if first is None else first(number),
            )
        )
        if number not in self._sinks:  # refused at once: there will be no puts to wait for
            self._requests.pop(number, None)
        return number

    def _check_running(self) -> None:
        if not self.runs:
            raise LocalProtocolError("this sender does not run: open transfers while it is entered")

    @asynccontextmanager
    async def open(
        self, req_id: str, *, receiver: str, total_chunks: int, notify: str | None = None, rank: int = 0
    ) -> AsyncIterator[Transfer]:
        """A transfer of `total_chunks` chunks to `receiver`. Never waits itself; staging waits for admission.

        Where the sender has several ranks, each opens the request by itself, in any order, and stages the same batches.

        Leaving normally waits until everything has landed, the receiver has acknowledged it and the proxy is told.
        Leaving by an exception or a cancellation cancels the transfer.

        Raises:
            LocalProtocolError: an address is none, the sender does not run; or, on leaving, not all chunks were staged.
            TransferError: refused, failed, revoked or cancelled; raised by the first `stage` or on leaving.
        """
        self._check_running()
        transfer = Transfer(self.buffer, rank, self.feed, total_chunks)
        transfer.number = self.open_for(transfer, self._own_engine, req_id, receiver, total_chunks, notify, rank=rank)
        try:
            yield transfer
            transfer.check_staged()
            await transfer.wait_ended()
        finally:
            self.feed(ev.EngineLetGo(transfer.number))

    def cancel(self, req_id: str) -> None:
        """End every transfer of this label, wherever it stands. Never fails; twice is harmless."""
        self.feed(RequestCancelled(req_id))


def _peer_address(what: str, text: str) -> str:
    try:
        return str(parse_peer_endpoint(text))
    except ValueError as exc:
        raise LocalProtocolError(f"{what}: {exc}") from exc


def _settings(config: SenderConfig, slots: int, host: HostIdentity) -> SenderSettings:
    return SenderSettings(
        sender_id=config.name,
        incarnation=secrets.randbits(61) + 1,
        staging_slots=slots,
        chunk_bytes=config.chunk_bytes,
        layout=config.layout,
        ranks=config.ranks,
        host=host,
        proxy_address=(config.proxy_address or None) if config.notify_proxy else None,
        notify_is_acknowledged=config.notify == "ack",
        connect_timeout_s=config.connect_timeout_s,
        request_timeout_s=config.request_timeout_s,
    )
