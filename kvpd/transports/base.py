"""The two contracts a transport keeps: control channels for messages, data planes for bytes.

Each contract has one suite of tests (tests/transports) that every implementation passes. A control channel may lose
messages when a connection breaks and says nothing of it: the core repeats what matters until it is answered. A data
plane never lies: a batch has succeeded only if every put's own status says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import attrs

# ------------------------------------------------------------------ control


class ControlServer(Protocol):
    """The receiver's end: many peers, each with the identity that it announced itself by."""

    @property
    def address(self) -> str:
        """Where it is really bound, as `tcp://host:port`; a port of 0 has become a real one."""

    async def receive(self) -> tuple[bytes, bytes]:
        """The next (peer, message), losing none by cancellation. One task at a time may call it.

        What was sent together comes one by one. What arrives without any frame is handed on as an empty message, which
        no decoder accepts.

        Raises:
            trio.ClosedResourceError: it was closed.
        """

    def receive_nowait(self) -> tuple[bytes, bytes]:
        """Like `receive`, now.

        Raises:
            trio.WouldBlock: nothing is here.
        """

    def send_nowait(self, peer: bytes, *messages: bytes) -> None:
        """Queue messages that travel together: all of them or none; never blocks. Sent together they cost little more
        than one.

        Raises:
            trio.WouldBlock: that peer's queue is full: it does not read.
            trio.BrokenResourceError: no such peer is connected.
        """


class ControlClient(Protocol):
    """The sender's end, towards one receiver; it connects, and reconnects, by itself."""

    async def receive(self) -> bytes:
        """The next message, losing none by cancellation (rules as for ControlServer.receive)."""

    def receive_nowait(self) -> bytes:
        """Like `receive`, now; trio.WouldBlock when nothing is here."""

    def send_nowait(self, *messages: bytes) -> None:
        """Queue messages that travel together, as for ControlServer.send_nowait. trio.WouldBlock: the queue is full."""


class ControlTransport(Protocol):
    """Makes control channels. Leaving the context closes; closing never waits longer than a second."""

    def serve(self, address: str) -> AbstractAsyncContextManager[ControlServer]:
        """Bind. OSError, with the address in its text, when that is impossible."""

    def connect(self, address: str, identity: bytes) -> AbstractAsyncContextManager[ControlClient]:
        """Connect to `address`, in the background, announcing `identity` (1 to 255 bytes, not starting with 0)."""


# ------------------------------------------------------------------ data


@attrs.frozen
class RemoteRegion:
    """What an endpoint needs to know of a region it writes to. The rkey is a write capability: never log it."""

    worker_address: bytes = attrs.field(repr=False)
    base_address: int
    length: int
    rkey: bytes = attrs.field(repr=False)


@attrs.frozen
class Put:
    """Write `length` bytes from `local_offset` of the mapped buffer to `remote_offset` of the endpoint's region."""

    local_offset: int
    remote_offset: int
    length: int


class PutBatch(Protocol):
    """Puts that belong together, and the flush right behind them."""

    @property
    def done(self) -> bool:
        """Whether every put and the flush have ended, or were never begun."""

    @property
    def failed(self) -> bool:
        """Whether any put or the flush ended badly."""

    async def wait(self) -> None:
        """Until all have ended well. May be cancelled: the puts go on.

        Raises:
            TransportError: one did not, and what it says.
        """

    def abandon(self) -> None:
        """Begin no more of them. Those in flight go on: wait for `drain`."""

    async def drain(self) -> None:
        """Until none is in flight, however they ended. Never raises TransportError."""


class Endpoint(Protocol):
    """One sender's way into one receiver's region. Bytes in flight are bounded by a window; the rest queue here."""

    @property
    def broken(self) -> bool:
        """Whether the transport has reported it dead, or it was closed."""

    @property
    def transports(self) -> frozenset[str]:
        """What carries its bytes: `cma`, `tcp`, ... as UCX calls them."""

    @property
    def in_flight_bytes(self) -> int:
        """Bytes posted and not yet ended."""

    def post(self, puts: Sequence[Put]) -> PutBatch:
        """Queue puts behind those already here; never blocks, and an empty batch succeeds.

        Raises:
            TransportError: the endpoint is broken.
            ValueError: an offset or a length is outside its buffer; nothing was queued.
        """

    def force_close(self) -> None:
        """Now: whatever is in flight ends with an error here. Its bytes may still land there."""


class Target(Protocol):
    """What one session may write through; one UCX worker. Closing it fences: over a network nothing lands after."""

    @property
    def worker_address(self) -> bytes: ...

    @property
    def base_address(self) -> int: ...

    @property
    def length(self) -> int: ...

    @property
    def rkey(self) -> bytes: ...

    def close(self) -> None:
        """End it, synchronously. Idempotent."""


class DataPlane(Protocol):
    """Moves bytes between two registered buffers. Made by `open_*_data_plane(...)`, an async context manager.

    It maps the one buffer it was made with and owns the tasks that make progress.
    """

    @property
    def transport(self) -> str:
        """Its name, for labels and logs: `memory`, `ucx`."""

    async def open_target(self) -> Target:
        """A new way in, for one session."""

    async def connect(self, region: RemoteRegion, on_broken: Callable[[str], None]) -> Endpoint:
        """A new endpoint; `on_broken(detail)` is called once, from the loop, if the transport reports it dead.

        Raises:
            TransportError: no endpoint can be made from what the peer sent.
        """
