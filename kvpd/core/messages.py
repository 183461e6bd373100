"""What kvpd's daemons say to each other: tagged msgpack arrays, one message a frame.

Nothing that arrives is trusted. A frame that is too long, has an unknown tag, a wrong type, a number or a
string beyond its bound or bytes left over is a RemoteProtocolError, never a crash. The four names AllocRequest,
AllocResponse, CancelNotif and ProxyNotif and their first fields are those of LMCache's PDBackendAsync; everything
else is kvpd's. Every message between a sender and a receiver names both sides' incarnations (Hello knows only its
own), and only durations cross the wire, never a clock's reading.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvpd.errors import ErrorCode, RemoteProtocolError

PROTOCOL_VERSION = 2
MESSAGE_BYTES_MAX = 1 << 20
CHUNKS_MAX = 1 << 24  # of one request; a receiver with more slots than this is not plausible
BATCH_CHUNKS_MAX = 8192  # keys in one AllocRequest, so that it fits a frame with room to spare
KEY_BYTES_MAX = 96
BATCH_KEYS_BYTES_MAX = (
    MESSAGE_BYTES_MAX - 4096
)  # a batch's keys, two bytes of framing each, and the rest of the message

Incarnation = Annotated[int, Meta(ge=0, lt=1 << 62)]
MessageId = Annotated[int, Meta(ge=0, lt=1 << 62)]
TransferNo = Annotated[int, Meta(ge=0, lt=1 << 62)]
Count = Annotated[int, Meta(ge=0, le=CHUNKS_MAX)]
Name = Annotated[str, Meta(max_length=128)]
ReqId = Annotated[str, Meta(max_length=512)]
Text = Annotated[str, Meta(max_length=4096)]
Key = Annotated[bytes, Meta(max_length=KEY_BYTES_MAX)]
# How chunks are verified: not at all, or by a checksum of each, which WriteDone carries.
Verify = Literal["off", "crc32c", "xxh3"]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]


class HostIdentity(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where a sender runs: enough to tell one host from another and one process from its pid's next owner."""

    boot_id: Name = ""
    pid_namespace: Name = ""
    pid: Annotated[int, Meta(ge=0, lt=1 << 31)] = 0
    start_time: Annotated[int, Meta(ge=0, lt=1 << 62)] = 0


