"""The decode engine's side: claims, and the chunks that they give.

A claim gives all of a request's chunks or none. Its views point into the receiver's own buffer and can only be read;
leaving the claim gives the slots back, and what they hold after that is somebody else's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Final, Self, overload

import attrs

from kvpd.client._connection import Connection
from kvpd.client._link import Link, checked_text
from kvpd.errors import ErrorCode, LocalProtocolError, RemoteProtocolError, TransferFailed
from kvpd.link import Claim as ClaimFrame
from kvpd.link import Claimed, ClaimedChunk, ClaimFailed, DaemonFrame, LinkError, Release

CLAIM_TIMEOUT_MAX_S: Final = 1e9
ANSWER_GRACE_S: Final = 2.0  # for the daemon to say by itself that the time is over


@attrs.frozen
class Chunk:
    """One chunk of a claimed request: `index` is its slot, `view` its bytes, read-only, until the claim is left."""

    key: bytes
    index: int
    view: memoryview = attrs.field(repr=False)


class Claim(Sequence[Chunk]):
    """A request's chunks, in request order: `with link.claim(req_id, timeout) as chunks`.

    `sender_id` and `transfer_no` say, once entered, whose they are.
    """

    def __init__(self, connection: Connection, req_id: str, timeout_s: float, sender_id: str | None) -> None:
        self._connection = connection
        self._number = connection.number()
        self._req_id = req_id
        self._timeout_s = timeout_s
        self._wanted_sender_id = sender_id
        self._changed = connection.condition()
        self._chunks: list[Chunk] = []
        self._entered = False
        # The reader thread's, under the lock.
        self._claimed: list[ClaimedChunk] = []
        self._complete = False
        self._error: LinkError | None = None
        self.sender_id = ""
        self.transfer_no = 0

    def __enter__(self) -> Self:
        """Wait until the request is complete and ours.

        Raises:
            TransferError: it failed, it is another's (`claimed`, `ambiguous_request`), or the time is over
                (`claim_timeout`).
        """
        connection = self._connection
        connection.check()
        if self._entered:
            raise LocalProtocolError("a claim is entered once")
        self._entered = True
        connection.enter(self._number, self)
        try:
            connection.send(
                ClaimFrame(self._number, self._req_id, connection.rank, self._timeout_s, self._wanted_sender_id)
            )
            with connection.lock:
                limit = self._timeout_s + ANSWER_GRACE_S
                in_time = connection.wait(self._changed, lambda: self._complete or self._error is not None, limit)
                if self._error is not None:
                    raise self._error.exception()
            if not in_time:
                detail = f"{self._req_id!r} is not complete within {self._timeout_s:g} s, and the daemon is silent"
                raise TransferFailed(ErrorCode.CLAIM_TIMEOUT, detail)
            self._map()
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._connection.is_ours:
            self._leave()

    @overload
    def __getitem__(self, where: int) -> Chunk: ...
    @overload
    def __getitem__(self, where: slice) -> Sequence[Chunk]: ...
    def __getitem__(self, where: int | slice) -> Chunk | Sequence[Chunk]:
        return self._chunks[where]

    def __len__(self) -> int:
        return len(self._chunks)

    def __iter__(self) -> Iterator[Chunk]:
        return iter(self._chunks)

    def _map(self) -> None:
        chunk_bytes = self._connection.info.chunk_bytes
        with memoryview(self._connection.region).toreadonly() as whole:
            for chunk in self._claimed:
                start = chunk.index * chunk_bytes
                self._chunks.append(Chunk(chunk.key, chunk.index, whole[start : start + chunk.length]))

    def _leave(self) -> None:
        for chunk in self._chunks:
            with contextlib.suppress(BufferError):  # an array of the engine's still refers to it
                chunk.view.release()
        self._chunks.clear()
        self._connection.send_last(Release(self._number))
        self._connection.leave(self._number)

    # ------------------------------------------------------------------ the reader thread's side, under the lock

    def accept(self, frame: Claimed | ClaimFailed) -> None:
        """A frame from the daemon.

        Raises:
            RemoteProtocolError: it makes no sense for this claim.
        """
        if self._complete or self._error is not None:
            raise RemoteProtocolError(f"claim {self._number} was answered already")
        if isinstance(frame, ClaimFailed):
            self._error = frame.error
        else:
            self._accept_piece(frame)
        self._changed.notify_all()

    def _accept_piece(self, piece: Claimed) -> None:
        connection = self._connection
        if piece.first != len(self._claimed):
            raise RemoteProtocolError(f"chunks from {piece.first} on, where {len(self._claimed)} are here")
        for chunk in piece.chunks:
            if not (0 <= chunk.index < connection.slots_total and 1 <= chunk.length <= connection.info.chunk_bytes):
                raise RemoteProtocolError(f"a chunk of {chunk.length} bytes in slot {chunk.index}")
        self._claimed += piece.chunks
        self.sender_id = piece.sender_id
        self.transfer_no = piece.transfer_no
        self._complete = piece.is_last_piece


class ReceiverLink(Link):
    """A decode engine's connection to its receiver, for one of the engine's ranks."""

    def claim(self, req_id: str, timeout: float, *, sender_id: str | None = None) -> Claim:
        """Claim a request's chunks: entering what this returns waits for them, `timeout` seconds at most.

        `sender_id` settles which transfer is meant, where two senders use the same `req_id`.

        Raises:
            TransferFailed: the daemon is lost.
            LocalProtocolError: an argument is impossible, or the link was closed.
        """
        self._connection.check()
        checked_text("req_id", req_id)
        if not 0 <= timeout <= CLAIM_TIMEOUT_MAX_S:
            raise LocalProtocolError(f"a timeout of {timeout!r} s; 0 to {CLAIM_TIMEOUT_MAX_S:g} are allowed")
        return Claim(self._connection, req_id, float(timeout), sender_id)

    def _handle_role(self, frame: DaemonFrame) -> None:
        if not isinstance(frame, Claimed | ClaimFailed):
            super()._handle_role(frame)
            return
        with self._connection.lock:
            claim = self._connection.find(frame.claim)
            if claim is None:
                return
            if not isinstance(claim, Claim):
                raise RemoteProtocolError(f"number {frame.claim} is no claim")
            claim.accept(frame)
