"""`kvpd bench trace`: a real trace, replayed through real daemons.

Whether a buffer is large enough is decided by the traffic: its sizes, its bursts and its shared prefixes.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import attrs
import click

from kvpd.bench import arguments, shapes
from kvpd.bench.arguments import size_text
from kvpd.bench.failure import BenchmarkFailed
from kvpd.bench.fleet import Daemon
from kvpd.bench.plots import Plot, Series
from kvpd.bench.progress import Progress
from kvpd.bench.replay import DecodePlan, PlannedRequest, PrefillPlan, Received, Scale, Sent, plan, scale
from kvpd.bench.rounds import percentile
from kvpd.bench.shapes import ModelShape
from kvpd.bench.suite import Bench, Subcommand
from kvpd.bench.tables import Table
from kvpd.client import ReceiverLink, connect_receiver
from kvpd.traces import EXCERPTS, Request, excerpt, read_file

_MEMORY_MAX: Final = 1 << 30  # of the buffer, where --scale-bytes is not given
_MOVED_MAX: Final = 16 << 30
_STAGING_BATCHES: Final = 16
_LEAD_S: Final = 0.5  # until everybody is ready to begin
_PATIENCE_S: Final = 400.0  # for what is still on its way when the last request has come
_STEPS: Final = 10
_SAMPLES: Final = 500
_STATES: Final = ("reserved", "writing", "ready", "quarantined")
_PERCENTS: Final = (50, 90, 99, 100)

_HELP = """A real trace through real daemons, for a buffer of a given size.

--trace is `mooncake` or `azure` (excerpts that come with kvpd, 500 requests each), or a file in either format. Each
request is opened when it comes, computed at --prefill-tokens-s, sent in batches as it is computed, and read by a decode
engine for --read-s as soon as it is ready. Chunks are as large as --model-shape makes them.

Time runs --speed times as fast, and every chunk is shrunk --scale-bytes times, so that the trace passes here in a
minute. Both are chosen to fit unless they are given; the output says what they were, and gives times in the trace's.
Where both are equal, moving bytes takes the share of the time that it would take on machines like this one; where
chunks shrink more, moving is cheaper than it would be, and the figures are those of admission alone. Only the admission
timeout is scaled with the time; --rounds is of no meaning here.

\b
Examples:
  kvpd bench trace --buffer-size 64GiB --plot occupancy.svg
  kvpd bench trace --trace azure --model-shape qwen2.5-7b --buffer-size 16GiB
  kvpd bench trace --trace mine.jsonl --model-shape layers=48,kv_heads=8,head_dim=128,dtype=fp8 --requests 5000
"""


@attrs.frozen(kw_only=True)
class Percentiles:
    """Of some durations, in the trace's seconds."""

    count: int
    p50: float | None
    p90: float | None
    p99: float | None
    max: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """None where there are no values."""
        found = [percentile(values, percent) if values else None for percent in _PERCENTS]
        return cls(count=len(values), p50=found[0], p90=found[1], p99=found[2], max=found[3])


@attrs.frozen(kw_only=True)
class Occupancy:
    """The receiver's slots by state and its queue, at one moment of the trace."""

    at: float  # the trace's seconds
    slots: Mapping[str, int]
    queued: int

    @property
    def used(self) -> int:
        """Slots that are not free for anybody else."""
        return sum(self.slots.values())


