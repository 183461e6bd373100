"""Outages of others, reported in public, as they would happen here. Each test bears the number of its row.

Those that are about waiting run in virtual time over memory transports; those about processes have real ones.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from typing import Any, Final

import pytest
import trio
from e2e.control import Stranger
from e2e.daemons import DEADLINE_S, Daemon, Fleet, in_background
from e2e.payloads import Request as Payload
from e2e.payloads import make_request, receive, stage
from e2e.payloads import send as send_payload
from service.worlds import ELSEWHERE, Request, World, run_in_virtual_time, send, take, transfer
from service.worlds import stage as stage_chunks

from kvpd.core.messages import PROTOCOL_VERSION, Hello, Welcome
from kvpd.errors import ErrorCode, KvpdError, TransferError

pytestmark = pytest.mark.timeout(300)  # seconds; a machine may be busy
LIMIT_S: Final = 3600.0
CHUNK: Final = 65536


def test_p53_a_lease_lasts_as_long_as_its_sender_waits() -> None:
    """Elsewhere waiting longer than a lease, alive, lost the blocks, and the reader waited for them for ever."""

    async def main() -> None:
        async with (
            World() as world,
            world.receiver(slots=4, allocation_timeout_s=600, lease_s=10) as receiver,
            world.sender(name="a") as holder,
            world.sender(name="b") as waiting,
            trio.open_nursery() as nursery,
        ):
            with trio.fail_after(LIMIT_S):
                async with holder.open("first", receiver=receiver.address, total_chunks=4) as moving:
                    await world.until(receiver, lambda: receiver.core.counts.reserved == 4)
                    nursery.start_soon(transfer, waiting, receiver, Request("second", 4))
                    await world.until(receiver, lambda: receiver.core.queue_depth == 1)
                    for _ in range(20):
                        await trio.sleep(2.0)
                        moving.touch()
                    await stage_chunks(moving, Request("first", 4), range(4))
                await take(receiver, Request("first", 4))
                await world.until_clean(holder, waiting, receiver)

    run_in_virtual_time(main)


def claim_in_vain(receiver: Daemon, req_id: str, codes: list[ErrorCode]) -> None:
    """A decode engine that waits for what will never be complete."""
    with receiver.receiver_link() as decode:
        try:
            receive(decode, req_id, timeout=DEADLINE_S)
        except TransferError as exc:
            codes.append(exc.code)


def test_p54_a_sender_s_death_ends_its_own_requests_and_leaves_the_receiver_ready(fleet: Fleet) -> None:
    """Elsewhere the decode side's health went down with a prefill node, and it was restarted, healthy as it was."""
    receiver, doomed = fleet.pair({"slots": 64, "lease_s": 600}, {"slots": 32})
    other = fleet.sender("other").wait_ready()
    codes: list[ErrorCode] = []
    with contextlib.ExitStack() as stack:
        prefill = stack.enter_context(doomed.sender_link())
        for number in range(4):
            stack.enter_context(pytest.raises(KvpdError))
            open_ = prefill.open(f"cut-{number}", receiver=receiver.address, total_chunks=8)
            stage(stack.enter_context(open_), make_request(f"cut-{number}", 8), 0, 4)
        receiver.wait_for("chunks_written", 4)
        claims = [threading.Thread(target=claim_in_vain, args=(receiver, f"cut-{n}", codes)) for n in range(4)]
        for claim in claims:
            claim.start()
        receiver.wait_for("engine_attached", 4)
        doomed.kill()
        for claim in claims:
            claim.join(DEADLINE_S)
        assert receiver.get("/readyz") == (200, "ok\n")
        with other.sender_link() as prefill_of_other, receiver.receiver_link() as decode:
            request = make_request("other", 8)
            send_payload(prefill_of_other, request, receiver.address)
            assert receive(decode, "other") == request.hashes
    assert len(codes) == 4
    assert set(codes) <= {ErrorCode.PEER_LOST, ErrorCode.REVOKED, ErrorCode.CLAIM_TIMEOUT}
    receiver.wait_quiet()
    assert receiver.slots() == {"free": 64}


