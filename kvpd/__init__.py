"""kvpd moves a request's KV cache from the engine that prefilled it to the engine that decodes it.

`kvpd.client` is an engine's side, `kvpd.Sender` and `kvpd.Receiver` are the daemons as trio objects. All three are
imported when they are first asked for, so that an engine that needs the client alone imports neither trio nor torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kvpd.errors import (
    AdmissionRefused,
    ConfigError,
    ErrorCode,
    KvpdError,
    LocalProtocolError,
    RemoteProtocolError,
    TransferCancelled,
    TransferError,
    TransferFailed,
    TransportError,
)

if TYPE_CHECKING:
    from kvpd import client
    from kvpd.service.receiver import Receiver
    from kvpd.service.sender import Sender

    __version__: str

__all__ = [
    "AdmissionRefused",
    "ConfigError",
    "ErrorCode",
    "KvpdError",
    "LocalProtocolError",
    "Receiver",
    "RemoteProtocolError",
    "Sender",
    "TransferCancelled",
    "TransferError",
    "TransferFailed",
    "TransportError",
    "__version__",
    "client",
]


def __getattr__(name: str) -> Any:
    match name:
        case "Receiver" | "Sender":
            value = getattr(importlib.import_module(f"kvpd.service.{name.lower()}"), name)
        case "client":
            value = importlib.import_module("kvpd.client")
        case "__version__":
            value = importlib.import_module("kvpd.version").VERSION
        case _:
            raise AttributeError(f"module 'kvpd' has no attribute {name!r}")
    globals()[name] = value
    return value
