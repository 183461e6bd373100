"""Claims, events and counters."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest

from kvpd import client
from kvpd.errors import ErrorCode, LocalProtocolError, TransferFailed
from kvpd.link import (
    CancelRequest,
    Claim,
    Claimed,
    ClaimedChunk,
    ClaimFailed,
    LinkError,
    Release,
    Stats,
    StatsRequest,
    TransferEvent,
)

from .harness import CHUNK_BYTES, DEADLINE_S, SLOTS, Daemon, Decode, Peer, chunk


def test_a_claim_gives_the_chunks_in_order_and_gives_them_back(decode: Decode) -> None:
    """Views without a copy, read-only because deduplicated chunks are shared, and invalid afterwards."""

    def script(peer: Peer) -> None:
        peer.buffer[:] = b"".join(chunk(index) for index in range(SLOTS))
        claim = peer.expect(Claim)
        assert (claim.req_id, claim.timeout_s, claim.sender_id) == ("r", 5.0, "s")
        first = (ClaimedChunk(b"k0", 4, CHUNK_BYTES), ClaimedChunk(b"k1", 1, CHUNK_BYTES))
        peer.send(Claimed(claim.claim, "s", 7, 0, first, False))
        peer.send(Claimed(claim.claim, "s", 7, 2, (ClaimedChunk(b"k2", 6, 5),), True))
        assert peer.expect(Release) == Release(claim.claim)

    with decode(script) as link:
        with link.claim("r", 5, sender_id="s") as chunks:
            assert (len(chunks), chunks.sender_id, chunks.transfer_no) == (3, "s", 7)
            assert [(c.key, c.index, bytes(c.view)) for c in chunks] == [
                (b"k0", 4, chunk(4)),
                (b"k1", 1, chunk(1)),
                (b"k2", 6, chunk(6, 5)),
            ]
            assert chunks[1:] == [chunks[1], chunks[2]]
            view = chunks[0].view
            with pytest.raises(TypeError, match="read-only"):
                view[0] = 0
            assert not np.frombuffer(view, np.uint8).flags.writeable
            assert repr(chunks[0]) == "Chunk(key=b'k0', index=4)"
        with pytest.raises(ValueError, match="released"):
            view[0]
        assert len(chunks) == 0


def test_an_array_that_outlives_its_claim_does_no_harm_to_the_link(daemon: Daemon) -> None:
    """A loop's variable lives on after the loop; that must not turn a success into an exception."""

    def script(peer: Peer) -> None:
        claim = peer.expect(Claim)
        peer.send(Claimed(claim.claim, "s", 1, 0, (ClaimedChunk(b"k", 0, CHUNK_BYTES),), True))
        peer.expect(Release)

    with daemon(script) as path:
        with client.connect_receiver(path) as link, link.claim("r", 5) as chunks:
            array = np.frombuffer(chunks[0].view, np.uint8)
        assert array.sum() == 0  # the memory is still mapped, whosever it is


def test_a_failed_claim_is_a_typed_error(decode: Decode) -> None:
    """What an engine does next depends on why."""

    def script(peer: Peer) -> None:
        for code in (ErrorCode.CLAIM_TIMEOUT, ErrorCode.CLAIMED, ErrorCode.AMBIGUOUS_REQUEST):
            peer.send(ClaimFailed(peer.expect(Claim).claim, LinkError(code, "so it is")))
            peer.expect(Release)

    with decode(script) as link:
        for code in (ErrorCode.CLAIM_TIMEOUT, ErrorCode.CLAIMED, ErrorCode.AMBIGUOUS_REQUEST):
            with pytest.raises(TransferFailed, match="so it is") as failed, link.claim("r", 5):
                pass
            assert failed.value.code is code


def test_a_silent_daemon_does_not_hold_a_claim(decode: Decode, monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline is the engine's, whoever keeps it; and what comes too late was given back before."""
    monkeypatch.setattr("kvpd.client._receiver.ANSWER_GRACE_S", 0.05)

    def script(peer: Peer) -> None:
        claim = peer.expect(Claim)
        assert peer.expect(Release) == Release(claim.claim)
        peer.send(Claimed(claim.claim, "s", 1, 0, (ClaimedChunk(b"k", 0, 1),), True))
        peer.send(Stats(peer.expect(StatsRequest).call, {}))

    with decode(script) as link:
        with pytest.raises(TransferFailed, match=r"'r' is not complete within 0 s") as failed, link.claim("r", 0):
            pass
        assert failed.value.code is ErrorCode.CLAIM_TIMEOUT
        assert link.stats() == {}


def test_an_interrupted_claim_is_released(decode: Decode) -> None:
    """Ctrl-C in an engine must not leave a request claimed until the engine dies."""

    def script(peer: Peer) -> None:
        claim = peer.expect(Claim)
        os.kill(os.getpid(), signal.SIGINT)
        assert peer.expect(Release) == Release(claim.claim)

    with (
        decode(script) as link,
        pytest.raises(KeyboardInterrupt),
        link.claim("r", 60),
    ):
        pass


@pytest.mark.parametrize("timeout", [-1, float("nan"), 1e10])
def test_p91_an_impossible_claim_timeout_is_refused(decode: Decode, timeout: float) -> None:
    """The meaning of 0 is documented, that of -1 is none."""
    with decode() as link, pytest.raises(LocalProtocolError, match="timeout of"):
        link.claim("r", timeout)


# ------------------------------------------------------------------ events, counters, cancelling by name


def test_events_are_pushed_and_the_oldest_go_first_when_nobody_takes_them(decode: Decode) -> None:
    """An engine's scheduler answers from memory; one that never asks must not fill it."""
    total = 1030

    def script(peer: Peer) -> None:
        for number in range(total):
            peer.send(TransferEvent("ready", "r", "s", number, 1))
        peer.send(Stats(peer.expect(StatsRequest).call, {}))
        peer.send(Stats(peer.expect(StatsRequest).call, {}))
        peer.send(TransferEvent("failed", "r", "s", total, 1, LinkError(ErrorCode.REVOKED)))

    with decode(script) as link:
        link.stats()  # answered behind the events
        assert link.events_dropped == total - 1024
        assert [event.transfer_no for event in link.events(timeout=0)] == list(range(total - 1024, total))
        link.stats()
        event = next(link.events(DEADLINE_S))
        assert event.error is not None
        assert event.error.code is ErrorCode.REVOKED
        assert list(link.events(timeout=0.01)) == []


def test_cancel_by_name_needs_no_handle_and_never_raises(daemon: Daemon) -> None:
    """The thread that learns of an abort is seldom the one that holds the transfer."""

    def script(peer: Peer) -> None:
        assert peer.expect(CancelRequest) == CancelRequest("r")
        assert peer.next() is None

    with daemon(script) as path:
        link = client.connect_receiver(path)
        link.cancel("r")
        link.cancel("")
        link.cancel("x" * 513)
        link.close()
        link.cancel("r")


def test_p85_a_daemon_without_counters_is_not_waited_for(decode: Decode, monkeypatch: pytest.MonkeyPatch) -> None:
    """Telemetry must not stop an engine."""
    monkeypatch.setattr("kvpd.client._link.STATS_TIMEOUT_S", 0.05)
    with decode() as link, pytest.raises(TransferFailed, match="gave no counters"):
        link.stats()
