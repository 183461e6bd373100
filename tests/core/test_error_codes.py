"""The whole vocabulary of errors: for each code the shortest way in which a core comes to say it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from core_parts import RECEIVER_INCARNATION, SENDER_INCARNATION, code_of, keys
from receiver_world import ReceiverWorld, refusal_of, revoked_in
from sender_world import SenderWorld, finished, sent

from kvpd.core.events import DrainRequested, RequestCancelled
from kvpd.core.messages import WriteDone
from kvpd.core.receiver import events as rev
from kvpd.core.sender import events as sev
from kvpd.errors import AdmissionRefused, ErrorCode, TransferCancelled, TransferFailed, transfer_error


def refused_claim(actions: list[rev.ReceiverAction]) -> ErrorCode | None:
    """Why the only claim among these actions is refused."""
    (refusal,) = (action for action in actions if isinstance(action, rev.RefuseClaim))
    return code_of(refusal.error)


def legacy_sender() -> ErrorCode | None:
    """No total."""
    return refusal_of(ReceiverWorld().connect().alloc(1, 0)).code


def too_large() -> ErrorCode | None:
    """More than the buffer."""
    return refusal_of(ReceiverWorld(slots=4).connect().alloc(1, 5)).code


def queue_full() -> ErrorCode | None:
    """Nobody may wait."""
    return refusal_of(ReceiverWorld(queue_depth_max=0).connect().alloc(1, 1)).code


def draining() -> ErrorCode | None:
    """The receiver is shutting down."""
    world = ReceiverWorld()
    p = world.connect()
    world.feed(DrainRequested())
    return refusal_of(p.alloc(1, 1)).code


def admission_timeout() -> ErrorCode | None:
    """No room in time."""
    world = ReceiverWorld(slots=2, allocation_timeout_s=1.0)
    p = world.connect()
    p.alloc(1, 2)
    p.alloc(2, 2)
    return refusal_of(world.pass_time(1.0)).code


def overflow() -> ErrorCode | None:
    """More chunks than declared."""
    return refusal_of(ReceiverWorld().connect().alloc(1, 1, keys(1, 2))).code


def underflow() -> ErrorCode | None:
    """The last batch ends short."""
    return refusal_of(ReceiverWorld().connect().alloc(1, 3, keys(1, 2), last=True)).code


def total_mismatch() -> ErrorCode | None:
    """Another total than at first."""
    p = ReceiverWorld().connect()
    p.alloc(1, 3)
    return refusal_of(p.alloc(1, 2, open_=False)).code


def batch_overlap() -> ErrorCode | None:
    """Two chunks at one position."""
    p = ReceiverWorld().connect()
    p.alloc(1, 3, keys(1, 2))
    return refusal_of(p.alloc(1, 3, keys(3, 4), first=1, open_=False)).code


def layout_mismatch() -> ErrorCode | None:
    """Bytes that mean something else."""
    return refusal_of(ReceiverWorld().stranger().hello(layout="fp8")).code


def protocol_version() -> ErrorCode | None:
    """A peer of another time."""
    return refusal_of(ReceiverWorld().stranger().hello(protocol_version=99)).code


def protocol_error() -> ErrorCode | None:
    """A write of what was never allocated."""
    p = ReceiverWorld().connect()
    p.alloc(1, 1)
    return refusal_of(p.done(1, 0, 1)).code


def no_session() -> ErrorCode | None:
    """No Hello before."""
    return refusal_of(ReceiverWorld().stranger().alloc(1, 1)).code


def claimed() -> ErrorCode | None:
    """Somebody reads it."""
    world = ReceiverWorld()
    world.connect().complete(1, keys(1))
    world.claim("req-1")
    return refused_claim(world.claim("req-1", claim=2))


def ambiguous_request() -> ErrorCode | None:
    """Two of this name."""
    world = ReceiverWorld()
    world.connect("a").alloc(1, 1)
    world.connect("b").alloc(1, 1)
    return refused_claim(world.claim("req-1"))


def cancelled() -> ErrorCode | None:
    """The engine asked for it."""
    world = SenderWorld()
    world.open(1, 1)
    return finished(world.feed(RequestCancelled("req-1")))[1]


def peer_lost() -> ErrorCode | None:
    """Nobody answers."""
    world = SenderWorld()
    world.open(1, 1)
    return finished(world.pass_time(5.0))[1]


def transport_failed() -> ErrorCode | None:
    """The wire broke."""
    world = SenderWorld()
    p = world.connect()
    p.admit(1, 1)
    return finished(world.feed(sev.EndpointBroken("decode-0", p.endpoint, "broken")))[1]


def request_timeout() -> ErrorCode | None:
    """The request took too long."""
    world = SenderWorld(request_timeout_s=1.0)
    world.open(1, 1)
    return finished(world.pass_time(1.0))[1]


def claim_timeout() -> ErrorCode | None:
    """The engine waited long enough."""
    world = ReceiverWorld()
    world.claim("req-1", timeout_s=1.0)
    return refused_claim(world.pass_time(1.0))


def no_progress() -> ErrorCode | None:
    """It held room and did nothing while others waited."""
    world = ReceiverWorld(slots=1, progress_timeout_s=5.0)
    p = world.connect()
    p.alloc(1, 1)
    p.alloc(2, 1)
    (revoke,) = revoked_in(world.pass_time(5.0))
    return revoke.reason


def ready_expired() -> ErrorCode | None:
    """Nobody came for it."""
    world = ReceiverWorld(ready_ttl_s=5.0)
    p = world.connect()
    p.complete(1, keys(1))
    world.pass_time(5.0)
    return refusal_of(p.alloc(1, 1, keys(1), last=True)).code


def checksum_mismatch() -> ErrorCode | None:
    """What has landed is not what was sent."""
    world = ReceiverWorld(verify="xxh3")
    p = world.connect()
    p.alloc(1, 1, keys(0), last=True)
    message = WriteDone(SENDER_INCARNATION, RECEIVER_INCARNATION, 99, 1, 0, 0, 1, (7,))
    p.say(message)
    return refusal_of(world.feed(rev.ChunksVerified(p.id(1), message, 1))).code


SCENARIOS: list[Callable[[], ErrorCode | None]] = [
    legacy_sender,
    too_large,
    queue_full,
    draining,
    admission_timeout,
    overflow,
    underflow,
    total_mismatch,
    batch_overlap,
    layout_mismatch,
    protocol_version,
    protocol_error,
    no_session,
    claimed,
    ambiguous_request,
    cancelled,
    peer_lost,
    transport_failed,
    request_timeout,
    claim_timeout,
    no_progress,
    ready_expired,
    checksum_mismatch,
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_each_code_is_said_where_its_name_says(scenario: Callable[[], ErrorCode | None]) -> None:
    """An operator reads the code first; a wrong one sends them the wrong way."""
    assert scenario() is ErrorCode(scenario.__name__)


def test_no_code_is_left_out() -> None:
    """`revoked` is what a client may say of any revocation."""
    said = {ErrorCode(scenario.__name__) for scenario in SCENARIOS}
    assert set(ErrorCode) - said == {ErrorCode.REVOKED}


def test_a_code_is_an_exception_of_the_kind_that_says_who_must_act() -> None:
    """Refused, asked for, or failed."""
    kinds = {code: type(transfer_error(code)) for code in ErrorCode}
    assert kinds[ErrorCode.TOO_LARGE] is AdmissionRefused
    assert kinds[ErrorCode.CANCELLED] is TransferCancelled
    assert kinds[ErrorCode.NO_PROGRESS] is TransferFailed
    assert str(transfer_error(ErrorCode.REVOKED)) == "revoked"
    assert str(transfer_error(ErrorCode.REVOKED, "why")) == "revoked: why"


def test_a_transfer_that_has_ended_well_has_no_code() -> None:
    """Success is not an error."""
    world = SenderWorld()
    p = world.connect()
    p.admit(1, 1)
    p.stage(1, 0, keys(1), last=True)
    world.fill(1, 0)
    assert finished(p.ack(sent(world.land(1, 0), WriteDone))) == {1: None}
