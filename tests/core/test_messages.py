"""Frames: what is sent comes out as it went in, and whatever else arrives is one typed error."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import damages, messages, mutated, packed

from kvpd import link
from kvpd.core.messages import (
    BATCH_CHUNKS_MAX,
    BATCH_KEYS_BYTES_MAX,
    KEY_BYTES_MAX,
    MESSAGE_BYTES_MAX,
    Ack,
    AllocRequest,
    AnyMessage,
    Heartbeat,
    Hello,
    HostIdentity,
    ProxyNotif,
    Welcome,
    decode,
    encode,
    encode_push,
)
from kvpd.errors import ErrorCode, RemoteProtocolError, TransferError


@given(messages)
def test_every_message_comes_out_as_it_went_in(message: AnyMessage) -> None:
    """At the edges of every bound, too."""
    assert decode(encode(message)) == message


@given(st.one_of(st.binary(max_size=200), packed))
def test_bytes_that_are_no_message_are_one_typed_error(frame: bytes) -> None:
    """A decoder that crashes takes its loop, and every transfer, with it."""
    with pytest.raises(RemoteProtocolError):
        decode(frame)


@given(messages, damages)
def test_a_damaged_message_is_another_message_or_a_typed_error(
    message: AnyMessage, cuts: list[tuple[int, int]]
) -> None:
    """And if it decodes it is within all bounds: it can be sent on."""
    try:
        decoded = decode(mutated(encode(message), cuts))
    except RemoteProtocolError:
        return
    assert decode(encode(decoded)) == decoded or decoded != decoded


@given(messages, st.integers(0, 400))
def test_a_message_that_is_cut_short_or_too_long_is_a_typed_error(message: AnyMessage, size: int) -> None:
    """Half a message never passes for a whole one."""
    frame = encode(message)
    for damaged in (frame[: min(size, len(frame) - 1)], frame + b"\x00"):
        with pytest.raises(RemoteProtocolError):
            decode(damaged)


def test_an_oversize_frame_is_refused_unread() -> None:
    """Its size alone is proof enough."""
    with pytest.raises(RemoteProtocolError, match="the limit is"):
        decode(b"\x00" * (MESSAGE_BYTES_MAX + 1))


def test_a_deeply_nested_frame_is_a_typed_error() -> None:
    """A recursion that ends the process costs the attacker a kilobyte."""
    with pytest.raises(RemoteProtocolError):
        decode(b"\x91" * 100_000 + b"\xc0")


def test_text_that_is_no_utf8_is_a_typed_error() -> None:
    """The codec has an error of its own for that."""
    frame = encode(Ack(1, 2, 3))
    assert frame.count(b"Ack") == 1
    with pytest.raises(RemoteProtocolError):
        decode(frame.replace(b"Ack", b"\xff\xfe\xfd"))


def test_an_unknown_tag_is_a_typed_error() -> None:
    """A newer peer's message is refused, not guessed at."""
    with pytest.raises(RemoteProtocolError, match="no message"):
        decode(msgspec.msgpack.encode(["Surprise", 1, 2, 3]))


@given(st.lists(st.binary(max_size=KEY_BYTES_MAX), min_size=1, max_size=8).map(tuple))
def test_p51_a_key_arrives_as_the_bytes_that_it_is(keys: tuple[bytes, ...]) -> None:
    """Written in one base and read in another, keys would never meet: nothing here reads them at all."""
    request = AllocRequest(
        1,
        2,
        3,
        transfer_no=4,
        req_id="r",
        open=True,
        keys=keys,
        is_last_batch=True,
        total_chunks=len(keys),
        first_chunk=0,
        last_chunk_bytes=1,
    )
    told = decode(encode(request))
    assert isinstance(told, AllocRequest)
    assert told.keys == keys


def test_the_largest_batch_fits_a_frame() -> None:
    """The bound on keys leaves room for the longest of everything else."""
    size = BATCH_KEYS_BYTES_MAX // BATCH_CHUNKS_MAX - 2
    assert size >= KEY_BYTES_MAX
    big = (1 << 62) - 1
    request = AllocRequest(
        big,
        big,
        big,
        transfer_no=big,
        req_id="\U000e0001" * 512,
        open=False,
        keys=(b"k" * KEY_BYTES_MAX,) * BATCH_CHUNKS_MAX,
        is_last_batch=True,
        total_chunks=big,
        first_chunk=big,
        last_chunk_bytes=big,
    )
    assert decode(encode(request)) == request


