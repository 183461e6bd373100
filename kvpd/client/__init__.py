"""The engine's side of kvpd: synchronous, thread-safe, and importing neither trio nor torch.

A prefill engine sends a request's chunks, a decode engine claims them:

    with kvpd.client.connect_sender("/run/kvpd/sender.sock") as link:
        with link.open(req_id, receiver="decode-0:9100", total_chunks=8) as transfer:  # leaving by exception cancels
            with transfer.stage(keys, last=True) as slots:  # waits until admitted and staged
                for slot, tensor in zip(slots, tensors):
                    if slot is not None:  # None: the receiver has this chunk already
                        slot[:] = tensor
        # here everything has landed, the receiver has acknowledged it, and the proxy was told

    with kvpd.client.connect_receiver("/run/kvpd/receiver.sock") as link:
        with link.claim(req_id, timeout=5) as chunks:  # views without a copy, in request order
            for chunk in chunks:
                use(chunk.view)

What fails raises a `kvpd.errors.TransferError`. Threads may share a link, forked processes may not: a forked child must
connect by itself. Arrays made from a slot or from a chunk's view must not be used once its `with` block was left.
"""

from __future__ import annotations

import os

from kvpd.client._attach import attach
from kvpd.client._link import Link
from kvpd.client._receiver import Chunk, Claim, ReceiverLink
from kvpd.client._sender import SenderLink, Transfer
from kvpd.client._slot import Slot
from kvpd.client._staging import Staging
from kvpd.link import TransferEvent

__all__ = [
    "Chunk",
    "Claim",
    "Link",
    "ReceiverLink",
    "SenderLink",
    "Slot",
    "Staging",
    "Transfer",
    "TransferEvent",
    "connect_receiver",
    "connect_sender",
]

CONNECT_TIMEOUT_S = 10.0


def connect_sender(
    path: str | os.PathLike[str], rank: int = 0, *, group: str = "", timeout: float = CONNECT_TIMEOUT_S
) -> SenderLink:
    """Attach a prefill engine's rank to the sender at a socket path, within `timeout` seconds.

    Each tensor-parallel rank of an engine attaches by itself, opens every request and stages the same batches of it.
    `group` names the engine, the same for all of its ranks: needed where several such engines share a sender and their
    requests might bear the same names.

    Raises:
        TransportError: no daemon answers there.
        LocalProtocolError: the daemon there refuses: it is no sender, or has no such rank.
        RemoteProtocolError: it speaks another version, or makes no sense.
    """
    return SenderLink(attach(path, "sender", rank, group, timeout))


def connect_receiver(
    path: str | os.PathLike[str], rank: int = 0, *, timeout: float = CONNECT_TIMEOUT_S
) -> ReceiverLink:
    """Attach a decode engine's rank to the receiver at a socket path, within `timeout` seconds.

    A claim gives what this rank has of a request; its room is free again when every rank has claimed and left it.

    Raises:
        TransportError: no daemon answers there.
        LocalProtocolError: the daemon there refuses: it is no receiver, or has no such rank.
        RemoteProtocolError: it speaks another version, or makes no sense.
    """
    return ReceiverLink(attach(path, "receiver", rank, "", timeout))
