"""What carries a benchmark's bytes, and what calls UCX for it.

Both are words of kvpd's settings or stand for them: a benchmark measures nothing that a daemon could not be told to do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Literal

import click

from kvpd.errors import ConfigError
from kvpd.transports import ucx_py
from kvpd.transports.ucx import ucx_version

Transport = Literal["cma", "tcp", "local"]
TRANSPORTS: Final[tuple[Transport, ...]] = ("cma", "tcp", "local")
# On one host UCX takes CMA where it may.
UCX_TLS: Final[Mapping[Transport, str]] = {"cma": "", "tcp": "tcp", "local": ""}

# As the setting `transport` names it: kvpd's own binding, or ucx-py.
Binding = Literal["ucx", "ucx-py"]
BINDINGS: Final[tuple[Binding, ...]] = ("ucx", "ucx-py")


def check_bindings(bindings: Sequence[Binding]) -> None:
    """Whether all of them can be had here.

    Raises:
        click.UsageError: ucx-py cannot; the message says where to get it, as a daemon does at its start.
    """
    if "ucx-py" in bindings:
        try:
            ucx_py.load()
        except ConfigError as exc:
            raise click.UsageError(f"--bindings: {exc}") from exc


def version_of(binding: Binding) -> str:
    """What a process that has opened a data plane through it has loaded."""
    if binding == "ucx":
        return f"UCX {ucx_version()}"
    api = ucx_py.load()
    return f"ucx-py {api.ucx_py_version} with UCX {'.'.join(map(str, api.libucp_version()))}"
