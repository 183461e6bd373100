"""kvpd's configuration: one TOML file, the environment, flags; each stronger than the one before.

Everything is checked before anything starts, and all problems are told at once. `resolve` gives the configuration of
a daemon, `validate` judges a section that a program has built itself.
"""

from __future__ import annotations

from kvpd.config.paths import default_engine_socket, default_name, ensure_socket_folder, runtime_folder
from kvpd.config.resolve import Setting, resolve, roles_mentioned, settings, validate
from kvpd.config.schema import (
    ROLES,
    Config,
    LogConfig,
    MetricsConfig,
    ProxyConfig,
    ReceiverConfig,
    Role,
    SenderConfig,
)
from kvpd.config.sources import Override

__all__ = [
    "ROLES",
    "Config",
    "LogConfig",
    "MetricsConfig",
    "Override",
    "ProxyConfig",
    "ReceiverConfig",
    "Role",
    "SenderConfig",
    "Setting",
    "default_engine_socket",
    "default_name",
    "ensure_socket_folder",
    "resolve",
    "roles_mentioned",
    "runtime_folder",
    "settings",
    "validate",
]
