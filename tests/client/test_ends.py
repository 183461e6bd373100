"""How a link ends: the daemon dies, makes no sense, or the engine closes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from kvpd import client
from kvpd.errors import ErrorCode, LocalProtocolError, TransferError, TransferFailed
from kvpd.link import (
    Claim,
    Claimed,
    ClaimedChunk,
    Close,
    Ended,
    Filled,
    Open,
    Rejected,
    Release,
    Stage,
    Staged,
    Stats,
    StatsRequest,
    Touch,
    encode_frame,
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
    claim_and_leave,
    fill,
    keys,
    send_one,
)


@pytest.mark.parametrize("call", ["stage", "leave", "claim", "events"])
def test_a_dead_daemon_ends_every_call_that_waits(daemon: Daemon, call: str) -> None:
    """An engine that waits for a daemon that is gone is gone too."""

    def script(peer: Peer) -> None:
        if call in ("stage", "leave"):
            transfer = peer.expect(Open).transfer
            peer.expect(Stage)
            if call == "leave":
                peer.send(Staged(transfer, 0, 0, 0, (0,), True))
                peer.expect(Filled)
        elif call == "claim":
            peer.expect(Claim)
        peer.hang_up()

    with daemon(script) as path:
        link = client.connect_sender(path) if call in ("stage", "leave") else client.connect_receiver(path)

        def wait() -> None:
            if isinstance(link, client.SenderLink):
                send_one(link)
            elif call == "claim":
                claim_and_leave(link, 60)
            else:
                list(link.events())

        with link:
            with pytest.raises(TransferFailed, match=str(path)) as failed:
                wait()
            assert failed.value.code is ErrorCode.PEER_LOST
            with pytest.raises(TransferFailed, match=str(path)):
                link.stats()
            link.cancel("r")


GARBAGE = {
    "bytes": b"\x05\0\0\0hello",
    "too long": b"\xff\xff\xff\xff",
    "an engine's frame": encode_frame(Touch(1)),
    "another role's frame": encode_frame(Claimed(1, "s", 1, 0, (), True)),
    "a transfer never opened": encode_frame(Ended(99)),
    "a stage never asked for": encode_frame(Staged(1, 5, 0, 0, (0,), True)),
    "a slot beyond the buffer": encode_frame(Staged(1, 0, 0, 0, (SLOTS,), True)),
    "a slot before the buffer": encode_frame(Staged(1, 0, 0, 0, (-2,), True)),
    "more slots than keys": encode_frame(Staged(1, 0, 0, 0, (0, 1), True)),
    "a piece twice": 2 * encode_frame(Staged(1, 0, 0, 0, (0,), True)),
    "a piece with a gap": encode_frame(Staged(1, 0, 0, 1, (), True)),
    "an end too early": encode_frame(Staged(1, 0, 0, 0, (), True)),
    "a refusal": encode_frame(Rejected("you bore me")),
}


@pytest.mark.parametrize("name", GARBAGE)
def test_a_daemon_that_makes_no_sense_is_left(daemon: Daemon, name: str) -> None:
    """A slot that is not ours must not be written because a daemon said so."""

    def script(peer: Peer) -> None:
        assert peer.expect(Open).transfer == 1
        peer.expect(Stage)
        peer.connection.sendall(GARBAGE[name])

    with daemon(script) as path, client.connect_sender(path) as link:
        with pytest.raises(TransferFailed, match=str(path)) as failed:
            send_one(link)
        assert failed.value.code is ErrorCode.PROTOCOL_ERROR


@pytest.mark.parametrize(
    "chunks",
    [
        (ClaimedChunk(b"k", SLOTS, 1),),
        (ClaimedChunk(b"k", -1, 1),),
        (ClaimedChunk(b"k", 0, CHUNK_BYTES + 1),),
        (ClaimedChunk(b"k", 0, 0),),
    ],
)
def test_a_claim_of_what_does_not_exist_is_not_believed(decode: Decode, chunks: tuple[ClaimedChunk, ...]) -> None:
    """A view beyond the chunk is a view of somebody else's."""

    def script(peer: Peer) -> None:
        peer.send(Claimed(peer.expect(Claim).claim, "s", 1, 0, chunks, True))

    with decode(script) as link:
        with pytest.raises(TransferFailed) as failed, link.claim("r", 5):
            pass
        assert failed.value.code is ErrorCode.PROTOCOL_ERROR


def test_a_closed_link_refuses_and_its_waiting_calls_end(daemon: Daemon) -> None:
    """Shutting an engine down must not need its daemon's help."""

    def script(peer: Peer) -> None:
        claim = peer.expect(Claim)
        assert peer.expect(Release) == Release(claim.claim)
        assert peer.next() is None

    with daemon(script) as path:
        link = client.connect_receiver(path)
        outcomes: list[object] = []

        def claim() -> None:
            try:
                with link.claim("r", 60):
                    outcomes.append("claimed")
            except TransferError as exc:
                outcomes.append(exc.code)

        def watch() -> None:
            outcomes.append(list(link.events()))

        threads = [threading.Thread(target=claim), threading.Thread(target=watch)]
        for thread in threads:
            thread.start()
        while not link._connection._open:
            time.sleep(0.001)
        link.close()
        for thread in threads:
            thread.join(DEADLINE_S)
        assert sorted(map(str, outcomes)) == ["[]", "cancelled"]
        for call in (link.stats, lambda: link.claim("r", 1)):
            with pytest.raises(LocalProtocolError, match="was closed"):
                call()
        assert list(link.events()) == []
        link.close()


def test_closing_waits_for_whoever_still_writes(daemon: Daemon) -> None:
    """The daemon gives a slot away when it is told that nobody writes it any more: that must be true."""
    closed = threading.Event()

    def script(peer: Peer) -> None:
        transfer = peer.stage(0)
        assert closed.wait(DEADLINE_S)
        assert peer.expect(Close) == Close(transfer)
        assert peer.slot(0) == chunk(0)
        assert peer.next() is None

    def close_and_fill(link: client.SenderLink, slots: client.Staging) -> None:
        link.close()
        closed.set()
        fill(slots)

    with daemon(script) as path:
        link = client.connect_sender(path)
        with (
            pytest.raises(LocalProtocolError, match="was closed"),
            link.open("r", receiver="d:1", total_chunks=1) as transfer,
            transfer.stage(keys(1)) as slots,
        ):
            close_and_fill(link, slots)


def test_p73_a_forked_child_is_refused_and_does_no_harm(prefill: Prefill) -> None:
    """Two processes on one stream cut each other's frames."""

    def script(peer: Peer) -> None:
        peer.expect(Open)
        peer.send(Stats(peer.expect(StatsRequest).call, {"alive": 1.0}))
        assert isinstance(peer.next(), Close)

    def in_child(link: client.SenderLink, transfer: client.Transfer) -> None:
        calls: list[Callable[[], Any]] = [link.stats, transfer.touch, lambda: transfer.stage(keys(1))]
        calls += [lambda: link.open("x", receiver="d:1", total_chunks=1), lambda: list(link.events(0))]
        for call in calls:
            with pytest.raises(LocalProtocolError, match="belongs to process"):
                call()
        transfer.cancel()
        link.cancel("r")
        transfer.__exit__(None, None, None)
        link.close()

    with prefill(script) as link:
        transfer = link.open("r", receiver="d:1", total_chunks=1)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                in_child(link, transfer)
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        assert link.stats() == {"alive": 1.0}
        with pytest.raises(ZeroDivisionError), transfer:
            raise ZeroDivisionError
