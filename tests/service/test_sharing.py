"""Who has a receiver's memory to write into, and when a sender on its host counts as dead."""

from __future__ import annotations

import mmap
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from kvpd.errors import RemoteProtocolError
from kvpd.link import LINK_VERSION, Attach, Attached, AttachWriter, LetGo, Rejected, Touch, encode_frame
from kvpd.service import sharing
from kvpd.service.engine_link import listen
from kvpd.service.host import own_host
from kvpd.service.serve import _engine_server
from kvpd.service.sharing import SenderStart, Writers, can_connect

from .links import Rig, in_thread, raw_engine
from .worlds import REAL_LIMIT_S, Request, World, send, take

START = SenderStart("prefill-0", 7)
OTHER = SenderStart("prefill-0", 8)


class Watched:
    """Writers, and whether the sender of session 1 has been found dead with all of its engines."""

    def __init__(self) -> None:
        self.writers = Writers()
        self.writers.session_began(1, START)
        self.is_gone = False

    async def sender_died(self) -> None:
        await self.writers.wait_gone(1)
        self.is_gone = True


async def test_a_dead_sender_is_waited_for_until_its_last_engine_has_let_go() -> None:
    """Its engines have the memory, and its death ends nothing of what they write."""
    watched = Watched()
    writers = watched.writers
    writers.admit(START)
    writers.admit(START)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watched.sender_died)
        await wait_all_tasks_blocked()
        writers.let_go(START)
        await wait_all_tasks_blocked()
        assert not watched.is_gone
        writers.let_go(START)
        await wait_all_tasks_blocked()
        assert watched.is_gone


async def test_a_dead_sender_without_engines_is_gone_at_once() -> None:
    """And so is one whose engines let go before it died."""
    watched = Watched()
    watched.writers.admit(START)
    watched.writers.let_go(START)
    await watched.sender_died()
    assert watched.is_gone


async def test_engines_of_another_start_are_not_waited_for() -> None:
    """They may write for that one alone, whose slots are its own."""
    watched = Watched()
    watched.writers.session_began(2, OTHER)
    watched.writers.admit(OTHER)
    await watched.sender_died()
    assert watched.is_gone


async def test_nobody_gets_the_memory_on_behalf_of_a_dead_sender() -> None:
    """Nobody would wait for who came late."""
    watched = Watched()
    await watched.sender_died()
    with pytest.raises(RemoteProtocolError, match="is dead"):
        watched.writers.admit(START)


async def test_a_session_that_was_forgotten_is_not_waited_for() -> None:
    """Its sender's death and its end may be seen in one turn of the loop."""
    watched = Watched()
    watched.writers.admit(START)
    watched.writers.session_forgotten(1)
    await watched.sender_died()
    assert watched.is_gone


async def test_every_session_of_a_dead_sender_is_told() -> None:
    """An earlier one may still have slots that wait for their fence; engines are not told apart by sessions."""
    watched = Watched()
    watched.writers.session_began(2, START)
    watched.writers.admit(START)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watched.sender_died)
        nursery.start_soon(watched.writers.wait_gone, 2)
        await wait_all_tasks_blocked()
        watched.writers.let_go(START)
    assert watched.is_gone


def test_a_sender_without_a_session_has_no_engines_here() -> None:
    """It never had one, or nothing of it matters any more."""
    writers = Writers()
    with pytest.raises(RemoteProtocolError, match="no session"):
        writers.admit(START)
    writers.session_began(1, START)
    writers.session_forgotten(1)
    writers.session_forgotten(1)  # also for sessions of other hosts, which never began here
    with pytest.raises(RemoteProtocolError, match="no session"):
        writers.admit(START)


async def test_an_engine_outlives_its_sessions_and_counts_in_the_next_one() -> None:
    """It has not let go of the memory only because a session was forgotten."""
    watched = Watched()
    watched.writers.admit(START)
    watched.writers.session_forgotten(1)
    watched.writers.session_began(1, START)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watched.sender_died)
        await wait_all_tasks_blocked()
        assert not watched.is_gone
        watched.writers.let_go(START)
    watched.writers.session_forgotten(1)
    assert not watched.writers._senders


