"""vLLM's NixlConnector with the two changes that it needs to be of use on a machine without a GPU.

Unchanged, its worker pins vLLM's own main thread to the last core of each NUMA node and leaves it there, so that on
two cores both engines of a pair compute on the same one; and NIXL's progress thread never sleeps, which takes a core
from each engine for as long as it lives. Here nothing is pinned, and the progress thread runs only where
`kv_connector_extra_config` has `progress_thread`: without it NIXL makes its progress when vLLM asks how transfers
stand, which it does in every step. What is transferred, and how, is untouched.
"""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlConnector, base_worker
from vllm.platforms import current_platform


class CpuNixlConnector(NixlConnector):  # type: ignore[misc]
    """See the module."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        has_thread = bool(vllm_config.kv_transfer_config.get_from_extra_config("progress_thread", False))
        agent_config = functools.partial(base_worker.nixl_agent_config, enable_prog_thread=has_thread)
        with (
            mock.patch.object(base_worker, "nixl_agent_config", agent_config),
            mock.patch.object(current_platform, "discover_numa_topology", list),
        ):
            super().__init__(vllm_config, role, kv_cache_config)
