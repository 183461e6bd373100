"""The part of ucx-py's core API that kvpd uses, as a binding (see `_ucx_binding`); never its asyncio layer.

Importing this module imports ucx-py and, with it, loads libucp. What ucx-py's authors never meant it for is done here:

- Every put's own status arrives as an exception in a callback; the callback writes it down and does nothing else,
  because it runs inside `progress` and ucx-py swallows what it raises.
- ucx-py closes an endpoint by waiting for its peer, unless the endpoint's status says that it has failed. A forced
  close therefore writes that status first. It is found by deriving from UCXEndpoint: the address is an argument of
  `add_handle_finalizer`.
- ucx-py keeps a list of children in each object, which never shrinks, and closes a worker's endpoints when they can no
  longer be closed. The lists are kept empty; kvpd closes in its own order.
- There is no `ucp_worker_signal`: an eventfd stands beside UCX's descriptor in the epoll set that ucx-py makes.

`progress` goes on until nothing is left to do, so what is outstanding must be bounded elsewhere.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import select
from collections.abc import Iterator
from typing import Any, Final

from ucp import __version__ as ucx_py_version
from ucp._libs import arr, ucx_api
from ucp._libs.exceptions import UCXBaseException

from kvpd.errors import TransportError
from kvpd.transports._ucp import SETTINGS

__all__ = ["Context", "libucp_version", "ucx_py_version"]

_UCS_ERR_CANCELED: Final = -16
_LABEL: Final = re.compile(r"(Endpoint 0x[0-9a-f]+ error: |<\w+>: |\[\w+\] )")
_LANE: Final = re.compile(r"lane\[\d+\]:\s+\d+:(\w+)/")
_FEATURES: Final = (ucx_api.Feature.RMA, ucx_api.Feature.WAKEUP)


def libucp_version() -> tuple[int, int, int]:
    """The version of the libucp that ucx-py has loaded."""
    major, minor, patch = ucx_api.get_ucx_version()
    return major, minor, patch


def _text(exc: BaseException) -> str:
    """What UCX said, without ucx-py's labels: it calls a put a get, and a cancelled request nothing at all."""
    text = _LABEL.sub("", str(exc), count=1).strip()
    return text or {"UCXCanceled": "Request canceled"}.get(type(exc).__name__, type(exc).__name__)


@contextlib.contextmanager
def _translated(action: str) -> Iterator[None]:
    """OSError too: ucx-py makes temporary files and epoll descriptors."""
    try:
        yield
    except (UCXBaseException, OSError) as exc:
        raise TransportError(f"{action}: {_text(exc)}") from exc


# ucx-py asks `add_child` of the object itself, so that a derived class decides.


class _UcxContext(ucx_api.UCXContext):  # type: ignore[misc]  # ucx-py has no types
    def add_child(self, child: object) -> None:
        """Closed by kvpd."""


class _UcxWorker(ucx_api.UCXWorker):  # type: ignore[misc]
    def add_child(self, child: object) -> None:
        """Closed by kvpd."""


class _UcxEndpoint(ucx_api.UCXEndpoint):  # type: ignore[misc]
    _status_address: int

    def add_handle_finalizer(self, finalizer: Any, handle: int, status_address: int, *rest: Any) -> None:
        self._status_address = status_address
        super().add_handle_finalizer(finalizer, handle, status_address, *rest)

    def add_child(self, child: object) -> None:
        """Closed by kvpd."""

    def why(self) -> str:
        """What it has failed of. Its status is freed when it is closed: ask no more then."""
        try:
            self.raise_on_error()
        except UCXBaseException as exc:
            return _text(exc)
        return "ucx-py does not say why"

    def close_by_force(self) -> None:
        """Close without waiting for the peer: only an endpoint that has failed is closed so."""
        self.set_close_callback(None)
        if self.is_alive():
            ctypes.c_int8.from_address(self._status_address).value = _UCS_ERR_CANCELED
        self.close()


class Context:
    """See `kvpd.transports._ucx_binding.Context`."""

    def __init__(self, *, tls: str, view: memoryview) -> None:
        """Map all of `view`, bytes. `tls`: as UCX_TLS, empty for UCX's own choice.

        Raises:
            TransportError: UCX does not accept the transports or the memory.
        """
        self.view, self.address = view, int(arr.Array(view).ptr)
        with _translated("ucp_init"):
            self.handle = _UcxContext(SETTINGS | {"TLS": tls} if tls else SETTINGS, _FEATURES)
        try:
            with _translated(f"mapping {view.nbytes} bytes (is `ulimit -l` too low?)"):
                self._memory = self.handle.map(view)
        except TransportError:
            self.handle.close()
            raise

    def pack_rkey(self) -> bytes:
        with _translated("ucp_rkey_pack"):
            return bytes(self._memory.pack_rkey())

    def create_worker(self) -> Worker:
        with _translated("ucp_worker_create"):
            handle = _UcxWorker(self.handle)
        try:
            return Worker(self, handle)
        except TransportError:
            handle.close()
            raise

    def close(self) -> None:
        with _translated("ucp_mem_unmap"):
            self._memory.close()
            self.handle.close()
        self.view.release()


