"""What the scheduler's half tells the worker's half each step, and what comes back.

The two may live in different processes: everything here is a value that can be pickled.
"""

from __future__ import annotations

import attrs

from kvpd.errors import ErrorCode, TransferError, transfer_error


@attrs.frozen
class Failure:
    """Why a transfer ended without success."""

    code: ErrorCode
    detail: str
    retry_after_s: float | None = None

    @classmethod
    def of(cls, error: TransferError) -> Failure:
        """The form that can be carried."""
        return cls(error.code, error.detail, error.retry_after_s)

    def exception(self) -> TransferError:
        """The form that can be raised."""
        return transfer_error(self.code, self.detail, self.retry_after_s)


@attrs.frozen
class OpenJob:
    """Prefill: a request was seen; begin its transfer."""

    request_id: str
    transfer_id: str
    receiver: str
    total_chunks: int
    notify: str | None = None


@attrs.frozen
class ChunkSource:
    """Prefill: one chunk, and the blocks that hold it."""

    key: bytes
    block_ids: tuple[int, ...]


@attrs.frozen
class SaveJob:
    """Prefill: these chunks are complete once this step has run."""

    request_id: str
    chunks: tuple[ChunkSource, ...]
    is_last: bool


@attrs.frozen
class LoadJob:
    """Decode: claim a transfer and write it into these blocks, `block_ids[0]` being the prompt's block `first_block`.

    `failure`: it is known already that there will be nothing to claim.
    """

    request_id: str
    transfer_id: str
    keys: tuple[bytes, ...]
    first_block: int
    block_ids: tuple[int, ...]
    failure: Failure | None = None


@attrs.define
class Step:
    """All of one step."""

    opens: list[OpenJob] = attrs.Factory(list)
    saves: list[SaveJob] = attrs.Factory(list)
    preempted: list[str] = attrs.Factory(list)  # their blocks may be overwritten by this step
    computing: list[str] = attrs.Factory(list)  # prefilling in this step, and none of their chunks became complete
    loads: list[LoadJob] = attrs.Factory(list)
    is_idle: bool = False  # nothing is computed in it