def test_p55_p62_a_restarted_sender_is_served_from_its_first_request_on(fleet: Fleet) -> None:
    """Elsewhere the other side had to be restarted by hand, or a stale registration refused the newcomer."""
    receiver, sender = fleet.pair({"lease_s": 600})
    for life in range(3):
        with sender.sender_link() as prefill, receiver.receiver_link() as decode:
            for number in range(10):
                request = make_request(f"life-{life}-{number}", 2)
                send_payload(prefill, request, receiver.address)
                assert receive(decode, request.req_id) == request.hashes
        sender.kill()
        sender = fleet.sender().wait_ready()
    receiver.wait_quiet()
    assert receiver.slots() == {"free": 16}


@pytest.mark.parametrize("tls", ["", "tcp"], ids=["cma", "tcp"])
def test_p56_a_receiver_killed_under_a_large_put_does_not_take_its_sender_along(fleet: Fleet, tls: str) -> None:
    """Elsewhere one side's SIGKILL aborted the other: without error handling that is what UCX does."""
    size = 4 << 20
    doomed, other = (fleet.receiver(name, slots=32, chunk_bytes=size, ucx_tls=tls) for name in ("doomed", "other"))
    sender = fleet.sender(slots=64, chunk_bytes=size, ucx_tls=tls).wait_ready()
    keys = [b"%d" % number for number in range(32)]
    with sender.sender_link() as prefill:
        for receiver in (doomed.wait_ready(), other.wait_ready()):
            warm = Payload(f"warm-{receiver.name}", (b"w",), (bytes(size),))
            send_payload(prefill, warm, receiver.address)
        with (  # noqa: PT012  leaving the transfer raises
            pytest.raises(TransferError) as error,
            prefill.open("cut", receiver=doomed.address, total_chunks=33) as moving,
        ):
            with moving.stage(keys[:31]) as slots:
                for slot in slots:
                    assert slot is not None
            doomed.kill()
            moving.stage([b"last", b"two"], last=True).__enter__()
        assert error.value.code in (ErrorCode.PEER_LOST, ErrorCode.TRANSPORT_FAILED, ErrorCode.TOO_LARGE)
        assert sender.get("/readyz") == (200, "ok\n")
        request = Payload("after", (b"a", b"b"), (b"a" * size, b"b" * size))
        with other.receiver_link() as decode:
            send_payload(prefill, request, other.address)
            assert receive(decode, "after") == request.hashes
    sender.stop()


def test_p57_sessions_come_and_go_and_nothing_reaches_the_wrong_one() -> None:
    """Elsewhere a handle was used again, and what was meant for the old endpoint hit the new one."""

    async def main() -> None:
        async with World() as world, world.receiver(slots=16) as receiver, world.sender(name="steady") as steady:
            with trio.fail_after(LIMIT_S):
                world.fabric.put_s = lambda _: 0.01
                numbers: list[int] = []
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(transfer, steady, receiver, *(Request(f"s{n}", 3, batch=1) for n in range(200)))
                    for life in range(200):
                        async with world.sender(name=f"fickle-{life % 2}") as fickle:
                            await transfer(fickle, receiver, Request(f"f{life}", 2))
                            session = receiver.core._sessions.of_sender(fickle.config.name)
                            assert session is not None
                            numbers.append(session.number)
                await world.until_clean(steady, receiver)
                assert numbers == sorted(set(numbers)), "every session has a number of its own"

    run_in_virtual_time(main)


def test_p58_two_hundred_senders_greet_at_once_and_all_are_welcome(fleet: Fleet) -> None:
    """After an outage all of them come back in the same moment."""
    receiver = fleet.receiver().wait_ready()
    with contextlib.ExitStack() as stack:
        crowd = [stack.enter_context(Stranger(receiver.address, b"sender %d" % n)) for n in range(200)]
        for number, stranger in enumerate(crowd):
            stranger.send(Hello(9, 0, 1, PROTOCOL_VERSION, f"sender-{number}", CHUNK, "", 0, ELSEWHERE))
        assert all(isinstance(stranger.receive(), Welcome) for stranger in crowd)
        assert receiver.metrics()["kvpd_sessions"] == 200


