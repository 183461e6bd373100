"""The environment of every process that the demo starts."""

from __future__ import annotations

import os
from pathlib import Path


def child_environment() -> dict[str, str]:
    """The caller's own, but nothing is ever asked of a model hub, and a model computes with one thread."""
    ours = str(Path(__file__).resolve().parents[1])
    return {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [ours, os.environ.get("PYTHONPATH")])),
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
    }
