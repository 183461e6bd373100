"""The prefill engine's side: one transfer per request.

A transfer succeeds whole or not at all. Every way out of one tells the daemon that this engine writes into its slots
no more; until then the daemon gives them to nobody else.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Final, Self

from kvpd.client._connection import Connection
from kvpd.client._link import Link, checked_text, checked_timeout
from kvpd.client._staging import Staging
from kvpd.errors import ErrorCode, LocalProtocolError, RemoteProtocolError, TransferFailed
from kvpd.link import (
    Cancel,
    Close,
    DaemonFrame,
    Ended,
    Open,
    Place,
    PlaceGone,
    Stage,
    Staged,
    StageDeferred,
    Touch,
)

STAGE_KEYS_MAX: Final = 8192
KEY_BYTES_MAX: Final = 96
COUNT_MAX: Final = 1 << 62


class Transfer:
    """One request on its way: `with link.open(...) as transfer`.

    Leaving normally waits until everything has landed, was acknowledged, and the proxy was told; leaving by an
    exception cancels. Either tells the daemon that its slots are written no more, so a transfer that was opened must be
    entered and left. One thread stages; any thread may cancel.
    """

    def __init__(self, connection: Connection, total_chunks: int, timeout: float | None) -> None:
        self.connection = connection
        self.number = connection.number()
        self._total_chunks = total_chunks
        self._timeout = timeout
        self._changed = connection.condition()
        self._stages: list[Staging] = []
        self._staged_chunks = 0
        self._last_was_staged = False
        self._ended: Ended | None = None
        self._left = False
        self._leaving = threading.Lock()  # nothing about a transfer may follow its Close: the daemon knows it no more

    # ------------------------------------------------------------------ the engine's calls

    def stage(self, keys: Sequence[bytes], *, last: bool = False, last_chunk_bytes: int | None = None) -> Staging:
        """Ask for the slots of the next batch, now; wait for them on entering what this returns.

        `keys` has one key of at most 96 bytes per chunk. The batch that reaches `total_chunks` is the last one,
        whether `last` says so or not. `last_chunk_bytes` is the length of the batch's last chunk, where it is shorter
        than a full one. The next batch may be asked for before this one is filled.

        Raises:
            TransferError: the transfer has ended.
            LocalProtocolError: the batch is impossible.
        """
        self._check_usable()
        batch = _checked_keys(keys)
        chunk_bytes = self.connection.info.chunk_bytes
        length = chunk_bytes if last_chunk_bytes is None else last_chunk_bytes
        if not 1 <= length <= chunk_bytes:
            raise LocalProtocolError(f"a last chunk of {length} bytes; 1 to {chunk_bytes} are allowed")
        if self._last_was_staged:
            raise LocalProtocolError("the last batch was staged already")
        is_last = last or self._staged_chunks + len(batch) == self._total_chunks
        with self.connection.lock:
            number = len(self._stages)
            staging = Staging(self, number, len(batch), length)
            self._stages.append(staging)
        self._staged_chunks += len(batch)
        self._last_was_staged = is_last
        self.connection.send(Stage(self.number, number, batch, is_last, length))
        return staging

    def touch(self) -> None:
        """Still computing: this counts as progress, where others wait for the room that this transfer holds.

        Raises:
            TransferError: the transfer has ended.
        """
        self.connection.check_process()
        with self._leaving:
            self._check_usable()
            self.connection.send(Touch(self.number))

    def cancel(self) -> None:
        """End the transfer, whatever its state. From any thread; never raises."""
        if not self.connection.is_ours:
            return
        with self._leaving:
            if self._ended is None and not self._left:
                self.connection.send_last(Cancel(self.number))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Wait for success; on an exception, cancel.

        Raises:
            TransferError: the transfer ended without success, or not within its timeout.
            LocalProtocolError: not all of it was staged and filled; it is cancelled.
        """
        if not self.connection.is_ours:
            return
        try:
            if kind is None and not self._left:
                self._wait_for_success()
        finally:
            self._leave()

    def _wait_for_success(self) -> None:
        with self.connection.lock:
            self._raise_if_failed()
            unfilled = sum(not stage.is_finished for stage in self._stages)
            if not self._last_was_staged or unfilled:
                raise LocalProtocolError(
                    f"left with {self._staged_chunks} of {self._total_chunks} chunks staged and {unfilled} stages not "
                    "filled; it is cancelled"
                )
            ended = self.connection.wait(self._changed, lambda: self._ended is not None, self._timeout)
            self._raise_if_failed()
        if not ended:
            detail = f"not over within {self._timeout:g} s of its last batch; it is cancelled"
            raise TransferFailed(ErrorCode.REQUEST_TIMEOUT, detail)

    def _leave(self) -> None:
        for stage in self._stages:
            stage.revoke_slots()
        with self._leaving:
            if self._left:
                return
            self._left = True
            self.connection.send_last(Close(self.number))
        self.connection.leave(self.number)

    # ------------------------------------------------------------------ for its stages

    def check(self) -> None:
        """Raises what the transfer ended with, if it did."""
        with self.connection.lock:
            self._raise_if_failed()

    def wait(self, ready: Callable[[], bool]) -> None:
        """With the lock held: until `ready()`, or the transfer has ended, which raises."""
        self.connection.wait(self._changed, lambda: ready() or self._ended is not None, None)
        self._raise_if_failed()
        if not ready():
            raise RemoteProtocolError("the transfer ended well before it was filled")

    def has_unfilled_before(self, stage: Staging) -> bool:
        """Whether an earlier stage has slots that were not sent yet."""
        return any(not earlier.is_finished for earlier in self._stages[: self._stages.index(stage)])

    def _check_usable(self) -> None:
        self.connection.check()
        if self._left:
            raise LocalProtocolError("this transfer was left")
        with self.connection.lock:
            self._raise_if_failed()
            if self._ended is not None:
                raise LocalProtocolError("this transfer is complete")

    def _raise_if_failed(self) -> None:
        if self._ended is not None and self._ended.error is not None:
            raise self._ended.error.exception()

    # ------------------------------------------------------------------ the reader thread's side, under the lock

    def accept(self, frame: Staged | StageDeferred | Ended) -> None:
        """A frame from the daemon.

        Raises:
            RemoteProtocolError: it makes no sense for this transfer.
        """
        if isinstance(frame, Ended):
            self._ended = self._ended or frame
        elif frame.stage >= len(self._stages):
            raise RemoteProtocolError(f"a frame about stage {frame.stage} of {len(self._stages)}")
        elif isinstance(frame, Staged):
            self._stages[frame.stage].accept(frame)
        else:
            self._stages[frame.stage].defer()
        self._changed.notify_all()


