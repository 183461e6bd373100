"""What of vLLM's configuration concerns the connector: the layout of its KV, and what is not supported."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvpd.integrations.vllm.blocks import Bytes, KvBlocks
from kvpd.integrations.vllm.keys import Chunking
from kvpd.integrations.vllm.layout import Layout
from kvpd.integrations.vllm.settings import Settings


def refuse_unsupported(vllm_config: Any, kv_cache_config: Any) -> None:
    """Before anything is computed.

    Raises:
        ValueError: this engine's KV cannot be moved, and why.
    """
    groups, parallel = kv_cache_config.kv_cache_groups, vllm_config.parallel_config
    problems = []
    if len(groups) != 1:
        problems.append(
            f"the model has {len(groups)} groups of KV caches; one is supported: run with "
            "--disable-hybrid-kv-cache-manager, where the model allows it"
        )
    problems += [
        f"{type(group.kv_cache_spec).__name__} is not supported, only attention that keeps all of its tokens"
        for group in groups
        if not isinstance(group.kv_cache_spec, FullAttentionSpec)
    ]
    for name in ("pipeline_parallel_size", "prefill_context_parallel_size", "decode_context_parallel_size"):
        size = getattr(parallel, name, 1)
        if size != 1:
            problems.append(
                f"{name} = {size}; only the heads of a request's KV may be spread over ranks, by tensor_parallel_size"
            )
    if problems:
        raise ValueError("KvpdConnector: " + "; ".join(problems))


def layout_of(vllm_config: Any, kv_cache_config: Any, settings: Settings) -> Layout:
    """The fingerprint of this engine's KV.

    Raises:
        ValueError: chunk_tokens does not fit vLLM's block size.
    """
    (group,) = kv_cache_config.kv_cache_groups
    spec = group.kv_cache_spec
    model = vllm_config.model_config
    Chunking(spec.block_size, settings.chunk_tokens)
    backend, isa = _kernel(vllm_config, spec)
    return Layout(
        model=settings.model or str(model.model),
        dtype=str(model.dtype).removeprefix("torch."),
        kv_dtype=f"{vllm_config.cache_config.cache_dtype}/{str(spec.dtype).removeprefix('torch.')}",
        kind=type(spec).__name__,
        block_tokens=spec.block_size,
        chunk_tokens=settings.chunk_tokens,
        layers=len(group.layer_names),
        heads=spec.num_kv_heads,
        head_dim=spec.head_size,
        block_bytes=spec.page_size_bytes * len(group.layer_names),
        backend=backend,
        isa=isa,
        ranks=vllm_config.parallel_config.tensor_parallel_size,
    )


def _kernel(vllm_config: Any, spec: Any) -> tuple[str, str]:
    """The attention backend and the instruction set that it packs blocks for."""
    if current_platform.device_type != "cpu":
        return str(vllm_config.attention_config.backend), current_platform.device_name
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa  # noqa: PLC0415  not importable elsewhere

    cache_dtype = vllm_config.cache_config.cache_dtype
    return "CPU_ATTN", _get_attn_isa(vllm_config.model_config.dtype, spec.block_size, spec.head_size, cache_dtype)


def rank_of_worker() -> int:
    """The tensor-parallel rank of the worker that this is called in."""
    return int(get_tensor_model_parallel_rank())


def blocks_of(tensors: Iterable[Any], blocks: int) -> KvBlocks:
    """vLLM's KV caches as bytes, their first dimension running through the blocks. Layers that share memory count once.

    Raises:
        ValueError: a tensor is laid out otherwise, or not in this host's memory.
    """
    layers: dict[int, Bytes] = {}
    for tensor in tensors:
        if tensor.device.type != "cpu":
            raise ValueError(f"a KV cache on {tensor.device}: this connector serves vLLM's CPU backend only")
        if not tensor.is_contiguous() or not tensor.numel() or tensor.shape[0] % blocks:
            raise ValueError(
                f"a KV cache of shape {tuple(tensor.shape)} whose {blocks} blocks are not in one piece each"
            )
        layers[tensor.data_ptr()] = tensor.view(torch.uint8).view(blocks, -1).numpy()
    return KvBlocks(list(layers.values()))
