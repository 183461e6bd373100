"""The engine link's daemon side: a Unix socket, a connection per engine, frames in and frames out.

Garbage, half a frame, a reader that never reads or a sudden death end that connection and nothing else. What an engine
may still touch is given back only when its process is dead, which a closed socket does not prove.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Protocol

import attrs
import msgspec
import trio

from kvpd.config import ensure_socket_folder
from kvpd.errors import ConfigError, RemoteProtocolError
from kvpd.link import (
    LINK_VERSION,
    Attach,
    Attached,
    AttachWriter,
    EngineFrame,
    EngineFrameReader,
    Frame,
    Rejected,
    encode_frame,
)
from kvpd.log import get_logger
from kvpd.service.host import peer_process, wait_dead

log = get_logger()

_CONNECTIONS_MAX: Final = 256
_ATTACH_TIMEOUT_S: Final = 5.0
_FRAMES_QUEUED_MAX: Final = 8192  # to one engine; one that reads none of them is cut off
_READ_BYTES: Final = 1 << 16
_WRITE_BYTES: Final = 1 << 18  # of frames joined into one write
_LAST_WORDS_S: Final = 1.0
_BACKLOG: Final = 128


class Engine(Protocol):
    """What a daemon does for one engine. Called from the loop; must not block."""

    def handle(self, frame: EngineFrame) -> None:
        """One frame. RemoteProtocolError: no correct engine sends it, and the connection ends."""

    def closed(self) -> None:
        """The connection has ended."""

    @property
    def holds_memory(self) -> bool:
        """Whether the engine, once closed, may still be reading or writing slots."""

    def died(self) -> None:
        """Its process is dead. Called after `closed`, and only if it held memory then."""


EngineFactory = Callable[["Connection", Attach], Engine]
WriterFactory = Callable[[AttachWriter], Engine]


@attrs.frozen
class Memory:
    """What an engine is told and given when it attaches: of `attached`, only its own rank's region."""

    role: str
    attached: Attached
    descriptor: int  # of the one file that all regions are in
    writing_descriptor: int = -1  # of the same, for writers; only where there may be any


class Connection:
    """One engine's connection: a bounded queue of frames on their way to it."""

    def __init__(self, stream: trio.SocketStream, label: str) -> None:
        self.label = label
        self.engine: Engine | None = None  # once it has attached
        self._stream = stream
        self._frames, self._queue = trio.open_memory_channel[bytes](_FRAMES_QUEUED_MAX)
        self.scope = trio.CancelScope()
        self.written = trio.Event()  # nothing more will be written

    def send(self, frame: Frame) -> None:
        """Queue a frame; an engine that does not read is cut off."""
        try:
            self._frames.send_nowait(encode_frame(frame))
        except trio.WouldBlock:
            self.cut_off(f"{_FRAMES_QUEUED_MAX} frames wait to be read")
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return  # the connection is ending: its writer has stopped, or writes its last words

    def cut_off(self, detail: str) -> None:
        """End the connection, whatever is queued."""
        log.warning("engine_cut_off", engine=self.label, detail=detail)
        self.scope.cancel()

    async def write(self) -> None:
        """The writing task: frames that wait together leave together."""
        try:
            await self._write_frames()
        finally:
            self.written.set()

    async def _write_frames(self) -> None:
        with self._queue:
            async for data in self._queue:
                parts, size = [data], len(data)
                with contextlib.suppress(trio.WouldBlock, trio.EndOfChannel):
                    while size < _WRITE_BYTES:
                        parts.append(self._queue.receive_nowait())
                        size += len(parts[-1])
                try:
                    await self._stream.send_all(b"".join(parts))
                except trio.BrokenResourceError:
                    return  # the reading side sees the end too, and acts on it

    def finish(self) -> None:
        """Write what is queued, then nothing more."""
        self._frames.close()


@contextmanager
def listen(path: str) -> Iterator[trio.SocketListener]:
    """Bind the engine socket, for this user alone; leaving removes it. A stale one of our own is replaced.

    Raises:
        ConfigError: somebody listens there, or the path is another user's or no socket.
    """
    where = Path(path)
    ensure_socket_folder(where)
    _remove_stale(where)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as raw:
        mask = os.umask(0o177)
        try:
            raw.bind(path)
        except OSError as exc:
            raise ConfigError([f"engine_socket = {path} cannot be bound ({exc}); choose another path"]) from exc
        finally:
            os.umask(mask)
        identity = where.lstat()
        try:
            raw.listen(_BACKLOG)
            yield trio.SocketListener(trio.socket.from_stdlib_socket(raw))
        finally:
            with contextlib.suppress(FileNotFoundError):
                # Only if it is still ours: a successor may have bound the path meanwhile.
                if os.path.samestat(where.lstat(), identity):
                    where.unlink()


def _remove_stale(path: Path) -> None:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.getuid():
        raise ConfigError([f"engine_socket = {path} exists and is no socket of this user; choose another path"])
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # a live daemon's backlog takes us at once, or is full
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()  # whoever bound it was killed
            return
        except BlockingIOError:
            pass
    raise ConfigError([f"engine_socket = {path}: a daemon listens there already; stop it, or choose another path"])


