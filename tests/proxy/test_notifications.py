"""The port that senders notify: each notification is acknowledged and acted on once, and junk changes nothing."""

from __future__ import annotations

import random

import msgspec
import trio
import zmq

from kvpd.core.messages import Ack, encode
from kvpd.errors import ErrorCode
from kvpd.transports.addresses import parse_address

from .engines import Call, Sender, answer
from .stacks import Stack, stack


async def serves(s: Stack) -> None:
    """A request still goes all the way, and the listener still counts for readiness."""
    with trio.fail_after(10):
        assert (await s.ask({"prompt": "a"})).status == 200
        assert b"[+] task hear_notifications: runs\n" in (await s.get("/readyz?verbose")).body


async def test_a_notification_is_acknowledged_with_its_own_numbers() -> None:
    """A sender repeats it until then."""
    async with stack() as s:
        notif = s.sender.send("nobody waits for this")
        ack = await s.sender.wait_ack()
        await s.wait_metric('kvpd_notifications_received_total{outcome="unknown"}', 1)
    assert (ack.sender_incarnation, ack.message_id) == (notif.sender_incarnation, notif.message_id)


async def test_a_repeated_notification_is_acknowledged_again_and_counts_once() -> None:
    """The acknowledgement may have been lost; the transfer is still the same one."""
    async with stack() as s:
        s.prefill.behave = lambda call: call.whole(answer("x"))
        async with trio.open_nursery() as clients:
            clients.start_soon(s.ask, {"prompt": "a"})
            call = await s.prefill.wait_calls(1)
            for _ in range(3):
                s.sender.send(call.transfer["transfer_id"], transfer_no=5)
            for _ in range(3):
                await s.sender.wait_ack()
        assert s.metric('kvpd_notifications_received_total{outcome="matched"}') == 1
        assert s.metric('kvpd_notifications_received_total{outcome="repeated"}') == 2
        assert [call.json.get("max_tokens") for call in s.decode.calls] == [None]


async def test_a_repeated_failure_is_acknowledged_again_and_counts_once() -> None:
    """It is repeated like any other notification, and must not cost the second try that it led to."""
    async with stack(prefills=2, policy="round_robin") as s:
        failing = s.prefills[0]
        failing.behave = lambda call: call.whole(answer("x"))
        async with trio.open_nursery() as clients:
            clients.start_soon(s.ask, {"prompt": "a"})
            call = await failing.wait_calls(1)
            told = [s.sender.fail(call.transfer["transfer_id"], ErrorCode.REVOKED, transfer_no=5) for _ in range(3)]
            acks = [await s.sender.wait_ack() for _ in range(3)]
        assert [ack.message_id for ack in acks] == [notif.message_id for notif in told]
        assert s.metric('kvpd_notifications_received_total{outcome="repeated"}') == 2
        assert s.metric("kvpd_retries_total") == 1
        assert [len(engine.calls) for engine in s.prefills] == [1, 1]


async def test_the_first_word_about_a_transfer_counts() -> None:
    """Two that contradict each other come from no sender of ours: the request has gone on by the first."""
    async with stack() as s:

        async def behave(call: Call) -> None:
            s.sender.send(call.transfer["transfer_id"], transfer_no=5)
            s.sender.fail(call.transfer["transfer_id"], ErrorCode.REVOKED, transfer_no=5)  # the same transfer
            s.sender.fail(call.transfer["transfer_id"], ErrorCode.REVOKED, transfer_no=6)  # the same label
            await s.wait_metric('kvpd_notifications_received_total{outcome="matched"}', 2)
            await call.whole(answer("x"))

        s.prefill.behave = behave
        assert (await s.ask({"prompt": "a"})).status == 200
        assert s.metric('kvpd_notifications_received_total{outcome="repeated"}') == 1
        assert s.metric("kvpd_retries_total") == 0


async def test_the_same_number_of_another_sender_or_another_life_is_another_transfer() -> None:
    """Numbers begin anew with each start of a sender."""
    others = [Sender("sender-1", 7), Sender("sender-0", 8)]
    async with stack() as s:
        s.sender.send("a", transfer_no=1)
        for other in others:
            async with other.connected(s.proxy.notify_address):
                other.send("a", transfer_no=1)
                await other.wait_ack()
        await s.wait_metric('kvpd_notifications_received_total{outcome="unknown"}', 3)


async def test_p02_http_at_the_notification_port_ends_nothing() -> None:
    """Somebody will mix the two ports up."""
    async with stack() as s:
        address = parse_address(s.proxy.notify_address)
        async with await trio.open_tcp_stream(address.host, address.port) as stream:
            await stream.send_all(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
            with trio.move_on_after(0.2):
                await stream.receive_some(1000)
        await serves(s)


async def test_p03_frames_of_any_number_and_size_end_nothing() -> None:
    """A tuple unpacked from what a peer sent is a peer's way to stop us."""
    rng = random.Random(3)
    async with stack() as s:
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        socket.linger = 1000
        with socket:
            socket.connect(s.proxy.notify_address)
            for _ in range(500):
                frames = [rng.randbytes(rng.choice((0, 1, 7, 4096))) for _ in range(rng.randrange(1, 13))]
                await trio.to_thread.run_sync(socket.send_multipart, frames)
            await s.wait_metric('kvpd_messages_dropped_total{reason="malformed"}', 500)
        await serves(s)


async def test_p05_messages_that_are_none_end_nothing() -> None:
    """Valid msgpack of the wrong shape, a message for somebody else, and one beyond every bound."""
    async with stack() as s:
        junk = [
            b"\x93\x01\x02\x03",
            b"",
            b"\xc0",
            encode(Ack(1, 2, 3)),
            msgspec.msgpack.encode(["ProxyNotif", "x" * 9999]),
        ]
        for frame in junk:
            s.sender.send_junk(frame)
        await s.wait_metric('kvpd_messages_dropped_total{reason="malformed"}', len(junk))
        await serves(s)
