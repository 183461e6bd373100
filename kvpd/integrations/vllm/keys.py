"""How a prompt is cut into chunks, and what each chunk is called.

A chunk is `chunk_tokens` tokens, whole blocks of all layers; the last one has as many blocks as the prompt still fills.
Its key is the layout's digest and a hash of everything that its bytes depend on: all tokens up to its end, and whatever
else changes the computation. It depends on content alone, so both engines, and any number of restarts, agree on it: a
decode engine knows the keys it must be given, and takes no others.
"""

from __future__ import annotations

import array
import hashlib
from collections.abc import Sequence
from typing import Final

import attrs
import msgspec

HASH_BYTES: Final = 32


@attrs.frozen
class Chunking:
    """The arithmetic of tokens, blocks and chunks. Nothing here is negative."""

    block_tokens: int
    chunk_tokens: int

    def __attrs_post_init__(self) -> None:
        if self.chunk_tokens < 1 or self.chunk_tokens % self.block_tokens:
            raise ValueError(
                f"chunk_tokens = {self.chunk_tokens} must be a multiple of vLLM's block size, {self.block_tokens}"
            )

    @property
    def blocks_per_chunk(self) -> int:
        """Blocks in a full chunk."""
        return self.chunk_tokens // self.block_tokens

    def blocks(self, tokens: int) -> int:
        """How many blocks `tokens` tokens touch."""
        return -(-tokens // self.block_tokens)

    def chunks(self, tokens: int) -> int:
        """How many chunks a prompt of `tokens` tokens has."""
        return -(-tokens // self.chunk_tokens)

    def complete_chunks(self, prompt_tokens: int, computed_tokens: int) -> int:
        """How many of a prompt's chunks are whole once `computed_tokens` of its tokens have been computed."""
        if computed_tokens >= prompt_tokens:
            return self.chunks(prompt_tokens)
        return computed_tokens // self.chunk_tokens

    def chunk_blocks(self, prompt_tokens: int, chunk: int) -> range:
        """Which of the prompt's blocks a chunk has."""
        first = chunk * self.blocks_per_chunk
        return range(first, min(first + self.blocks_per_chunk, self.blocks(prompt_tokens)))

    def loadable(self, prompt_tokens: int, computed_tokens: int) -> int:
        """How many tokens a decode engine that has `computed_tokens` may take from outside: never the last one, which
        it computes itself to have something to sample from.
        """
        return max(0, prompt_tokens - 1 - computed_tokens)


def chunk_keys(layout_digest: bytes, tokens: Sequence[int], chunk_tokens: int, extras: Sequence[object]) -> list[bytes]:
    """The keys of a prompt's chunks. `extras` is what the KV depends on besides the tokens: adapter, salt, images.

    Everything is hashed length first or in msgpack, so that no two different inputs are hashed as the same bytes.
    """
    running = hashlib.blake2b(msgspec.msgpack.encode(list(extras)), digest_size=HASH_BYTES)
    keys = []
    for start in range(0, len(tokens), chunk_tokens):
        some = array.array("q", tokens[start : start + chunk_tokens])
        running.update(len(some).to_bytes(8, "little"))
        running.update(some.tobytes())
        keys.append(layout_digest + running.digest())
    return keys
