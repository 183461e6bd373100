"""How a daemon tells those who started it where it is and that it is ready."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping
from pathlib import Path

import orjson

from kvpd.errors import ConfigError


def write_addresses(file: Path, addresses: Mapping[str, str]) -> None:
    """Write the addresses really bound, as JSON. Whole or not at all: whoever waits for the file reads it at once.

    Raises:
        ConfigError: it cannot be written.
    """
    draft = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        draft.write_bytes(orjson.dumps(addresses, option=orjson.OPT_APPEND_NEWLINE))
        draft.replace(file)
    except OSError as exc:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise ConfigError([f"--address-file {file} cannot be written ({exc.strerror})"]) from exc


def tell_systemd(state: str) -> None:
    """sd_notify(3), where systemd asked for it."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify, contextlib.suppress(OSError):
        notify.connect("\0" + address[1:] if address.startswith("@") else address)
        notify.send(state.encode())
