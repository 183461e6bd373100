"""The full job, or the nearest to it that each system can do: requests of several chunks, from engine to engine.

Time runs from the first request's beginning at the source to the last one's being read at the sink.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import attrs

from peers_app.children import Child
from peers_app.daemons import Daemon
from peers_app.figures import Pass, cpu_since
from peers_app.pipeline import Job
from peers_app.raw import SYSTEMS, Environment, System, open_pair
from peers_app.sizes import Sizes

_JOB_S: Final = 180.0
_START_S: Final = 60.0

KVPD: Final = "kvpd"
KVPD_IN_PLACE: Final = "kvpd, no engine copies"
LOCAL: Final = "local"  # a path of kvpd's alone: the prefill engine fills the receiver's slots, and nothing else moves

JOB_SYSTEMS: Final = (
    System(KVPD, "kvpd", "cma", ours=True),
    System(KVPD_IN_PLACE, "kvpd", "cma", ours=True),
    System(KVPD, "kvpd", LOCAL, ours=True),
    System(KVPD_IN_PLACE, "kvpd", LOCAL, ours=True),
    *(one for one in SYSTEMS if one.path == "cma" and one.module.startswith("nixl")),
    System(KVPD, "kvpd", "tcp", ours=True),
    System(KVPD_IN_PLACE, "kvpd", "tcp", ours=True),
    *(one for one in SYSTEMS if one.path == "tcp" and one.module != "ucx"),
)

# What each does of the job, and what it leaves to whoever uses it.
_BY_BENCHMARK: Final = "the benchmark's own, in order of asking"
WHAT_IT_DOES: Final = (
    (
        KVPD,
        "daemons beside the engines",
        "the receiver's: for the whole request, first come, first served",
        "into the sender's slots and out of the receiver's",
        "the engine by its claim, a proxy by a message",
        "yes",
    ),
    (
        KVPD_IN_PLACE,
        "the same",
        "the same",
        "none: engines work in the slots",
        "the same",
        "yes",
    ),
    (
        "either, over local",
        "the same",
        "the same",
        "into the receiver's slots, which is the transfer, and out of them; or none",
        "the same",
        "yes",
    ),
    (
        "NIXL",
        "in the engines",
        _BY_BENCHMARK,
        "none: engines' own memory",
        "its notification, polled for",
        "no",
    ),
    (
        "Mooncake",
        "in the engines",
        _BY_BENCHMARK,
        "none: engines' own memory",
        "the benchmark's line over TCP",
        "no",
    ),
    ("TCP socket", "in the engines", _BY_BENCHMARK, "none: engines' own memory", "in the stream", "no"),
)
WHAT_IT_DOES_COLUMNS: Final = (
    "system",
    "runs",
    "room at the sink",
    "copies besides the transfer",
    "told that all has landed",
    "cancel, dead peers, fences",
)


def job_of(sizes: Sizes, chunk_bytes: int) -> Job:
    """The job for one chunk size."""
    return Job(sizes.job_requests(chunk_bytes), sizes.job_chunks, chunk_bytes, sizes.job_depth)


def measure_job(system: System, environment: Environment, sizes: Sizes) -> Iterator[Pass]:
    """One job for every chunk size, each after a short one that nobody measures, each verified."""
    if system.module == "kvpd":
        for chunk_bytes in sizes.chunk_bytes:
            yield _measure_kvpd(system, job_of(sizes, chunk_bytes))
    else:
        with open_pair(system, environment, sizes.buffer_bytes) as pair:
            assert pair.sink is not None
            for chunk_bytes in sizes.chunk_bytes:
                job = job_of(sizes, chunk_bytes)
                _run_pipeline(pair.source, pair.sink, attrs.evolve(job, requests=2 * job.depth))
                pair.sink.ask(_JOB_S, do="poison")
                cpu_s = pair.cpu_s()
                seconds = _run_pipeline(pair.source, pair.sink, job)
                cpu_s = cpu_since(cpu_s, pair.cpu_s())
                equal = pair.sink.ask(_JOB_S, do="check_job")["equal"]
                yield _pass_of(system, job, seconds, cpu_s, equal)


def _run_pipeline(source: Child, sink: Child, job: Job) -> float:
    words = attrs.asdict(job)
    sink.ask(_JOB_S, do="job", job=words)
    began = source.ask(_JOB_S, do="job", job=words)["began"]
    return float(sink.answer(_JOB_S)["ended"] - began)


def _measure_kvpd(system: System, job: Job) -> Pass:
    copies = system.name == KVPD
    with tempfile.TemporaryDirectory(prefix="bench-peers-") as folder, _open_site(system, job, Path(folder)) as site:
        few = attrs.evolve(job, requests=4 * job.depth)
        site.run(few, copies=True, first=0)  # with copies: every slot holds the pattern after it
        right = site.check()
        cpu_s = site.cpu_s()
        seconds, _ = site.run(job, copies=copies, first=few.requests)
        cpu_s = cpu_since(cpu_s, site.cpu_s())
        if copies:
            right &= site.check()
        else:
            # Where nothing is moved, a slot holds what it held before: what engines write into it is compared instead.
            written = system.path == LOCAL
            right &= site.run(few, copies=written, first=few.requests + job.requests, compare=True)[1]
        return _pass_of(system, job, seconds, cpu_s, right)


def _pass_of(system: System, job: Job, seconds: float, cpu_s: dict[str, float], equal: bool) -> Pass:
    moved = job.requests * job.chunks * job.chunk_bytes
    return Pass(system.name, system.path, job.chunk_bytes, moved, seconds, cpu_s, equal)


@attrs.frozen
class _Site:
    """Two daemons and two engines."""

    receiver: Daemon
    sender: Daemon
    prefill: Child
    decode: Child

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds of each so far."""
        return {
            "prefill engine": self.prefill.cpu_s(),
            "sender": self.sender.cpu_s(),
            "receiver": self.receiver.cpu_s(),
            "decode engine": self.decode.cpu_s(),
        }

    def run(self, job: Job, *, copies: bool, first: int, compare: bool = False) -> tuple[float, bool]:
        """How long it took, and whether what was compared was right."""
        words: dict[str, Any] = {"do": "run", "job": attrs.asdict(job), "copies": copies, "first": first}
        self.decode.say(**words, compare=compare)
        began = self.prefill.ask(_JOB_S, **words, receiver=self.receiver.address)["began"]
        answer = self.decode.answer(_JOB_S)
        return answer["ended"] - began, answer["equal"]

    def check(self) -> bool:
        """Whether the decode engine's own memory holds the prefill engine's chunks."""
        return bool(self.decode.ask(_JOB_S, do="check")["equal"])


@contextlib.contextmanager
def _open_site(system: System, job: Job, folder: Path) -> Iterator[_Site]:
    # Room for the requests under way and for as many that are being read.
    slots = 2 * job.depth * job.chunks
    common = {"chunk_bytes": job.chunk_bytes, "ucx_tls": system.tls}
    way = {"transport": LOCAL} if system.path == LOCAL else {}  # senders follow their receiver in this
    buffers = {"buffer_size": slots * job.chunk_bytes, "control_address": "127.0.0.1:0", **way, **common}
    staging = {"staging_size": job.depth * job.chunks * job.chunk_bytes, "notify_proxy": "false", **common}
    with contextlib.ExitStack() as stack:
        receiver = stack.enter_context(Daemon("receiver", folder, buffers))
        sender = stack.enter_context(Daemon("sender", folder, staging))
        receiver.wait_ready()
        sender.wait_ready()
        engines = [
            stack.enter_context(Child(f"{role} engine", Environment.ours("peers_app.engine", role, str(daemon.socket))))
            for role, daemon in (("prefill", sender), ("decode", receiver))
        ]
        for engine in engines:
            engine.answer(_START_S)
        yield _Site(receiver, sender, *engines)
