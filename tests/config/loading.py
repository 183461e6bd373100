"""How these tests read a configuration: from what they name, and nothing of this process's environment."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from kvpd.config import Config, Override, Role, resolve
from kvpd.errors import ConfigError

MIB = 1 << 20
RECEIVER = {"receiver.buffer_size": "8MiB", "receiver.chunk_bytes": "1MiB"}
SENDER = {"sender.staging_size": "8MiB", "sender.chunk_bytes": "1MiB"}


def load(
    *roles: Role,
    flags: Mapping[str, str] | None = None,
    env: Mapping[str, str] | None = None,
    file: Path | None = None,
) -> Config:
    """Resolve, without this process's environment."""
    overrides = [Override(path, text) for path, text in (flags or {}).items()]
    return resolve(*roles, file=file, environ=env or {}, overrides=overrides)


def problems_of(
    *roles: Role,
    flags: Mapping[str, str] | None = None,
    env: Mapping[str, str] | None = None,
    file: Path | None = None,
) -> tuple[str, ...]:
    """What is wrong."""
    with pytest.raises(ConfigError) as caught:
        load(*roles, flags=flags, env=env, file=file)
    return caught.value.problems
