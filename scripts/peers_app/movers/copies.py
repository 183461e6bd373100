"""A copy within one process: the memory's own speed at the moment."""

from __future__ import annotations

from typing import Any

import numpy as np

from peers_app.memory import Buffer
from peers_app.movers.base import Address, Chunks, End, Source


class CopySource(Source):
    """See `Source`; the sink is a second buffer of this process."""

    def __init__(self, buffer: Buffer) -> None:
        super().__init__(buffer)
        self.target = Buffer(buffer.length)

    def connect(self, address: Address) -> None:
        """There is nobody to connect to."""

    def tell(self, words: bytes) -> None:
        raise NotImplementedError("there is nobody to tell")

    def heard(self) -> list[bytes]:
        return []

    def begin(self, chunks: Chunks, notice: bytes = b"") -> Any:
        for local, remote in zip(chunks.local, chunks.remote, strict=True):
            np.copyto(self.target.chunk(remote, chunks.chunk_bytes), self.buffer.chunk(local, chunks.chunk_bytes))

    def is_done(self, write: Any) -> bool:
        return True


def make_end(system: str, role: str, tls: str, buffer: Buffer) -> End:
    """See `peers_app.mover`."""
    return CopySource(buffer)
