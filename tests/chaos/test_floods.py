"""Peers that ask for far too much of a real receiver: it stays within its bounds, and everybody else is served."""

from __future__ import annotations

from typing import Final

import pytest
import trio
from e2e.control import Stranger
from e2e.daemons import Daemon, Fleet
from e2e.payloads import make_request, receive, send, stage
from service.worlds import ELSEWHERE, Request, World, run_in_virtual_time, transfer

from kvpd.client import ReceiverLink, SenderLink
from kvpd.core.messages import (
    PROTOCOL_VERSION,
    Ack,
    AllocRequest,
    AllocResponse,
    CancelNotif,
    ErrorInfo,
    Heartbeat,
    Hello,
    Welcome,
    WriteDone,
    decode,
    encode,
)
from kvpd.errors import ErrorCode

pytestmark = pytest.mark.timeout(300)  # seconds; a machine may be busy
CHUNK: Final = 65536
HELLOS: Final = 10_000
MINE: Final = 7  # the stranger's incarnation


def hello(number: int, chunk_bytes: int = CHUNK) -> Hello:
    """A greeting from a sender that nobody has heard of."""
    return Hello(MINE + number, 0, 1 + number, PROTOCOL_VERSION, f"name-{number}", chunk_bytes, "", 0, ELSEWHERE)


def greet(stranger: Stranger) -> Welcome:
    """A session of the stranger's own."""
    stranger.send(hello(0))
    answer = stranger.receive()
    assert isinstance(answer, Welcome)
    return answer


def move(prefill: SenderLink, decode: ReceiverLink, receiver: Daemon, req_id: str) -> None:
    """A normal request, which must work whatever strangers do."""
    request = make_request(req_id, 3)
    send(prefill, request, receiver.address)
    assert receive(decode, req_id) == request.hashes


def test_ten_thousand_hellos_from_one_peer_leave_one_session_and_no_memory(fleet: Fleet) -> None:
    """Each makes the one before void: a worker is made only for who is still there when its turn comes."""
    receiver, sender = fleet.pair()
    resident, descriptors = [], []
    with (
        sender.sender_link() as prefill,
        receiver.receiver_link() as reader,
        Stranger(receiver.address, b"many names", queue=2 * HELLOS) as stranger,
    ):
        for round_number in range(3):
            numbers = range(round_number * HELLOS, (round_number + 1) * HELLOS)
            for number in numbers:
                stranger.send(hello(number))
            move(prefill, reader, receiver, f"meanwhile-{round_number}")
            last = hello(numbers[-1])
            while not any(
                isinstance(answer, Welcome) and answer.sender_incarnation == last.sender_incarnation
                for answer in stranger.receive_waiting()
            ):
                stranger.send(last)  # as a sender does whose answer was dropped with the others
            assert receiver.metrics()["kvpd_sessions"] == 2
            resident.append(receiver.resident_bytes())
            descriptors.append(receiver.descriptors())
    assert resident[2] - resident[0] < 16 << 20
    assert descriptors[2] - descriptors[0] < 8
    receiver.stop()


async def greet_from_everywhere() -> None:
    """More senders than a receiver takes, each on a channel of its own; then they are silent."""
    many = 1100
    async with World() as world, world.receiver() as receiver, world.sender() as sender:
        with trio.fail_after(3600):
            await transfer(sender, receiver, Request("before", 4))
            answers: dict[str, int] = {}
            async with trio.open_nursery() as nursery:

                async def greet_once(number: int) -> None:
                    async with world.control.connect(receiver.address, b"channel %d" % number) as client:
                        client.send_nowait(encode(hello(number, receiver.config.chunk_bytes)))
                        answer = decode(await client.receive())
                        kind = answer.error.code if isinstance(answer, Ack) and answer.error else "welcome"
                        answers[kind] = answers.get(kind, 0) + 1

                for number in range(many):
                    nursery.start_soon(greet_once, number)
            limit = receiver.core.settings.sessions_max
            assert answers == {"welcome": limit - 1, ErrorCode.QUEUE_FULL: many - limit + 1}
            assert receiver.core.session_count == limit
            await transfer(sender, receiver, Request("meanwhile", 4))
            await world.until(receiver, lambda: receiver.core.session_count == 1)
            await transfer(sender, receiver, Request("after", 4))