@attrs.frozen(kw_only=True)
class TraceResult:
    """One replay."""

    trace: str
    requests: int
    span_s: float  # of the trace
    shape: ModelShape
    bytes_per_token: int
    chunk_tokens: int
    buffer_bytes: int
    scale: Scale
    seconds: float  # that the replay took
    outcomes: Mapping[str, int]  # `ready`, or the code of the error
    chunks: int  # of the requests that became ready
    bytes_read: int  # here
    admission_wait: Percentiles
    time_to_ready: Percentiles
    occupancy: tuple[Occupancy, ...]

    def tables(self) -> Sequence[Table]:
        """What it was, what became of the requests, how long they waited."""
        return [self._setting(), self._outcomes(), self._times()]

    def _setting(self) -> Table:
        real = self.bytes_per_token * self.chunk_tokens
        rows = [
            ("trace", f"{self.trace}: {self.requests:,} requests in {self.span_s:,.0f} s"),
            ("model", f"{self.bytes_per_token / 1024:,.4g} KiB a token, {size_text(real)} a chunk"),
            ("buffer", f"{size_text(self.buffer_bytes)}, {self.scale.slots:,} chunks"),
            ("time", f"{self.scale.speed:.3g} times as fast: {self.seconds:.0f} s here"),
            ("bytes", f"shrunk {self.scale.scale_bytes:,} times: {size_text(self.scale.chunk_bytes)} a chunk"),
        ]
        return Table(title="Replayed", columns=("", ""), rows=rows)

    def _outcomes(self) -> Table:
        rows = [(name, count, 100 * count / self.requests) for name, count in self.outcomes.items()]
        return Table(title="What became of the requests", columns=("outcome", "requests", "%"), rows=rows)

    def _times(self) -> Table:
        rows = [
            (name, each.count, each.p50, each.p90, each.p99, each.max)
            for name, each in (
                ("wait for admission, of those admitted", self.admission_wait),
                ("arrival until ready", self.time_to_ready),
            )
        ]
        used = [100 * sample.used / self.scale.slots for sample in self.occupancy]
        note = f"buffer: {sum(used) / len(used):.3g} % in use on average, {max(used):.3g} % at most"
        columns = ("seconds of the trace", "requests", *(f"p{percent}" for percent in _PERCENTS[:-1]), "max")
        return Table(title="Times", columns=columns, rows=rows, notes=[note])

    def plots(self) -> Sequence[Plot]:
        """The buffer and the queue over time."""
        x = [sample.at for sample in self.occupancy]

        def line(name: str, values: Sequence[float]) -> Series:
            return Series(name=name, x=x, y=values)

        percent = 100 / self.scale.slots
        buffer = [
            line("used or promised", [sample.used * percent for sample in self.occupancy]),
            line("ready to be read", [sample.slots["ready"] * percent for sample in self.occupancy]),
        ]
        queue = [line("waiting", [sample.queued for sample in self.occupancy])]
        common = {"x_label": "seconds of the trace", "steps": True, "markers": False}
        return [
            Plot(title=f"{self.trace}: the buffer", y_label="% of the slots", series=buffer, **common),  # type: ignore[arg-type]
            Plot(title=f"{self.trace}: the queue", y_label="requests", series=queue, **common),  # type: ignore[arg-type]
        ]


class _Watch:
    """Looks at a receiver's gauges while a replay runs, and tells how far that is."""

    def __init__(self, link: ReceiverLink, progress: Progress, scale: Scale, span_s: float, begin_at: float) -> None:
        self._link = link
        self._progress = progress
        self._scale = scale
        self._span_s = span_s  # here
        self._begin_at = begin_at
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self.samples: list[Occupancy] = []

    def _watch(self) -> None:
        steps = 0
        while not self._over.wait(max(self._span_s, 1.0) / _SAMPLES):
            passed = time.monotonic() - self._begin_at
            while steps < _STEPS and passed >= steps * self._span_s / _STEPS:
                self._progress.step(f"trace: {steps * 100 // _STEPS} % of it have come")
                steps += 1
            if passed >= 0:
                self._look(passed)

    def _look(self, passed: float) -> None:
        stats = self._link.stats()
        slots = {state: int(stats[f'kvpd_slots{{state="{state}"}}']) for state in _STATES}
        queued = int(stats["kvpd_queued_transfers"])
        self.samples.append(Occupancy(at=passed * self._scale.speed, slots=slots, queued=queued))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        if error is None:
            self._look(time.monotonic() - self._begin_at)


@attrs.frozen(kw_only=True)
class _Traffic:
    """What the options say about the engines."""

    chunk_tokens: int
    batch_tokens: int
    prefill_tokens_s: float
    read_s: float
    allocation_timeout_s: float