class Worker:
    """See `kvpd.transports._ucx_binding.Worker`."""

    def __init__(self, context: Context, handle: _UcxWorker) -> None:
        self.context = context
        self.handle = handle
        self._failures: list[tuple[int, str]] = []
        self._signalled = False
        with _translated("an event descriptor"):
            self._epoll = select.epoll.fromfd(handle.init_blocking_progress_mode())
            try:
                self._eventfd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            except OSError:
                self._epoll.close()
                raise
        self._epoll.register(self._eventfd, select.EPOLLIN)
        self.descriptor = self._epoll.fileno()
        os.set_inheritable(self.descriptor, False)

    def address(self) -> bytes:
        with _translated("ucp_worker_get_address"):
            address = self.handle.get_address()
            packed = bytes(address)
            address.close()
        return packed

    def progress(self, budget_s: float) -> bool:
        """Until nothing is left to do, however long it takes: ucx-py has no other way."""
        if self._signalled:
            self._signalled = False
            os.eventfd_read(self._eventfd)
        self.handle.progress()
        return False

    def arm(self) -> bool:
        with _translated("ucp_worker_arm"):
            return bool(self.handle.arm())

    def signal(self) -> None:
        self._signalled = True
        os.eventfd_write(self._eventfd, 1)

    def take_failures(self) -> list[tuple[int, str]]:
        failures = self._failures.copy()
        if failures:
            self._failures.clear()
            # Else ucx-py keeps what was in flight there, and asks for it to be cancelled when it is something else.
            self.handle.cancel_inflight_messages()
        return failures

    def connect(self, address: bytes, number: int) -> Connection:
        with _translated("ucp_ep_create"):
            endpoint = _UcxEndpoint.create_from_worker_address(
                self.handle, ucx_api.UCXAddress.from_buffer(address), True
            )
        endpoint.set_close_callback(lambda: self._failures.append((number, endpoint.why())))
        return Connection(self.context, endpoint)

    def destroy(self) -> None:
        self._epoll.close()
        os.close(self._eventfd)
        self.handle.close()


class _Request:
    """A put or a flush on its way, and the memory that it reads."""

    __slots__ = ("error", "source")

    def __init__(self, source: object) -> None:
        self.source: object = source
        self.error: str | None = None  # once it has ended; empty: well

    def end(self, _request: object, exception: BaseException | None) -> None:
        """ucx-py's callback. Nothing here may raise: it would be logged and forgotten."""
        self.source = None
        self.error = "" if exception is None else _text(exception)


class Connection:
    """See `kvpd.transports._ucx_binding.Connection`."""

    def __init__(self, context: Context, endpoint: _UcxEndpoint) -> None:
        self._view, self._base = context.view, context.address
        self._endpoint = endpoint
        self._key: Any = None

    def transports(self) -> frozenset[str]:
        """Read from what UCX prints about the endpoint: ucx-py has no other way."""
        with _translated("ucp_ep_print_info"):
            return frozenset(_LANE.findall(self._endpoint.info()))

    def unpack_rkey(self, rkey: bytes) -> None:
        with _translated("ucp_ep_rkey_unpack"):
            self._key = ucx_api.UCXRkey(self._endpoint, ucx_api.PackedRemoteKey.from_buffer(rkey))

    def put(self, local_address: int, length: int, remote_address: int) -> _Request | None:
        start = local_address - self._base
        source = arr.Array(self._view[start : start + length])
        request = _Request(source)
        try:
            begun = ucx_api.put_nb(source, length, remote_address, self._key, request.end, (), {})
        except UCXBaseException as exc:
            raise TransportError(f"ucp_put_nb: {_text(exc)}") from exc
        return self._pending(request, begun)

    def flush(self) -> _Request | None:
        request = _Request(None)
        try:
            begun = self._endpoint.flush(request.end, (), {})
        except UCXBaseException as exc:
            raise TransportError(f"ucp_ep_flush_nb: {_text(exc)}") from exc
        return self._pending(request, begun)

    @staticmethod
    def _pending(request: _Request, begun: object | None) -> _Request | None:
        if begun is not None:
            return request
        if request.error is not None:
            # It ended inside the call, and ucx-py says "well" whatever its status was. UCX says that this cannot be.
            raise TransportError("ucx-py has lost its status")
        return None

    def force_close(self) -> _Request | None:
        """The request is a flush that ends when nothing is left of the endpoint, ucx-py's own flush for the key too."""
        request = None
        with contextlib.suppress(UCXBaseException, TransportError):  # a flush fails: there is nothing to wait for
            self._release_key()
            request = self.flush()
        with _translated("ucp_ep_close_nb"):
            self._endpoint.close_by_force()
        return request

    def _release_key(self) -> None:
        if self._key is not None:
            key, self._key = self._key, None
            key.close()

    def has_ended(self, request: _Request) -> bool:
        if request.error:
            raise TransportError(request.error)
        return request.error is not None

    def release_key(self) -> None:
        """`force_close` has done so: ucx-py gives a key back through its endpoint, while that is open."""