def test_p59_one_broken_connection_costs_the_request_in_flight_at_most() -> None:
    """Elsewhere one disconnect made the survivor forget its living peer, and every later request failed."""

    async def main() -> None:
        async with World() as world, world.receiver(slots=16) as receiver, world.sender() as sender:
            with trio.fail_after(LIMIT_S):
                await transfer(sender, receiver, Request("before", 3))
                session = receiver.core._sessions.of_sender("prefill")
                assert session is not None
                world.network.disconnect(session.peer)
                await transfer(sender, receiver, *(Request(f"control-{number}", 3) for number in range(5)))
                failures = []
                target = receiver._targets[session.number]
                assert target is not None
                world.fabric.break_target(target.worker_address)
                for number in range(5):
                    try:
                        await send(sender, receiver.address, Request(f"data-{number}", 3))
                    except TransferError as exc:
                        failures.append(exc.code)
                    receiver.cancel(f"data-{number}")
                assert len(failures) <= 1
                await world.until_clean(sender, receiver)

    run_in_virtual_time(main)


def test_p60_p65_what_nobody_can_reach_fails_in_time_and_works_when_it_is_back(fleet: Fleet) -> None:
    """There is no registry to lose: a request names its receiver, and asks it anew, whoever was restarted."""
    short: dict[str, Any] = {"lease_s": 2, "put_deadline_s": 0.5}
    receiver, sender = fleet.pair(short, {"connect_timeout_s": 1})
    address = receiver.address
    request = make_request("lost", 2)
    with sender.sender_link() as prefill:
        send_payload(prefill, make_request("before", 2), address)
        receiver.kill()
        with pytest.raises(TransferError) as error:
            send_payload(prefill, request, address)
        assert error.value.code in (ErrorCode.PEER_LOST, ErrorCode.TRANSPORT_FAILED)
        again = fleet.receiver(control_address=address, **short).wait_ready()
        with again.receiver_link() as decode:
            send_payload(prefill, request, address)
            assert receive(decode, "lost") == request.hashes


@pytest.mark.parametrize("part", [0.25, 1.5], ids=["shorter", "longer"])
def test_p63_an_outage_of_any_length_restarts_nobody(part: float) -> None:
    """Elsewhere a short outage of the registry ended every lease, and with it every component."""

    async def main() -> None:
        async with World() as world, world.receiver(slots=8) as receiver, world.sender() as sender:
            with trio.fail_after(LIMIT_S):
                await transfer(sender, receiver, Request("before", 3))
                world.network.partition()
                await trio.sleep(part * receiver.config.lease_s)
                world.network.heal()
                await transfer(sender, receiver, *(Request(f"after-{number}", 8) for number in range(5)))
                await world.until_clean(sender, receiver)

    run_in_virtual_time(main)


def test_p64_a_stuck_transfer_does_not_keep_a_daemon_from_its_end(fleet: Fleet) -> None:
    """Elsewhere what neither served nor ended any more stayed for good."""
    receiver, sender = fleet.pair({"lease_s": 600}, {"drain_timeout_s": 0.5})

    def hang() -> None:
        with (  # noqa: PT012  leaving the transfer raises
            pytest.raises(KvpdError),
            sender.sender_link() as prefill,
            prefill.open("stuck", receiver=receiver.address, total_chunks=8) as moving,
        ):
            stage(moving, make_request("stuck", 8), 0, 4)
            sender.wait_for("drain_timed_out")
            stage(moving, make_request("stuck", 8), 4, 4)

    with in_background(hang):
        receiver.wait_for("chunks_written")
        receiver.signal(signal.SIGSTOP)  # it answers nothing any more
        assert sender.stop() < DEADLINE_S
    assert sender.said("drain_timed_out")


def test_p58_engines_that_attach_all_at_once_are_all_served(fleet: Fleet) -> None:
    """An engine's ranks start together; the daemon's backlog is longer than they are many."""
    sender = fleet.sender().wait_ready()
    with contextlib.ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(socket.socket(socket.AF_UNIX)).connect(str(sender.socket))
        with sender.sender_link() as prefill:
            assert prefill.stats()
