"""The part of libucp that kvpd uses, through ctypes: contexts, workers, endpoints, one-sided puts.

Every call is made from one thread, the event loop's; the only callback reports an endpoint's failure and does nothing
but append to a list, because it runs inside `ucp_worker_progress`. Whatever UCX hands out is given back exactly once,
by the object that owns it. UCX is configured per context: the process's environment is read, never written, and what
an operator sets there wins only where kvpd does not depend on the value.

The structures are those of UCX 1.20 and later (ucp/api/ucp.h); UCX reads only the fields that a structure's mask names.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import time
from typing import TYPE_CHECKING, Any, Final

from kvpd.errors import ConfigError, TransportError

MIN_VERSION: Final = (1, 20)  # older ones fall back to emulation over TCP once errors are to be survived

_UCS_OK: Final = 0
_UCS_INPROGRESS: Final = 1
_UCS_ERR_BUSY: Final = -15
_UCS_ERR_LAST: Final = -100

_API_VERSION: Final = (1, 15)  # what these structures need; newer libraries accept it
_FEATURES: Final = 1 << 1 | 1 << 4  # RMA, WAKEUP
SETTINGS: Final = {
    # Without rendezvous a put stays zero-copy over CMA although peer errors are handled.
    "RNDV_THRESH": "inf",
    # Only a zero-copy put ends when its bytes are there: a copied one "succeeds" early and may still be lost.
    "ZCOPY_THRESH": "0",
}

_vp, _u64, _size, _int, _u32 = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_int, ctypes.c_uint32
_status = ctypes.c_int8
_status_ptr = ctypes.c_ssize_t  # 0: ended well; -100 to -1: a status; else a request

_SIGNATURES: Final[dict[str, tuple[Any, ...]]] = {
    "ucp_get_version": (None, _vp, _vp, _vp),
    "ucs_status_string": (ctypes.c_char_p, _status),
    "ucs_global_opts_set_value": (_status, ctypes.c_char_p, ctypes.c_char_p),
    "ucp_config_read": (_status, ctypes.c_char_p, ctypes.c_char_p, _vp),
    "ucp_config_modify": (_status, _vp, ctypes.c_char_p, ctypes.c_char_p),
    "ucp_config_release": (None, _vp),
    "ucp_init_version": (_status, _u32, _u32, _vp, _vp, _vp),
    "ucp_cleanup": (None, _vp),
    "ucp_mem_map": (_status, _vp, _vp, _vp),
    "ucp_mem_unmap": (_status, _vp, _vp),
    "ucp_rkey_pack": (_status, _vp, _vp, _vp, _vp),
    "ucp_rkey_buffer_release": (None, _vp),
    "ucp_worker_create": (_status, _vp, _vp, _vp),
    "ucp_worker_destroy": (None, _vp),
    "ucp_worker_get_address": (_status, _vp, _vp, _vp),
    "ucp_worker_release_address": (None, _vp, _vp),
    "ucp_worker_get_efd": (_status, _vp, _vp),
    "ucp_worker_arm": (_status, _vp),
    "ucp_worker_signal": (_status, _vp),
    "ucp_worker_progress": (_u32, _vp),
    "ucp_ep_create": (_status, _vp, _vp, _vp),
    "ucp_ep_query": (_status, _vp, _vp),
    "ucp_ep_rkey_unpack": (_status, _vp, _vp, _vp),
    "ucp_rkey_destroy": (None, _vp),
    "ucp_put_nbx": (_status_ptr, _vp, _vp, _size, _u64, _vp, _vp),
    "ucp_ep_flush_nbx": (_status_ptr, _vp, _vp),
    "ucp_ep_close_nbx": (_status_ptr, _vp, _vp),
    "ucp_request_check_status": (_status, _vp),
    "ucp_request_free": (None, _vp),
}

_ErrorCallback = ctypes.CFUNCTYPE(None, _vp, _vp, _status)


class _ContextParams(ctypes.Structure):
    _fields_ = (("field_mask", _u64), ("features", _u64), ("rest", ctypes.c_char * 112))


class _WorkerParams(ctypes.Structure):
    _fields_ = (("field_mask", _u64), ("rest", ctypes.c_char * 248))


class _MapParams(ctypes.Structure):
    _fields_ = (("field_mask", _u64), ("address", _vp), ("length", _size), ("rest", ctypes.c_char * 104))


class _EndpointParams(ctypes.Structure):
    _fields_ = (
        ("field_mask", _u64),
        ("address", _vp),
        ("err_mode", _int),
        ("err_cb", _ErrorCallback),
        ("err_arg", _vp),
        ("rest", ctypes.c_char * 88),
    )


class _RequestParams(ctypes.Structure):
    _fields_ = (
        ("op_attr_mask", _u32),
        ("flags", _u32),
        ("skipped", ctypes.c_char * 56),
        ("memh", _vp),
        ("rest", ctypes.c_char * 56),
    )


class _TransportEntry(ctypes.Structure):
    _fields_ = (("transport_name", ctypes.c_char_p), ("device_name", ctypes.c_char_p))


class _EndpointAttributes(ctypes.Structure):
    _fields_ = (
        ("field_mask", _u64),
        ("skipped", ctypes.c_char * 288),
        ("entries", _vp),
        ("num_entries", ctypes.c_uint),
        ("entry_size", _size),
        ("rest", ctypes.c_char * 64),
    )


class Library:
    """A loaded libucp and, through it, libucs."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        for name, (result, *arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)  # found at once from then on: some are called for every put
        numbers = [_u32() for _ in range(3)]
        library.ucp_get_version(*map(ctypes.byref, numbers))
        self.version = tuple(number.value for number in numbers)
        # UCX writes its log to stdout. Its failures reach kvpd as statuses; who wants to see more asks for it.
        if "UCX_LOG_LEVEL" not in os.environ:
            library.ucs_global_opts_set_value(b"LOG_LEVEL", b"fatal")

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def status_text(self, status: int) -> str:
        """What UCX calls `status`, and its number."""
        text: bytes = self._library.ucs_status_string(status)
        return f"{text.decode()} ({status})"

    def check(self, status: int, action: str) -> None:
        """Raise TransportError if `status` says that `action` failed."""
        if status < 0:
            raise TransportError(f"{action}: {self.status_text(status)}")

    def request(self, result: int, action: str) -> int | None:
        """The request that a non-blocking call has returned; None when it has already ended well."""
        if _UCS_ERR_LAST <= result < 0:
            raise TransportError(f"{action}: {self.status_text(result)}")
        return result or None


