"""How a transfer goes on and ends, for one thread or several."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from kvpd import client
from kvpd.errors import ErrorCode, LocalProtocolError, TransferCancelled, TransferFailed
from kvpd.link import (
    Cancel,
    Close,
    Ended,
    Filled,
    LinkError,
    Open,
    Stage,
    Staged,
    StageDeferred,
    Stats,
    StatsRequest,
    Touch,
)

from .harness import DEADLINE_S, Daemon, Peer, Prefill, chunk, fill, keys, send_one, stage_and_fill


def test_p65_leaving_waits_no_longer_than_its_timeout(prefill: Prefill) -> None:
    """Nothing waits without a timer."""

    def script(peer: Peer) -> None:
        transfer = peer.stage(0)
        peer.expect(Filled)
        peer.expect(Close)
        peer.send(Ended(transfer, LinkError(ErrorCode.CANCELLED)))  # late, and nobody's any more
        peer.send(Stats(peer.expect(StatsRequest).call, {}))

    with prefill(script) as link:
        with pytest.raises(TransferFailed, match=r"not over within 0\.05 s") as failed:
            send_one(link, timeout=0.05)
        assert failed.value.code is ErrorCode.REQUEST_TIMEOUT
        assert link.stats() == {}


def test_the_next_batch_is_asked_for_before_this_one_is_filled(prefill: Prefill) -> None:
    """Small requests are bound by round trips."""

    def script(peer: Peer) -> None:
        transfer = peer.expect(Open).transfer
        assert not peer.expect(Stage).is_last
        peer.send(Staged(transfer, 0, 0, 0, (0,), True))
        assert peer.expect(Stage).is_last
        peer.send(StageDeferred(transfer, 1))
        assert peer.expect(Filled).stage == 0
        peer.send(Staged(transfer, 1, 0, 0, (0,), True))
        assert peer.expect(Filled).stage == 1
        peer.send(Ended(transfer))

    with prefill(script) as link, link.open("r", receiver="d:1", total_chunks=2) as transfer:
        with transfer.stage(keys(1)) as slots:
            following = transfer.stage(keys(1))
            fill(slots)
        with following as slots:
            fill(slots, first=1)


def test_waiting_for_a_deferred_stage_with_unfilled_slots_is_refused(prefill: Prefill) -> None:
    """It would wait for slots that it holds itself."""

    def script(peer: Peer) -> None:
        transfer = peer.stage(0)
        peer.expect(Stage)
        peer.send(StageDeferred(transfer, 1))
        peer.expect(Cancel)
        peer.expect(Close)

    with (
        prefill(script) as link,
        pytest.raises(LocalProtocolError, match="fill and leave it first"),
        link.open("r", receiver="d:1", total_chunks=2) as transfer,
        transfer.stage(keys(1)),
    ):
        stage_and_fill(transfer, 1)


def test_cancel_from_another_thread_ends_the_wait(prefill: Prefill) -> None:
    """An aborted request must not hold its thread until a timeout."""

    def script(peer: Peer) -> None:
        transfer = peer.expect(Open).transfer
        peer.expect(Stage)
        peer.expect(Touch)
        peer.expect(Cancel)
        peer.send(Ended(transfer, LinkError(ErrorCode.CANCELLED, "the engine asked for it")))
        peer.expect(Close)

    with prefill(script) as link:
        transfer = link.open("r", receiver="d:1", total_chunks=1)
        staging = transfer.stage(keys(1))
        transfer.touch()
        thread = threading.Thread(target=transfer.cancel)
        thread.start()
        with pytest.raises(TransferCancelled, match="asked for it"), transfer, staging:
            pass
        thread.join()
        transfer.cancel()
        with pytest.raises(LocalProtocolError, match="was left"):
            transfer.stage(keys(1))


def test_nothing_follows_a_close(prefill: Prefill) -> None:
    """A daemon that hears of a transfer that it knows no more ends the connection, and every other request with it."""
    rounds = 200

    def script(peer: Peer) -> None:
        for _ in range(rounds):
            transfer = peer.expect(Open).transfer
            frames = []
            while not isinstance(frame := peer.next(), Close):
                frames.append(frame)
            assert frame.transfer == transfer
            assert frames in ([], [Cancel(transfer)])

    with prefill(script) as link:
        for _ in range(rounds):
            transfer = link.open("r", receiver="d:1", total_chunks=1)
            thread = threading.Thread(target=transfer.cancel)
            thread.start()
            with pytest.raises(ZeroDivisionError), transfer:
                raise ZeroDivisionError
            thread.join()


def test_two_threads_share_a_link(prefill: Prefill) -> None:
    """One link a process is enough: frames of two requests interleave, and neither gets the other's answers."""
    rounds = 50

    def script(peer: Peer) -> None:
        names: dict[int, int] = {}
        for _ in range(2 * rounds * 4):
            match peer.next():
                case Open(transfer, req_id):
                    names[transfer] = int(req_id)
                case Stage(transfer, stage):
                    peer.send(Staged(transfer, stage, 0, 0, (names[transfer],), True))
                case Filled(transfer):
                    assert peer.slot(names[transfer]) == chunk(names[transfer])
                    error = LinkError(ErrorCode.REVOKED) if names[transfer] else None
                    peer.send(Ended(transfer, error))
                case Close(transfer):
                    del names[transfer]
                case other:
                    raise AssertionError(other)
        assert not names

    def work(link: client.SenderLink, number: int, outcomes: list[str]) -> None:
        for _ in range(rounds):
            try:
                with (
                    link.open(str(number), receiver="d:1", total_chunks=1) as transfer,
                    transfer.stage(keys(1)) as slots,
                ):
                    fill(slots, first=number)
                outcomes.append("ok")
            except TransferFailed:
                outcomes.append("revoked")

    with prefill(script) as link:
        outcomes: list[list[str]] = [[], []]
        threads = [threading.Thread(target=work, args=(link, n, outcomes[n])) for n in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
    assert outcomes == [["ok"] * rounds, ["revoked"] * rounds]


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda link: link.open("", receiver="d:1", total_chunks=1), "req_id is a text of 1 to 512"),
        (lambda link: link.open("x" * 513, receiver="d:1", total_chunks=1), "req_id is a text"),
        (lambda link: link.open("\ud800", receiver="d:1", total_chunks=1), "cannot be sent"),
        (lambda link: link.open("r", receiver="", total_chunks=1), "receiver is a text"),
        (lambda link: link.open("r", receiver="d:1", notify="", total_chunks=1), "notify is a text"),
        (lambda link: link.open("r", receiver="d:1", total_chunks=1 << 70), "a request of"),
        (lambda link: link.open("r", receiver="d:1", total_chunks=1, timeout=-1), "timeout of -1"),
        (lambda link: link.open("r", receiver="d:1", total_chunks=1).stage([]), "a batch of 0 chunks"),
        (lambda link: link.open("r", receiver="d:1", total_chunks=1).stage([b"x"] * 8193), "a batch of 8193"),
        (lambda link: link.open("r", receiver="d:1", total_chunks=1).stage([bytes(97)]), "a key has at most 96"),
        (lambda link: link.open("r", receiver="d:1", total_chunks=1).stage(["k"]), "a key has at most 96"),
        (
            lambda link: link.open("r", receiver="d:1", total_chunks=1).stage([b"k"], last_chunk_bytes=65),
            "a last chunk of 65 bytes; 1 to 64",
        ),
        (
            lambda link: link.open("r", receiver="d:1", total_chunks=1).stage([b"k"], last_chunk_bytes=0),
            "a last chunk of 0 bytes",
        ),
    ],
)
def test_impossible_arguments_are_refused_and_the_link_lives(
    daemon: Daemon, call: Callable[[client.SenderLink], Any], match: str
) -> None:
    """A caller's mistake is his own: the other requests on the link go on."""

    def script(peer: Peer) -> None:
        while not isinstance(frame := peer.next(), StatsRequest):
            assert frame is not None
        peer.send(Stats(frame.call, {"alive": 1.0}))

    with daemon(script) as path:
        link = client.connect_sender(path)
        with pytest.raises(LocalProtocolError, match=match):
            call(link)
        assert link.stats() == {"alive": 1.0}
        link._connection._open.clear()  # what was opened above is never left
        link.close()
