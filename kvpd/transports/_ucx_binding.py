"""What the UCX data plane asks of a binding to UCX; `_ucp` (ctypes) and `_ucx_api` (ucx-py) are such bindings.

Every call is made from the event loop's thread. A binding calls nobody back: it writes down what UCX reports while it
makes progress, and is asked afterwards. What it hands out is given back exactly once, by the object that owns it.
"""

from __future__ import annotations

from typing import Any, Protocol

import attrs


class Connection(Protocol):
    """An endpoint with the remote key of the one region it writes to. A request is whatever the binding makes of it."""

    def transports(self) -> frozenset[str]:
        """The names of the transports that UCX has chosen: `cma`, `tcp`, `rc_mlx5`, ..."""

    def unpack_rkey(self, rkey: bytes) -> None:
        """Take the right to write; like an address, `rkey` must come from a trusted peer."""

    def put(self, local_address: int, length: int, remote_address: int) -> Any | None:
        """Begin a put of mapped memory, which must stay; its request, or None when it has ended well.

        Raises:
            TransportError: it has ended, badly.
        """

    def flush(self) -> Any | None:
        """Begin a flush of everything put so far (like `put`). It may report success although a put failed."""

    def force_close(self) -> Any | None:
        """Begin to close at once (like `put`); what is in flight ends with an error."""

    def has_ended(self, request: Any) -> bool:
        """Whether a request has ended well; once it has ended, it is given back: ask no more.

        Raises:
            TransportError: it has ended, badly.
        """

    def release_key(self) -> None:
        """Give the remote key back, once no put refers to it any more."""


class Worker(Protocol):
    """It makes progress for its endpoints and for what peers write through its address."""

    @property
    def descriptor(self) -> int:
        """Readable, once armed, when there may be progress to make."""

    def address(self) -> bytes:
        """What a peer needs to connect here."""

    def progress(self, budget_s: float) -> bool:
        """Make progress, for about `budget_s` where the binding can; whether there was more to do."""

    def arm(self) -> bool:
        """Ask for the descriptor to become readable at the next event; False when there is one already."""

    def signal(self) -> None:
        """Make the descriptor readable: without it, work that a call has queued may wait for ever."""

    def take_failures(self) -> list[tuple[int, str]]:
        """The (endpoint number, detail) of endpoints that have failed since this was asked last, in order."""

    def connect(self, address: bytes, number: int) -> Connection:
        """A new endpoint; its failure is reported under `number`.

        `address` must come from a peer that is trusted to send what its UCX made: UCX itself checks little.
        """

    def destroy(self) -> None:
        """End it, its descriptor, and every endpoint and request that it still has."""


class Context(Protocol):
    """UCX, configured, and the one buffer that is mapped in it."""

    def pack_rkey(self) -> bytes:
        """What a peer needs to write into the buffer."""

    def create_worker(self) -> Worker:
        """A new worker with an event descriptor. TransportError: UCX has none to give."""

    def close(self) -> None:
        """Unmap the buffer and end the context. Every worker must be gone."""


@attrs.define
class Mapping:
    """A context and the buffer that it has mapped, which is kept from being freed or resized."""

    context: Context
    export: object | None
    address: int
    length: int

    def close(self) -> None:
        self.context.close()
        self.export = None
