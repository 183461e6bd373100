"""A receiver's control port meets strangers, and a sender meets receivers that do not answer: nobody else notices.

The tests are named after the public bug reports that they answer.
"""

from __future__ import annotations

import contextlib
import random
import signal
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpd.core.messages import (
    MESSAGE_BYTES_MAX,
    PROTOCOL_VERSION,
    Ack,
    AllocRequest,
    AllocResponse,
    CancelNotif,
    Heartbeat,
    Hello,
    HostIdentity,
    Welcome,
)
from kvpd.errors import ErrorCode, LocalProtocolError, TransferCancelled, TransferError

from .conftest import CHUNK, Pair
from .control import Stranger
from .daemons import DEADLINE_S, Daemon, Fleet, in_background
from .payloads import Request, make_request, receive, send, stage

ELSEWHERE = HostIdentity("another host", "its namespace", 1, 1)  # so that no process of ours vouches for a stranger


def move(pair: Pair, req_id: str) -> None:
    """A normal request, which must work whatever strangers did."""
    request = make_request(req_id, 3)
    send(pair.prefill, request, pair.address)
    assert receive(pair.decode, req_id) == request.hashes


def greet(stranger: Stranger, name: str, chunk_bytes: int = CHUNK) -> Welcome:
    """Open a session as a sender does."""
    stranger.send(Hello(7, 0, 1, PROTOCOL_VERSION, name, chunk_bytes, "", 0, ELSEWHERE))
    answer = stranger.receive()
    assert isinstance(answer, Welcome)
    return answer


def open_request(receiver: int, number: int, chunks: int, req_id: str = "strange") -> AllocRequest:
    """A stranger's request for room."""
    return AllocRequest(7, receiver, 100 + number, number, req_id, True, (), False, chunks, 0, 0)


def connect(address: str) -> socket.socket:
    """A plain connection to a port."""
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), DEADLINE_S)


def read_to_end(connection: socket.socket) -> bytes:
    """What comes until the other end closes."""
    connection.settimeout(DEADLINE_S)
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(4096):
            data += part
    return data


def test_p01_one_failed_transfer_and_a_storm_of_aborts_cost_nobody_else(pair: Pair) -> None:
    """Elsewhere one failed chunk tore down the thread of all transfers, under aborts that named nothing."""
    requests = [make_request(f"p01-{number}", 6) for number in range(3)]
    with Stranger(pair.address, b"storm") as stranger, contextlib.ExitStack() as stack:
        welcome = greet(stranger, "storm")
        before = pair.receiver.resident_bytes()
        transfers = [
            stack.enter_context(pair.prefill.open(request.req_id, receiver=pair.address, total_chunks=6))
            for request in (requests[0], requests[2])
        ]
        with (  # noqa: PT012  leaving the transfer raises
            pytest.raises(TransferCancelled),
            pair.prefill.open(requests[1].req_id, receiver=pair.address, total_chunks=6) as doomed,
        ):
            for transfer, request in zip((*transfers, doomed), (requests[0], requests[2], requests[1]), strict=True):
                stage(transfer, request, 0, 3)
            for number in range(1000):
                unknown = CancelNotif(7, welcome.receiver_incarnation, number, number, (), ErrorCode.CANCELLED, True)
                stranger.send(unknown)
            pair.decode.cancel(requests[1].req_id)
            assert sum(isinstance(stranger.receive(), Ack) for _ in range(1000)) == 1000
            pair.receiver.wait_for("transfer_revoked", req_id=requests[1].req_id)
            stage(doomed, requests[1], 3, 3)
        for transfer, request in zip(transfers, (requests[0], requests[2]), strict=True):
            stage(transfer, request, 3, 3)
    for request in (requests[0], requests[2]):
        assert receive(pair.decode, request.req_id) == request.hashes
    assert pair.receiver.resident_bytes() - before < 8 << 20
    assert len([line for line in pair.receiver.lines if "storm" in str(line.get("peer"))]) < 100


def test_p02_http_to_the_control_port_changes_nothing(pair: Pair) -> None:
    """One mistaken POST ended another project's listener for good."""
    post = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"
    with connect(pair.address) as first, connect(pair.address) as second:
        first.sendall(post)
        second.sendall(b"GET / HTTP/1.1\r\n\r\n")
        second.shutdown(socket.SHUT_WR)
        read_to_end(second)
        move(pair, "p02")  # the first is still open
    assert pair.receiver.get("/readyz") == (200, "ok\n")


