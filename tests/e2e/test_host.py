"""Hosts as they are: small limits, missing privileges, other namespaces, IPv6, names instead of addresses.

The tests are named after the public bug reports that they answer.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from kvpd.errors import ErrorCode, TransferError

from .conftest import CHUNK, Pair
from .daemons import DEADLINE_S, Fleet
from .payloads import make_request, move, receive, send

TINY_SHM = 'mount -t tmpfs -o size=4k none /dev/shm && exec "$@"'
RECEIVER = {"buffer_size": 16 * CHUNK, "chunk_bytes": CHUNK, "control_address": "127.0.0.1:0"}
SENDER = {"staging_size": 8 * CHUNK, "chunk_bytes": CHUNK}


def usable(*prefix: str) -> list[str]:
    """A command that starts another one in other circumstances; the test is skipped where that is not allowed."""
    if (
        shutil.which(prefix[0]) is None
        or subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode
    ):
        pytest.skip(f"this machine does not allow {' '.join(prefix[:3])}")
    return list(prefix)


def test_p69_a_tiny_dev_shm_is_enough(fleet: Fleet) -> None:
    """Containers have 64 MB of it or none; elsewhere that ended in a SIGBUS. Chunks live in memfds, which need none."""
    prefix = usable("unshare", "--mount", "sh", "-c", TINY_SHM, "sh")
    receiver = fleet.start("receiver", "r", RECEIVER, prefix=prefix)
    move(make_request("p69", 4), fleet.start("sender", "s", SENDER, prefix=prefix), receiver)
    maps = Path(f"/proc/{receiver.pid}/maps").read_text()
    assert "/memfd:kvpd-r" in maps
    assert "/dev/shm/" not in maps.replace("/dev/shm/ucx_shm_posix", "")


def test_p69_memory_that_the_machine_has_not_is_refused_with_the_number(fleet: Fleet) -> None:
    """At start, by name, and not as a signal at the first touch."""
    receiver = fleet.receiver(buffer_size="512TiB", chunk_bytes="1GiB")
    assert receiver.wait() == 2
    assert str(512 << 40) in receiver.text
    assert "set a smaller size" in receiver.text


def test_p70_without_the_right_to_trace_another_way_is_found(fleet: Fleet) -> None:
    """Elsewhere process_vm_writev failed deep inside the transport, and the job aborted."""
    prefix = usable("setpriv", "--bounding-set=-sys_ptrace")
    move(make_request("p70", 4), fleet.start("sender", "s", SENDER, prefix=prefix), fleet.receiver())


def test_p70_a_way_that_is_forced_and_closed_is_named(fleet: Fleet) -> None:
    """No bytes move, both daemons stay, and the request says why."""
    prefix = usable("setpriv", "--bounding-set=-sys_ptrace")
    receiver = fleet.receiver(ucx_tls="cma,self,sm")
    sender = fleet.start("sender", "s", {**SENDER, "ucx_tls": "cma,self,sm"}, prefix=prefix)
    with pytest.raises(TransferError, match="unreachable") as error:
        move(make_request("p70-forced", 4), sender, receiver)
    assert error.value.code is ErrorCode.TRANSPORT_FAILED
    receiver.wait_quiet()
    assert receiver.slots() == {"free": 16}
    sender.stop()


def test_p71_another_user_namespace_is_no_obstacle(fleet: Fleet) -> None:
    """Two rootless containers on one host share its boot id, and little else."""
    prefix = usable("unshare", "--user", "--map-root-user")
    move(make_request("p71", 4), fleet.start("sender", "s", SENDER, prefix=prefix), fleet.receiver())


def test_p72_p79_a_shells_limits_are_enough(fleet: Fleet) -> None:
    """64 KiB of locked memory suffice for buffers in host memory; the soft limit on files is raised to the hard one."""
    limits = (
        "resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, 4096))"
    )
    receiver = fleet.start("receiver", "r", RECEIVER, before=limits)
    move(make_request("p72", 4), fleet.start("sender", "s", SENDER, before=limits), receiver)
    ready = receiver.wait_for("ready")
    assert (ready["descriptors_soft"], ready["descriptors_hard"]) == (256, 4096)
    assert "Max open files            4096" in Path(f"/proc/{receiver.pid}/limits").read_text()


def test_p76_engines_that_come_and_go_leave_no_descriptor(pair: Pair) -> None:
    """One leaked descriptor a connection ends a daemon in days."""
    for daemon, connect in ((pair.receiver, pair.receiver.receiver_link), (pair.sender, pair.sender.sender_link)):
        connect().close()
        count = len(daemon.said("engine_detached"))
        daemon.get("/livez")
        before = daemon.descriptors()
        for number in range(100):
            connect().close()
            with socket.socket(socket.AF_UNIX) as half_way:
                half_way.settimeout(DEADLINE_S)
                half_way.connect(str(daemon.socket))
                half_way.sendall(b"\x10")
            if number % 10 == 0:
                daemon.get("/metrics")
        connect().close()  # accepted after all of them
        daemon.wait_for("engine_detached", count + 101)
        daemon.get("/livez")
        assert daemon.descriptors() <= before + 5  # some of the last ones may be closing still
    request = make_request("p76", 2)
    send(pair.prefill, request, pair.address)
    assert receive(pair.decode, "p76") == request.hashes


def test_p81_the_whole_way_over_ipv6(fleet: Fleet) -> None:
    """Clusters with nothing else exist; the address that is bound is the address that senders are told."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("this machine has no IPv6")
    receiver = fleet.receiver(control_address="[::1]:0")
    move(make_request("p81", 4), fleet.sender(), receiver)
    assert receiver.address.startswith("[::1]:")


def test_p82_a_name_is_resolved_before_it_is_bound(fleet: Fleet) -> None:
    """libzmq takes a name for a network device; its 'No such device' tells nobody what is wrong."""
    nobody = fleet.receiver("nobody", control_address="nosuch.invalid:0")
    move(make_request("p82", 4), fleet.sender(), fleet.receiver(control_address="localhost:0"))
    assert nobody.wait() == 1  # not 2: it may be the resolver that is down, and the next start may find it up
    detail = nobody.said("start_failed")[0]["detail"]
    assert "cannot resolve 'nosuch.invalid'" in detail
