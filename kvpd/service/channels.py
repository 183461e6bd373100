"""The sender's outgoing channels: one to each receiver, one to each proxy, made when first needed.

Sending never blocks and may lose: a full queue drops messages and counts them, because the core repeats what matters
until it is answered. What one turn of the loop has to say to a receiver travels together.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Final, Protocol, runtime_checkable

import trio

from kvpd.log import get_logger
from kvpd.service.turns import MESSAGES_TOGETHER_MAX, TurnEnd, together
from kvpd.transports.base import ControlClient, ControlTransport

log = get_logger()

_BACKLOG_MAX: Final = 64  # messages kept while a channel is being made
_PROXIES_MAX: Final = 256
_HEARD_AT_ONCE_MAX: Final = 64  # messages in one turn of the loop


class Sendable(Protocol):
    """The sending half of a control channel."""

    def send_nowait(self, *messages: bytes) -> None: ...


@runtime_checkable
class PushTransport(Protocol):
    """A control transport that can also push to a proxy that binds PULL."""

    def connect_push(self, address: str) -> AbstractAsyncContextManager[Sendable]: ...


class Channel:
    """One outgoing channel and the task that hears its answers.

    `to_proxy`: each message travels alone, for whoever was not written for kvpd expects them so.
    """

    def __init__(
        self,
        address: str,
        on_message: Callable[[str, bytes], None],
        on_dropped: Callable[[str, int], None],
        turn_end: TurnEnd,
        *,
        to_proxy: bool = False,
    ) -> None:
        self.address = address
        self._on_message = on_message
        self._on_dropped = on_dropped
        self._turn_end = turn_end
        self._group = _alone if to_proxy else together
        self._scope = trio.CancelScope()
        self._client: Sendable | None = None
        self._outgoing: list[bytes] = []  # of this turn of the loop, or kept until there is a client

    def send(self, message: bytes) -> None:
        """Have a message leave with this turn's others; or drop and count it, now or then."""
        if self._client is None and len(self._outgoing) == _BACKLOG_MAX:
            self._on_dropped("queue_full", 1)
            return
        self._outgoing.append(message)
        if self._client is not None:
            if len(self._outgoing) == MESSAGES_TOGETHER_MAX:
                self._send_all()
            else:
                self._turn_end.call(self._send_all)

    def _send_all(self) -> None:
        outgoing, self._outgoing = self._outgoing, []
        for messages in self._group(outgoing):
            assert self._client is not None, "nothing is sent before there is a client"
            try:
                self._client.send_nowait(*messages)
            except trio.WouldBlock:
                self._on_dropped("queue_full", len(messages))
            except trio.ClosedResourceError:
                self._on_dropped("not_connected", len(messages))

    def close(self) -> None:
        """End the task, and the channel with it, once what there is to say has left."""
        if self._client is not None:
            self._send_all()
        self._scope.cancel()

    async def run(self, control: ControlTransport, identity: bytes) -> None:
        """The task: connect, and hand over what arrives."""
        try:
            # Closed from within, a channel lets its last words leave.
            async with control.connect(self.address, identity) as client:
                with self._scope:
                    self._connected(client)
                    await self._hear(client)
        except OSError as exc:
            log.warning("channel_failed", peer=self.address, detail=str(exc), rate_limited=True)

    async def run_push(self, control: ControlTransport) -> None:
        """The task of a channel that is never answered."""
        assert isinstance(control, PushTransport), "this control transport cannot push"
        try:
            async with control.connect_push(self.address) as client:
                with self._scope:
                    self._connected(client)
                    await trio.sleep_forever()
        except OSError as exc:
            log.warning("channel_failed", peer=self.address, detail=str(exc), rate_limited=True)

    def _connected(self, client: Sendable) -> None:
        self._client = client
        self._send_all()

    async def _hear(self, client: ControlClient) -> None:
        while True:
            self._heard(await client.receive())
            with contextlib.suppress(trio.WouldBlock):
                for _ in range(_HEARD_AT_ONCE_MAX):
                    self._heard(client.receive_nowait())

    def _heard(self, message: bytes) -> None:
        # A closed channel's last words belong to a session that is over.
        if not self._scope.cancel_called:
            self._on_message(self.address, message)


def _alone(messages: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    return ((message,) for message in messages)


class ProxyChannels:
    """The channels to proxies; when there are too many, the one unused for longest is closed."""

    def __init__(
        self,
        control: ControlTransport,
        nursery: trio.Nursery,
        identity: bytes,
        *,
        acknowledged: bool,
        on_message: Callable[[str, bytes], None],
        on_dropped: Callable[[str, int], None],
        turn_end: TurnEnd,
    ) -> None:
        self._control = control
        self._nursery = nursery
        self._identity = identity
        self._acknowledged = acknowledged
        self._on_message = on_message
        self._on_dropped = on_dropped
        self._turn_end = turn_end
        self._channels: OrderedDict[str, Channel] = OrderedDict()

    def send(self, address: str, message: bytes) -> None:
        """To the proxy at `address`."""
        channel = self._channels.get(address)
        if channel is None:
            channel = self._open(address)
        self._channels.move_to_end(address)
        channel.send(message)

    def _open(self, address: str) -> Channel:
        if len(self._channels) >= _PROXIES_MAX:
            self._channels.popitem(last=False)[1].close()
        channel = Channel(address, self._on_message, self._on_dropped, self._turn_end, to_proxy=True)
        self._channels[address] = channel
        self._nursery.start_soon(self._run, channel)
        return channel

    async def _run(self, channel: Channel) -> None:
        try:
            if self._acknowledged:
                await channel.run(self._control, self._identity)
            else:
                await channel.run_push(self._control)
        finally:
            # One that failed is made anew for the next notification.
            if self._channels.get(channel.address) is channel:
                del self._channels[channel.address]