def test_p03_random_frames_leave_every_socket_serving(pair: Pair) -> None:
    """An unexpected number of frames ended a listener while its health stayed green."""
    rng = random.Random(3)
    with Stranger(pair.address, b"odd") as stranger:
        for number in range(2000):
            frames = [rng.randbytes(rng.choice((0, 1, 3, 60, 5000))) for _ in range(rng.randint(1, 12))]
            stranger.send_frames(*frames)
            if number % 500 == 0:
                stranger.send_frames(rng.randbytes(65536), b"extra")
        stranger.send(Hello(7, 0, 1, PROTOCOL_VERSION, "odd", CHUNK, "", 0, ELSEWHERE))
        assert any(isinstance(stranger.receive(), Welcome) for _ in range(3000))
    for daemon in (pair.receiver, pair.sender):
        for number in range(50):
            with socket.socket(socket.AF_UNIX) as engine:
                engine.settimeout(DEADLINE_S)
                engine.connect(str(daemon.socket))
                with contextlib.suppress(OSError):
                    engine.sendall(rng.randbytes(rng.choice((3, 64, 4096))))
                    if number % 2:
                        engine.shutdown(socket.SHUT_WR)
                        read_to_end(engine)
        assert daemon.get("/readyz") == (200, "ok\n")
    move(pair, "p03")


def test_p04_a_refused_message_costs_the_next_peer_nothing(pair: Pair) -> None:
    """A socket that must answer before it may hear again hears nothing any more after one bad message."""
    logged = len(pair.receiver.lines)
    with Stranger(pair.address, b"bad") as bad, Stranger(pair.address, b"good") as good:
        for _ in range(100):
            bad.send_frames(b"\xc0")
        bad.send(Hello(7, 0, 1, PROTOCOL_VERSION + 1, "bad", CHUNK, "", 0, ELSEWHERE))
        greet(good, "good")
        answer = bad.receive()
        assert isinstance(answer, Ack)
        assert answer.error is not None
        assert answer.error.code is ErrorCode.PROTOCOL_VERSION
    move(pair, "p04")
    assert len(pair.receiver.lines) - logged < 100


def test_p06_bytes_of_anything_do_not_end_the_daemon(fleet: Fleet) -> None:
    """Typing text into such a port aborted whole processes once."""
    receiver, sender = fleet.pair()
    rng = random.Random(6)
    with sender.sender_link() as prefill, receiver.receiver_link() as decode:
        send(prefill, make_request("p06-before", 2), receiver.address)
        assert receive(decode, "p06-before") == make_request("p06-before", 2).hashes
        receiver.wait_quiet()
        open_before = receiver.descriptors()
        with connect(receiver.address):  # one that stays and says nothing
            for _ in range(100):
                with connect(receiver.address) as connection:
                    with contextlib.suppress(OSError):
                        connection.sendall(rng.randbytes(rng.randint(1, 63)))
                        connection.shutdown(socket.SHUT_WR)
                    read_to_end(connection)
            send(prefill, make_request("p06", 2), receiver.address)
            assert receive(decode, "p06") == make_request("p06", 2).hashes
            receiver.wait_quiet()
            assert receiver.descriptors() <= open_before + 1


