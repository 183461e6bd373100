"""What the ucx-py data plane owes besides the contract; skipped, with the reason, where it cannot be imported."""

from __future__ import annotations

import importlib
import mmap
import os
from contextlib import AsyncExitStack
from typing import Any, cast

import pytest
import trio

from kvpd.transports import ucx_py
from kvpd.transports.base import Put
from kvpd.transports.memory_data import MemoryFabric
from kvpd.transports.ucx import UcxDataPlane

from .data_plane_rig import never_broken, open_pair, open_plane, open_remote, region_of
from .marks import needs_ucx_py

KIB = 1 << 10
MIB = 1 << 20

pytestmark = needs_ucx_py
wires = pytest.mark.parametrize("wire", ["cma", "tcp"])


@wires
@pytest.mark.parametrize(("here", "there"), [("ucx", "ucx-py"), ("ucx-py", "ucx")])
async def test_the_bindings_understand_each_other(here: str, there: str, wire: str) -> None:
    """A site changes its daemons one by one."""
    source, sink, fabric = mmap.mmap(-1, MIB), mmap.mmap(-1, MIB), MemoryFabric()
    source[:] = os.urandom(MIB)
    async with (
        open_plane(f"{there}-{wire}", fabric, sink) as receiver,
        open_plane(f"{here}-{wire}", fabric, source) as sender,
    ):
        endpoint = await sender.connect(region_of(await receiver.open_target()), never_broken)
        await endpoint.post([Put(0, 0, MIB)]).wait()
        assert sink[:] == source[:]


@wires
async def test_one_window_bounds_all_endpoints_and_starves_none(wire: str) -> None:
    """Its progress goes on until nothing is left: what is outstanding is how long the loop stands still."""
    window, each = 256 * KIB, 4 * MIB
    async with open_pair(f"ucx-py-{wire}", each, window_bytes=window) as pair, AsyncExitStack() as stack:
        endpoints = [pair.endpoint]
        for _ in range(3):
            sink = mmap.mmap(-1, each)
            plane = await stack.enter_async_context(open_plane(pair.mode, pair.fabric, sink))
            endpoints.append(await pair.sender.connect(region_of(await plane.open_target()), never_broken))
        puts = [Put(at, at, 64 * KIB) for at in range(0, each, 64 * KIB)]
        batches = [endpoint.post(puts) for endpoint in endpoints]
        began = set()
        while not any(batch.done for batch in batches):
            in_flight = [endpoint.in_flight_bytes for endpoint in endpoints]
            assert sum(in_flight) <= window
            began |= {number for number, count in enumerate(in_flight) if count}
            await trio.lowlevel.checkpoint()
        assert began == {0, 1, 2, 3}, "the first one took all the room until it was done"
        for batch in batches:
            await batch.wait()
        for endpoint in endpoints[1:]:
            endpoint.force_close()


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("UCXCanceled", "<get_nb>: ", "Request canceled"),
        ("UCXError", "<put_nb>: Endpoint timeout", "Endpoint timeout"),
        ("UCXError", "[ucp_init] No such device", "No such device"),
        (
            "UCXConnectionReset",
            "Endpoint 0x7f00 error: Connection reset by remote peer",
            "Connection reset by remote peer",
        ),
        ("UCXUnreachable", "", "UCXUnreachable"),
    ],
)
def test_what_ucx_says_is_told_without_ucx_py_s_labels(name: str, text: str, told: str) -> None:
    """It calls a put a get, and a cancelled request nothing at all."""
    exceptions = importlib.import_module("ucp._libs.exceptions")
    assert ucx_py.load()._text(getattr(exceptions, name)(text)) == told


@wires
async def test_a_dead_peer_is_reported_in_ucx_s_words(wire: str) -> None:
    """The log's reader looks the words up; ucx-py's own would lead to ucx-py."""
    fabric, source, details = MemoryFabric(), mmap.mmap(-1, MIB), list[str]()
    broken = trio.Event()

    def on_broken(detail: str) -> None:
        details.append(detail)
        broken.set()

    mode = f"ucx-py-{wire}"
    async with open_plane(mode, fabric, source) as plane, open_remote(mode, fabric, MIB) as remote:
        endpoint = await plane.connect(remote.region, on_broken)
        await endpoint.post([Put(0, 0, MIB)]).wait()
        await remote.kill()
        await broken.wait()
    assert details[0].startswith("the endpoint failed: ")
    assert "0x" not in details[0]
    assert "get_nb" not in details[0]


async def test_its_descriptors_are_not_left_to_children() -> None:
    """ucx-py's epoll descriptor is inheritable as it comes, and an engine would hold the worker's events open."""
    async with open_plane("ucx-py-tcp", MemoryFabric(), mmap.mmap(-1, 4 * KIB)) as plane:
        assert isinstance(plane, UcxDataPlane)
        worker = plane._loop.worker
        assert not os.get_inheritable(worker.descriptor)
        assert not os.get_inheritable(cast(Any, worker)._eventfd)
