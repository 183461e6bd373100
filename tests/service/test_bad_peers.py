"""Peers that talk nonsense, speak another version or are not there: a typed error for them, nothing for the others."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
import trio

from kvpd.core.messages import (
    PROTOCOL_VERSION,
    Ack,
    AllocRequest,
    AllocResponse,
    CancelNotif,
    ErrorInfo,
    Heartbeat,
    Hello,
    HostIdentity,
    PeerMessage,
    Region,
    Welcome,
    WriteDone,
    decode,
    encode,
)
from kvpd.errors import ErrorCode, LocalProtocolError
from kvpd.service.host import own_host

from .worlds import CHUNK_BYTES, Request, World, ask, in_virtual_time, refused, send, stage, take, transfer

HELLO = Hello(
    sender_incarnation=7,
    receiver_incarnation=0,
    message_id=1,
    protocol_version=PROTOCOL_VERSION,
    sender_id="stranger",
    chunk_bytes=CHUNK_BYTES,
    layout="",
    oldest_live=0,
    host=HostIdentity("elsewhere"),
)

# ------------------------------------------------------------------ at the receiver


@in_virtual_time
async def test_rubbish_at_the_receivers_door_disturbs_nobody(world: World) -> None:
    """P03, P04: bytes that are no message, and messages that are none of a sender's, while requests are running."""
    chance = random.Random(1)
    rubbish = [b"", b"\x00", b"\xc0", b"\x93\x01\x02\x03", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 5000]
    rubbish += [chance.randbytes(chance.randrange(1, 400)) for _ in range(300)]
    rubbish.append(encode(Ack(1, 1, 1)))
    async with world.receiver() as receiver, world.sender() as sender, trio.open_nursery() as nursery:
        nursery.start_soon(transfer, sender, receiver, *(Request(f"r{number}", 8, batch=2) for number in range(6)))
        await ask(world.control, receiver.address, *rubbish)
    snapshot = receiver.metrics.snapshot()
    assert sum(v for k, v in snapshot.items() if "dropped" in k and "malformed" in k) >= 300


@in_virtual_time
async def test_a_session_ends_at_its_peers_first_nonsense(world: World) -> None:
    """Whoever breaks the protocol once cannot be trusted with what it says next; all that it held is free."""
    reserve = _alloc(transfer_no=1, total_chunks=6)
    async with world.receiver() as receiver, world.sender() as sender:
        async with world.control.connect(receiver.address, b"stranger") as client:
            welcome = await _welcome(client)
            client.send_nowait(encode(_meant(reserve, welcome)))
            assert isinstance(decode(await client.receive()), AllocResponse)
            assert receiver.core.counts.reserved == 6
            client.send_nowait(b"\xc1 nonsense")
            answer = decode(await client.receive())
            assert isinstance(answer, Ack)
            assert answer.error is not None
            assert answer.error.code is ErrorCode.PROTOCOL_ERROR
        await world.until(receiver, lambda: receiver.core.is_clean)
        await transfer(sender, receiver, Request("next", 10))


@pytest.mark.parametrize(
    ("changes", "code", "names"),
    [
        ({"protocol_version": 99}, ErrorCode.PROTOCOL_VERSION, ("99", str(PROTOCOL_VERSION))),
        ({"chunk_bytes": 4096}, ErrorCode.LAYOUT_MISMATCH, ("4096", str(CHUNK_BYTES))),
        ({"layout": "theirs"}, ErrorCode.LAYOUT_MISMATCH, ("theirs", "''")),
        ({"sender_id": ""}, ErrorCode.PROTOCOL_ERROR, ("name",)),
    ],
)
@in_virtual_time
async def test_a_hello_that_does_not_fit_is_refused_with_both_values(
    world: World, changes: dict[str, Any], code: ErrorCode, names: tuple[str, ...]
) -> None:
    """Whoever reads the log of either side must see what to change."""
    async with world.receiver() as receiver:
        (answer,) = await ask(world.control, receiver.address, msgspec.structs.replace(HELLO, **changes))
        assert isinstance(answer, Ack)
        assert answer.error is not None
        assert answer.error.code is code
        assert all(name in answer.error.detail for name in names)


@pytest.mark.parametrize("pid", [0, 2**31 - 1])
@in_virtual_time
async def test_a_process_that_cannot_be_watched_gets_no_session(world: World, pid: int) -> None:
    """It claims to run on this host, under a pid that no process can have: no fence could ever prove it dead."""
    here = own_host()
    hello = msgspec.structs.replace(HELLO, host=HostIdentity(here.boot_id, here.pid_namespace, pid, 1))
    async with world.receiver() as receiver, world.sender() as sender:
        *_, answer = await ask(world.control, receiver.address, hello)
        assert isinstance(answer, Ack)
        assert answer.error is not None
        assert receiver.core.session_count == 0
        await transfer(sender, receiver, Request("next", 4))