@functools.cache
def load_library(name: str) -> Library:
    """libucp: from the libucx wheel, then from the system (`auto`), or from the file `name`.

    Raises:
        ConfigError: there is none, or it is no libucp.
    """
    try:
        return Library(_open_library(name))
    except (OSError, AttributeError) as exc:
        remedy = "install libucx-cu12>=1.20 or name the path of a libucp.so.0 (UCX 1.20 or newer)"
        raise ConfigError([f"ucx_library = {name!r}: no usable libucp: {exc}; {remedy}"]) from exc


def _open_library(name: str) -> ctypes.CDLL:
    if name != "auto":
        return ctypes.CDLL(name)
    try:
        wheel = importlib.import_module("libucx")
    except ModuleNotFoundError:
        return ctypes.CDLL("libucp.so.0")
    loaded = wheel.load_library()[-1]  # libucp comes last, after what it needs; None where the wheel lacks it
    return loaded if isinstance(loaded, ctypes.CDLL) else ctypes.CDLL("libucp.so.0")


class Context:
    """A UCP context and the one buffer that is mapped in it."""

    def __init__(self, library: Library, *, tls: str, address: int, length: int) -> None:
        """Map `length` bytes from `address` on. `tls`: as UCX_TLS, empty for UCX's own choice.

        Raises:
            TransportError: UCX does not accept the transports or the memory.
        """
        self.library = library
        self._handle, self.memory = _vp(), _vp()
        config = _vp()
        library.check(library.ucp_config_read(None, None, ctypes.byref(config)), "reading UCX's configuration")
        try:
            for name, value in (SETTINGS | {"TLS": tls} if tls else SETTINGS).items():
                status = library.ucp_config_modify(config, name.encode(), value.encode())
                library.check(status, f"setting UCX_{name}={value}")
            params = _ContextParams(field_mask=1, features=_FEATURES)
            status = library.ucp_init_version(*_API_VERSION, ctypes.byref(params), config, ctypes.byref(self._handle))
            library.check(status, "ucp_init")
        finally:
            library.ucp_config_release(config)
        mapping = _MapParams(field_mask=1 | 2, address=address, length=length)
        try:
            status = library.ucp_mem_map(self._handle, ctypes.byref(mapping), ctypes.byref(self.memory))
            library.check(status, f"mapping {length} bytes (is `ulimit -l` too low?)")
        except TransportError:
            library.ucp_cleanup(self._handle)
            raise

    def pack_rkey(self) -> bytes:
        """What a peer needs to write into the buffer."""
        packed, length = _vp(), _size()
        status = self.library.ucp_rkey_pack(self._handle, self.memory, ctypes.byref(packed), ctypes.byref(length))
        self.library.check(status, "ucp_rkey_pack")
        rkey = ctypes.string_at(packed, length.value)
        self.library.ucp_rkey_buffer_release(packed)
        return rkey

    def create_worker(self) -> Worker:
        """A new worker with an event descriptor."""
        handle = _vp()
        params = _WorkerParams(field_mask=0)  # used by one thread
        status = self.library.ucp_worker_create(self._handle, ctypes.byref(params), ctypes.byref(handle))
        self.library.check(status, "ucp_worker_create")
        return Worker(self, handle)

    def close(self) -> None:
        """Unmap the buffer and end the context. Every worker must be gone."""
        self.library.check(self.library.ucp_mem_unmap(self._handle, self.memory), "ucp_mem_unmap")
        self.library.ucp_cleanup(self._handle)


