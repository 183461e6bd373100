"""The ways through UCX that the data planes' contract is tested on: a binding and a wire, as in `ucx-py-tcp`."""

from __future__ import annotations

import mmap
from contextlib import AbstractAsyncContextManager
from typing import Final

from kvpd.transports.base import DataPlane
from kvpd.transports.ucx import open_ucx_data_plane
from kvpd.transports.ucx_py import open_ucx_py_data_plane

_OPENINGS: Final = {"ucx": open_ucx_data_plane, "ucx-py": open_ucx_py_data_plane}
_TLS: Final = {"cma": "", "tcp": "tcp"}
_TRANSPORTS: Final = {"cma": {"cma", "tcp"}, "tcp": {"tcp"}}  # the first one writes, TCP sets up


def open_ucx(mode: str, buffer: mmap.mmap, window_bytes: int | None = None) -> AbstractAsyncContextManager[DataPlane]:
    """A data plane through UCX, as `mode` says."""
    binding, _, wire = mode.rpartition("-")
    return _OPENINGS[binding](buffer, tls=_TLS[wire], put_window_bytes=window_bytes)


def transports_of(mode: str) -> set[str]:
    """What an endpoint of that mode consists of between two processes of one host."""
    return _TRANSPORTS[mode.rpartition("-")[2]]
