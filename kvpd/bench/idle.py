"""`kvpd bench idle`: the CPU that daemons use while nothing happens.

A cluster's daemons wait most of the time, beside engines that need every core.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Final

import attrs
import click

from kvpd.bench.failure import BenchmarkFailed
from kvpd.bench.plots import Plot
from kvpd.bench.processes import cores_used
from kvpd.bench.rounds import Measured
from kvpd.bench.suite import Bench, Subcommand
from kvpd.bench.tables import Table
from kvpd.client import ReceiverLink, SenderLink, connect_receiver, connect_sender
from kvpd.errors import AdmissionRefused, ErrorCode

_CHUNK_BYTES: Final = 4096
_FOR_EVER_S: Final = 3600  # no limit may end what waits while it is looked at
_SETTLE_S: Final = 1.0  # for what the last event still causes, in the other daemon too
_BURST: Final = 500  # transfers opened before the receiver must have heard of them

_HELP = """CPU of daemons that have nothing to do.

Three situations: alone; with a prefill and a decode engine attached; and with --waiting transfers in the receiver's
queue, behind one that holds the only slot. Each is left alone for a second at most, then looked at for --seconds at a
time.

\b
Example:
  kvpd bench idle --seconds 30
"""


@attrs.frozen(kw_only=True)
class Idle:
    """CPU time per second of each daemon in one situation; 1 is one core."""

    situation: str
    waiting: int  # transfers in the receiver's queue
    sender: Measured
    receiver: Measured


@attrs.frozen(kw_only=True)
class IdleResult:
    """All situations."""

    seconds: float  # of each measurement
    situations: tuple[Idle, ...]

    def tables(self) -> Sequence[Table]:
        """A row each."""
        rows = [
            (each.situation, each.waiting, each.sender.times(100), each.receiver.times(100)) for each in self.situations
        ]
        columns = ("situation", "transfers waiting", "sender, % of a core", "receiver, % of a core")
        return [Table(title=f"Idle daemons, {self.seconds:g} s at a time", columns=columns, rows=rows)]

    def plots(self) -> Sequence[Plot]:
        """None: a few numbers need no picture."""
        return []


def _run(bench: Bench, *, seconds: float, waiting: int) -> IdleResult:
    situations: list[Idle] = []
    bench.progress.plan(3)
    with bench.fleet() as fleet, contextlib.ExitStack() as engines:
        receiver = fleet.receiver(
            chunk_bytes=_CHUNK_BYTES,
            slots=1,
            queue_depth_max=waiting,
            allocation_timeout_s=_FOR_EVER_S,
            progress_timeout_s=_FOR_EVER_S,
        )
        sender = fleet.sender(chunk_bytes=_CHUNK_BYTES, slots=1, request_timeout_s=_FOR_EVER_S)

        def look(situation: str, queued: int) -> None:
            bench.progress.step(f"idle: {situation}")
            time.sleep(min(_SETTLE_S, seconds))
            cpu = [cores_used((sender, receiver), seconds) for _ in range(bench.rounds)]
            by_daemon = [Measured.of(values) for values in zip(*cpu, strict=True)]
            situations.append(Idle(situation=situation, waiting=queued, sender=by_daemon[0], receiver=by_daemon[1]))

        look("alone", 0)
        prefill = engines.enter_context(connect_sender(sender.socket))
        decode = engines.enter_context(connect_receiver(receiver.socket))
        look("engines attached", 0)
        with _waiting(prefill, decode, receiver.address, waiting):
            look("transfers wait for admission", waiting)
    return IdleResult(seconds=seconds, situations=tuple(situations))


class _Over(Exception):
    """Leaves transfers the way that cancels them."""


@contextlib.contextmanager
def _waiting(prefill: SenderLink, decode: ReceiverLink, receiver: str, count: int) -> Iterator[None]:
    """`count` transfers wait in the receiver's queue, for a slot that another one holds and does not fill."""
    with contextlib.suppress(_Over), contextlib.ExitStack() as transfers:
        holder = transfers.enter_context(prefill.open("holder", receiver=receiver, total_chunks=1))
        transfers.enter_context(holder.stage([b"holder"]))
        for number in range(count):
            transfer = transfers.enter_context(prefill.open(f"idle-{number}", receiver=receiver, total_chunks=1))
            transfer.stage([b"%d" % number])
            if number % _BURST == _BURST - 1 or number == count - 1:
                _wait_until_heard(prefill, receiver)
        queued = int(decode.stats()["kvpd_queued_transfers"])
        if queued != count:
            raise BenchmarkFailed(f"{queued} of {count} transfers wait in the receiver's queue")
        yield
        raise _Over


def _wait_until_heard(prefill: SenderLink, receiver: str) -> None:
    """Messages keep their order, so whoever is refused knows that those before it were heard."""
    try:
        with prefill.open("barrier", receiver=receiver, total_chunks=2) as transfer, transfer.stage([b"a", b"b"]):
            raise BenchmarkFailed("a request of two chunks was admitted into one slot")
    except AdmissionRefused as refusal:
        if refusal.code is not ErrorCode.TOO_LARGE:
            raise BenchmarkFailed(f"opening transfers that wait: {refusal}") from refusal


SUBCOMMAND: Final = Subcommand(
    name="idle",
    help=_HELP,
    run=_run,
    options=(
        click.Option(
            ["--seconds"],
            type=click.FloatRange(0.1, 3600),
            default=10.0,
            show_default=True,
            help="How long each measurement is.",
        ),
        click.Option(
            ["--waiting"],
            type=click.IntRange(1, 60_000),
            default=10_000,
            show_default=True,
            help="Transfers that wait for admission.",
        ),
    ),
    quick={"seconds": 0.3, "waiting": 500},
)
