"""Checksums: nothing may be read before its bytes have been compared with those that were sent."""

from __future__ import annotations

from core_parts import CHUNK, RECEIVER_INCARNATION, keys
from receiver_world import ReceiverWorld, SenderPeer, refusal_of, revoked_in

from kvpd.core.messages import WriteDone
from kvpd.core.receiver import events as ev
from kvpd.errors import ErrorCode


def done(p: SenderPeer, *checksums: int, first: int = 0) -> WriteDone:
    """The message that a sender says when these chunks of its transfer 1 have landed."""
    p.last_id += 1
    return WriteDone(p.incarnation, RECEIVER_INCARNATION, p.last_id, 1, 0, first, len(checksums), checksums)


def verifying() -> tuple[ReceiverWorld, SenderPeer, WriteDone]:
    """A transfer of two chunks whose checksums are being compared."""
    world = ReceiverWorld(verify="xxh3")
    p = world.connect()
    p.alloc(1, 2, keys(0, 1), last=True)
    message = done(p, 7, 8)
    chunks = (ev.WrittenSlot(0, CHUNK, 7), ev.WrittenSlot(1, CHUNK, 8))
    assert p.say(message) == [ev.VerifyChunks(p.id(1), message, chunks)]
    return world, p, message


def test_a_chunk_is_ready_only_when_its_checksum_was_compared() -> None:
    """Announced before, a decoder could read what was garbled on the way."""
    world, p, message = verifying()
    assert world.core.counts.writing == 2
    actions = world.feed(ev.ChunksVerified(p.id(1), message, 0))
    assert actions == [p.ack(), p.ready(1, 2)]
    assert world.core.counts.ready == 2


def test_a_repeat_is_answered_once_it_has_been_compared_and_compared_no_second_time() -> None:
    """A sender repeats WriteDone until it hears; that must not cost the sums again and again."""
    world, p, message = verifying()
    assert p.say(message) == []
    world.feed(ev.ChunksVerified(p.id(1), message, 0))
    assert p.say(message) == [p.ack()]


def test_a_repeat_within_a_transfer_that_goes_on_is_acknowledged_plainly() -> None:
    """Chunks that are ready already have nothing left to compare."""
    world = ReceiverWorld(verify="crc32c")
    p = world.connect()
    p.alloc(1, 2, keys(0, 1), last=True)
    message = done(p, 7)
    p.say(message)
    world.feed(ev.ChunksVerified(p.id(1), message, 0))
    assert p.say(message) == [p.ack()]


def test_other_bytes_than_were_sent_roll_the_whole_transfer_back() -> None:
    """Wrong bytes are worse than none: nothing of the transfer is read, and the reason is counted."""
    world, p, message = verifying()
    actions = world.feed(ev.ChunksVerified(p.id(1), message, 1))
    assert refusal_of(actions).code is ErrorCode.CHECKSUM_MISMATCH
    assert [notif.reason for notif in revoked_in(actions)] == [ErrorCode.CHECKSUM_MISMATCH]
    assert world.core.counts.quarantined == 2
    p.cancel(1)
    assert world.core.is_clean


def test_a_verdict_on_a_transfer_that_has_ended_counts_for_nothing() -> None:
    """Its slots may hold another's bytes by now."""
    world, p, message = verifying()
    p.cancel(1)
    assert world.feed(ev.ChunksVerified(p.id(1), message, 0)) == []
    assert world.core.is_clean


def test_checksums_that_are_missing_are_a_violation() -> None:
    """A sender that does not sum what it was asked to sum has not understood the Welcome."""
    world = ReceiverWorld(verify="xxh3")
    p = world.connect()
    p.alloc(1, 2, keys(0, 1), last=True)
    assert refusal_of(p.done(1, 0, 2)).code is ErrorCode.PROTOCOL_ERROR


def test_a_sender_learns_from_the_welcome_what_to_sum() -> None:
    """The receiver decides; a sender needs no setting of its own."""
    world = ReceiverWorld(verify="crc32c")
    p = world.connect()
    assert p.last_hello is not None
    (again,) = p.say(p.last_hello)
    assert isinstance(again, ev.SendMessage)
    assert again.message.verify == "crc32c"  # type: ignore[attr-defined]
