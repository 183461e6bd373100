"""This process and its neighbours: who runs where, and the moment at which one is dead.

A process is named by its pid and its start time, because a pid is given away again; its death is seen through a
pidfd, never guessed from a closed socket.
"""

from __future__ import annotations

import os
import resource
import socket
import struct
from pathlib import Path
from typing import Final

import trio

from kvpd.core.messages import HostIdentity

_SO_PEERPIDFD: Final = 77  # not in Python's socket module; Linux 6.5
_START_TIME_FIELD: Final = 19  # of /proc/PID/stat, counted after the command's closing bracket


def own_host() -> HostIdentity:
    """The identity that a sender announces, and a receiver compares with its own."""
    pid = os.getpid()
    return HostIdentity(
        boot_id=_read("/proc/sys/kernel/random/boot_id"),
        pid_namespace=str(Path("/proc/self/ns/pid").readlink()),
        pid=pid,
        start_time=_start_time(pid) or 0,
    )


def _read(path: str) -> str:
    return Path(path).read_text().strip()


def _start_time(pid: int) -> int | None:
    """Clock ticks after boot at which `pid` started; None when there is no such process."""
    try:
        stat = _read(f"/proc/{pid}/stat")
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[_START_TIME_FIELD])


def open_process(host: HostIdentity) -> int | None:
    """A pidfd of the process with this pid and this start time; None when it is dead already."""
    try:
        pidfd = os.pidfd_open(host.pid)
    except ProcessLookupError:
        return None
    if _start_time(host.pid) != host.start_time:  # read after the pidfd was opened: another process bears the pid now
        os.close(pidfd)
        return None
    return pidfd


def peer_process(connection: socket.socket | trio.socket.SocketType) -> tuple[int, int]:
    """The process at the other end of a Unix socket: its pid, and a pidfd to watch it by.

    Raises:
        OSError: it is dead already, or this kernel cannot name it.
    """
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid = int(struct.unpack("3i", credentials)[0])
    try:
        raw = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD, struct.calcsize("i"))
        return pid, int(struct.unpack("i", raw)[0])
    except OSError:
        return pid, os.pidfd_open(pid)


async def wait_dead(pidfd: int) -> None:
    """Until the process is dead; closes `pidfd`, also when cancelled."""
    try:
        await trio.lowlevel.wait_readable(pidfd)
    finally:
        os.close(pidfd)


def raise_descriptor_limit() -> tuple[int, int]:
    """Lift the soft limit on open files to the hard one: (before, now). It is low for no reason that concerns us."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return soft, hard
