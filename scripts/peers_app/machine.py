"""Where a run took place: what figures mean nothing without."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any, Final

from kvpd.transports.ucx import ucx_version
from kvpd.version import VERSION

_PEERS: Final = ("nixl-cu12", "mooncake-transfer-engine-non-cuda", "lmcache")
_ASK_VERSIONS: Final = (
    "import importlib.metadata as m, json, sys; print(json.dumps({name: m.version(name) for name in sys.argv[1:]}))"
)


def describe(peers_python: Path) -> dict[str, Any]:
    """The machine, the moment and the versions."""
    versions = subprocess.run(
        [peers_python, "-c", _ASK_VERSIONS, *_PEERS], check=True, capture_output=True, text=True, timeout=60
    ).stdout
    return {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load": ", ".join(f"{value:.2f}" for value in os.getloadavg()),
        "anonymous_huge_pages": _chosen(Path("/sys/kernel/mm/transparent_hugepage/enabled")),
        "shmem_huge_pages": _chosen(Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")),
        "kvpd": VERSION,
        "ucx": ucx_version(),
        **json.loads(versions),
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _chosen(path: Path) -> str:
    """The word in brackets: what is in force."""
    return path.read_text().partition("[")[2].partition("]")[0] if path.exists() else "unknown"
