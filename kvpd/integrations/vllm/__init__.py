"""vLLM's door to kvpd: `KvpdConnector`, loaded by `--kv-transfer-config` with `kv_connector_module_path`.

The connector is imported when it is first asked for: only `connector` needs vLLM, the rest of this package runs and is
tested without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvpd.integrations.vllm.connector import KvpdConnector

__all__ = ["KvpdConnector"]


def __getattr__(name: str) -> Any:
    if name != "KvpdConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module("kvpd.integrations.vllm.connector").KvpdConnector
