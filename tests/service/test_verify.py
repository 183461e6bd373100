"""Checksums end to end: what was garbled on its way is never read, and what was not arrives as ever."""

from __future__ import annotations

import pytest
import trio

from kvpd.core.messages import WriteDone
from kvpd.core.receiver import events as rev
from kvpd.errors import ErrorCode, TransferError
from kvpd.service.checksums import checksums_of
from kvpd.service.receiver import Receiver

from .worlds import Request, World, in_virtual_time, send, take


@pytest.mark.parametrize("verify", ["crc32c", "xxh3"])
@in_virtual_time
async def test_verified_bytes_arrive(memory_world: World, verify: str) -> None:
    """Short last chunks, several pieces and chunks that were there already included."""
    request = Request("a", 6, last_bytes=17, batch=3, shared_keys="same")
    again = Request("b", 6, last_bytes=17, shared_keys="same")
    async with memory_world.receiver(slots=12, verify=verify) as receiver, memory_world.sender(staging=2) as sender:
        await send(sender, receiver.address, request)
        assert await send(sender, receiver.address, again) == 6
        await take(receiver, request)
        await take(receiver, again)
        await memory_world.until_clean(sender, receiver)


@in_virtual_time
async def test_garbled_bytes_are_revoked_and_counted_and_the_next_request_is_served(memory_world: World) -> None:
    """One bit on the way from one memory to the other is enough to be noticed."""
    async with memory_world.receiver(verify="xxh3") as receiver, memory_world.sender() as sender:
        flip_a_bit_of_what_lands_next(receiver)
        with pytest.raises(TransferError) as caught:
            await send(sender, receiver.address, Request("a", 3))
        assert caught.value.code is ErrorCode.CHECKSUM_MISMATCH
        assert receiver.metrics.snapshot()['kvpd_revocations_total{reason="checksum_mismatch"}'] == 1
        await memory_world.until_clean(sender, receiver)
        await send(sender, receiver.address, Request("b", 3))
        await take(receiver, Request("b", 3))


def flip_a_bit_of_what_lands_next(receiver: Receiver) -> None:
    """Between the last byte's landing and the sender's word that it has landed."""
    feed = receiver.feed

    def garble(event: rev.ReceiverEvent) -> None:
        if isinstance(event, rev.MessageReceived) and isinstance(event.message, WriteDone):
            receiver.feed = feed  # type: ignore[method-assign]
            receiver.buffer.memory[5] ^= 1
        feed(event)

    receiver.feed = garble  # type: ignore[method-assign]


async def test_the_sums_are_those_of_the_standards() -> None:
    """Another implementation must find the same: the check values for these inputs are published."""
    with trio.fail_after(5):
        assert await checksums_of([memoryview(b"123456789")], "crc32c") == (0xE3069283,)
        assert await checksums_of([memoryview(b"")], "xxh3") == (0x2D06800538D394C2,)