@in_virtual_time
async def test_messages_without_a_session_are_told_so(world: World) -> None:
    """Fault 19: a stranger can neither cancel nor finish what is not its own."""
    messages: list[PeerMessage] = [
        _alloc(transfer_no=1, total_chunks=3),
        WriteDone(7, 8, 3, transfer_no=1, rank=0, first_chunk=0, count=1),
        CancelNotif(7, 8, 4, transfer_no=1, keys=(), reason=ErrorCode.CANCELLED, drained=True),
        Heartbeat(7, 8, 5, oldest_live=1),
    ]
    async with world.receiver() as receiver, world.sender() as sender:
        async with sender.open("r", receiver=receiver.address, total_chunks=2) as moving:
            await stage(moving, Request("r", 2), range(1))
            answers = await ask(world.control, receiver.address, *messages)
            codes = [answer.error.code for answer in answers if isinstance(answer, Ack) and answer.error is not None]
            assert codes == [ErrorCode.NO_SESSION] * len(messages)
            await stage(moving, Request("r", 2), range(1, 2))
        await take(receiver, Request("r", 2))
        await world.until_clean(sender, receiver)


@pytest.mark.parametrize(
    ("total_chunks", "req_id", "code"),
    [
        (0, "r", ErrorCode.LEGACY_SENDER),
        (-5, "r", ErrorCode.LEGACY_SENDER),
        (3, "", ErrorCode.LEGACY_SENDER),
        (11, "r", ErrorCode.TOO_LARGE),
        (1 << 40, "r", ErrorCode.TOO_LARGE),
    ],
)
@in_virtual_time
async def test_what_can_never_be_admitted_is_refused_at_once(
    world: World, total_chunks: int, req_id: str, code: ErrorCode
) -> None:
    """Fault 4, and requests that no buffer of this size will ever hold."""
    async with world.receiver(slots=10) as receiver:
        async with world.control.connect(receiver.address, b"stranger") as client:
            welcome = await _welcome(client)
            request = msgspec.structs.replace(_alloc(transfer_no=1, total_chunks=total_chunks), req_id=req_id)
            client.send_nowait(encode(_meant(request, welcome)))
            answer = decode(await client.receive())
            assert isinstance(answer, AllocResponse)
            assert answer.error is not None
            assert answer.error.code is code
        assert receiver.core.is_clean


def _alloc(*, transfer_no: int, total_chunks: int) -> AllocRequest:
    return AllocRequest(
        sender_incarnation=7,
        receiver_incarnation=8,
        message_id=2,
        transfer_no=transfer_no,
        req_id="stranger's",
        open=True,
        keys=(),
        is_last_batch=False,
        total_chunks=total_chunks,
        first_chunk=0,
        last_chunk_bytes=0,
    )


def _meant(message: PeerMessage, welcome: Welcome) -> PeerMessage:
    return msgspec.structs.replace(message, receiver_incarnation=welcome.receiver_incarnation)


async def _welcome(client: Any) -> Welcome:
    client.send_nowait(encode(HELLO))
    welcome = decode(await client.receive())
    assert isinstance(welcome, Welcome)
    return welcome


# ------------------------------------------------------------------ at the sender


@pytest.mark.parametrize(
    ("settings", "code", "names"),
    [
        ({"chunk_bytes": 128}, ErrorCode.LAYOUT_MISMATCH, "128.*64|64.*128"),
        ({"layout": "theirs"}, ErrorCode.LAYOUT_MISMATCH, "theirs"),
    ],
)
@in_virtual_time
async def test_a_receiver_that_does_not_fit_refuses_with_both_values(
    world: World, settings: dict[str, Any], code: ErrorCode, names: str
) -> None:
    """The engine's own error says what differs; and a receiver that does fit is served beside it."""
    async with (
        world.receiver(name="other", **settings) as other,
        world.receiver() as receiver,
        world.sender() as sender,
    ):
        for _ in range(2):
            with refused(code, match=names):
                await send(sender, other.address, Request("r", 2))
        await transfer(sender, receiver, Request("next", 4))
        await world.until_clean(sender, receiver, other)


@in_virtual_time
async def test_a_request_that_is_too_large_is_refused_with_both_numbers(world: World) -> None:
    """At once, with nothing held, and the same session goes on."""
    async with world.receiver(slots=10) as receiver, world.sender() as sender:
        with refused(ErrorCode.TOO_LARGE, match=r"11.*10"):
            await send(sender, receiver.address, Request("r", 11))
        assert trio.current_time() < 1
        await transfer(sender, receiver, Request("next", 10))


@in_virtual_time
async def test_a_receiver_that_is_not_there(world: World) -> None:
    """A deadline, an address in the error, and a later request that finds it works."""
    address = "127.0.0.1:7300" if world.transport == "memory" else "inproc://decode"
    async with world.sender(connect_timeout_s=5) as sender:
        with refused(ErrorCode.PEER_LOST, match=address):
            await send(sender, address, Request("r", 2))
        assert trio.current_time() == pytest.approx(5, abs=0.5)
        async with world.receiver(address=address) as receiver:
            await transfer(sender, receiver, Request("next", 4))
            await world.until_clean(sender, receiver)