class EngineServer:
    """Accepts engines and runs a connection for each."""

    def __init__(
        self,
        listener: trio.SocketListener,
        memory: Memory,
        make_engine: EngineFactory,
        on_count: Callable[[int], None],
        make_writer: WriterFactory | None = None,
    ) -> None:
        self._listener = listener
        self._memory = memory
        self._make_engine = make_engine
        self._make_writer = make_writer
        self._on_count = on_count
        self._connections: set[Connection] = set()
        self._count = 0

    async def run(self) -> None:
        """Serve until cancelled."""
        async with trio.open_nursery() as self._nursery:
            await trio.serve_listeners(self._serve, [self._listener], handler_nursery=self._nursery)

    async def finish(self) -> None:
        """Say nothing more to any engine, and wait, a second at most, until they have what was said."""
        connections = list(self._connections)
        for connection in connections:
            connection.finish()
        with trio.move_on_after(_LAST_WORDS_S):
            for connection in connections:
                await connection.written.wait()

    async def _serve(self, stream: trio.SocketStream) -> None:
        if self._count >= _CONNECTIONS_MAX:
            log.warning("engine_refused", connections=self._count, limit=_CONNECTIONS_MAX, rate_limited=True)
            await stream.aclose()
            return
        self._count += 1
        self._on_count(self._count)
        try:
            await self._run_connection(stream)
        finally:
            self._count -= 1
            self._on_count(self._count)

    async def _run_connection(self, stream: trio.SocketStream) -> None:
        try:
            pid, pidfd = peer_process(stream.socket)
        except OSError as exc:
            log.warning("engine_refused", detail=f"its process cannot be watched: {exc}", rate_limited=True)
            await stream.aclose()
            return
        connection = Connection(stream, f"pid {pid}")
        self._connections.add(connection)
        try:
            with connection.scope:
                async with stream, trio.open_nursery() as nursery:
                    nursery.start_soon(connection.write)
                    await self._converse(stream, connection)
                    connection.finish()
                    nursery.cancel_scope.deadline = trio.current_time() + _LAST_WORDS_S
        finally:
            self._connections.discard(connection)
            self._part(connection, pidfd)

    def _part(self, connection: Connection, pidfd: int) -> None:
        """The connection has ended: what its engine may still touch waits for its process's death."""
        engine = connection.engine
        if engine is None:
            os.close(pidfd)
            return
        engine.closed()
        log.info("engine_detached", engine=connection.label)
        if engine.holds_memory:
            log.warning("engine_left_holding_memory", engine=connection.label)
            self._nursery.start_soon(_bury, engine, pidfd)
        else:
            os.close(pidfd)

    async def _converse(self, stream: trio.SocketStream, connection: Connection) -> None:
        """Attach, then handle frames until the engine goes or misbehaves."""
        reader = EngineFrameReader()
        attach_by = trio.current_time() + _ATTACH_TIMEOUT_S
        try:
            while True:
                if connection.engine is None:
                    with trio.move_on_at(attach_by) as waiting:
                        data = await stream.receive_some(_READ_BYTES)
                    if waiting.cancelled_caught:
                        raise RemoteProtocolError(f"no Attach within {_ATTACH_TIMEOUT_S:g} s")
                else:
                    data = await stream.receive_some(_READ_BYTES)
                if not data:
                    break
                for frame in reader.feed(data):
                    if connection.engine is None:
                        await self._attach(stream, connection, frame)
                    else:
                        connection.engine.handle(frame)
        except RemoteProtocolError as exc:
            log.warning("engine_rejected", engine=connection.label, detail=str(exc)[:512], rate_limited=True)
            connection.send(Rejected(str(exc)[:4096]))
        except trio.BrokenResourceError:
            log.info("engine_connection_reset", engine=connection.label)
        if reader.in_frame:
            log.warning("engine_ended_in_a_frame", engine=connection.label, rate_limited=True)

    async def _attach(self, stream: trio.SocketStream, connection: Connection, frame: EngineFrame) -> None:
        memory = self._memory
        if not isinstance(frame, Attach | AttachWriter):
            raise RemoteProtocolError(f"the first frame is {type(frame).__name__}, not Attach")
        if frame.version != LINK_VERSION:
            raise RemoteProtocolError(f"the engine's link version is {frame.version}, this daemon's {LINK_VERSION}")
        ranks = len(memory.attached.regions)
        if frame.rank >= ranks:
            raise RemoteProtocolError(f"rank {frame.rank}, and this daemon has ranks = {ranks}: set it higher")
        if isinstance(frame, AttachWriter):
            if self._make_writer is None:
                raise RemoteProtocolError("the engine wants to write in place, which this daemon does not offer")
            # Counted before it can have the descriptor, and whatever becomes of this connection.
            connection.engine = self._make_writer(frame)
            await self._greet(stream, frame.rank, memory.writing_descriptor)
        else:
            if frame.role != memory.role:
                raise RemoteProtocolError(f"the engine wants a {frame.role}, this is a {memory.role}")
            await self._greet(stream, frame.rank, memory.descriptor)
            connection.engine = self._make_engine(connection, frame)
        log.info("engine_attached", engine=connection.label, rank=frame.rank)

    async def _greet(self, stream: trio.SocketStream, rank: int, descriptor: int) -> None:
        attached = self._memory.attached
        data = encode_frame(msgspec.structs.replace(attached, regions=(attached.regions[rank],)))
        fds = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptor.to_bytes(4, "little"))]
        try:
            sent = await stream.socket.sendmsg([data], fds)
        except OSError as exc:
            raise trio.BrokenResourceError(f"the engine did not wait for its answer: {exc}") from exc
        if sent < len(data):
            await stream.send_all(data[sent:])


async def _bury(engine: Engine, pidfd: int) -> None:
    await wait_dead(pidfd)
    engine.died()
