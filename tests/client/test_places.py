"""Slots in a receiver's memory: mapped at their first use, and let go of in an order that nothing can break."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpd.errors import ErrorCode, RemoteProtocolError, TransferFailed
from kvpd.link import (
    LINK_VERSION,
    AttachWriter,
    Cancel,
    Close,
    Ended,
    Filled,
    LetGo,
    LinkError,
    Open,
    Place,
    PlaceGone,
    Rejected,
    Stage,
    Staged,
    TransferEvent,
)

from .harness import (
    CHUNK_BYTES,
    DEADLINE_S,
    SLOTS,
    Daemon,
    Decode,
    Peer,
    Prefill,
    chunk,
    keys,
    send_one,
    stage_and_fill,
)

SAID = TransferEvent("ready", "any", "s", 1, 1)  # whoever hears of it has heard what was said before


def place(path: Path, number: int = 4) -> Place:
    """A receiver at this path."""
    return Place(number, str(path), "prefill-0", 77, 99)


def grant(peer: Peer, share: Path, *slots: int, number: int = 4) -> int:
    """An engine opens a transfer and is given slots of the receiver: the transfer."""
    transfer = peer.expect(Open).transfer
    peer.expect(Stage)
    peer.send(place(share, number), Staged(transfer, 0, 0, 0, slots, True, number))
    return transfer


def finish(peer: Peer, transfer: int) -> None:
    """It is filled, over and left."""
    assert peer.expect(Filled) == Filled(transfer, 0, 0)
    peer.send(Ended(transfer))
    assert peer.expect(Close) == Close(transfer)


class Receiver:
    """A receiver's part: what it is told, and what is in its memory at the end."""

    def __init__(self) -> None:
        self.greetings: list[AttachWriter] = []
        self.slots: list[bytes] = []
        self.has_let_go = False

    def __call__(self, peer: Peer) -> None:
        self.greetings.append(peer.greet_writer())
        frame = peer.next()
        self.slots = [peer.slot(n) for n in range(SLOTS)]
        self.has_let_go = isinstance(frame, LetGo)


def test_slots_of_a_receiver_are_filled_there(daemon: Daemon, prefill: Prefill) -> None:
    """The engine says for whom it writes, keeps one mapping for all of its transfers, and lets go when all is over."""
    receiver = Receiver()
    with daemon(receiver, greet=False) as share:

        def script(peer: Peer) -> None:
            finish(peer, grant(peer, share, 6, 1))
            transfer = peer.expect(Open).transfer
            peer.expect(Stage)
            peer.send(Staged(transfer, 0, 0, 0, (3,), True, 4))
            finish(peer, transfer)
            assert not any(peer.slot(n).strip(b"\0") for n in range(SLOTS)), "nothing was staged"
            peer.send(PlaceGone(4), SAID)

        with prefill(script) as link:
            with link.open("r", receiver="d:1", total_chunks=2) as transfer:
                stage_and_fill(transfer, 2)
            send_one(link)
            next(link.events())
    assert receiver.greetings == [AttachWriter(LINK_VERSION, 0, "prefill-0", 77, 99)]
    assert (receiver.slots[6], receiver.slots[1], receiver.slots[3]) == (chunk(0), chunk(1), chunk(0))
    assert receiver.has_let_go


def test_a_place_that_is_gone_is_let_go_of_when_its_last_transfer_was_left(daemon: Daemon, prefill: Prefill) -> None:
    """Its slots are the transfer's until then, whatever the daemon says."""
    receiver = Receiver()
    is_mapped = threading.Event()
    with daemon(receiver, greet=False) as share:

        def script(peer: Peer) -> None:
            transfer = grant(peer, share, 6)
            assert is_mapped.wait(DEADLINE_S)
            peer.send(PlaceGone(4), Ended(transfer, LinkError(ErrorCode.PEER_LOST, "the session is over")), SAID)
            assert peer.expect(Close) == Close(transfer)

        with (  # noqa: PT012  leaving raises
            prefill(script) as link,
            pytest.raises(TransferFailed, match="the session is over"),
            link.open("r", receiver="d:1", total_chunks=1) as transfer,
            transfer.stage(keys(1)) as slots,
        ):
            slot = next(slots)
            assert slot is not None
            is_mapped.set()
            next(link.events())
            slot[:] = chunk(5)
            assert not receiver.has_let_go
    assert receiver.has_let_go
    assert receiver.slots[6] == chunk(5)


