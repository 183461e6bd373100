"""Where a daemon's name and its engine socket come from when nobody chose them.

Two daemons with different names never share a socket path, and the folder is one that no other user can write.
"""

from __future__ import annotations

import os
import re
import socket
import stat
import tempfile
from pathlib import Path

from kvpd.errors import ConfigError


def default_name(role: str) -> str:
    """`<host name>-<role>`, the host name reduced to what a name may hold."""
    host = re.sub(r"[^A-Za-z0-9._-]+", "-", socket.gethostname()).strip(".-_")[:48] or "host"
    return f"{host}-{role}"


def default_engine_socket(role: str, name: str) -> str:
    """`<role>-<name>.sock` in the runtime folder. Nothing is created."""
    return str(runtime_folder() / f"{role}-{name}.sock")


def runtime_folder() -> Path:
    """`$XDG_RUNTIME_DIR/kvpd`; without that, a folder of this user's own among the temporary files."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if Path(runtime).is_absolute():
        return Path(runtime) / "kvpd"
    return Path(tempfile.gettempdir()) / f"kvpd-{os.getuid()}"


def ensure_socket_folder(path: Path) -> None:
    """Make the folder of the socket at `path`, for its user alone; one that exists is left as it is.

    Raises:
        ConfigError: it cannot be made or used, or it is the default one and belongs to another user.
    """
    folder = path.parent
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError as exc:
        raise ConfigError([f"engine_socket = {path}: its folder cannot be made ({exc}); choose another"]) from exc
    # Anybody may make /tmp/kvpd-<uid> before we do, and would then hold the path our engines connect to.
    if folder == runtime_folder() and (
        found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode) or found.st_mode & 0o022
    ):
        raise ConfigError(
            [f"engine_socket = {path}: others can write to {folder}; remove it, or set engine_socket elsewhere"]
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError([f"engine_socket = {path}: {folder} is not writable; choose another folder"])