@pytest.mark.parametrize("address", ["", "nowhere", "host:", "host:70000", "http://host:1", "0.0.0.0:7300", "host:0"])
@in_virtual_time
async def test_an_address_that_is_none_is_the_callers_error(memory_world: World, address: str) -> None:
    """It is refused before anything is opened, naming the value."""
    async with memory_world.sender() as sender:
        with pytest.raises(LocalProtocolError, match="receiver"):
            await send(sender, address, Request("r", 1))
        with pytest.raises(LocalProtocolError, match="notify"):
            await send(sender, "127.0.0.1:1", Request("r", 1), notify=address)
        assert sender.core.is_clean


WELCOME = Welcome(
    sender_incarnation=0,
    receiver_incarnation=8,
    message_id=0,
    protocol_version=PROTOCOL_VERSION,
    receiver_id="impostor",
    total_chunks=10,
    chunk_bytes=CHUNK_BYTES,
    layout="",
    lease_s=10,
    put_deadline_s=4,
    regions=(Region(0, b"no worker", 0, 10 * CHUNK_BYTES, b"no key"),),
)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"protocol_version": 99}, ErrorCode.PROTOCOL_VERSION),
        ({"chunk_bytes": 65}, ErrorCode.LAYOUT_MISMATCH),
        ({"layout": "x"}, ErrorCode.LAYOUT_MISMATCH),
        ({"total_chunks": 11}, ErrorCode.PROTOCOL_ERROR),
        ({"put_deadline_s": 5}, ErrorCode.PROTOCOL_ERROR),
        ({}, ErrorCode.TRANSPORT_FAILED),  # all is well but the worker's address
    ],
)
@in_virtual_time
async def test_a_welcome_that_cannot_be_is_refused(world: World, changes: dict[str, Any], code: ErrorCode) -> None:
    """A sender believes nothing that would make it write outside of what it was given."""

    async def impostor(server: Any) -> None:
        while True:
            peer, frame = await server.receive()
            hello = decode(frame)
            if isinstance(hello, Hello):
                named = {"sender_incarnation": hello.sender_incarnation, "message_id": hello.message_id}
                server.send_nowait(peer, encode(msgspec.structs.replace(WELCOME, **named, **changes)))

    async with (
        world.control.serve(world.address_of("impostor")) as server,
        world.receiver() as receiver,
        world.sender() as sender,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(impostor, server)
        with refused(code):
            await send(sender, server.address, Request("r", 2))
        await transfer(sender, receiver, Request("next", 4))
        await world.until_clean(sender, receiver)
        nursery.cancel_scope.cancel()


@in_virtual_time
async def test_a_receiver_that_talks_nonsense_loses_its_session(world: World) -> None:
    """Rubbish, answers to what was never asked, messages of other kinds: its requests end, the others' do not."""
    nonsense = [b"", b"\xc0", b"\xff" * 3000, encode(HELLO)]
    async with (
        world.control.serve(world.address_of("mad")) as server,
        world.receiver() as receiver,
        world.sender() as sender,
        trio.open_nursery() as nursery,
    ):

        async def talk() -> None:
            for data in nonsense:
                peer, _ = await server.receive()
                server.send_nowait(peer, data)

        nursery.start_soon(talk)
        for _ in nonsense:
            with refused(ErrorCode.PROTOCOL_ERROR):
                await send(sender, server.address, Request("r", 2))
        assert trio.current_time() < 1.0
        await transfer(sender, receiver, Request("next", 4))
        await world.until_clean(sender, receiver)


@in_virtual_time
async def test_an_answer_with_a_wild_index_is_never_written_to(world: World) -> None:
    """A wrong index would be a write into somebody else's slot."""
    async with (
        world.receiver(slots=10) as real,
        world.sender() as sender,
        world.control.serve(world.address_of("liar")) as server,
        trio.open_nursery() as nursery,
    ):

        async def lie() -> None:
            while True:
                peer, frame = await server.receive()
                message = decode(frame)
                assert isinstance(message, PeerMessage)
                ids = (message.sender_incarnation, 8, message.message_id)
                if isinstance(message, Hello):
                    target = await real._plane.open_target()
                    region = Region(0, target.worker_address, target.base_address, target.length, target.rkey)
                    named = {"sender_incarnation": ids[0], "message_id": ids[2], "regions": (region,)}
                    server.send_nowait(peer, encode(msgspec.structs.replace(WELCOME, **named)))
                elif isinstance(message, AllocRequest):
                    indexes = (10,) * len(message.keys)
                    server.send_nowait(peer, encode(AllocResponse(*ids, message.transfer_no, 0, indexes, ())))

        nursery.start_soon(lie)
        with refused(ErrorCode.PROTOCOL_ERROR, match="does not fit"):
            await send(sender, server.address, Request("r", 2))
        await world.until_clean(sender)
        nursery.cancel_scope.cancel()


def test_errors_cross_the_wire_whole() -> None:
    """What the receiver knows of the reason, the sender's engine is told."""
    error = ErrorInfo(ErrorCode.QUEUE_FULL, "1024 wait", 2.5)
    assert decode(encode(Ack(1, 2, 3, error))) == Ack(1, 2, 3, error)
