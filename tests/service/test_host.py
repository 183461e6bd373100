"""Who runs where, and the moment at which a process is dead: never guessed, never mistaken for another's."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import pytest
import trio
import trio.testing

from kvpd.core.messages import HostIdentity
from kvpd.service.host import open_process, own_host, peer_process, raise_descriptor_limit, wait_dead

TELL = (
    "import sys, msgspec\n"
    "from kvpd.service.host import own_host\n"
    "sys.stdout.buffer.write(msgspec.json.encode(own_host()) + b'\\n'); sys.stdout.flush(); sys.stdin.read()\n"
)


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """Another process of this host, which lives until its input ends."""
    with subprocess.Popen([sys.executable, "-c", TELL], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        yield process
        process.kill()


def told_by(process: subprocess.Popen[bytes]) -> HostIdentity:
    """The identity that it announces."""
    assert process.stdout is not None
    return msgspec.json.decode(process.stdout.readline(), type=HostIdentity)


def test_an_identity_names_this_machine_this_namespace_and_this_process() -> None:
    """It is compared with others' and must be the same whenever it is asked for."""
    own = own_host()
    assert own == own_host()
    assert own.pid == os.getpid()
    assert own.boot_id
    assert own.pid_namespace.startswith("pid:[")
    assert own.start_time > 0


def test_two_processes_of_a_host_differ_in_process_alone(process: subprocess.Popen[bytes]) -> None:
    """`Same host` is judged by the rest."""
    own, other = own_host(), told_by(process)
    assert (own.boot_id, own.pid_namespace) == (other.boot_id, other.pid_namespace)
    assert other.pid == process.pid != own.pid


async def test_a_death_is_seen_and_a_life_is_not_mistaken_for_one(process: subprocess.Popen[bytes]) -> None:
    """Slots in quarantine wait for exactly this."""
    with trio.fail_after(20):
        identity = await trio.to_thread.run_sync(told_by, process)
        pidfd = open_process(identity)
        assert pidfd is not None
        dead = trio.Event()

        async def watch() -> None:
            await wait_dead(pidfd)
            dead.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            await trio.testing.wait_all_tasks_blocked()
            assert not dead.is_set()
            process.kill()
            await dead.wait()
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(pidfd)
        process.wait()
        assert open_process(identity) is None


def test_another_process_under_the_same_pid_is_not_the_one(process: subprocess.Popen[bytes]) -> None:
    """A pid is given away again; whoever bore it before is dead."""
    identity = told_by(process)
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    assert open_process(msgspec.structs.replace(identity, start_time=identity.start_time - 1)) is None
    assert len(os.listdir("/proc/self/fd")) == before, "the pidfd of the wrong one is closed"  # noqa: PTH208


def test_a_zombie_is_dead(process: subprocess.Popen[bytes]) -> None:
    """Its parent has not asked for it yet, but it writes nothing any more: the pidfd says so at once."""
    identity = told_by(process)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    pidfd = open_process(identity)
    assert pidfd is not None

    async def main() -> None:
        with trio.fail_after(10):
            await wait_dead(pidfd)

    trio.run(main)


async def test_a_watch_can_be_given_up(process: subprocess.Popen[bytes]) -> None:
    """And closes its pidfd: one per sender would pile up."""
    with trio.fail_after(20):
        pidfd = open_process(await trio.to_thread.run_sync(told_by, process))
        assert pidfd is not None
        with trio.move_on_after(0):
            await wait_dead(pidfd)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(pidfd)


def test_the_peer_of_a_socket_is_known() -> None:
    """A closed socket does not prove that its process is dead; this process does not say who it is, the kernel does."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        pid, pidfd = peer_process(ours)
        assert pid == os.getpid()
        os.close(pidfd)


def test_descriptors_are_as_many_as_may_be() -> None:
    """P79: the soft limit is low for reasons that do not concern us."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        soft, hard = before
        lowered = min(soft, hard - 1, 512)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowered, hard))
        assert raise_descriptor_limit() == (lowered, hard)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
        assert raise_descriptor_limit() == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
