"""Engines that die by SIGKILL: what they held comes back, when and only when the process is dead."""

from __future__ import annotations

from pathlib import Path

import trio

from kvpd.errors import ErrorCode

from .links import Rig, engine_process, open_rig
from .worlds import Request, refused, send, stage, take

HOLD_A_CLAIM = """
link = client.connect_receiver(sys.argv[1])
claim = link.claim("r", timeout=30)
chunks = claim.__enter__()
"""

# The connection is gone, the mapping is not: whoever runs this could go on reading.
CLAIM_AND_CLOSE_THE_SOCKET = HOLD_A_CLAIM + "link._connection._socket.shutdown(2)\n"

FILL_A_SLOT = """
link = client.connect_sender(sys.argv[1])
transfer = link.open("r", receiver=sys.argv[2], total_chunks=4)
transfer.__enter__()
slots = transfer.stage([b"k", b"l"]).__enter__()
slot = next(slots)
"""

FILL_AND_CLOSE_THE_SOCKET = FILL_A_SLOT + "link._connection._socket.shutdown(2)\n"

WAIT_FOR_ADMISSION = """
link = client.connect_sender(sys.argv[1])
transfer = link.open("r", receiver=sys.argv[2], total_chunks=8)
transfer.__enter__()
staging = transfer.stage([b"k", b"l"])
"""

REQUEST = Request("r", 6, last_bytes=9)


async def until_returned(rig: Rig) -> None:
    """Until nobody reads any claim."""
    await rig.world.until(rig.receiver, lambda: not rig.receiver.core._desk._held)


async def test_a_claim_returns_once_when_its_engine_dies(tmp_path: Path) -> None:
    """Another decode engine may try; a request that kills a second one is dropped, not handed round."""
    async with open_rig(tmp_path) as rig:
        await send(rig.sender, rig.receiver.address, REQUEST)
        for _ in range(2):
            async with engine_process(HOLD_A_CLAIM, str(rig.receiver_socket)) as engine:
                assert rig.receiver.core.counts.ready == 6
                with refused(ErrorCode.CLAIMED):
                    await take(rig.receiver, REQUEST)
                await engine.kill()
                await until_returned(rig)
        await rig.world.until_clean(rig.sender, rig.receiver)


async def test_a_returned_claim_is_whole(tmp_path: Path) -> None:
    """The next engine gets every byte of it."""
    async with open_rig(tmp_path) as rig:
        await send(rig.sender, rig.receiver.address, REQUEST)
        async with engine_process(HOLD_A_CLAIM, str(rig.receiver_socket)) as engine:
            await engine.kill()
            await until_returned(rig)
        await take(rig.receiver, REQUEST)
        await rig.world.until_clean(rig.sender, rig.receiver)


async def test_a_waiting_engine_gets_what_a_dead_one_held(tmp_path: Path) -> None:
    """Asked for before the death, granted by it."""
    async with open_rig(tmp_path) as rig, trio.open_nursery() as nursery:
        await send(rig.sender, rig.receiver.address, REQUEST)
        async with engine_process(HOLD_A_CLAIM, str(rig.receiver_socket)) as engine:
            nursery.start_soon(engine.kill)
            await until_returned(rig)
            await take(rig.receiver, REQUEST)


async def test_a_closed_socket_alone_returns_no_claim(tmp_path: Path) -> None:
    """Its process may still be reading: handing the slots out would change bytes under its eyes."""
    async with open_rig(tmp_path) as rig:
        await send(rig.sender, rig.receiver.address, REQUEST)
        async with engine_process(CLAIM_AND_CLOSE_THE_SOCKET, str(rig.receiver_socket)) as engine:
            await _until_detached(rig)
            assert rig.receiver.core.counts.ready == 6
            assert len(rig.receiver.core._desk._held) == 1
            await engine.kill()
            await until_returned(rig)
        await take(rig.receiver, REQUEST)


async def _until_detached(rig: Rig) -> None:
    """Until only the embedding program's own engine is attached: that one's going is a step of the receiver's."""
    await rig.world.until(rig.receiver, lambda: len(rig.receiver._engines) == 1)


async def test_staging_that_an_engine_was_filling_comes_back_at_its_death(tmp_path: Path) -> None:
    """And the receiver's room at once: nothing was put, so nothing can land."""
    async with open_rig(tmp_path, staging=4) as rig:
        async with engine_process(FILL_A_SLOT, str(rig.sender_socket), rig.receiver.address) as engine:
            assert rig.sender.core.staging[0].free_count == 2
            await engine.kill()
            await rig.world.until_clean(rig.sender, rig.receiver)
        await rig.transfer(Request("next", 10))


async def test_a_closed_socket_alone_returns_no_staging(tmp_path: Path) -> None:
    """Its process may still be writing: whoever got the slot next would send the dead request's bytes."""
    async with (
        open_rig(tmp_path, staging=4) as rig,
        engine_process(FILL_AND_CLOSE_THE_SOCKET, str(rig.sender_socket), rig.receiver.address) as engine,
    ):
        await rig.world.until(rig.receiver, lambda: rig.receiver.core.is_clean)
        await rig.transfer(Request("meanwhile", 10, batch=2))
        assert rig.sender.core.staging[0].free_count == 2
        await engine.kill()
        await rig.world.until_clean(rig.sender, rig.receiver)


async def test_an_engine_that_dies_in_the_queue(tmp_path: Path) -> None:
    """It waits for admission when it is killed: its place is free, and it is never admitted afterwards."""
    async with open_rig(tmp_path) as rig:
        async with rig.sender.open("holder", receiver=rig.receiver.address, total_chunks=4) as holder:
            await rig.world.until(rig.receiver, lambda: rig.receiver.core.counts.reserved == 4)
            async with engine_process(WAIT_FOR_ADMISSION, str(rig.sender_socket), rig.receiver.address) as engine:
                await rig.world.until(rig.receiver, lambda: rig.receiver.core.queue_depth == 1)
                await engine.kill()
                await rig.world.until(rig.receiver, lambda: rig.receiver.core.queue_depth == 0)
            await stage(holder, Request("holder", 4), range(4))
        await take(rig.receiver, Request("holder", 4))
        await rig.world.until_clean(rig.sender, rig.receiver)
