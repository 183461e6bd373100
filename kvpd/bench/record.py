"""What the machine is and what runs on it: a figure without these says nothing."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Mapping
from pathlib import Path

import attrs
import trio
import zmq

from kvpd.bench.memcpy import memcpy_of_the_moment
from kvpd.bench.rounds import Measured
from kvpd.transports.ucx import ucx_version
from kvpd.version import VERSION


@attrs.frozen(kw_only=True)
class Record:
    """The machine, the versions, the settings, and how fast the machine was when the run began."""

    date: str  # UTC
    cpu: str
    cores: int  # that this process may use
    memory_bytes: int
    kernel: str
    shmem_huge_pages: str  # the buffers are shared memory
    versions: Mapping[str, str]
    settings: tuple[str, ...]  # what daemons were given beyond the benchmark's own
    environment: Mapping[str, str]  # variables of UCX's
    load: tuple[float, float, float]  # processes that wanted to run, over 1, 5 and 15 minutes
    memcpy_gb_s: Measured

    def lines(self) -> list[str]:
        """The same for a person."""
        memcpy = self.memcpy_gb_s
        return [
            f"{self.date}, {self.cpu}, {self.cores} cores to use, {self.memory_bytes / 2**30:.0f} GiB",
            f"kernel {self.kernel}; huge pages for shared memory: {self.shmem_huge_pages}",
            ", ".join(f"{name} {version}" for name, version in self.versions.items()),
            "settings: " + (" ".join(self.settings) or "kvpd's defaults, and what the benchmark needs"),
            "environment: " + (" ".join(f"{name}={value}" for name, value in self.environment.items()) or "nothing"),
            "load: " + ", ".join(f"{value:.2f}" for value in self.load),
            f"memcpy of the moment: {memcpy.median:.1f} GB/s ({memcpy.low:.1f} to {memcpy.high:.1f})",
        ]


def record(settings: tuple[str, ...]) -> Record:
    """Look around, and copy memory for about a second."""
    return Record(
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        cpu=_cpu(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        kernel=platform.release(),
        shmem_huge_pages=_shmem_huge_pages(),
        versions={
            "kvpd": VERSION,
            "python": platform.python_version(),
            "trio": trio.__version__,
            "pyzmq": zmq.pyzmq_version(),
            "libzmq": zmq.zmq_version(),
            "ucx": ucx_version(),
        },
        settings=settings,
        environment={name: value for name, value in sorted(os.environ.items()) if name.startswith("UCX_")},
        load=os.getloadavg(),
        memcpy_gb_s=memcpy_of_the_moment(),
    )


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


def _shmem_huge_pages() -> str:
    try:
        choices = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled").read_text()
    except OSError:
        return "not known"
    return choices.partition("[")[2].partition("]")[0]