def test_there_is_a_limit_to_sessions_and_silence_ends_them() -> None:
    """Each has a worker, memory and descriptors: who greets once too often is told when to ask again."""
    run_in_virtual_time(greet_from_everywhere)


def test_requests_above_the_queues_depth_are_refused_at_once(fleet: Fleet) -> None:
    """A queue without a bound is memory without a bound, and a wait that nobody survives."""
    receiver, sender = fleet.pair({"slots": 4, "queue_depth_max": 8, "lease_s": 2, "put_deadline_s": 0.5})
    flood = 3000
    before = receiver.resident_bytes()
    with Stranger(receiver.address, b"greedy", queue=2 * flood) as stranger:
        incarnation = greet(stranger).receiver_incarnation
        for number in range(1, flood + 1):
            request = AllocRequest(MINE, incarnation, 100 + number, number, f"flood-{number}", True, (), False, 4, 0, 0)
            stranger.send(request)
        refused: list[ErrorInfo] = []
        told_to_wait = 0
        while len(refused) < flood - 9:  # one holds the room, eight wait
            answer = stranger.receive()
            if isinstance(answer, Ack):
                told_to_wait += 1
                continue
            assert isinstance(answer, AllocResponse)
            if answer.error is not None:
                refused.append(answer.error)
        assert told_to_wait == 8
        assert {error.code for error in refused} == {ErrorCode.QUEUE_FULL}
        assert all(error.retry_after_s for error in refused)
        assert receiver.metrics()["kvpd_queued_transfers"] == 8
        assert receiver.slots() == {"reserved": 4}
    receiver.wait_for("session_ended", code="peer_lost")
    with sender.sender_link() as prefill, receiver.receiver_link() as reader:
        move(prefill, reader, receiver, "after")
    receiver.wait_until(lambda: receiver.slots() == {"free": 4}, "every slot free")
    assert receiver.resident_bytes() - before < 16 << 20


def test_a_peer_that_claims_another_s_transfers_touches_none_of_them(fleet: Fleet) -> None:
    """Fault 19: transfers belong to the session of their sender, and numbers are no secret."""
    receiver, sender = fleet.pair()
    request = make_request("mine", 8)
    with (
        sender.sender_link() as prefill,
        receiver.receiver_link() as reader,
        Stranger(receiver.address, b"thief") as thief,
    ):
        there = greet(thief).receiver_incarnation
        with prefill.open("mine", receiver=receiver.address, total_chunks=8) as transfer:
            stage(transfer, request, 0, 4)
            receiver.wait_for("chunks_written")
            whose = str(receiver.said("transfer_queued", req_id="mine")[0]["transfer"])
            sender_id, incarnation, number = whose.rsplit("/", 2)
            assert sender_id == "sender"
            victim = int(number)
            for me in (MINE, int(incarnation, 0) if incarnation.isdigit() else int(incarnation, 16)):
                header = (me, there)
                thief.send(AllocRequest(*header, 50, victim, "mine", False, (b"x",), False, 8, 4, CHUNK))
                thief.send(WriteDone(*header, 51, victim, 0, 0, 8))
                thief.send(CancelNotif(*header, 52, victim, (), ErrorCode.CANCELLED, True))
                thief.send(CancelNotif(*header, 53, victim, (), ErrorCode.CANCELLED, True))
                thief.send(Heartbeat(*header, 54, 1 << 40))
            answers = [thief.receive() for _ in range(9)]
            assert all(isinstance(answer, Ack | AllocResponse) for answer in answers)
            assert receiver.slots() == {"ready": 4, "reserved": 4, "free": 8}
            stage(transfer, request, 4, 4)
        assert receive(reader, "mine") == request.hashes
        receiver.wait_quiet()
    assert receiver.slots() == {"free": 16}
