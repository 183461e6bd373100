"""A sender whose engines have ranks, and what its tests do with them."""

from __future__ import annotations

from collections.abc import Sequence

from sender_world import ReceiverPeer, SenderWorld, sent

from kvpd.core.messages import AllocRequest, WriteDone
from kvpd.core.sender import events as ev
from kvpd.errors import TransferError


def two_ranks(staging: int = 8, **settings: object) -> tuple[SenderWorld, ReceiverPeer]:
    """A sender for engines of two ranks, and a receiver whose session is up. Numbers from 11 on are unused."""
    world = SenderWorld(staging, ranks=2, **settings)
    return world, world.connect()


def open_both(world: SenderWorld, p: ReceiverPeer, first: int, total: int, *, req_id: str = "r") -> None:
    """Rank 0 opens by `first`, rank 1 by the number behind it; the transfer is admitted."""
    actions = world.open(first, total, req_id=req_id)
    actions += world.open(first + 1, total, req_id=req_id, rank=1)
    p.answer(sent(actions, AllocRequest))


def put_all(world: SenderWorld, p: ReceiverPeer, number: int, piece: int) -> list[ev.SenderAction]:
    """A piece is filled, put and acknowledged."""
    actions = world.fill(number, piece)
    actions += world.land(number, piece)
    return actions + p.ack(sent(actions, WriteDone))


def error_of(actions: Sequence[ev.SenderAction], number: int) -> TransferError:
    """Why this open's transfer has ended."""
    (error,) = [a.error for a in actions if isinstance(a, ev.FinishTransfer) and a.transfer_no == number]
    assert error is not None
    return error
