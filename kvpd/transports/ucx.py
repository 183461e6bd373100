"""The data plane over UCX: shared memory (CMA), TCP, and what else the loaded libucp can do.

One context per data plane, one buffer mapped in it, one worker per target and one for all endpoints. Each worker has
one task that makes progress half a millisecond at a time and otherwise sleeps on the worker's event descriptor: idle
costs nothing. Whoever begins work kicks that task, because UCX may have queued work that no event will announce.
A peer's death is an error, never a crash: endpoints are made with error handling. UCX is called through a binding:
kvpd's own here, ucx-py's in `ucx_py`, which limits what is in flight instead of the progress.

Never fork a process that has a data plane open.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

import attrs
import trio

from kvpd.errors import ConfigError, TransportError
from kvpd.transports import _ucp
from kvpd.transports._puts import Batch, PutQueue, Window
from kvpd.transports._seal import seal_rkey, seal_worker_address, unseal_rkey, unseal_worker_address
from kvpd.transports._ucx_binding import Connection, Mapping, Worker
from kvpd.transports.base import Put, RemoteRegion

PUT_WINDOW_BYTES: Final = 64 << 20
TCP_PUT_WINDOW_BYTES: Final = 8 << 20
# Over TCP one progress call works on a whole put, tens of milliseconds where it is large. CMA cuts by itself.
PIECE_BYTES: Final = 1 << 20
PROGRESS_BUDGET_S: Final = 0.0005
CLOSE_S: Final = 1.0  # what endpoints get to end in before their worker is destroyed under them

Buffer = mmap.mmap | memoryview | bytearray


def ucx_version(library: str = "auto") -> str:
    """The version of the UCX that `library` stands for, such as `1.22.0`, whether or not it is new enough.

    Raises:
        ConfigError: there is none.
    """
    return _ucp.version_text(_ucp.load_library(library))


@asynccontextmanager
async def open_ucx_data_plane(
    buffer: Buffer, *, library: str = "auto", tls: str = "", put_window_bytes: int | None = None
) -> AsyncIterator[UcxDataPlane]:
    """A data plane for `buffer`, which must be writable and stays exported until the context is left.

    Leaving force-closes every endpoint and destroys every worker, within about CLOSE_S.

    Args:
        buffer: what puts read from here and what peers write into.
        library: `auto` (the libucx wheel, then the system's libucp.so.0) or the path of a libucp.
        tls: the transports UCX may use, as UCX_TLS; empty leaves the choice to UCX.
        put_window_bytes: bytes in flight per endpoint; None: PUT_WINDOW_BYTES, or TCP_PUT_WINDOW_BYTES over TCP.

    Raises:
        ConfigError: no usable libucp, or it is too old, or it has none of the transports.
        TransportError: UCX has no worker to give; descriptors may have run out.
    """
    async with run_data_plane("ucx", _open_context(buffer, library, tls), put_window_bytes) as plane:
        yield plane


@asynccontextmanager
async def run_data_plane(
    transport: str, mapping: Mapping, put_window_bytes: int | None, shared_window: Window | None = None
) -> AsyncIterator[UcxDataPlane]:
    """A data plane over any binding to UCX; it closes `mapping`. `shared_window`: one for all endpoints together."""
    try:
        worker = mapping.context.create_worker()
    except TransportError:
        mapping.close()
        raise
    async with trio.open_nursery() as nursery:
        plane = UcxDataPlane(transport, mapping, worker, nursery, put_window_bytes, shared_window)
        try:
            yield plane
        finally:
            await plane._close()


def _open_context(buffer: Buffer, name: str, tls: str) -> Mapping:
    library = _ucp.load_library(name)
    if library.version[:2] < _ucp.MIN_VERSION:
        limit = ".".join(map(str, _ucp.MIN_VERSION))
        version = _ucp.version_text(library)
        remedy = f"install libucx-cu12>={limit} or name the path of a newer libucp.so.0"
        raise ConfigError([f"ucx_library = {name!r}: it is UCX {version}, kvpd needs {limit} or newer; {remedy}"])
    length = memoryview(buffer).nbytes
    export = (ctypes.c_char * length).from_buffer(buffer)
    address = ctypes.addressof(export)
    try:
        context = _ucp.Context(library, tls=tls, address=address, length=length)
    except TransportError as exc:
        choice = f"ucx_tls = {tls!r}" if tls else "ucx_tls is not set"
        remedy = "`ucx_info -d` lists the transports of this machine"
        raise ConfigError([f"UCX {_ucp.version_text(library)} cannot start: {exc}; {choice}; {remedy}"]) from exc
    return Mapping(context, export, address, length)


# ------------------------------------------------------------------ progress


class _ProgressLoop:
    """A worker and the task that makes progress for it."""

    def __init__(self, worker: Worker, after_progress: Callable[[], None]) -> None:
        self.worker = worker
        self.rounds = 0
        self._after_progress = after_progress
        self._kicked = False
        self._parked = False
        self._closed = False

    async def run(self) -> None:
        # Shielded: what ends this task is `close`. Until then endpoints need progress, above all to be closed.
        with trio.CancelScope(shield=True):
            while not self._closed:
                self.rounds += 1
                self._kicked = False
                more = self.worker.progress(PROGRESS_BUDGET_S)
                self._after_progress()
                # No await from here to parking: a kick either shows in the flag or finds the task parked.
                if more or self._kicked or not self.worker.arm():
                    await trio.lowlevel.cancel_shielded_checkpoint()  # shielded anyway, and this one says so for less
                else:
                    await self._park()

    async def _park(self) -> None:
        self._parked = True
        try:
            await trio.lowlevel.wait_readable(self.worker.descriptor)
        except trio.ClosedResourceError:
            assert self._closed, "somebody else closed UCX's descriptor"
        finally:
            self._parked = False

    def kick(self) -> None:
        """See to it that progress is made after this moment."""
        self._kicked = True
        if self._parked and not self._closed:
            self._parked = False
            self.worker.signal()

    def close(self) -> None:
        """Destroy the worker, now, whatever its task is doing. Idempotent."""
        if not self._closed:
            self._closed = True
            trio.lowlevel.notify_closing(self.worker.descriptor)
            self.worker.destroy()


# ------------------------------------------------------------------ the two ends


class UcxTarget:
    """A worker of its own: destroying it stops what a network still has on its way. CMA writes it cannot stop."""

    def __init__(self, loop: _ProgressLoop, mapping: Mapping, on_closed: Callable[[UcxTarget], None]) -> None:
        self.worker_address = seal_worker_address(loop.worker.address())
        self.base_address = mapping.address
        self.length = mapping.length
        self.rkey = seal_rkey(mapping.context.pack_rkey(), mapping.address, mapping.length)
        self._loop = loop
        self._on_closed = on_closed

    def close(self) -> None:
        self._loop.close()
        self._on_closed(self)


@attrs.frozen
class _Request:
    """A UCX request: of a put with so many bytes, of a batch's flush (no bytes), or of the close (no batch)."""

    handle: Any  # the binding's
    batch: Batch | None
    length: int | None


class UcxEndpoint(PutQueue):
    """See `kvpd.transports.base.Endpoint`."""

    def __init__(
        self,
        plane: UcxDataPlane,
        connection: Connection,
        region: RemoteRegion,
        on_broken: Callable[[str], None],
    ) -> None:
        self.transports = connection.transports()
        over_tcp = self.transports == {"tcp"}
        super().__init__(
            local_bytes=plane._mapping.length,
            remote_bytes=region.length,
            window_bytes=plane._put_window_bytes or (TCP_PUT_WINDOW_BYTES if over_tcp else PUT_WINDOW_BYTES),
            piece_bytes=PIECE_BYTES if over_tcp or plane._shared_window else None,
            shared=plane._shared_window,
        )
        self._plane = plane
        self._connection = connection
        self._local_address = plane._mapping.address
        self._remote_address = region.base_address
        self._on_broken = on_broken
        self._requests: deque[_Request] = deque()

    def force_close(self) -> None:
        if not self.broken:
            self._close("the endpoint was force-closed")

    def _begin_put(self, batch: Batch, put: Put) -> None:
        try:
            handle = self._connection.put(
                self._local_address + put.local_offset, put.length, self._remote_address + put.remote_offset
            )
        except TransportError as exc:
            self._put_ended(batch, put.length, str(exc))
        else:
            self._begun(_Request(handle, batch, put.length) if handle else None)
            if handle is None:
                self._put_ended(batch, put.length, None)

    def _begin_flush(self, batch: Batch) -> None:
        try:
            handle = self._connection.flush()
        except TransportError as exc:
            self._flush_ended(batch, str(exc))
        else:
            self._begun(_Request(handle, batch, None) if handle else None)
            if handle is None:
                self._flush_ended(batch, None)

    def _begun(self, request: _Request | None) -> None:
        if request is not None:
            self._requests.append(request)
        self._plane._loop.kick()

    def _close(self, detail: str) -> None:
        self._break(detail)
        try:
            handle = self._connection.force_close()
        except TransportError:
            handle = None  # UCX has nothing to close any more
        self._begun(_Request(handle, None, None) if handle else None)

    def _report_failure(self, detail: str) -> None:
        """UCX says that the endpoint has failed; it wants it closed, from outside its callback."""
        if not self.broken:
            detail = f"the endpoint failed: {detail}"
            self._close(detail)
            self._on_broken(detail)

    def _reap(self) -> bool:
        """Take what has ended; False when the endpoint is closed and nothing of it is left.

        Requests are asked in the order in which they began: asking all of them each time would cost more than the
        little that one waits here behind an older one.
        """
        while self._requests:
            request, error = self._requests[0], None
            try:
                if not self._connection.has_ended(request.handle):
                    break
            except TransportError as exc:
                error = str(exc)
            self._requests.popleft()
            self._request_ended(request, error)
        return not self.broken or bool(self._requests)

    def _request_ended(self, request: _Request, error: str | None) -> None:
        if request.batch is None:
            return  # the close: however it ended, UCX has given the endpoint up
        if request.length is None:
            self._flush_ended(request.batch, error and f"a flush failed: {error}")
        else:
            self._put_ended(request.batch, request.length, error and f"a put of {request.length} bytes failed: {error}")

    def _worker_destroyed(self) -> None:
        """The requests went with the worker: nothing of them can be asked or freed any more."""
        while self._requests:
            self._request_ended(self._requests.popleft(), "the data plane was closed")


class UcxDataPlane:
    """See `kvpd.transports.base.DataPlane`; made by `open_ucx_data_plane`."""

    def __init__(
        self,
        transport: str,
        mapping: Mapping,
        worker: Worker,
        nursery: trio.Nursery,
        put_window_bytes: int | None,
        shared_window: Window | None,
    ) -> None:
        self.transport = transport
        self._mapping = mapping
        self._nursery = nursery
        self._put_window_bytes = put_window_bytes
        self._shared_window = shared_window
        self._targets: dict[UcxTarget, None] = {}
        self._endpoints: dict[int, UcxEndpoint] = {}
        # UCX reuses the addresses of its endpoints; a number is never used again.
        self._numbers = itertools.count(1)
        self._closing = False
        self._endpoints_gone = trio.Event()  # set once, while closing
        self._loop = _ProgressLoop(worker, self._after_progress)
        nursery.start_soon(self._loop.run)

    @property
    def progress_rounds(self) -> int:
        """How often the progress tasks have gone round; it stands still while nothing happens."""
        return self._loop.rounds + sum(target._loop.rounds for target in self._targets)

    async def open_target(self) -> UcxTarget:
        """See `kvpd.transports.base.DataPlane`. TransportError: UCX has no worker to give, or this is closed."""
        await trio.lowlevel.checkpoint()
        self._refuse_when_closing()
        loop = _ProgressLoop(self._mapping.context.create_worker(), lambda: None)
        try:
            target = UcxTarget(loop, self._mapping, lambda target: self._targets.pop(target, None))
        except TransportError:
            loop.close()
            raise
        self._targets[target] = None
        self._nursery.start_soon(loop.run)
        return target

    async def connect(self, region: RemoteRegion, on_broken: Callable[[str], None]) -> UcxEndpoint:
        """See `kvpd.transports.base.DataPlane`."""
        await trio.lowlevel.checkpoint()
        self._refuse_when_closing()
        address = unseal_worker_address(region.worker_address)
        rkey = unseal_rkey(region.rkey, region.base_address, region.length)
        number = next(self._numbers)
        connection = self._loop.worker.connect(address, number)
        try:
            endpoint = UcxEndpoint(self, connection, region, on_broken)
        except TransportError:
            connection.force_close()
            raise
        self._endpoints[number] = endpoint
        try:
            connection.unpack_rkey(rkey)
        except TransportError:
            endpoint.force_close()
            raise
        self._loop.kick()
        return endpoint

    def _refuse_when_closing(self) -> None:
        if self._closing:
            raise TransportError("the data plane is closed")

    def _after_progress(self) -> None:
        # Failures first: a batch whose flush "succeeded" on a failed endpoint must not count as written.
        for number, detail in self._loop.worker.take_failures():
            if endpoint := self._endpoints.get(number):
                endpoint._report_failure(detail)
        for number, endpoint in list(self._endpoints.items()):
            if not endpoint._reap():
                del self._endpoints[number]
                endpoint._connection.release_key()
        self._begin_puts()
        if self._closing and not self._endpoints:
            self._endpoints_gone.set()

    def _begin_puts(self) -> None:
        """Each endpoint begins what fits; who was first is last the next time, because the first may take all room."""
        for endpoint in self._endpoints.values():
            endpoint.pump()
        if self._shared_window is not None and len(self._endpoints) > 1:
            first = next(iter(self._endpoints))
            self._endpoints[first] = self._endpoints.pop(first)

    async def _close(self) -> None:
        self._closing = True
        for target in list(self._targets):
            target.close()
        for endpoint in self._endpoints.values():
            endpoint.force_close()
        self._loop.kick()
        with trio.move_on_after(CLOSE_S) as scope:
            scope.shield = True
            await self._endpoints_gone.wait()
        self._loop.close()
        for endpoint in self._endpoints.values():
            endpoint._worker_destroyed()
        self._endpoints.clear()
        self._mapping.close()
