"""What hypothesis may send: every message of the protocol, sensible and absurd, but never one that no frame carries."""

from __future__ import annotations

import msgspec
from core_parts import CHUNK, RECEIVER_INCARNATION, SENDER_INCARNATION, regions
from hypothesis import strategies as st

from kvpd.core.messages import (
    PROTOCOL_VERSION,
    Ack,
    AllocRequest,
    AllocResponse,
    AnyMessage,
    CancelNotif,
    ErrorInfo,
    FailNotif,
    Heartbeat,
    Hello,
    HostIdentity,
    ProxyAck,
    ProxyNotif,
    RevokeNotif,
    Welcome,
    WriteDone,
)
from kvpd.errors import ErrorCode

# Few values, so that messages meet each other; and now and then one from the edge of what the wire carries.
numbers = st.one_of(st.integers(0, 5), st.integers(0, 5), st.sampled_from([1 << 24, (1 << 62) - 1]))
counts = st.one_of(st.integers(0, 5), st.integers(0, 5), st.just(1 << 24))
totals = st.one_of(st.integers(1, 5), st.integers(1, 5), st.integers(-2, 8), st.sampled_from([-(1 << 61), 1 << 61]))
names = st.sampled_from(["prefill-0", "prefill-1", "", "\U000e0001" * 128])
req_ids = st.sampled_from(["r0", "r1", "r1", "", "\U000e0001" * 512])
chunk_keys = st.lists(st.sampled_from([b"", b"a", b"b", b"c", b"k" * 96]), max_size=4).map(tuple)
lengths = st.one_of(st.just(CHUNK), st.just(CHUNK), st.integers(0, CHUNK + 1), st.just((1 << 62) - 1))
sender_incarnations = st.one_of(st.just(SENDER_INCARNATION), st.just(SENDER_INCARNATION), st.integers(2999, 3001))
receiver_incarnations = st.one_of(
    st.just(RECEIVER_INCARNATION), st.just(RECEIVER_INCARNATION), st.integers(6999, 7001), st.just(0)
)
codes = st.sampled_from(ErrorCode)
reasons = st.builds(ErrorInfo, codes, st.just("why"), st.one_of(st.none(), st.just(1.0)))
errors = st.one_of(st.none(), reasons)
hosts = st.sampled_from([HostIdentity(), HostIdentity("boot-1", "pidns-1", 77, 1), HostIdentity("b", "p", 1, 1)])
texts = st.sampled_from(["", "", "", "other", "\U000e0001" * 4096])
header = (sender_incarnations, receiver_incarnations, numbers)

hellos = st.builds(
    Hello,
    *header,
    protocol_version=st.sampled_from([PROTOCOL_VERSION, PROTOCOL_VERSION, 0]),
    sender_id=names,
    chunk_bytes=st.sampled_from([CHUNK, CHUNK, 0]),
    layout=texts,
    oldest_live=numbers,
    host=hosts,
)
welcomes = st.builds(
    Welcome,
    *header,
    protocol_version=st.sampled_from([PROTOCOL_VERSION, PROTOCOL_VERSION, 0]),
    receiver_id=names,
    total_chunks=st.sampled_from([4, 4, 0, 1 << 24]),
    chunk_bytes=st.sampled_from([CHUNK, CHUNK, 1]),
    layout=texts,
    lease_s=st.sampled_from([9.0, 9.0, 1e6, 1e-300]),
    put_deadline_s=st.sampled_from([2.0, 2.0, 1e-301, 1e6]),
    regions=st.sampled_from([regions(4), regions(4), regions(1)]),
)
alloc_requests = st.builds(
    AllocRequest,
    *header,
    transfer_no=numbers,
    req_id=req_ids,
    open=st.booleans(),
    keys=chunk_keys,
    is_last_batch=st.booleans(),
    total_chunks=totals,
    first_chunk=numbers,
    last_chunk_bytes=lengths,
)
indexes = st.lists(st.integers(-1, 4), max_size=4).map(tuple)
alloc_responses = st.builds(
    AllocResponse,
    *header,
    transfer_no=numbers,
    first_chunk=counts,
    remote_indexes=indexes,
    already_sent_indexes=st.lists(st.integers(0, 4), max_size=4).map(tuple),
    error=errors,
)
write_dones = st.builds(
    WriteDone,
    *header,
    transfer_no=numbers,
    rank=st.sampled_from([0, 0, 1, 4095]),
    first_chunk=counts,
    count=counts,
    checksums=st.sampled_from([(), (1 << 63,)]),
)
cancel_notifs = st.builds(CancelNotif, *header, numbers, chunk_keys, codes, st.booleans())
revoke_notifs = st.builds(RevokeNotif, *header, numbers, codes, st.just("why"))
heartbeats = st.builds(
    Heartbeat, *header, oldest_live=numbers, in_flight=st.lists(st.tuples(numbers, counts), max_size=3).map(tuple)
)
acks = st.builds(Ack, *header, errors)
proxy_notifs = st.builds(ProxyNotif, req_ids, numbers, names, names, sender_incarnations, numbers)
fail_notifs = st.builds(FailNotif, req_ids, numbers, names, names, sender_incarnations, numbers, reasons)
proxy_acks = st.builds(ProxyAck, sender_incarnations, numbers)

messages: st.SearchStrategy[AnyMessage] = st.one_of(
    hellos,
    alloc_requests,
    alloc_responses,
    write_dones,
    cancel_notifs,
    revoke_notifs,
    heartbeats,
    acks,
    welcomes,
    proxy_notifs,
    fail_notifs,
    proxy_acks,
)


def mutated(frame: bytes, cuts: list[tuple[int, int]]) -> bytes:
    """A frame with some of its bytes replaced."""
    damaged = bytearray(frame)
    for position, value in cuts:
        if damaged:
            damaged[position % len(damaged)] = value
    return bytes(damaged)


damages = st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), min_size=1, max_size=4)
# Valid msgpack of any shape: what a decoder meets from a program that speaks something else.
packed = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(1 << 63), (1 << 64) - 1), st.floats(), st.text(), st.binary()),
    lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text(), inner)),
    max_leaves=12,
).map(msgspec.msgpack.encode)
