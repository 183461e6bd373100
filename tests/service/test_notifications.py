"""What the proxy is told: after everything has landed, once when it answers, again until it does."""

from __future__ import annotations

import msgspec
import pytest
import trio
import zmq

from kvpd.core.messages import ProxyAck, ProxyNotif, decode, encode
from kvpd.errors import AdmissionRefused, ErrorCode, TransferCancelled
from kvpd.transports.zmq import ZmqControl

from .worlds import Proxy, Request, World, in_virtual_time, send, stage, take, transfer


@in_virtual_time
async def test_the_proxy_is_told_once_and_only_when_the_receiver_is_ready(world: World) -> None:
    """Invariant 6: a proxy that is told earlier sends the decode request before its KV."""
    async with world.control.serve(world.address_of("proxy")) as server:
        proxy = Proxy(server)
        async with (
            world.receiver() as receiver,
            world.sender(proxy_address=proxy.address) as sender,
            trio.open_nursery() as nursery,
        ):

            def ready(notification: ProxyNotif) -> None:
                assert receiver.core.counts.ready == 6
                assert receiver.core.counts.writing == 0

            nursery.start_soon(proxy.run, ready)
            await send(sender, receiver.address, Request("one", 6, batch=2))
            await proxy.heard.wait()
            await take(receiver, Request("one", 6))
            await world.until_clean(sender, receiver)
            await trio.sleep(60)
            (told,) = proxy.notifications
            assert (told.req_id, told.receiver_id, told.sender_id) == ("one", "decode", "prefill")
            nursery.cancel_scope.cancel()


