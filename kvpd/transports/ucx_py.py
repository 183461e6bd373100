"""The data plane over ucx-py: the same as over UCX (`ucx`), through the binding that a site already has.

It is for sites that ship ucx-py, and for comparison. It differs where ucx-py leaves no choice: its progress goes on
until nothing is left to do, so one window of bytes bounds what all endpoints together have in flight, and puts are cut
into pieces; what a network brings in is not bounded, and may hold up a receiver's loop. An endpoint's forced close is
made inside one call. It is loaded when a data plane is opened, and only then.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import ModuleType
from typing import Final

from kvpd.errors import ConfigError, TransportError
from kvpd.transports import _ucp
from kvpd.transports._puts import Window
from kvpd.transports._ucx_binding import Mapping
from kvpd.transports.ucx import Buffer, UcxDataPlane, run_data_plane

SHARED_WINDOW_BYTES: Final = 8 << 20  # about a millisecond of copying
_VERSION: Final = (0, 45)  # the last one; what `_ucx_api` knows of its inside is true of it

_REMEDY: Final = (
    "install ucx-py 0.45: from conda (channel rapidsai), or as kvpd[ucx-py] with pip, for which the wheel comes from "
    "NVIDIA's package index; or set transport to ucx"
)


@asynccontextmanager
async def open_ucx_py_data_plane(
    buffer: Buffer, *, tls: str = "", put_window_bytes: int | None = None
) -> AsyncIterator[UcxDataPlane]:
    """A data plane for `buffer`, like `kvpd.transports.ucx.open_ucx_data_plane`.

    Args:
        buffer: what puts read from here and what peers write into; writable, and exported until the context is left.
        tls: the transports UCX may use, as UCX_TLS; empty leaves the choice to UCX.
        put_window_bytes: bytes in flight of all endpoints together; None: SHARED_WINDOW_BYTES.

    Raises:
        ConfigError: ucx-py or its libucp cannot be loaded or is too old, or UCX has none of the transports.
        TransportError: UCX has no worker to give; descriptors may have run out.
    """
    window_bytes = put_window_bytes or SHARED_WINDOW_BYTES
    mapping = _open_context(buffer, tls)
    async with run_data_plane("ucx-py", mapping, window_bytes, Window(window_bytes)) as plane:
        yield plane


def _open_context(buffer: Buffer, tls: str) -> Mapping:
    api = load()
    view = memoryview(buffer).cast("B")
    try:
        context = api.Context(tls=tls, view=view)
    except TransportError as exc:
        choice = f"ucx_tls = {tls!r}" if tls else "ucx_tls is not set"
        remedy = "`ucx_info -d` lists the transports of this machine"
        raise ConfigError([f"ucx-py cannot start UCX: {exc}; {choice}; {remedy}"]) from exc
    return Mapping(context, view, context.address, view.nbytes)


def load() -> ModuleType:
    """ucx-py, through kvpd's eyes (`kvpd.transports._ucx_api`).

    Raises:
        ConfigError: there is none, or it or its UCX is not one that kvpd knows.
    """
    try:
        with _environment_restored():
            api = importlib.import_module("kvpd.transports._ucx_api")
    except (ImportError, OSError) as exc:
        raise ConfigError([f"transport = 'ucx-py': it cannot be imported: {exc}; {_REMEDY}"]) from exc
    if tuple(map(int, api.ucx_py_version.split(".")[:2])) != _VERSION:
        raise ConfigError([f"transport = 'ucx-py': this is ucx-py {api.ucx_py_version}; {_REMEDY}"])
    version = api.libucp_version()
    if version[:2] < _ucp.MIN_VERSION:
        found, limit = (".".join(map(str, numbers)) for numbers in (version, _ucp.MIN_VERSION))
        raise ConfigError([f"transport = 'ucx-py': it has loaded UCX {found}, kvpd needs {limit} or newer"])
    return api


@contextmanager
def _environment_restored() -> Iterator[None]:
    """ucx-py sets variables of UCX when it is imported; kvpd's own contexts and children must not meet them.

    UCX writes its log to stdout. Its failures reach kvpd as exceptions; who wants to see more asks for it.
    """
    before = os.environ.copy()
    os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
