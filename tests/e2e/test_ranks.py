"""Engines of two ranks through real daemons and UCX: each rank's own bytes, one admission, one end."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import ExitStack

import attrs
import pytest

from kvpd.errors import ErrorCode, LocalProtocolError, TransferError

from .daemons import Daemon, Fleet, in_background
from .payloads import Request, make_request, receive, send

RANKS = 2
ODD = 1000  # bytes of a chunk: no window of such slots ends at a page by itself


def parts(req_id: str, chunks: int, chunk_bytes: int = ODD, last: int | None = None) -> list[Request]:
    """Each rank's part of a request: the same keys, other bytes."""
    keys = make_request(req_id, chunks, chunk_bytes, last).keys
    return [
        attrs.evolve(make_request(f"{req_id}/{n}", chunks, chunk_bytes, last), req_id=req_id, keys=keys) for n in (0, 1)
    ]


def move_all_ranks(sender: Daemon, receiver: Daemon, requests: Sequence[Sequence[Request]]) -> None:
    """Each rank's engines send and read their parts of all requests, and get every byte."""

    def prefill(rank: int) -> None:
        with sender.sender_link(rank) as link:
            for request in requests:
                send(link, request[rank], receiver.address, batch=5)

    with ExitStack() as stack:
        for rank in range(RANKS):
            stack.enter_context(in_background(functools.partial(prefill, rank)))
        links = [stack.enter_context(receiver.receiver_link(rank)) for rank in range(RANKS)]
        for request in requests:
            for rank, link in enumerate(links):
                assert receive(link, request[rank].req_id) == request[rank].hashes


def two_ranks(fleet: Fleet, *, slots: int = 8, tls: str = "", **settings: object) -> tuple[Daemon, Daemon]:
    """A receiver and a sender for engines of two ranks."""
    common = {"ranks": RANKS, "chunk_bytes": ODD, "ucx_tls": tls, **settings}
    return fleet.pair({"slots": slots, **common}, {"slots": 3, **common})


@pytest.mark.parametrize("tls", ["", "tcp"], ids=["cma", "tcp"])
@pytest.mark.parametrize("verify", ["off", "crc32c"])
def test_every_byte_of_every_rank_arrives_in_its_own_window(fleet: Fleet, tls: str, verify: str) -> None:
    """Requests that do not all fit at once, in pieces, with a short last chunk."""
    receiver = fleet.receiver(slots=8, ranks=RANKS, chunk_bytes=ODD, ucx_tls=tls, verify=verify)
    sender = fleet.sender(slots=3, ranks=RANKS, chunk_bytes=ODD, ucx_tls=tls).wait_ready()
    requests = [parts(f"r{n}", 7, last=13) for n in range(4)]
    assert requests[0][0].hashes != requests[0][1].hashes

    move_all_ranks(sender, receiver, requests)
    receiver.wait_quiet()
    assert receiver.slots() == {"free": 8}
    assert len(receiver.said("transfer_admitted")) == len(sender.said("transfer_done")) == len(requests)
    assert len(sender.said("transfer_joined")) == len(requests)
    assert {line["rank"] for line in sender.said("piece_written")} == {0, 1}
    assert {line["bytes"] for line in sender.said("transfer_done")} == {RANKS * (6 * ODD + 13)}


def test_daemons_of_different_ranks_refuse_each_other_with_both_numbers(fleet: Fleet) -> None:
    """The first request says what to change."""
    receiver, sender = fleet.pair({"ranks": 2, "chunk_bytes": ODD}, {"ranks": 1, "chunk_bytes": ODD})
    with sender.sender_link() as link, pytest.raises(TransferError, match="serves 2 ranks, this sender 1") as caught:
        send(link, make_request("r", 1, ODD), receiver.address)
    assert caught.value.code is ErrorCode.LAYOUT_MISMATCH


def test_an_engine_of_a_rank_too_many_is_told_which_setting_to_raise(fleet: Fleet) -> None:
    """At either daemon, when it attaches."""
    for daemon in fleet.pair({"chunk_bytes": ODD}, {"chunk_bytes": ODD}):
        connect = daemon.sender_link if daemon.role == "sender" else daemon.receiver_link
        with pytest.raises(LocalProtocolError, match="rank 1, and this daemon has ranks = 1: set it higher"):
            connect(1)


def test_a_rank_that_leaves_by_an_error_ends_it_for_the_others(fleet: Fleet) -> None:
    """And the next request of both goes through."""
    receiver, sender = two_ranks(fleet)
    bad, good = parts("bad", 4), parts("good", 4)
    with sender.sender_link(0) as first, sender.sender_link(1) as second:

        def fails() -> None:
            with (
                pytest.raises(ValueError, match="out of memory"),
                second.open("bad", receiver=receiver.address, total_chunks=4),
            ):
                raise ValueError("out of memory")

        with in_background(fails), pytest.raises(TransferError) as caught:
            send(first, bad[0], receiver.address, batch=2)
        assert caught.value.code is ErrorCode.CANCELLED
        with in_background(lambda: send(second, good[1], receiver.address)):
            send(first, good[0], receiver.address)
    for rank in range(RANKS):
        with receiver.receiver_link(rank) as link:
            assert receive(link, "good") == good[rank].hashes
    receiver.wait_quiet()
    assert receiver.slots() == {"free": 8}
