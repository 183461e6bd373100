"""A simulated proxy: it hears that a request is ready, acknowledges it, and has the decode side claim it."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from kvpd.core.messages import ProxyAck, ProxyNotif
from kvpd.simulation.schedule import Process
from kvpd.simulation.sender import SimulatedSender


class SimulatedProxy:
    """One start of a proxy. While it is silent it hears and says nothing."""

    def __init__(
        self,
        process: Process,
        address: str,
        random: Random,
        on_first: Callable[[ProxyNotif], None],
        latency_s: float,
    ) -> None:
        self.process = process
        self.address = address
        self.is_silent = False
        self.heard: set[tuple[str, int, int]] = set()
        self._random = random
        self._on_first = on_first
        self._latency_s = latency_s

    def deliver(self, sender: SimulatedSender, notif: ProxyNotif) -> None:
        """A notification is on its way here."""
        self.process.soon(self._random.random() * self._latency_s, lambda: self._hear(sender, notif))

    def _hear(self, sender: SimulatedSender, notif: ProxyNotif) -> None:
        if self.is_silent:
            return
        ack = ProxyAck(notif.sender_incarnation, notif.message_id)
        sender.process.soon(
            self._random.random() * self._latency_s, lambda: sender.proxy_acknowledged(self.address, ack)
        )
        key = (notif.sender_id, notif.sender_incarnation, notif.transfer_no)
        if key not in self.heard:
            self.heard.add(key)
            self._on_first(notif)
