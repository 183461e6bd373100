"""Requests, layouts and boards, as the connector's scheduler sees them."""

from __future__ import annotations

from typing import Any

import attrs

from kvpd.integrations.vllm.layout import Layout

LAYOUT = Layout(
    model="tiny",
    dtype="float32",
    kv_dtype="auto/float32",
    kind="FullAttentionSpec",
    block_tokens=16,
    chunk_tokens=32,
    layers=2,
    heads=2,
    head_dim=8,
    block_bytes=4096,
    backend="CPU_ATTN",
    isa="vec",
    ranks=1,
)


@attrs.define
class FakeRequest:
    """What the scheduler reads of vLLM's Request."""

    request_id: str
    prompt_token_ids: list[int] | None
    kv_transfer_params: dict[str, Any] | None = None
    lora_request: Any = None
    cache_salt: str | None = None
    mm_features: tuple[Any, ...] = ()

    @property
    def num_prompt_tokens(self) -> int:
        """As vLLM counts them."""
        return len(self.prompt_token_ids or ())


@attrs.frozen
class NewRequest:
    """vLLM's NewRequestData."""

    req_id: str
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int = 0


@attrs.define
class CachedRequests:
    """vLLM's CachedRequestData."""

    req_ids: list[str] = attrs.Factory(list)
    resumed_req_ids: set[str] = attrs.Factory(set)
    new_block_ids: list[tuple[list[int], ...] | None] = attrs.Factory(list)
    num_computed_tokens: list[int] = attrs.Factory(list)


def outgoing(name: str, tokens: int, **params: Any) -> FakeRequest:
    """A prefill request of the transfer `t-name`."""
    wanted = {"do_remote_decode": True, "transfer_id": f"t-{name}", "receiver": "127.0.0.1:7300", **params}
    return FakeRequest(name, list(range(tokens)), wanted)


def incoming(name: str, tokens: int, **params: Any) -> FakeRequest:
    """A decode request of the transfer `t-name`."""
    return FakeRequest(name, list(range(tokens)), {"do_remote_prefill": True, "transfer_id": f"t-{name}", **params})
