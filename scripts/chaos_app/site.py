"""Where the senders run: beside the receivers, or in network and process namespaces of their own.

Between namespaces nothing of one host helps: no CMA, no pidfd, and a wire that can be taken away or made to lose
packets. It needs root, unshare, nsenter, setpriv, ip and tc; where they are not to be had, `missing` says why.
"""

from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import attrs
import trio

_TOOLS: Final = ("unshare", "nsenter", "setpriv", "ip", "tc")
_DEVICE: Final = "kvpd0"  # at either end
_HERE: Final = "10.213.99.1"
_THERE: Final = "10.213.99.2"
_INSIDE: Final = "KVPD_CHAOS_INSIDE"
_COMMAND_S: Final = 20.0
_PORTS: Final = range(20_000, 30_000)
# UCX looks for network devices in /sys, which shows those of the namespace that it was mounted in.
_WITH_OWN_SYS: Final = ("sh", "-c", 'mount -t sysfs sysfs /sys && exec "$@"', "sh")


@attrs.frozen
class Site:
    """How senders and their engines are started, and the addresses at which both sides are reached."""

    prefix: Sequence[str] = ()
    sender_host: str = "127.0.0.1"
    receiver_host: str = "127.0.0.1"
    environment: Mapping[str, str] = attrs.field(factory=dict)
    loses_packets: bool = False  # whether it can

    @property
    def is_remote(self) -> bool:
        """Whether there is a wire between the two sides."""
        return bool(self.prefix)


def missing() -> str:
    """Why there can be no namespaces here; nothing where there can."""
    if absent := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        return f"{', '.join(absent)} not found (Debian: iproute2, util-linux)"
    probe = subprocess.run(
        [
            *("unshare", "--net", "--pid", "--mount", "--fork", "--mount-proc"),
            *(*_WITH_OWN_SYS, "ip", "link", "add", _DEVICE, "type", "veth"),
        ],
        capture_output=True,
        text=True,
        timeout=_COMMAND_S,
        check=False,
    )
    if probe.returncode:
        return f"namespaces are not permitted: {probe.stderr.strip().rpartition(chr(10))[2]}"
    return ""


def enter_own_network() -> None:
    """Begin this program anew in a network of its own, so that nothing here touches the machine's. Once."""
    if _INSIDE in os.environ:
        del os.environ[_INSIDE]
        subprocess.run(["ip", "link", "set", "lo", "up"], timeout=_COMMAND_S, check=True)
        return
    os.environ[_INSIDE] = "1"
    again = (sys.executable, "-m", "chaos_app.main", *sys.argv[1:])
    os.execvp("unshare", ["unshare", "--net", "--mount", *_WITH_OWN_SYS, *again])


def free_address(host: str) -> str:
    """An address that will be bound again and again.

    Not from the range that the kernel gives to outgoing connections: one that tries to reach it while nobody listens
    may be given that very port, and keep it.
    """
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return f"{host}:{port}"
    raise RuntimeError(f"no port of {_PORTS} is free at {host}")


async def _command(*words: str) -> bool:
    with trio.fail_after(_COMMAND_S):
        done = await trio.run_process(list(words), capture_stdout=True, capture_stderr=True, check=False)
    return done.returncode == 0


@asynccontextmanager
async def open_remote_site() -> AsyncIterator[Site]:
    """Namespaces for the senders, and a wire to them. Leaving ends whoever is in there."""
    # It says a word when it is in all of its namespaces.
    shell = (*_WITH_OWN_SYS, "sh", "-c", "echo in; exec sleep infinity")
    holder = await trio.lowlevel.open_process(
        ["unshare", "--net", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc", *shell],
        stdout=subprocess.PIPE,
    )
    assert holder.stdout is not None
    try:
        with trio.fail_after(_COMMAND_S):
            assert await holder.stdout.receive_some()
        inner = _only_child(holder.pid)
        enter = ("nsenter", f"--target={inner}", "--net", "--pid", "--mount", "--")
        ends = ("ip", "link", "add", _DEVICE, "type", "veth", "peer", "name", _DEVICE, "netns", str(inner))
        steps = [
            ends,
            ("ip", "address", "add", f"{_HERE}/30", "dev", _DEVICE),
            ("ip", "link", "set", _DEVICE, "up"),
            (*enter, "ip", "address", "add", f"{_THERE}/30", "dev", _DEVICE),
            (*enter, "ip", "link", "set", _DEVICE, "up"),
            (*enter, "ip", "link", "set", "lo", "up"),
        ]
        for step in steps:
            assert await _command(*step), f"failed: {' '.join(step)}"
        loses = await set_loss(10) and await set_loss(0)
        # nsenter waits for what it has started: who kills it means that.
        prefix = (*enter, "setpriv", "--pdeathsig", "KILL")
        yield Site(prefix, _THERE, _HERE, {"UCX_NET_DEVICES": _DEVICE}, loses_packets=loses)
    finally:
        with trio.CancelScope(shield=True):
            holder.kill()
            await holder.wait()
            await holder.stdout.aclose()


def _only_child(pid: int) -> int:
    """The process that `unshare` has forked."""
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


async def set_link(*, is_up: bool) -> None:
    """Take the wire away, or give it back."""
    await _command("ip", "link", "set", _DEVICE, "up" if is_up else "down")


async def set_loss(percent: int) -> bool:
    """Lose so many of the packets to the senders. False where the kernel cannot."""
    if percent:
        return await _command("tc", "qdisc", "add", "dev", _DEVICE, "root", "netem", "loss", f"{percent}%")
    return await _command("tc", "qdisc", "del", "dev", _DEVICE, "root")