def test_there_is_a_limit_to_engines_that_have_not_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each costs a descriptor until its process is dead."""
    monkeypatch.setattr(sharing, "_WRITERS_MAX", 2)
    writers = Watched().writers
    writers.admit(START)
    writers.admit(START)
    with pytest.raises(RemoteProtocolError, match="the limit is 2"):
        writers.admit(START)
    writers.let_go(START)
    writers.admit(START)


def test_whether_a_socket_takes_connections(tmp_path: Path) -> None:
    """A sender looks before it promises its engines anything."""
    path = tmp_path / "there.sock"
    assert not can_connect(str(path))
    assert not can_connect("no\0path")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        assert not can_connect(str(path))
        server.listen(1)
        assert can_connect(str(path))


# ---------------------------------------------------------------------- over the link


@asynccontextmanager
async def sharing_rig(folder: Path, *, transport: str = "local") -> AsyncIterator[Rig]:
    """Both daemons on this host; a session is up when a request has been moved."""
    receiver_socket, sender_socket = folder / "receiver.sock", folder / "sender.sock"
    share = str(receiver_socket)
    with trio.fail_after(REAL_LIMIT_S), listen(share) as decode, listen(str(sender_socket)) as prefill:
        async with (
            World() as world,
            world.receiver(slots=10, transport=transport, share=share) as receiver,
            world.sender(staging=4, host=own_host()) as sender,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(_engine_server(decode, receiver).run)
            nursery.start_soon(_engine_server(prefill, sender).run)
            rig = Rig(world, receiver, sender, receiver_socket, sender_socket)
            await rig.transfer(Request("first", 3))
            yield rig
            nursery.cancel_scope.cancel()


def greeting(rig: Rig, **changes: object) -> AttachWriter:
    """What an engine of the rig's sender says to the rig's receiver."""
    settings = rig.sender.core.settings
    fields: dict[str, object] = {
        "version": LINK_VERSION,
        "rank": 0,
        "sender_id": settings.sender_id,
        "sender_incarnation": settings.incarnation,
        "receiver_incarnation": rig.receiver.core.settings.incarnation,
    }
    return AttachWriter(**(fields | changes))  # type: ignore[arg-type]


async def until_counted(rig: Rig, count: int) -> None:
    """Until so many engines have the memory: what the loop has in hand is done in a few of its turns."""
    while rig.receiver.writers._count != count:
        await trio.lowlevel.checkpoint()


async def test_requests_go_through_the_receivers_memory(tmp_path: Path) -> None:
    """Over the real client; nothing is put."""
    async with sharing_rig(tmp_path) as rig:
        await rig.transfer(*(Request(f"r{n}", 3 + n, last_bytes=5, batch=2) for n in range(5)))
        await rig.world.until_clean(rig.sender, rig.receiver)
        metrics = rig.sender.metrics.snapshot()
        assert metrics["kvpd_put_bytes_total"] == 0
        assert metrics["kvpd_filled_bytes_total"] > 0
        await until_counted(rig, 0)


async def test_a_program_that_embeds_the_sender_puts(tmp_path: Path) -> None:
    """In the same session as engines that fill in place."""
    async with sharing_rig(tmp_path) as rig:
        await send(rig.sender, rig.receiver.address, Request("mine", 1))
        assert rig.sender.metrics.snapshot()["kvpd_put_bytes_total"] == 64
        await take(rig.receiver, Request("mine", 1))


async def test_a_writer_is_counted_from_its_greeting_to_its_last_word(tmp_path: Path) -> None:
    """It is given what it may write into, and says one thing more."""
    async with sharing_rig(tmp_path) as rig:
        await until_counted(rig, 0)
        async with raw_engine(rig.receiver_socket) as engine:
            await engine.say(greeting(rig))
            attached = await engine.hear_kind(Attached)
            assert attached.chunk_bytes == 64
            assert rig.receiver.writers._count == 1
            await engine.say(LetGo())
            await until_counted(rig, 0)
            await engine.say(LetGo())
            assert "LetGo" in (await engine.hear_kind(Rejected)).detail


async def test_the_end_of_a_connection_proves_nothing(tmp_path: Path) -> None:
    """This process lives, so it may still have the memory."""
    async with sharing_rig(tmp_path) as rig:
        await until_counted(rig, 0)
        async with raw_engine(rig.receiver_socket) as engine:
            await engine.say(greeting(rig))
            await engine.hear_kind(Attached)
        async with raw_engine(rig.receiver_socket) as engine:
            await engine.say(greeting(rig), Touch(1))
            await engine.hear_kind(Attached)
            assert "no frame for a receiver" in (await engine.hear_kind(Rejected)).detail
            await engine.hear_end()
        await wait_all_tasks_blocked(0.01)
        assert rig.receiver.writers._count == 2


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"sender_id": "nobody"}, "no session here"),
        ({"sender_incarnation": 1}, "no session here"),
        ({"receiver_incarnation": 1}, "that start of this receiver is over"),
        ({"rank": 1}, "ranks = 1"),
        ({"version": 99}, "link version is 99"),
    ],
)
async def test_a_writer_that_nobody_would_wait_for_gets_nothing(
    tmp_path: Path, changes: dict[str, object], why: str
) -> None:
    """No descriptor comes along with a refusal."""
    async with sharing_rig(tmp_path) as rig:
        await until_counted(rig, 0)
        async with raw_engine(rig.receiver_socket) as engine:
            await engine.say(greeting(rig, **changes))
            assert why in (await engine.hear_kind(Rejected)).detail
        assert rig.receiver.writers._count == 0


async def test_a_daemon_that_does_not_share_has_no_writers(tmp_path: Path) -> None:
    """A receiver of another transport; and a sender, for nobody writes into its memory but its own engines."""
    async with sharing_rig(tmp_path, transport="ucx") as rig, raw_engine(rig.receiver_socket) as engine:
        await engine.say(greeting(rig))
        assert "does not offer" in (await engine.hear_kind(Rejected)).detail
    async with sharing_rig(tmp_path) as rig, raw_engine(rig.sender_socket) as engine:
        await engine.say(greeting(rig))
        assert "does not offer" in (await engine.hear_kind(Rejected)).detail


@pytest.mark.parametrize("transport", ["ucx", "local"])
async def test_a_decode_engine_is_given_nothing_that_it_could_write_through(tmp_path: Path, transport: str) -> None:
    """Where the memory is sealed against it, and where it cannot be."""
    async with sharing_rig(tmp_path, transport=transport) as rig:
        await in_thread(try_to_write, rig.receiver_socket)


def try_to_write(path: Path) -> None:
    """Attach as a decode engine, and map what came to write into it."""
    with socket.socket(socket.AF_UNIX) as raw:
        raw.connect(str(path))
        raw.sendall(encode_frame(Attach(LINK_VERSION, "receiver")))
        _, descriptors, _, _ = socket.recv_fds(raw, 65536, 8)
        (descriptor,) = descriptors
        try:
            with pytest.raises(PermissionError):
                mmap.mmap(descriptor, 640)
            mmap.mmap(descriptor, 640, access=mmap.ACCESS_READ).close()
        finally:
            os.close(descriptor)
