"""A sender and a receiver inside one trio program: six chunks go from one to the other and come out the same.

Run it with `python docs/examples/embed.py`. A program of your own would run one of the two, on its own host.
"""

from __future__ import annotations

import os

import trio

import kvpd
from kvpd.config import ReceiverConfig, SenderConfig

CHUNK_BYTES = 1 << 20
SLOTS = 8
KEYS = [f"prompt-1/chunk-{number}".encode() for number in range(6)]


async def prefill(sender: kvpd.Sender, receiver: str, chunks: list[bytes]) -> None:
    """What a prefill engine does: open, stage, fill. Leaving the transfer waits until everything has landed."""
    async with (
        sender.open("prompt-1", receiver=receiver, total_chunks=len(chunks)) as transfer,
        transfer.stage(KEYS, last=True) as slots,
    ):
        remaining = iter(chunks)
        async for slot in slots:
            chunk = next(remaining)
            if slot is not None:  # None: the receiver has this chunk already
                slot[:] = chunk


async def decode(receiver: kvpd.Receiver) -> list[bytes]:
    """What a decode engine does: claim, read, and give the slots back by leaving the claim."""
    async with receiver.claim("prompt-1", timeout_s=10) as chunks:
        return [bytes(chunk.view) for chunk in chunks]


async def main() -> None:
    """Both sides at once; the staging buffer is smaller than the request, so it goes in pieces."""
    chunks = [os.urandom(CHUNK_BYTES) for _ in KEYS]
    decode_host = ReceiverConfig(
        name="decode-0", control_address="127.0.0.1:0", buffer_size=SLOTS * CHUNK_BYTES, chunk_bytes=CHUNK_BYTES
    )
    prefill_host = SenderConfig(name="prefill-0", staging_size=4 * CHUNK_BYTES, chunk_bytes=CHUNK_BYTES)
    async with kvpd.Receiver(decode_host) as receiver, kvpd.Sender(prefill_host) as sender:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(prefill, sender, receiver.address, chunks)
            received = await decode(receiver)
        assert received == chunks, "the chunks differ"
        free = receiver.core.counts.free
        print(f"{len(received)} chunks moved, {free} of {SLOTS} slots free again")  # noqa: T201  an example says so


if __name__ == "__main__":
    trio.run(main)