class Worker:
    """A UCP worker: it makes progress for its endpoints and for what peers write through its address."""

    def __init__(self, context: Context, handle: ctypes.c_void_p) -> None:
        self.library = context.library
        self.context = context
        self.handle = handle
        self._failures: list[tuple[int, int]] = []  # (endpoint number, status), in the order of their report
        self._error_callback = _ErrorCallback(self._append_failure)
        descriptor = _int()
        try:
            self.library.check(self.library.ucp_worker_get_efd(handle, ctypes.byref(descriptor)), "ucp_worker_get_efd")
        except TransportError:
            self.destroy()
            raise
        self.descriptor = descriptor.value

    def _append_failure(self, number: int | None, _endpoint: int | None, status: int) -> None:
        self._failures.append((number or 0, status))

    def address(self) -> bytes:
        """What a peer needs to connect here."""
        address, length = _vp(), _size()
        status = self.library.ucp_worker_get_address(self.handle, ctypes.byref(address), ctypes.byref(length))
        self.library.check(status, "ucp_worker_get_address")
        packed = ctypes.string_at(address, length.value)
        self.library.ucp_worker_release_address(self.handle, address)
        return packed

    def progress(self, budget_s: float) -> bool:
        """Make progress for about `budget_s`; whether there was more to do."""
        deadline = time.perf_counter() + budget_s
        while self.library.ucp_worker_progress(self.handle):
            if time.perf_counter() >= deadline:
                return True
        return False

    def take_failures(self) -> list[tuple[int, str]]:
        """The (endpoint number, detail) of endpoints that have failed since this was asked last, in order."""
        failures = [(number, self.library.status_text(status)) for number, status in self._failures]
        self._failures.clear()
        return failures

    def arm(self) -> bool:
        """Ask for the descriptor to become readable at the next event; False when there is one already."""
        status: int = self.library.ucp_worker_arm(self.handle)
        if status == _UCS_ERR_BUSY:
            return False
        self.library.check(status, "ucp_worker_arm")
        return True

    def signal(self) -> None:
        """Make the descriptor readable: without it, work that a call has queued may wait for ever."""
        self.library.check(self.library.ucp_worker_signal(self.handle), "ucp_worker_signal")

    def connect(self, address: bytes, number: int) -> Connection:
        """A new endpoint; its failure is reported under `number`.

        `address` must come from a peer that is trusted to send what its UCX made: UCX itself checks little.
        """
        endpoint = _vp()
        packed = ctypes.create_string_buffer(address, len(address))
        params = _EndpointParams(
            field_mask=1 << 0 | 1 << 1 | 1 << 2,  # remote address, error handling mode, error handler
            address=ctypes.addressof(packed),
            err_mode=1,  # UCP_ERR_HANDLING_MODE_PEER
            err_cb=self._error_callback,
            err_arg=number,
        )
        status = self.library.ucp_ep_create(self.handle, ctypes.byref(params), ctypes.byref(endpoint))
        self.library.check(status, "ucp_ep_create")
        return Connection(self, endpoint)

    def destroy(self) -> None:
        """End it, its descriptor, and every endpoint and request that it still has."""
        self.library.ucp_worker_destroy(self.handle)


