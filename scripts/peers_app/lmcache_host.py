"""LMCache's PD backend as a process: `python -m peers_app.lmcache_host receiver|sender JSON`.

The class is the unmodified one, with the allocator that it makes itself and its own defaults; its transfer channel is
LMCache's own `mock_memory`, which copies memory within the process instead of moving it through NIXL. So what is
measured is what kvpd replaces: admission, staging, messages. What lands, `{"landed": REQ}`, comes without being asked.
"""

from __future__ import annotations

import importlib
import json
import sys
import threading
from types import SimpleNamespace
from typing import Any, Final

from peers_app.commands import Commands, Words

# Two layers of 16 tokens, one head of 32 values of two bytes, keys and values: 4 KiB a chunk.
KV_SHAPE: Final = (2, 2, 16, 1, 32)
CHUNK_BYTES: Final = 4096
MODEL: Final = "bench"
HOST: Final = "127.0.0.1"


def make_backend(role: str, given: Words) -> Any:
    """A PDBackendAsync; `given` names its ports and how many chunks its buffer holds."""
    config_class = importlib.import_module("lmcache.v1.config").LMCacheEngineConfig
    metadata_class = importlib.import_module("lmcache.v1.metadata").LMCacheMetadata
    module = importlib.import_module("lmcache.v1.storage_backend.pd_backend_async")
    torch = importlib.import_module("torch")
    config = config_class.from_defaults(
        chunk_size=KV_SHAPE[2],
        enable_pd=True,
        pd_role=role,
        pd_buffer_size=given["chunks"] * CHUNK_BYTES,
        pd_buffer_device="cpu",
        pd_peer_host=HOST,
        pd_peer_init_port=[given["init_port"]],
        pd_peer_alloc_port=[given["alloc_port"]],
        pd_proxy_host=HOST,
        pd_proxy_port=given["proxy_port"],
        transfer_channel="mock_memory",
    )
    metadata = metadata_class(MODEL, 1, 1, 0, 0, torch.bfloat16, KV_SHAPE, chunk_size=KV_SHAPE[2])
    return module.PDBackendAsync(config, metadata)


class Host:
    """The backend and what the conductor may ask of it."""

    def __init__(self, role: str, given: Words, commands: Commands) -> None:
        self._given = given
        self._commands = commands
        self._backend = make_backend(role, given)
        self._torch = importlib.import_module("torch")
        self._key_class = importlib.import_module("lmcache.utils").CacheEngineKey
        self._format = importlib.import_module("lmcache.v1.memory_management").MemoryFormat.KV_2LTD
        self._speaking = threading.Lock()

    def serve(self) -> None:
        """Until the conductor ends it."""
        self._reply(dtype="bfloat16", format=self._format.value, shape=list(self._shape()))
        while True:
            words = self._commands.next()
            self._reply(**getattr(self, "do_" + words.pop("do"))(**words))

    def _reply(self, **words: Any) -> None:
        with self._speaking:
            self._commands.reply(**words)

    def _shape(self) -> Any:
        layers, kinds, tokens, heads, values = KV_SHAPE
        return self._torch.Size([kinds, layers, tokens, heads * values])

    def _keys(self, first_key: int, count: int) -> list[Any]:
        return [
            self._key_class(MODEL, 1, 0, number, self._torch.bfloat16) for number in range(first_key, first_key + count)
        ]

    def do_submit(self, req_id: str, first_key: int, count: int, total: int, last: bool) -> Words:
        """A sender: stage a batch and hand it over, as LMCache's own storage manager does."""
        backend = self._backend
        chunks = backend.batched_allocate(self._shape(), self._torch.bfloat16, count, self._format)
        spec = SimpleNamespace(
            req_id=req_id,
            receiver_host=HOST,
            receiver_init_port=[self._given["peer_init_port"]],
            receiver_alloc_port=[self._given["peer_alloc_port"]],
            is_last_prefill=last,
            total_chunks=total,
        )
        waiting = set(range(first_key, first_key + count))

        def landed(key: Any) -> None:
            waiting.discard(key.chunk_hash)
            if not waiting:
                self._reply(landed=req_id)

        backend.batched_submit_put_task(self._keys(first_key, count), chunks, spec, landed)
        for chunk in chunks:
            chunk.ref_count_down()
        return {"submitted": True}

    def do_cancel(self, req_id: str) -> Words:
        """A sender: the engine gives a request up."""
        self._backend.cancel_request(req_id)
        return {"cancelled": True}

    def do_consume(self, first_key: int, count: int) -> Words:
        """A receiver: the decode engine has read these chunks."""
        return {"consumed": sum(self._backend.remove(key) for key in self._keys(first_key, count))}


def main() -> None:
    """Serve as the command line says."""
    Host(sys.argv[1], json.loads(sys.argv[2]), Commands()).serve()


if __name__ == "__main__":
    main()