def test_the_end_of_the_link_lets_go_of_what_nobody_uses(daemon: Daemon, prefill: Prefill) -> None:
    """A daemon that died says nothing of its places."""
    receiver = Receiver()
    with daemon(receiver, greet=False) as share:

        def script(peer: Peer) -> None:
            finish(peer, grant(peer, share, 6))
            peer.hang_up()

        with prefill(script) as link:
            send_one(link)
            with pytest.raises(TransferFailed):
                next(link.events())
    assert receiver.has_let_go


def test_an_array_that_refers_to_the_memory_keeps_the_last_word_back(daemon: Daemon, prefill: Prefill) -> None:
    """It can be written through: the receiver is to wait for the end of this process."""
    receiver = Receiver()
    with daemon(receiver, greet=False) as share:

        def script(peer: Peer) -> None:
            finish(peer, grant(peer, share, 6))

        with (
            prefill(script) as link,
            link.open("r", receiver="d:1", total_chunks=1) as transfer,
            transfer.stage(keys(1)) as slots,
        ):
            slot = next(slots)
            assert slot is not None
            array = np.frombuffer(slot.view, np.uint8)
    assert not receiver.has_let_go
    assert len(array) == CHUNK_BYTES


def refuse(peer: Peer) -> None:
    """A receiver that is another one by now."""
    peer.expect(AttachWriter)
    peer.send(Rejected("that start of this receiver is over"))
    assert peer.expect(LetGo) == LetGo()


def other_chunks(peer: Peer) -> None:
    """A receiver whose chunks are of another size."""
    peer.greet_writer(CHUNK_BYTES // 2)
    assert peer.expect(LetGo) == LetGo()


@pytest.mark.parametrize(
    ("does", "why"), [(refuse, "that start of this receiver is over"), (other_chunks, "chunks of 32 bytes")]
)
def test_memory_that_cannot_be_had_ends_the_transfer(daemon: Daemon, prefill: Prefill, does: Any, why: str) -> None:
    """The error names the path and what to do; the receiver hears that nothing of it is held."""
    with daemon(does, greet=False) as share:

        def script(peer: Peer) -> None:
            transfer = grant(peer, share, 6)
            assert peer.expect(Cancel) == Cancel(transfer)
            assert peer.expect(Close) == Close(transfer)

        with (
            prefill(script) as link,
            pytest.raises(TransferFailed, match=f"{share}.*{why}.*set transport") as error,
        ):
            send_one(link)
    assert error.value.code is ErrorCode.TRANSPORT_FAILED


def test_nobody_at_the_path(prefill: Prefill, tmp_path: Path) -> None:
    """The engine sees another file system than its daemon."""

    def script(peer: Peer) -> None:
        transfer = grant(peer, tmp_path / "nothing.sock", 6)
        assert peer.expect(Cancel) == Cancel(transfer)

    with prefill(script) as link, pytest.raises(TransferFailed, match=r"nothing\.sock"):
        send_one(link)


def test_a_slot_beyond_the_receivers_memory_is_no_slot(daemon: Daemon, prefill: Prefill) -> None:
    """Behind the mapping is other memory of this process."""
    with daemon(Receiver(), greet=False) as share:

        def script(peer: Peer) -> None:
            transfer = grant(peer, share, SLOTS)
            assert peer.expect(Close) == Close(transfer)

        with prefill(script) as link, pytest.raises(RemoteProtocolError, match="beyond the 8"):
            send_one(link)


def test_a_place_that_went_before_it_was_used_is_not_looked_for(prefill: Prefill) -> None:
    """Its receiver may be another one by now."""

    def script(peer: Peer) -> None:
        transfer = peer.expect(Open).transfer
        peer.expect(Stage)
        peer.send(place(Path("/nowhere")), PlaceGone(4), PlaceGone(5), Staged(transfer, 0, 0, 0, (1,), True, 4))
        assert peer.expect(Cancel) == Cancel(transfer)

    with (
        prefill(script) as link,
        pytest.raises(TransferFailed, match="the session with the receiver is over") as error,
    ):
        send_one(link)
    assert error.value.code is ErrorCode.PEER_LOST


def test_a_receivers_link_knows_no_places(decode: Decode) -> None:
    """They are for those who write."""
    with (
        decode(lambda peer: peer.send(place(Path("/nowhere")))) as link,
        pytest.raises(TransferFailed, match="makes no sense"),
    ):
        next(link.events())
