"""Notifications on their way to proxies: in order, repeated with growing pauses until acknowledged, or given up.

A proxy that is down, slow or gone costs a bounded queue and never delays a transfer. What is promised is at least
once, within `notify_give_up_s`; a proxy that was told twice deduplicates by (sender, incarnation, transfer_no).
"""

from __future__ import annotations

from collections import OrderedDict

import attrs

from kvpd.core.messages import Notification
from kvpd.core.sender.settings import SenderSettings
from kvpd.core.timers import Timers

_BURST = 256  # repeats in one go


@attrs.frozen
class Pending:
    """One notification that was not acknowledged yet."""

    message: Notification
    since: float


@attrs.define
class _Proxy:
    pending: OrderedDict[int, Pending] = attrs.field(factory=OrderedDict)  # by message id
    backoff_s: float = 0.0
    due_at: float = 0.0


class Notifier:
    """All proxies' queues."""

    def __init__(self, settings: SenderSettings) -> None:
        self._settings = settings
        self._proxies: dict[str, _Proxy] = {}  # without empty ones
        self._timers: Timers[str] = Timers()

    @property
    def pending_count(self) -> int:
        """Notifications that no proxy has acknowledged yet."""
        return sum(len(proxy.pending) for proxy in self._proxies.values())

    def add(self, address: str, message: Notification, *, now: float) -> bool:
        """Keep a notification until it is acknowledged. False: the queue is full, and it is sent but once."""
        proxy = self._proxies.get(address)
        if proxy is None:
            if len(self._proxies) >= self._settings.proxies_max:
                return False
            proxy = self._proxies[address] = _Proxy(backoff_s=self._settings.notify_repeat_s)
            self._arm(address, proxy, now + proxy.backoff_s)
        if len(proxy.pending) >= self._settings.notifications_max:
            return False
        proxy.pending[message.message_id] = Pending(message, now)
        return True

    def acknowledged(self, address: str, message_id: int, *, now: float) -> None:
        """The proxy has it. That it answers at all ends its backoff."""
        proxy = self._proxies.get(address)
        if proxy is None or proxy.pending.pop(message_id, None) is None:
            return
        if not proxy.pending:
            self._forget(address)
            return
        proxy.backoff_s = self._settings.notify_repeat_s
        # Never later than it was due: a stream of answers must not put off the repeat of the one that was lost.
        self._arm(address, proxy, min(proxy.due_at, now + proxy.backoff_s))

    def _arm(self, address: str, proxy: _Proxy, at: float) -> None:
        proxy.due_at = at
        self._timers.set(address, at)

    def _forget(self, address: str) -> None:
        del self._proxies[address]
        self._timers.clear(address)

    def next_at(self) -> float | None:
        """When repeats are due."""
        return self._timers.next_at()

    def due(self, now: float) -> tuple[list[tuple[str, Notification]], list[tuple[str, Notification]]]:
        """What to send again now, and what is given up."""
        again: list[tuple[str, Notification]] = []
        dropped: list[tuple[str, Notification]] = []
        while (address := self._timers.pop_due(now)) is not None:
            proxy = self._proxies[address]
            while proxy.pending:
                message_id, oldest = next(iter(proxy.pending.items()))
                if oldest.since + self._settings.notify_give_up_s > now:
                    break
                del proxy.pending[message_id]
                dropped.append((address, oldest.message))
            if not proxy.pending:
                self._forget(address)
                continue
            late = [p.message for p in proxy.pending.values() if p.since + self._settings.notify_repeat_s <= now]
            again += [(address, message) for message in late[:_BURST]]
            if late:
                proxy.backoff_s = min(2 * proxy.backoff_s, self._settings.notify_backoff_max_s)
            self._arm(address, proxy, now + proxy.backoff_s)
        return again, dropped