class SenderLink(Link):
    """A prefill engine's connection to its sender."""

    def open(
        self,
        req_id: str,
        *,
        receiver: str,
        total_chunks: int,
        notify: str | None = None,
        timeout: float | None = None,
    ) -> Transfer:
        """Begin to move a request of `total_chunks` chunks to `receiver` (`host:port`). Never waits for anything.

        A refusal is raised by the first stage, or on leaving. `notify` names the proxy of this request, where it is not
        the configured one. `timeout` (seconds; None: no limit but the daemon's) bounds the wait on leaving.

        Raises:
            TransferFailed: the daemon is lost.
            LocalProtocolError: an argument is impossible, or the link was closed.
        """
        connection = self._connection
        connection.check()
        checked_text("req_id", req_id)
        checked_text("receiver", receiver)
        if notify is not None:
            checked_text("notify", notify)
        if not -COUNT_MAX < total_chunks < COUNT_MAX:
            raise LocalProtocolError(f"a request of {total_chunks} chunks")
        transfer = Transfer(connection, total_chunks, checked_timeout(timeout))
        connection.enter(transfer.number, transfer)
        sent: list[int] = []
        try:
            connection.send(Open(transfer.number, req_id, receiver, total_chunks, notify), sent)
        except BaseException:
            if sent:  # interrupted, but opened all the same
                connection.send_last(Close(transfer.number))
            connection.leave(transfer.number)
            raise
        return transfer

    def _handle_role(self, frame: DaemonFrame) -> None:
        match frame:
            case Place():
                self._connection.places.introduce(frame)
            case PlaceGone(place):
                self._connection.places.gone(place)
            case Staged() | StageDeferred() | Ended():
                self._handle_transfer(frame)
            case _:
                super()._handle_role(frame)

    def _handle_transfer(self, frame: Staged | StageDeferred | Ended) -> None:
        with self._connection.lock:
            transfer = self._connection.find(frame.transfer)
            if transfer is None:
                return
            if not isinstance(transfer, Transfer):
                raise RemoteProtocolError(f"number {frame.transfer} is no transfer")
            transfer.accept(frame)


def _checked_keys(keys: Sequence[bytes]) -> tuple[bytes, ...]:
    for key in keys:
        if not isinstance(key, bytes | bytearray | memoryview) or len(key) > KEY_BYTES_MAX:
            raise LocalProtocolError(f"a key has at most {KEY_BYTES_MAX} bytes; {key!r} is none"[:300])
    if not 1 <= len(keys) <= STAGE_KEYS_MAX:
        raise LocalProtocolError(f"a batch of {len(keys)} chunks; 1 to {STAGE_KEYS_MAX} are allowed")
    return tuple(bytes(key) for key in keys)