class Connection:
    """A UCP endpoint with the remote key of the one region it writes to."""

    def __init__(self, worker: Worker, endpoint: ctypes.c_void_p) -> None:
        self._library = worker.library
        self._endpoint, self._key = endpoint, _vp()
        self._put = _RequestParams(op_attr_mask=1 << 8, memh=worker.context.memory)
        self._flush = _RequestParams(op_attr_mask=0)
        self._close = _RequestParams(op_attr_mask=1 << 4, flags=1)  # UCP_EP_CLOSE_FLAG_FORCE

    def transports(self) -> frozenset[str]:
        """The names of the transports that UCX has chosen: `cma`, `tcp`, `rc_mlx5`, ..."""
        entries = (_TransportEntry * 16)()
        attributes = _EndpointAttributes(
            field_mask=1 << 3,
            entries=ctypes.addressof(entries),
            num_entries=len(entries),
            entry_size=ctypes.sizeof(_TransportEntry),
        )
        self._library.check(self._library.ucp_ep_query(self._endpoint, ctypes.byref(attributes)), "ucp_ep_query")
        return frozenset(entry.transport_name.decode() for entry in entries[: attributes.num_entries])

    def unpack_rkey(self, rkey: bytes) -> None:
        """Take the right to write; like an address, `rkey` must come from a trusted peer."""
        status = self._library.ucp_ep_rkey_unpack(self._endpoint, rkey, ctypes.byref(self._key))
        self._library.check(status, "ucp_ep_rkey_unpack")

    def put(self, local_address: int, length: int, remote_address: int) -> int | None:
        """Begin a put of mapped memory; its request, or None when it has ended well. The memory must stay."""
        result = self._library.ucp_put_nbx(
            self._endpoint, local_address, length, remote_address, self._key, ctypes.byref(self._put)
        )
        return self._library.request(result, "ucp_put_nbx")

    def flush(self) -> int | None:
        """Begin a flush of everything put so far. It may report success although a put failed."""
        return self._library.request(self._library.ucp_ep_flush_nbx(self._endpoint, ctypes.byref(self._flush)), "flush")

    def force_close(self) -> int | None:
        """Begin to close at once; what is in flight ends with an error."""
        return self._library.request(self._library.ucp_ep_close_nbx(self._endpoint, ctypes.byref(self._close)), "close")

    def has_ended(self, request: int) -> bool:
        """Whether a request has ended well, or TransportError; once it has ended, it is freed: ask no more."""
        status = self._library.ucp_request_check_status(request)
        if status == _UCS_INPROGRESS:
            return False
        self._library.ucp_request_free(request)
        if status != _UCS_OK:
            raise TransportError(self._library.status_text(status))
        return True

    def release_key(self) -> None:
        """Give the remote key back, once no put refers to it any more."""
        if self._key:
            self._library.ucp_rkey_destroy(self._key)
            self._key = _vp()


def version_text(library: Library) -> str:
    """The library's version as `1.22.0`."""
    return ".".join(map(str, library.version))