@in_virtual_time
async def test_a_notification_is_repeated_until_it_is_acknowledged(world: World) -> None:
    """The proxy restarts, the Ack is lost: a request that is never announced is never decoded."""
    async with world.control.serve(world.address_of("proxy")) as server:
        proxy = Proxy(server, deaf=3)
        async with (
            world.receiver() as receiver,
            world.sender(proxy_address=proxy.address) as sender,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(proxy.run)
            await transfer(sender, receiver, Request("one", 2))
            await world.until_clean(sender, receiver)
            assert len(proxy.notifications) == 4
            assert len(set(proxy.notifications)) == 1, "a repeat is the same message"
            nursery.cancel_scope.cancel()


@in_virtual_time
async def test_a_proxy_that_is_not_there_yet_is_told_when_it_comes(world: World) -> None:
    """Fault 16: the request is done all the same, and nobody waits for the proxy."""
    address = "127.0.0.1:9" if world.transport == "memory" else "inproc://proxy"
    async with world.receiver() as receiver, world.sender(proxy_address=address) as sender:
        await transfer(sender, receiver, Request("one", 2))
        assert trio.current_time() < 1.0
        await trio.sleep(20)
        async with world.control.serve(address) as server, trio.open_nursery() as nursery:
            proxy = Proxy(server)
            nursery.start_soon(proxy.run)
            await world.until_clean(sender, receiver)
            assert {told.req_id for told in proxy.notifications} == {"one"}
            nursery.cancel_scope.cancel()


@in_virtual_time
async def test_a_proxy_that_never_answers_is_given_up_and_counted(memory_world: World) -> None:
    """Everything is bounded: notifications of a proxy that is gone for good do not pile up."""
    world = memory_world
    async with world.receiver() as receiver, world.sender(proxy_address="127.0.0.1:9") as sender:
        await transfer(sender, receiver, Request("one", 2))
        await world.until_clean(sender, receiver)
        assert trio.current_time() > 300
        dropped = [v for k, v in sender.metrics.snapshot().items() if "notif" in k and "dropped" in k]
        assert dropped == [1.0]


@in_virtual_time
async def test_a_request_may_name_its_own_proxy(world: World) -> None:
    """Several proxies share the engines: each hears of its own requests and of no others."""
    async with (
        world.control.serve(world.address_of("usual")) as usual,
        world.control.serve(world.address_of("own")) as own,
        world.receiver() as receiver,
        world.sender(proxy_address=usual.address) as sender,
        trio.open_nursery() as nursery,
    ):
        proxies = Proxy(usual), Proxy(own)
        for proxy in proxies:
            nursery.start_soon(proxy.run)
        await send(sender, receiver.address, Request("theirs", 2))
        await send(sender, receiver.address, Request("mine", 2), notify=own.address)
        await take(receiver, Request("theirs", 2))
        await take(receiver, Request("mine", 2))
        await world.until_clean(sender, receiver)
        assert [[told.req_id for told in proxy.notifications] for proxy in proxies] == [["theirs"], ["mine"]]
        nursery.cancel_scope.cancel()


@in_virtual_time
async def test_a_request_that_failed_is_told_as_failed_and_never_as_ready(world: World) -> None:
    """A proxy that believed it were ready would decode from nothing; one that heard nothing would wait."""
    async with (
        world.control.serve(world.address_of("proxy")) as server,
        world.receiver() as receiver,
        world.sender(proxy_address=server.address) as sender,
        trio.open_nursery() as nursery,
    ):
        proxy = Proxy(server)
        nursery.start_soon(proxy.run)

        async def break_off() -> None:
            async with sender.open("gone", receiver=receiver.address, total_chunks=4) as moving:
                await stage(moving, Request("gone", 4), range(2))
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await break_off()
        await world.until_clean(sender, receiver)
        await trio.sleep(60)
        assert proxy.notifications == []
        assert [(told.req_id, told.error.code) for told in proxy.failures] == [("gone", ErrorCode.CANCELLED)]
        nursery.cancel_scope.cancel()


@in_virtual_time
async def test_a_refusal_is_told_while_its_engine_still_computes(world: World) -> None:
    """The engine learns of it at its next call, which may be a long prompt away; the client need not wait for that."""
    async with (
        world.control.serve(world.address_of("proxy")) as server,
        world.receiver(slots=4) as receiver,
        world.sender() as sender,
        trio.open_nursery() as nursery,
    ):
        proxy = Proxy(server)
        nursery.start_soon(proxy.run)
        with pytest.raises(AdmissionRefused):
            async with sender.open("vast", receiver=receiver.address, total_chunks=5, notify=proxy.address):
                await proxy.heard.wait()  # would wait for ever if leaving, which ends the transfer, came first
        (told,) = proxy.failures
        assert (told.req_id, told.receiver, told.sender_id) == ("vast", receiver.address, "prefill")
        assert told.error.code is ErrorCode.TOO_LARGE
        assert "5 chunks" in told.error.detail
        await world.until_clean(sender, receiver)
        nursery.cancel_scope.cancel()


@in_virtual_time
async def test_a_failure_is_repeated_until_a_proxy_that_was_away_has_heard_it(world: World) -> None:
    """It was down just then: its client waits all the same."""
    async with world.control.serve(world.address_of("proxy")) as server:
        proxy = Proxy(server, deaf=2)
        async with (
            world.receiver() as receiver,
            world.sender(proxy_address=proxy.address) as sender,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(proxy.run)
            with pytest.raises(TransferCancelled):
                async with sender.open("gone", receiver=receiver.address, total_chunks=4):
                    sender.cancel("gone")
            await world.until_clean(sender, receiver)
            assert len(proxy.failures) == 3
            assert len(set(proxy.failures)) == 1, "a repeat is the same message"
            assert sender.metrics.snapshot()['kvpd_notifications_total{outcome="sent"}'] == 1
            nursery.cancel_scope.cancel()


@in_virtual_time
async def test_a_proxy_that_talks_nonsense_is_no_danger(world: World) -> None:
    """Bytes, messages of other kinds and acknowledgements of what was never sent: counted, and the rest goes on."""
    async with (
        world.control.serve(world.address_of("proxy")) as server,
        world.receiver() as receiver,
        world.sender(proxy_address=server.address) as sender,
    ):
        await transfer(sender, receiver, Request("one", 2))
        peer, frame = await server.receive()
        told = decode(frame)
        assert isinstance(told, ProxyNotif)
        wrong = (
            ProxyAck(told.sender_incarnation + 1, told.message_id),
            ProxyAck(told.sender_incarnation, told.message_id + 99),
            told,
        )
        for answer in (b"", b"\xff" * 100, *(encode(message) for message in wrong)):
            server.send_nowait(peer, answer)
        await trio.sleep(0.5)
        assert sender.core.notifications_pending == 1
        server.send_nowait(peer, encode(ProxyAck(told.sender_incarnation, told.message_id)))
        await world.until_clean(sender, receiver)


@in_virtual_time
async def test_a_proxy_that_binds_pull_is_told_once_without_an_answer() -> None:
    """`notify = "push"` is for the reference's proxies; nothing is kept for their acknowledgement."""
    async with (
        World("zmq") as world,
        world.receiver() as receiver,
        world.sender(notify="push", proxy_address="inproc://proxy") as sender,
    ):
        control = world.control
        assert isinstance(control, ZmqControl)
        with control._context.socket(zmq.PULL) as pull:
            pull.bind("inproc://proxy")
            await transfer(sender, receiver, Request("one", 2))
            await world.until_clean(sender, receiver)
            told = msgspec.msgpack.decode(pull.recv(zmq.DONTWAIT))
            assert (told["type"], told["req_id"]) == ("ProxyNotif", "one")
            with pytest.raises(TransferCancelled):
                async with sender.open("gone", receiver=receiver.address, total_chunks=1):
                    sender.cancel("gone")
            await world.until_clean(sender, receiver)
            with pytest.raises(zmq.Again):  # what failed is not pushed: it would be taken for ready
                pull.recv(zmq.DONTWAIT)