def test_a_pushed_notification_is_the_reference_proxys_own() -> None:
    """A tagged map whose fields it knows; those that it does not know are passed over."""
    notif = ProxyNotif("r", 5, "decode-0", "prefill-0", 7, 3)
    fields = msgspec.msgpack.decode(encode_push(notif))
    assert list(fields)[:2] == ["type", "req_id"]
    assert fields == {
        "type": "ProxyNotif",
        "req_id": "r",
        "message_id": 5,
        "receiver_id": "decode-0",
        "sender_id": "prefill-0",
        "sender_incarnation": 7,
        "transfer_no": 3,
    }


def test_the_largest_heartbeat_fits_a_frame() -> None:
    """However many transfers are being put."""
    big = (1 << 62) - 1
    beat = Heartbeat(big, big, big, big, ((big, 1 << 24),) * 16384)
    assert decode(encode(beat)) == beat


def test_a_message_that_fits_no_frame_is_our_own_bug() -> None:
    """It must not leave: the receiver would end the session for it."""
    with pytest.raises(AssertionError):
        encode(Hello(1, 0, 1, 1, "x", 64, "y" * (MESSAGE_BYTES_MAX + 1), 0, HostIdentity()))


@pytest.mark.parametrize(("lease_s", "put_deadline_s"), [(0.0, 1.0), (-1.0, 1.0), (float("nan"), 1.0), (1.0, 0.0)])
def test_durations_of_a_welcome_are_positive(lease_s: float, put_deadline_s: float) -> None:
    """They become timers: none of zero length, and no NaN that no comparison catches."""
    welcome = Welcome(1, 2, 3, 1, "r", 1, 1, "", lease_s, put_deadline_s, ())
    with pytest.raises(RemoteProtocolError):
        decode(msgspec.msgpack.encode(welcome))


# ------------------------------------------------------------------ the engine link

engine_frames: st.SearchStrategy[link.EngineFrame] = st.one_of(
    st.builds(link.Attach, st.integers(0, 9), st.sampled_from(["sender", "receiver"])),
    st.builds(link.Stage, st.integers(0, 9), st.integers(0, 9), st.just((b"k",)), st.booleans(), st.integers(0, 99)),
    st.builds(link.Open, st.integers(0, 9), st.just("r"), st.just("a"), st.integers(-3, 1 << 63)),
    st.builds(link.Claim, st.integers(0, 9), st.just("r"), st.just(0), st.floats(0, 9)),
    st.builds(link.Filled, st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)),
    st.builds(link.Release, st.integers(0, 9)),
)
daemon_frames: st.SearchStrategy[link.DaemonFrame] = st.one_of(
    st.builds(link.Staged, *(st.integers(0, 9),) * 4, st.just((0, -1)), st.booleans()),
    st.builds(link.Ended, st.integers(0, 9), st.sampled_from([None, link.LinkError(ErrorCode.REVOKED, "x", 1.0)])),
    st.builds(link.Stats, st.integers(0, 9), st.just({"x": 1.0})),
)


@given(st.lists(engine_frames, max_size=5), st.lists(daemon_frames, max_size=5), st.integers(1, 40))
def test_frames_come_out_whole_whatever_the_cuts(
    to_daemon: list[link.EngineFrame], to_engine: list[link.DaemonFrame], size: int
) -> None:
    """A stream socket cuts where it likes."""
    daemon, engine = link.EngineFrameReader(), link.DaemonFrameReader()
    data = b"".join(map(link.encode_frame, to_daemon))
    assert [frame for i in range(0, len(data), size) for frame in daemon.feed(data[i : i + size])] == to_daemon
    data = b"".join(map(link.encode_frame, to_engine))
    assert [frame for i in range(0, len(data), size) for frame in engine.feed(data[i : i + size])] == to_engine
    assert not daemon.in_frame
    assert not engine.in_frame


@given(
    st.lists(
        st.one_of(st.binary(max_size=60), packed, st.builds(mutated, engine_frames.map(link.encode_frame), damages))
    )
)
def test_rubbish_on_the_engine_link_is_one_typed_error(pieces: list[bytes]) -> None:
    """An engine that writes rubbish into its socket ends its own connection and nothing else."""
    for reader in (link.EngineFrameReader(), link.DaemonFrameReader()):
        for piece in pieces:
            try:
                reader.feed(piece)
            except RemoteProtocolError:
                break
            try:
                reader.feed(len(piece).to_bytes(4, "little") + piece)
            except RemoteProtocolError:
                break


def test_an_error_travels_to_the_engine_and_back() -> None:
    """With its code, its words and its advice."""
    error = TransferError(ErrorCode.TOO_LARGE, "x" * 5000, 2.0)
    exc = link.LinkError.of(error).exception()
    assert (exc.code, exc.detail, exc.retry_after_s) == (ErrorCode.TOO_LARGE, "x" * 4096, 2.0)
