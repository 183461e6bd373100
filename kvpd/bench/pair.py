"""A sender, a receiver and an engine on each: what a load goes through, from end to end."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from typing import Final

import attrs

from kvpd.bench.decode import AttachDecode, Taken
from kvpd.bench.failure import BenchmarkFailed
from kvpd.bench.fleet import Fleet
from kvpd.bench.payload import Load, Mode
from kvpd.bench.prefill import AttachPrefill, Sent
from kvpd.bench.wires import UCX_TLS, Binding, Transport

_REQUESTS_MAX: Final = 4000  # seconds, where requests are small

_runs = itertools.count(1)


@attrs.frozen(kw_only=True)
class Flow:
    """What became of one load."""

    seconds: float  # from the first open to the last end, on either side
    requests: int
    nbytes: int
    latencies_s: tuple[float, ...]  # by request, from open to the chunks in the decode engine's hands
    cpu_s: Mapping[str, float]  # by process, while it ran

    @property
    def gb_s(self) -> float:
        """Goodput, 10⁹ bytes per second."""
        return self.nbytes / self.seconds / 1e9


def requests_of(nbytes: int, request_bytes: int, *, least: int) -> int:
    """How many requests a measurement of about `nbytes` has."""
    return max(least, min(nbytes // request_bytes, _REQUESTS_MAX))


class Pair:
    """Two daemons and two engines, each a process of its own."""

    def __init__(
        self,
        fleet: Fleet,
        *,
        chunk_bytes: int,
        slots: int,
        staging_slots: int,
        transport: Transport = "cma",
        binding: Binding = "ucx",
        watched: bool = False,
    ) -> None:
        """Start them; the fleet ends them. `binding` does not matter to the transport "local".

        Raises:
            BenchmarkFailed: one does not come up.
        """
        tls = UCX_TLS[transport]
        there, here = ("local", "auto") if transport == "local" else (binding, binding)
        self._chunk_bytes = chunk_bytes
        # The engines first: they come up while the daemons are waited for.
        self._prefill = fleet.worker("kvpd.bench.prefill")
        self._decode = fleet.worker("kvpd.bench.decode")
        self.receiver = fleet.receiver(
            chunk_bytes=chunk_bytes, slots=slots, watched=watched, transport=there, ucx_tls=tls
        )
        self.sender = fleet.sender(
            chunk_bytes=chunk_bytes, slots=staging_slots, watched=watched, transport=here, ucx_tls=tls
        )
        released = f"{self.receiver.socket}.released"
        os.mkfifo(released)
        sending = AttachPrefill(socket=str(self.sender.socket), receiver=self.receiver.address, released=released)
        self._prefill.call("attach", sending, type(None))
        taking = AttachDecode(socket=str(self.receiver.socket), released=released)
        self._decode.call("attach", taking, type(None))

    def run(self, *, requests: int, chunks: int, depth: int, mode: Mode) -> Flow:
        """Move a load, and see that all of it has arrived.

        Raises:
            BenchmarkFailed: chunks are missing or wrong, or somebody died.
        """
        load = Load(run=next(_runs), requests=requests, chunks=chunks, depth=depth, mode=mode)
        processes = {
            "prefill": self._prefill,
            "sender": self.sender,
            "receiver": self.receiver,
            "decode": self._decode,
        }
        before = {name: process.cpu_seconds for name, process in processes.items()}
        self._decode.begin("run", load)
        try:
            sent = self._prefill.call("run", load, Sent)
        except BenchmarkFailed:
            self._decode.check_alive()  # else its end is the reason
            raise
        taken = self._decode.result(Taken)
        cpu_s = {name: process.cpu_seconds - before[name] for name, process in processes.items()}
        if taken.wrong or taken.chunks != requests * chunks:
            raise BenchmarkFailed(
                f"{taken.chunks} chunks arrived of {requests * chunks}, and {taken.wrong} of them had wrong bytes"
            )
        pairs = zip(sent.opened_at, taken.claimed_at, strict=True)
        return Flow(
            seconds=max(sent.ended_at, taken.ended_at) - sent.began_at,
            requests=requests,
            nbytes=taken.chunks * self._chunk_bytes,
            latencies_s=tuple(claimed_at - opened_at for opened_at, claimed_at in pairs),
            cpu_s=cpu_s,
        )
