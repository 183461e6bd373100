"""Senders' word that a transfer is complete, or will never be: acknowledged, and told to whoever waits for it.

A transfer ends once, and the first word about it counts. A sender repeats a notification until it is acknowledged, so
the same one may come twice. Nothing that arrives here ends the listening; what is no notification is counted and
dropped.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import attrs
import trio

from kvpd.core.messages import ErrorInfo, FailNotif, Notification, ProxyAck, ProxyNotif, decode, encode
from kvpd.errors import RemoteProtocolError
from kvpd.log import get_logger
from kvpd.metrics import ProxyMetrics
from kvpd.transports.base import ControlServer

log = get_logger()

_REMEMBERED_MAX: Final = 16_384


@attrs.define
class Arrival:
    """One transfer that somebody waits for.

    `meanwhile` is for what is only worth doing if the transfer arrives: it is cancelled when the transfer has failed.
    """

    meanwhile: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    _ended: trio.Event = attrs.field(factory=trio.Event)
    _error: ErrorInfo | None = None

    async def outcome(self) -> ErrorInfo | None:
        """Wait until a sender says that it is complete: None; or why it will never be."""
        await self._ended.wait()
        return self._error

    def end(self, error: ErrorInfo | None) -> None:
        """A sender has said so. Another word about it changes nothing."""
        if self._ended.is_set():
            return
        self._error = error
        self._ended.set()
        if error is not None:
            self.meanwhile.cancel()


class Notifications:
    """The socket that senders notify, and those who wait."""

    def __init__(self, server: ControlServer, metrics: ProxyMetrics) -> None:
        self._server = server
        self._metrics = metrics
        self._waiting: dict[str, Arrival] = {}
        self._seen: OrderedDict[tuple[str, int, int], None] = OrderedDict()

    @property
    def waiting_count(self) -> int:
        """Transfers that are waited for."""
        return len(self._waiting)

    @contextmanager
    def expect(self, transfer_id: str) -> Iterator[Arrival]:
        """Wait for a transfer, from before anybody is asked for it."""
        arrival = self._waiting[transfer_id] = Arrival()
        try:
            yield arrival
        finally:
            del self._waiting[transfer_id]

    async def run(self) -> None:
        """Hear senders, for ever."""
        while True:
            peer, frame = await self._server.receive()
            try:
                message = decode(frame)
            except RemoteProtocolError as exc:
                self._dropped(str(exc))
                continue
            if isinstance(message, ProxyNotif | FailNotif):
                self._hear(peer, message)
            else:
                self._dropped(f"a {type(message).__name__}, which is for receivers and senders")

    def _dropped(self, detail: str) -> None:
        self._metrics.message_dropped("malformed")
        log.warning(
            "notification_malformed", detail=f"{detail}; this port hears senders' notifications", rate_limited=True
        )

    def _hear(self, peer: bytes, notif: Notification) -> None:
        try:
            self._server.send_nowait(peer, encode(ProxyAck(notif.sender_incarnation, notif.message_id)))
        except trio.WouldBlock:
            self._metrics.message_dropped("queue_full")  # it asks again
        except trio.BrokenResourceError:
            self._metrics.message_dropped("not_connected")
        identity = (notif.sender_id, notif.sender_incarnation, notif.transfer_no)
        if identity in self._seen:
            self._metrics.notification("repeated")
            return
        self._seen[identity] = None
        if len(self._seen) > _REMEMBERED_MAX:
            self._seen.popitem(last=False)
        arrival = self._waiting.get(notif.req_id)
        self._metrics.notification("unknown" if arrival is None else "matched")
        if arrival is not None:
            arrival.end(notif.error if isinstance(notif, FailNotif) else None)
