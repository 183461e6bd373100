"""A receiver and a sender with their engine sockets, and engines of every kind: good, mad, frozen and dead."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import attrs
import trio

from kvpd import client
from kvpd.link import LINK_VERSION, Attach, Attached, DaemonFrame, DaemonFrameReader, Frame, encode_frame
from kvpd.service.engine_link import listen
from kvpd.service.receiver import Receiver
from kvpd.service.sender import Sender
from kvpd.service.serve import _engine_server

from .worlds import REAL_LIMIT_S, Request, World

T = TypeVar("T")


@attrs.frozen
class Rig:
    """Both daemons and where their engines connect."""

    world: World
    receiver: Receiver
    sender: Sender
    receiver_socket: Path
    sender_socket: Path

    def socket_of(self, role: str) -> Path:
        return self.receiver_socket if role == "receiver" else self.sender_socket

    async def transfer(self, *requests: Request) -> None:
        """Requests over the real client, which needs threads of its own."""

        def send() -> None:
            with client.connect_sender(self.sender_socket) as link:
                for request in requests:
                    send_with(link, self.receiver.address, request)

        def take() -> None:
            with client.connect_receiver(self.receiver_socket) as link:
                for request in requests:
                    take_with(link, request)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(in_thread, send)
            nursery.start_soon(in_thread, take)


def send_with(link: client.SenderLink, receiver: str, request: Request) -> None:
    """A whole request, by an engine."""
    with link.open(request.req_id, receiver=receiver, total_chunks=request.chunks) as transfer:
        for batch in request.batches:
            last_bytes = request.last_bytes if batch.stop == request.chunks else None
            with transfer.stage([request.key(n) for n in batch], last_chunk_bytes=last_bytes) as slots:
                for number, slot in zip(batch, slots, strict=True):
                    if slot is not None:
                        slot[:] = request.chunk(number)


def take_with(link: client.ReceiverLink, request: Request) -> None:
    """Claim it and compare every byte."""
    with link.claim(request.req_id, timeout=REAL_LIMIT_S) as chunks:
        assert [bytes(chunk.view) for chunk in chunks] == request.payload


async def in_thread(function: Callable[..., T], *args: Any) -> T:
    """Run an engine, which blocks, in a thread; a test that is over waits for it no more."""
    return await trio.to_thread.run_sync(function, *args, abandon_on_cancel=True)


@asynccontextmanager
async def open_rig(
    folder: Path, *, slots: int = 10, staging: int = 4, ranks: int = 1, **settings: Any
) -> AsyncIterator[Rig]:
    """Both daemons, under the real clock, with a deadline for all that happens inside."""
    receiver_socket, sender_socket = folder / "receiver.sock", folder / "sender.sock"
    with trio.fail_after(REAL_LIMIT_S), listen(str(receiver_socket)) as decode, listen(str(sender_socket)) as prefill:
        async with (
            World() as world,
            world.receiver(slots=slots, ranks=ranks, **settings) as receiver,
            world.sender(staging=staging, ranks=ranks) as sender,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(_engine_server(decode, receiver).run)
            nursery.start_soon(_engine_server(prefill, sender).run)
            yield Rig(world, receiver, sender, receiver_socket, sender_socket)
            nursery.cancel_scope.cancel()


class RawEngine:
    """An engine that says whatever a test wants it to say."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self._reader = DaemonFrameReader()
        self._frames: list[DaemonFrame] = []

    async def say(self, *frames: Frame | bytes) -> None:
        await self.stream.send_all(b"".join(f if isinstance(f, bytes) else encode_frame(f) for f in frames))

    async def hear(self) -> DaemonFrame | None:
        """The daemon's next frame; None at the end."""
        while not self._frames:
            try:
                data = await self.stream.receive_some(65536)
            except trio.BrokenResourceError:
                return None
            if not data:
                return None
            self._frames += self._reader.feed(bytes(data))
        return self._frames.pop(0)

    async def hear_kind(self, kind: type[T]) -> T:
        """The next frame of this kind."""
        while True:
            frame = await self.hear()
            assert frame is not None, f"the connection ended before a {kind.__name__} came"
            if isinstance(frame, kind):
                return frame

    async def hear_end(self) -> None:
        """Until the daemon has ended the connection."""
        while await self.hear() is not None:
            pass


@asynccontextmanager
async def raw_engine(path: Path, role: str | None = None) -> AsyncIterator[RawEngine]:
    """A connection to a daemon; with a role, an attached one."""
    async with await trio.open_unix_socket(str(path)) as stream:
        engine = RawEngine(stream)
        if role is not None:
            await engine.say(Attach(LINK_VERSION, role))  # type: ignore[arg-type]
            await engine.hear_kind(Attached)
        yield engine


class EngineProcess:
    """An engine in a process of its own: it runs a program, says a word when it has come so far, and waits."""

    def __init__(self, process: trio.Process) -> None:
        self.process = process

    async def until_it_says(self, word: str) -> None:
        """Read its output up to a word."""
        assert self.process.stdout is not None
        said = b""
        while word.encode() not in said:
            data = await self.process.stdout.receive_some()
            assert data, f"it ended with {said!r}"
            said += data

    async def kill(self) -> None:
        """SIGKILL: no clean-up of its own."""
        self.process.send_signal(signal.SIGKILL)
        await self.process.wait()


@asynccontextmanager
async def engine_process(program: str, *args: str) -> AsyncIterator[EngineProcess]:
    """Run a program that has `kvpd.client`, `sys` and `signal` at hand."""
    text = (
        f"import signal, sys\nimport kvpd.client as client\n{program}\nprint('holding', flush=True)\nsignal.pause()\n"
    )
    process = await trio.lowlevel.open_process([sys.executable, "-c", text, *args], stdout=subprocess.PIPE)
    engine = EngineProcess(process)
    try:
        await engine.until_it_says("holding")
        yield engine
    finally:
        with trio.CancelScope(shield=True):
            await engine.kill()
            assert process.stdout is not None
            await process.stdout.aclose()