def _run(
    bench: Bench,
    *,
    trace: str,
    model_shape: ModelShape,
    buffer_size: int,
    requests: int,
    seconds: float,
    speed: float | None,
    scale_bytes: int | None,
    **traffic: float,
) -> TraceResult:
    engines = _Traffic(**traffic)  # type: ignore[arg-type]  # click has made them what they should be
    chosen = _requests(trace)[:requests]
    bytes_per_token = model_shape.bytes_per_token
    try:
        scaled = scale(
            chosen,
            chunk_bytes=bytes_per_token * engines.chunk_tokens,
            chunk_tokens=engines.chunk_tokens,
            buffer_bytes=buffer_size,
            memory_bytes=min(_MEMORY_MAX, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") // 4),
            moved_bytes=_MOVED_MAX,
            scale_bytes=scale_bytes,
            speed=speed,
            seconds=seconds,
        )
    except ValueError as exc:
        raise click.UsageError(str(exc)) from exc
    planned = plan(chosen, scaled, engines.chunk_tokens)
    bench.progress.plan(_STEPS)
    seconds, sent, received, waits, occupancy = _replay(bench, planned, scaled, engines)
    outcomes = Counter("ready" if each.code is None else each.code for each in sent)
    due = {request.req_id: request.at_s for request in planned}
    return TraceResult(
        trace=Path(trace).name,
        requests=len(planned),
        span_s=chosen[-1].at,
        shape=model_shape,
        bytes_per_token=bytes_per_token,
        chunk_tokens=engines.chunk_tokens,
        buffer_bytes=buffer_size,
        scale=scaled,
        seconds=seconds,
        outcomes=dict(outcomes.most_common()),
        chunks=sum(each.chunks for each in received),
        bytes_read=sum(each.nbytes for each in received),
        admission_wait=Percentiles.of([wait * scaled.speed for wait in waits]),
        time_to_ready=Percentiles.of([(each.ready_at - due[each.req_id]) * scaled.speed for each in received]),
        occupancy=tuple(occupancy),
    )


def _requests(trace: str) -> tuple[Request, ...]:
    if trace in EXCERPTS:
        return excerpt(trace)
    try:
        return read_file(Path(trace))
    except (OSError, ValueError) as exc:
        raise click.UsageError(f"{trace} is no trace that can be read: {exc}") from exc


def _replay(
    bench: Bench, planned: list[PlannedRequest], scaled: Scale, engines: _Traffic
) -> tuple[float, list[Sent], list[Received], list[float], list[Occupancy]]:
    """How long it took, what was sent, what was read (`ready_at` since it began), each wait, and the buffer's use."""
    batch_chunks = max(1, engines.batch_tokens // engines.chunk_tokens)
    chunk_s = engines.chunk_tokens / engines.prefill_tokens_s / scaled.speed
    span_s = planned[-1].at_s
    with bench.fleet() as fleet:
        receiver = fleet.receiver(
            chunk_bytes=scaled.chunk_bytes,
            slots=scaled.slots,
            allocation_timeout_s=engines.allocation_timeout_s / scaled.speed,
        )
        sender = fleet.sender(chunk_bytes=scaled.chunk_bytes, slots=_STAGING_BATCHES * batch_chunks)
        prefill = fleet.worker("kvpd.bench.replay_prefill")
        decode = fleet.worker("kvpd.bench.replay_decode")
        decode.call("start", DecodePlan(str(receiver.socket), engines.read_s / scaled.speed), type(None))
        begin_at = time.monotonic() + _LEAD_S
        work = PrefillPlan(str(sender.socket), receiver.address, planned, batch_chunks, chunk_s, begin_at)
        with connect_receiver(receiver.socket) as link, _Watch(link, bench.progress, scaled, span_s, begin_at) as watch:
            sent = prefill.call("replay", work, list[Sent], timeout_s=span_s + _PATIENCE_S)
        whole = [each.req_id for each in sent if each.code is None]
        received = decode.call("finish", whole, list[Received])
        seconds = time.monotonic() - begin_at
    if len(sent) != len(planned):
        raise BenchmarkFailed(f"{len(sent)} of {len(planned)} requests came to an end")
    received = [Received(each.req_id, each.ready_at - begin_at, each.chunks, each.nbytes) for each in received]
    return seconds, sent, received, _admission_waits(receiver, whole), watch.samples


def _admission_waits(receiver: Daemon, whole: Sequence[str]) -> list[float]:
    """How long each transfer waited, as the receiver's log says; it must have ended.

    Raises:
        BenchmarkFailed: the log does not name every request that was sent well.
    """
    waits: dict[str, float] = {}
    for line in receiver.log.read_text().splitlines():
        if '"transfer_admitted"' in line:
            fields = json.loads(line)
            waits[fields["req_id"]] = fields["queued_s"]
    if not waits.keys() >= set(whole):
        raise BenchmarkFailed("the receiver's log does not name every request: it must be JSON, of level info")
    return list(waits.values())


def _number(name: str, default: float, help_text: str) -> click.Option:
    return click.Option([name], type=click.FloatRange(0.001, 1e9), default=default, show_default=True, help=help_text)


def _count(name: str, default: int, help_text: str) -> click.Option:
    return click.Option([name], type=click.IntRange(1, 1 << 40), default=default, show_default=True, help=help_text)


SUBCOMMAND: Final = Subcommand(
    name="trace",
    help=_HELP,
    run=_run,
    options=(
        click.Option(["--trace"], default="mooncake", show_default=True, metavar="NAME|FILE", help="What to replay."),
        shapes.option("--model-shape", "llama-3.1-8b"),
        arguments.size("--buffer-size", "64GiB", "The receiver's buffer, before it is shrunk."),
        _count("--requests", 500, "How many of the trace's requests, from its beginning."),
        _number("--seconds", 60.0, "How long the replay should take, where --speed is not given."),
        click.Option(["--speed"], type=click.FloatRange(0.001, 1e6), help="How many times as fast time runs."),
        click.Option(["--scale-bytes"], type=click.IntRange(1), help="How many times smaller every chunk is."),
        _count("--chunk-tokens", 256, "Tokens in a chunk."),
        _count("--batch-tokens", 2048, "Tokens that are computed and sent together."),
        _number("--prefill-tokens-s", 20_000.0, "How fast one prompt is computed."),
        _number("--read-s", 0.1, "How long a decode engine reads a request, in the trace's time."),
        _number("--allocation-timeout-s", 30.0, "How long a request may wait for admission, in the trace's time."),
    ),
    quick={"requests": 40, "seconds": 2.0, "scale_bytes": 4096},
)