def listening_on(daemon: Daemon) -> list[str]:
    """The addresses on which a process takes TCP connections."""
    mine = set()
    for path in Path(f"/proc/{daemon.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            mine.add(str(path.readlink()))
    found = []
    for row in Path(f"/proc/{daemon.pid}/net/tcp").read_text().splitlines()[1:]:
        fields = row.split()
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in mine:  # 0A: listening
            host, _, port = fields[1].partition(":")
            found.append(f"{socket.inet_ntoa(bytes.fromhex(host)[::-1])}:{int(port, 16)}")
    rows = Path(f"/proc/{daemon.pid}/net/tcp6").read_text().splitlines()[1:]
    assert not [row for row in rows if row.split()[3] == "0A" and f"socket:[{row.split()[9]}]" in mine]
    return found


@pytest.mark.parametrize("tls", ["", "tcp"], ids=["cma", "tcp"])
def test_p07_every_port_survives_a_scan_and_is_a_known_one(fleet: Fleet, tls: str) -> None:
    """A port scanner finds them all one day: kvpd's two, and those that UCX opens for its own connections."""
    how = {"environment": {"UCX_NET_DEVICES": "lo"}}
    settings = {"chunk_bytes": CHUNK, "ucx_tls": tls}
    receiver = fleet.start(
        "receiver", "r", {**settings, "buffer_size": 16 * CHUNK, "control_address": "127.0.0.1:0"}, **how
    )
    sender = fleet.start("sender", "s", {**settings, "staging_size": 8 * CHUNK}, **how).wait_ready()
    receiver.wait_ready()
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with sender.sender_link() as prefill, receiver.receiver_link() as decode:
        for name in ("p07-before", "p07-after"):
            request = make_request(name, 5)
            send(prefill, request, receiver.address)
            assert receive(decode, name) == request.hashes
            ready = receiver.wait_for("ready")
            open_ports = listening_on(receiver)
            assert {ready["control_address"], ready["metrics_address"]} <= set(open_ports)
            assert all(address.startswith("127.0.0.1:") for address in (*open_ports, *listening_on(sender)))
            for address in (*open_ports, *listening_on(sender)):
                connect(address).close()
                with contextlib.suppress(OSError), connect(address) as connection:
                    connection.sendall(b"GET / HTTP/1.0\r\n\r\n" + bytes(300))
                    connection.shutdown(socket.SHUT_WR)
                with contextlib.suppress(OSError), connect(address) as connection:
                    connection.settimeout(0.05)
                    context.wrap_socket(connection).close()
    receiver.stop()
    sender.stop()


def test_p08_p09_a_peer_that_takes_no_answers_delays_nobody_and_each_is_counted(fleet: Fleet) -> None:
    """Elsewhere a send to it blocked for ever, or said that it had succeeded and dropped the answer silently."""
    receiver, sender = fleet.receiver(slots=4096, chunk_bytes=8), fleet.sender(slots=8, chunk_bytes=8)
    receiver.wait_ready()
    keys = tuple(b"%d" % number for number in range(1500))
    with (
        sender.wait_ready().sender_link() as prefill,
        receiver.receiver_link() as decode,
        Stranger(receiver.address, b"deaf", queue=1, receive_bytes=4096) as deaf,
    ):
        incarnation = greet(deaf, "deaf", chunk_bytes=8).receiver_incarnation
        for number in range(10_000):  # a repeat finds the same answer, of 4 KB
            deaf.send(AllocRequest(7, incarnation, 100 + number, 1, "deaf", True, keys, False, 1501, 0, 8))
        for number in range(2000):
            request = make_request(f"p08-{number}", 2, 8)
            send(prefill, request, receiver.address)
            assert receive(decode, request.req_id) == request.hashes
            if decode.stats().get('kvpd_messages_dropped_total{reason="queue_full"}'):
                break
        else:
            pytest.fail("nothing was dropped, or not counted")
        for number in range(100):  # it begins to listen: what it repeats until it is answered is answered
            deaf.send(Heartbeat(7, incarnation, 10_000 + number, 0))
            if any(isinstance(answer, Ack) for answer in deaf.receive_waiting()):
                break
        else:
            pytest.fail("no answer ever comes again")


def test_p10_short_lived_peers_leave_nothing(fleet: Fleet) -> None:
    """Elsewhere the memory of tens of thousands of peers that had come and gone was never given back."""
    receiver = fleet.receiver().wait_ready()
    resident = []
    for round_number in range(3):
        for number in range(150):
            with Stranger(receiver.address, f"{round_number}/{number}".encode()) as stranger:
                stranger.send_frames(b"nonsense")
                # Its answer shows that it has been heard; it needs no session for that.
                stranger.send(Hello(7, 0, 1, PROTOCOL_VERSION + 1, "short-lived", CHUNK, "", 0, ELSEWHERE))
                assert isinstance(stranger.receive(), Ack)
        resident.append(receiver.resident_bytes())
        assert receiver.metrics()["kvpd_sessions"] == 0
    assert resident[2] - resident[0] < 4 << 20
    receiver.stop()


@pytest.mark.parametrize(
    "req_id",
    ["0", "x" * 300, "___prefill_addr_1.2.3.4:1___decode_addr_", "a b", "é☃", "x\r\nSet-Cookie: y", '"},{"', "\x00"],
)
def test_p11_a_label_is_never_read(pair: Pair, req_id: str) -> None:
    """Elsewhere a peer's address was parsed out of it, and a label without one ended the engine."""
    request = Request(req_id, (b"key of " + req_id.encode()[:80],), (b"p11!" * (CHUNK // 4),))
    send(pair.prefill, request, pair.address)
    assert receive(pair.decode, req_id) == request.hashes
    assert pair.receiver.wait_for("transfer_released", req_id=req_id)["log.level"] == "info"


@pytest.mark.parametrize("req_id", ["", "x" * 513])
def test_p11_a_label_that_is_none_or_too_long_is_refused_at_the_edge(pair: Pair, req_id: str) -> None:
    """Before anything knows of it."""
    with pytest.raises(LocalProtocolError, match="req_id"):
        pair.prefill.open(req_id, receiver=pair.address, total_chunks=1)
    move(pair, "p11")


def test_p12_there_is_one_limit_and_it_is_checked_at_the_edge(fleet: Fleet) -> None:
    """Elsewhere a body that one hop accepted broke the connection of the next, and then of a second node."""
    receiver, sender = fleet.receiver(slots=8192, chunk_bytes=8), fleet.sender(slots=8192, chunk_bytes=8)
    keys = [b"%096d" % number for number in range(8192)]
    with sender.wait_ready().sender_link() as prefill, receiver.wait_ready().receiver_link() as decode:
        with prefill.open("p12", receiver=receiver.address, total_chunks=8192) as transfer:
            with pytest.raises(LocalProtocolError, match="8192"):
                transfer.stage([*keys, b"one more"])
            with transfer.stage(keys) as slots:
                for slot, key in zip(slots, keys, strict=True):
                    assert slot is not None
                    slot[:] = key[-8:]
        with decode.claim("p12", 20) as chunks:
            assert [(chunk.key, bytes(chunk.view)) for chunk in chunks] == [(key, key[-8:]) for key in keys]
    with Stranger(receiver.address, b"huge") as stranger:
        greet(stranger, "huge", chunk_bytes=8)
        stranger.send_frames(bytes(MESSAGE_BYTES_MAX + 1))
        receiver.wait_for("peer_rejected")
    assert receiver.get("/readyz")[0] == 200


@contextlib.contextmanager
def stopped(daemon: Daemon) -> Iterator[None]:
    """A daemon that takes connections, and then does nothing more, for as long as the body runs."""
    daemon.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        daemon.signal(signal.SIGCONT)


def test_p13_a_receiver_that_never_speaks_costs_its_own_requests_only(fleet: Fleet) -> None:
    """The kernel accepts for a process that is stopped; only a deadline tells that nobody is there."""
    frozen, good, sender = fleet.receiver("frozen"), fleet.receiver("good"), fleet.sender(connect_timeout_s=1.5)
    for daemon in (frozen, good, sender):
        daemon.wait_ready()
    request = make_request("p13", 2)
    with sender.sender_link() as prefill:
        with stopped(frozen):
            errors: list[TransferError] = []

            def fail() -> None:
                with pytest.raises(TransferError) as error:
                    send(prefill, request, frozen.address)
                errors.append(error.value)

            with in_background(fail), good.receiver_link() as decode:
                send(prefill, make_request("p13-good", 2), good.address)
                assert receive(decode, "p13-good") == make_request("p13-good", 2).hashes
            assert errors[0].code is ErrorCode.PEER_LOST
            assert frozen.address in errors[0].detail
        with frozen.receiver_link() as decode:
            send(prefill, request, frozen.address)
            assert receive(decode, "p13") == request.hashes


def test_an_address_that_is_none_is_refused_by_name(pair: Pair) -> None:
    """A typing error must not look like a peer that is down."""
    for address in ("decode-0", "decode-0:0", "http://x:1", "0.0.0.0:1"):
        with (
            pytest.raises(TransferError, match="receiver: "),
            pair.prefill.open("nowhere", receiver=address, total_chunks=1) as transfer,
        ):
            stage(transfer, make_request("nowhere", 1), 0, 1)
    move(pair, "somewhere")


def test_a_stranger_cannot_hold_room_beyond_its_session(fleet: Fleet) -> None:
    """Whoever greets may ask for room; when it is silent, its lease ends and the room comes back."""
    receiver = fleet.receiver(slots=8, lease_s=0.6, put_deadline_s=0.2).wait_ready()
    with Stranger(receiver.address, b"silent") as silent:
        welcome = greet(silent, "silent")
        silent.send(open_request(welcome.receiver_incarnation, 1, 8))
        answer = silent.receive()
        assert isinstance(answer, AllocResponse)
        assert answer.error is None
        receiver.wait_for("session_ended", code="peer_lost")
        receiver.wait_quiet()
    assert receiver.slots() == {"free": 8}
