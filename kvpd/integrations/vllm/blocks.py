"""The engine's KV blocks as bytes: gathered into chunks, scattered out of them, with one copy each way.

A chunk is layer after layer, and in each the chunk's blocks in order. What is inside a block is opaque. Copies run
without the interpreter's lock and in the calling thread alone: no thread pool of torch's wakes up for them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


class KvBlocks:
    """All layers' blocks. Each layer is an array of shape (blocks, bytes of one block in this layer)."""

    def __init__(self, layers: Sequence[Bytes]) -> None:
        if not layers:
            raise ValueError("the engine has no KV cache")
        counts = {layer.shape[0] for layer in layers}
        if len(counts) != 1:
            raise ValueError(f"the layers have different numbers of blocks: {sorted(counts)}")
        self._layers = list(layers)
        self.count = layers[0].shape[0]
        self.block_bytes = sum(layer.shape[1] for layer in layers)

    def gather(self, block_ids: Sequence[int], out: memoryview) -> None:
        """Copy blocks into a chunk's slot, which has exactly their size."""
        ids = self._checked(block_ids, len(out))
        chunk = np.frombuffer(out, np.uint8)
        start = 0
        for layer in self._layers:
            end = start + len(ids) * layer.shape[1]
            # "clip" because the default copies twice; the numbers were checked.
            np.take(layer, ids, axis=0, out=chunk[start:end].reshape(len(ids), -1), mode="clip")
            start = end

    def scatter(self, chunk: memoryview, chunk_blocks: int, skip: int, block_ids: Sequence[int]) -> None:
        """Copy a chunk of `chunk_blocks` blocks, but for its first `skip`, into these blocks."""
        ids = self._checked(block_ids, len(block_ids) * self.block_bytes)
        if skip + len(ids) > chunk_blocks or len(chunk) != chunk_blocks * self.block_bytes:
            raise ValueError(f"{len(chunk)} bytes are no chunk of {chunk_blocks} blocks of {self.block_bytes} bytes")
        source = np.frombuffer(chunk, np.uint8)
        start = 0
        for layer in self._layers:
            end = start + chunk_blocks * layer.shape[1]
            layer[ids] = source[start:end].reshape(chunk_blocks, -1)[skip : skip + len(ids)]
            start = end

    def _checked(self, block_ids: Sequence[int], length: int) -> npt.NDArray[np.int64]:
        ids = np.asarray(block_ids, np.int64)
        if length != len(ids) * self.block_bytes:
            raise ValueError(f"{length} bytes for {len(ids)} blocks of {self.block_bytes} bytes")
        if len(ids) and (ids.min() < 0 or ids.max() >= self.count):
            raise ValueError(f"blocks {ids.min()} to {ids.max()} of {self.count}")
        return ids
