"""One stage of a run: two senders, two receivers, their engines, a proxy and a relay, all over one transport.

`sender-0` and `receiver-0` are killed and restarted; `sender-1` and `receiver-1` meet everything else, so that what
grows in a process that lives long is seen to grow.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Final, Self

import trio

from chaos_app import words
from chaos_app.daemons import Daemon
from chaos_app.engines import Engine
from chaos_app.payloads import CHUNK_BYTES
from chaos_app.process import Process
from chaos_app.proxy import Proxy
from chaos_app.relay import Relay
from chaos_app.site import Site, free_address
from chaos_app.tally import Tally
from kvpd.transports.base import ControlTransport
from kvpd.transports.zmq import open_zmq_control

RECEIVER_SLOTS: Final = 32
_STAGING_SLOTS: Final = 16
_THREADS: Final = 3
LEASE_S: Final = 3.0
PUT_DEADLINE_S: Final = 1.0
REQUEST_TIMEOUT_S: Final = 12.0

_RECEIVER: Final = {
    "chunk_bytes": CHUNK_BYTES,
    "buffer_size": RECEIVER_SLOTS * CHUNK_BYTES,
    "lease_s": LEASE_S,
    "put_deadline_s": PUT_DEADLINE_S,
    "allocation_timeout_s": 4,
    "progress_timeout_s": 6,
    "ready_ttl_s": 4,
    "claim_grace_s": 1,
    "drain_timeout_s": 1,
}
_SENDER: Final = {
    "chunk_bytes": CHUNK_BYTES,
    "staging_size": _STAGING_SLOTS * CHUNK_BYTES,
    "connect_timeout_s": 2,
    "request_timeout_s": REQUEST_TIMEOUT_S,
    "drain_timeout_s": 1,
}


class Stage:
    """Everything that runs. Made by `open_stage`."""

    def __init__(
        self,
        nursery: trio.Nursery,
        control: ControlTransport,
        folder: Path,
        *,
        tls: str,
        seed: str,
        tally: Tally,
        site: Site,
        in_place: bool,
    ) -> None:
        self.nursery = nursery
        self.control = control
        self.tally = tally
        self.site = site
        self.proxy = Proxy(control, free_address(site.receiver_host))
        self.wire = trio.Lock()  # one fault at a time
        self.sent: dict[str, str] = {}  # of this round: request → sender
        # The second receiver also compares checksums; over the first one only the engines' hashes would tell. Nobody
        # could sum what engines write by themselves: there both do without.
        way = {"ucx_tls": tls, "transport": "local" if in_place else "ucx"}
        self.receivers = [
            Daemon(
                "receiver",
                f"receiver-{n}",
                folder,
                {**_RECEIVER, **way, "control_address": free_address(site.receiver_host), "verify": verify},
                environment=site.environment,
            )
            for n, verify in enumerate(("off", "off" if in_place else "xxh3"))
        ]
        self.relay = Relay(lambda: self.receivers[1].address, site.receiver_host)
        self.senders: list[Daemon] = []
        self.prefills: list[Engine] = []
        self._folder = folder
        self._seed = seed
        self._tls = tls
        self.decodes = [
            Engine("decode", f"decode-{n}", seed, receiver.socket, _THREADS, list, partial(self.tally.heard, "decode"))
            for n, receiver in enumerate(self.receivers)
        ]

    async def start(self) -> Self:
        """Start all of it."""
        await self.nursery.start(self.proxy.run)
        await self.nursery.start(self.relay.run)
        for number in range(2):
            settings = {**_SENDER, "ucx_tls": self._tls, "proxy_address": self.proxy.address}
            sender = Daemon(
                "sender",
                f"sender-{number}",
                self._folder,
                settings,
                prefix=self.site.prefix,
                host=self.site.sender_host,
                environment=self.site.environment,
            )
            self.senders.append(sender)
            heard = partial(self._heard_prefill, sender.name)
            self.prefills.append(
                Engine(
                    "prefill",
                    f"prefill-{number}",
                    self._seed,
                    sender.socket,
                    _THREADS,
                    self.addresses,
                    heard,
                    self.site.prefix,
                )
            )
        for daemons in (self.daemons, self.engines):
            async with trio.open_nursery() as starting:
                for process in daemons:
                    starting.start_soon(process.up, self.nursery)
        return self

    def addresses(self) -> Sequence[str]:
        """Where the receivers are reached: one directly, one through the relay."""
        return [self.receivers[0].address, self.relay.address]

    def _heard_prefill(self, sender: str, event: words.AnyEvent) -> None:
        self.tally.heard("prefill", event)
        if isinstance(event, words.Sent):
            self.sent[event.req_id] = sender

    @property
    def daemons(self) -> list[Daemon]:
        """Receivers and senders."""
        return [*self.receivers, *self.senders]

    @property
    def engines(self) -> list[Engine]:
        """Prefill and decode engines."""
        return [*self.prefills, *self.decodes]

    @property
    def processes(self) -> list[Process]:
        """All that could crash."""
        return [*self.daemons, *self.engines]

    def any_daemon(self, rng: random.Random) -> Daemon:
        """One of them."""
        return rng.choice(self.daemons)


@asynccontextmanager
async def open_stage(
    folder: Path, tls: str, seed: str, tally: Tally, site: Site, *, in_place: bool
) -> AsyncIterator[Stage]:
    """A stage that runs under load; `in_place`: its receivers let engines fill slots. Leaving kills every process."""
    async with open_zmq_control() as control, trio.open_nursery() as nursery:
        stage = Stage(nursery, control, folder, tls=tls, seed=seed, tally=tally, site=site, in_place=in_place)
        yield await stage.start()
        nursery.cancel_scope.cancel()