class Region(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One rank's window of a receiver's memory. An rkey is a write capability: never log it."""

    rank: Annotated[int, Meta(ge=0, lt=4096)]
    worker_address: Annotated[bytes, Meta(max_length=65536)]
    base_address: Annotated[int, Meta(ge=0)]
    length: Annotated[int, Meta(ge=0, lt=1 << 62)]
    rkey: Annotated[bytes, Meta(max_length=65536)]


class ErrorInfo(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Why the answer is no."""

    code: ErrorCode
    detail: Text = ""
    retry_after_s: Seconds | None = None


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """The root of all messages; the tag is the class's name."""


class PeerMessage(Message, frozen=True):
    """A message between a sender and a receiver, which says who it is meant for and from whom."""

    sender_incarnation: Incarnation
    receiver_incarnation: Incarnation
    message_id: MessageId


class Hello(PeerMessage, frozen=True):
    """Sender to receiver: here I am, in this incarnation; `receiver_incarnation` is 0, not known yet.

    No transfer numbered below `oldest_live` will be spoken of in the session that this opens. `puts_ended` says that
    every put of this process's earlier sessions with this receiver has ended, well or not, and that none of its engines
    fills a slot for one of them: on one host, where the sender's own kernel and its engines write, that is a fence.
    """

    protocol_version: Annotated[int, Meta(ge=0, lt=1 << 31)]
    sender_id: Name
    chunk_bytes: Annotated[int, Meta(ge=0, lt=1 << 62)]
    layout: Text
    oldest_live: TransferNo
    host: HostIdentity
    puts_ended: bool = False


class Welcome(PeerMessage, frozen=True):
    """Receiver to sender: the session is open, here is where to put.

    `share` is the path of the socket where the sender's engines are given the receiver's memory, to fill slots in
    place; empty where they are not.
    """

    protocol_version: Annotated[int, Meta(ge=0, lt=1 << 31)]
    receiver_id: Name
    total_chunks: Count
    chunk_bytes: Annotated[int, Meta(ge=1, lt=1 << 62)]
    layout: Text
    lease_s: Annotated[float, Meta(gt=0, le=1e6)]
    put_deadline_s: Annotated[float, Meta(gt=0, le=1e6)]
    regions: Annotated[tuple[Region, ...], Meta(min_length=1, max_length=4096)]
    verify: Verify = "off"
    share: Text = ""


class AllocRequest(PeerMessage, frozen=True):
    """Sender to receiver: hold room for all of a request's chunks, or for none, and place this batch.

    `open` alone creates a transfer. `keys` (one per chunk, possibly none: then it only reserves) stand at positions
    `first_chunk` and on. `last_chunk_bytes` is the length of the batch's last chunk; every other one is full.
    """

    transfer_no: TransferNo
    req_id: ReqId
    open: bool
    keys: Annotated[tuple[Key, ...], Meta(max_length=BATCH_CHUNKS_MAX)]
    is_last_batch: bool
    # Not a Count: a negative or absurd total is answered with `legacy_sender` or `too_large`, not dropped.
    total_chunks: Annotated[int, Meta(ge=-(1 << 62), lt=1 << 62)]
    first_chunk: Annotated[int, Meta(ge=0, lt=1 << 62)]
    last_chunk_bytes: Annotated[int, Meta(ge=0, lt=1 << 62)]


class AllocResponse(PeerMessage, frozen=True):
    """Receiver to sender: one slot per key, -1 where the key is in `already_sent_indexes` (positions in `keys`)."""

    transfer_no: TransferNo
    first_chunk: Count
    remote_indexes: Annotated[tuple[Annotated[int, Meta(ge=-1, lt=CHUNKS_MAX)], ...], Meta(max_length=BATCH_CHUNKS_MAX)]
    already_sent_indexes: Annotated[tuple[Count, ...], Meta(max_length=BATCH_CHUNKS_MAX)]
    error: ErrorInfo | None = None


class WriteDone(PeerMessage, frozen=True):
    """Sender to receiver: every chunk that this range had to write for `rank` has landed.

    `checksums` has one entry per chunk that was written, in order, where the Welcome asked for them; else none.
    """

    transfer_no: TransferNo
    rank: Annotated[int, Meta(ge=0, lt=4096)]
    first_chunk: Count
    count: Count
    checksums: Annotated[tuple[Annotated[int, Meta(ge=0)], ...], Meta(max_length=BATCH_CHUNKS_MAX)] = ()


class CancelNotif(PeerMessage, frozen=True):
    """Sender to receiver: this transfer is over. `drained`: its puts have ended, and nothing can still land.

    One that is not drained ends the session, unless `goes_on`: an engine may still be filling slots in place, nothing
    else is wrong, and a drained one follows when the engine has let go.
    """

    transfer_no: TransferNo
    keys: Annotated[tuple[Key, ...], Meta(max_length=BATCH_CHUNKS_MAX)]
    reason: ErrorCode
    drained: bool
    goes_on: bool = False


class RevokeNotif(PeerMessage, frozen=True):
    """Receiver to sender: I have rolled this transfer back; drain it, then answer with CancelNotif."""

    transfer_no: TransferNo
    reason: ErrorCode
    detail: Text = ""


class Heartbeat(PeerMessage, frozen=True):
    """Sender to receiver: I live, I speak of no transfer below `oldest_live`, and these transfers are being put.

    `puts_ended` makes up for a Hello that could not say so: every put of this process's earlier sessions with this
    receiver has ended by now, and none of its engines fills a slot for one of them.
    """

    oldest_live: TransferNo
    # (transfer_no, puts in flight), only where there are any.
    in_flight: Annotated[tuple[tuple[TransferNo, Count], ...], Meta(max_length=16384)] = ()
    puts_ended: bool = False


class Ack(PeerMessage, frozen=True):
    """Either way: message `message_id` has been acted on, or was refused for the reason given.

    As the answer to an AllocRequest, without an error, it says that the transfer waits for room: AllocResponse follows.
    As the answer to a Heartbeat it says how many of the sender's transfers are `waiting` so.
    """

    error: ErrorInfo | None = None
    waiting: Count = 0


class ProxyNotif(Message, frozen=True):
    """Sender to proxy: the whole KV of `req_id` is ready at `receiver_id`. Deduplicate by (sender, incarnation, no)."""

    req_id: ReqId
    message_id: MessageId
    receiver_id: Name
    sender_id: Name
    sender_incarnation: Incarnation
    transfer_no: TransferNo


class FailNotif(Message, frozen=True):
    """Sender to proxy: transfer `transfer_no` of `req_id` has ended, and its KV will not be ready. `error` says why.

    Never together with a ProxyNotif of the same transfer, and acknowledged like one. `receiver` is the address that
    the transfer was opened to: who is there may not be known.
    """

    req_id: ReqId
    message_id: MessageId
    receiver: Text
    sender_id: Name
    sender_incarnation: Incarnation
    transfer_no: TransferNo
    error: ErrorInfo


class ProxyAck(Message, frozen=True):
    """Proxy to sender: notification `message_id` of this incarnation was received."""

    sender_incarnation: Incarnation
    message_id: MessageId


AnyMessage = (
    Hello
    | Welcome
    | AllocRequest
    | AllocResponse
    | WriteDone
    | CancelNotif
    | RevokeNotif
    | Heartbeat
    | Ack
    | ProxyNotif
    | FailNotif
    | ProxyAck
)
# What a proxy is told about a transfer, at most one of them for each.
Notification = ProxyNotif | FailNotif

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: Message) -> bytes:
    """One frame. Its size is the sender's to keep within MESSAGE_BYTES_MAX; a longer one is our own bug."""
    frame = _encoder.encode(message)
    assert len(frame) <= MESSAGE_BYTES_MAX, f"{type(message).__name__} of {len(frame)} bytes"
    return frame


def encode_push(notif: ProxyNotif) -> bytes:
    """A notification as LMCache's PDBackend sends it, a tagged map: for proxies that were written for that.

    There is no such form of a FailNotif: those proxies would take it for the word that all is ready.

    Its two fields come first; ours follow, and a decoder that does not know them passes them over.
    """
    return _encoder.encode({"type": "ProxyNotif", **msgspec.structs.asdict(notif)})


def decode(frame: bytes) -> AnyMessage:
    """The message in a frame.

    Raises:
        RemoteProtocolError: the frame is empty, too long, or no message of this protocol.
    """
    if len(frame) > MESSAGE_BYTES_MAX:
        raise RemoteProtocolError(f"a message of {len(frame)} bytes; the limit is {MESSAGE_BYTES_MAX}")
    try:
        return _decoder.decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise RemoteProtocolError(f"{len(frame)} bytes that are no message: {exc}") from exc
