"""What the configuration's words for the outside world stand for."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from kvpd.transports.base import DataPlane

# From the memory to register and the put window in bytes (None: the data plane's own default).
DataPlaneFactory = Callable[[mmap.mmap, int | None], AbstractAsyncContextManager[DataPlane]]


def data_plane_factory(transport: str, ucx_library: str, ucx_tls: str) -> DataPlaneFactory:
    """How to open the data plane that the configuration names. libucp is loaded only when that is called.

    "local" and "auto" too open UCX: for peers on other hosts, and for what engines do not fill in place.
    """

    def open_ucx(memory: mmap.mmap, put_window_bytes: int | None) -> AbstractAsyncContextManager[DataPlane]:
        from kvpd.transports.ucx import open_ucx_data_plane  # noqa: PLC0415  loads a C library

        return open_ucx_data_plane(memory, library=ucx_library, tls=ucx_tls, put_window_bytes=put_window_bytes)

    def open_ucx_py(memory: mmap.mmap, put_window_bytes: int | None) -> AbstractAsyncContextManager[DataPlane]:
        from kvpd.transports.ucx_py import open_ucx_py_data_plane  # noqa: PLC0415  needs a package that few have

        return open_ucx_py_data_plane(memory, tls=ucx_tls, put_window_bytes=put_window_bytes)

    openings: dict[str, DataPlaneFactory] = {
        "ucx": open_ucx,
        "ucx-py": open_ucx_py,
        "local": open_ucx,
        "auto": open_ucx,
    }
    assert transport in openings, f"the configuration let transport {transport!r} through"
    return openings[transport]
