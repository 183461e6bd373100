"""A simulated proxy: it hears how transfers end, acknowledges, and has the decode side claim those that are ready."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from kvpd.core.messages import Notification, ProxyAck, ProxyNotif
from kvpd.simulation.rules import Rule, Violation
from kvpd.simulation.schedule import Process
from kvpd.simulation.sender import SimulatedSender

TransferKey = tuple[str, int, int]  # sender, incarnation, transfer_no


def _key_of(notif: Notification) -> TransferKey:
    return notif.sender_id, notif.sender_incarnation, notif.transfer_no


class Heard:
    """What the proxy of one address was told, over all its starts: how each transfer ended, once and for all."""

    def __init__(self) -> None:
        self._was_ready: dict[TransferKey, bool] = {}

    def __contains__(self, key: TransferKey) -> bool:
        return key in self._was_ready

    def note(self, notif: Notification) -> None:
        """One more notification.

        Raises:
            Violation: the same transfer was said to have ended otherwise.
        """
        key, is_ready = _key_of(notif), isinstance(notif, ProxyNotif)
        if self._was_ready.setdefault(key, is_ready) is not is_ready:
            raise Violation(Rule.ONE_END, f"{key} is said to be ready, and to have failed")


class SimulatedProxy:
    """One start of a proxy. While it is silent it hears and says nothing."""

    def __init__(
        self,
        process: Process,
        address: str,
        random: Random,
        heard: Heard,
        on_ready: Callable[[ProxyNotif], None],
        latency_s: float,
    ) -> None:
        self.process = process
        self.address = address
        self.is_silent = False
        self._heard = heard
        self._seen: set[TransferKey] = set()  # by this start of it
        self._random = random
        self._on_ready = on_ready
        self._latency_s = latency_s

    def deliver(self, sender: SimulatedSender, notif: Notification) -> None:
        """A notification is on its way here."""
        self.process.soon(self._random.random() * self._latency_s, lambda: self._hear(sender, notif))

    def _hear(self, sender: SimulatedSender, notif: Notification) -> None:
        if self.is_silent:
            return
        ack = ProxyAck(notif.sender_incarnation, notif.message_id)
        sender.process.soon(
            self._random.random() * self._latency_s, lambda: sender.proxy_acknowledged(self.address, ack)
        )
        self._heard.note(notif)
        key = _key_of(notif)
        if key not in self._seen:
            self._seen.add(key)
            if isinstance(notif, ProxyNotif):
                self._on_ready(notif)
