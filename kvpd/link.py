"""What an engine and its daemon say to each other over a Unix stream socket.

A frame is a little-endian u32 length and that many bytes of msgpack: one tagged array. It is at most 1 MiB; one
that is longer, unknown or malformed ends the connection. The engine speaks first, with Attach; the daemon answers
Attached together with one descriptor per region (SCM_RIGHTS, in the same order). From then on either side sends at
will: transfers, stages and claims are numbered by the engine, and an answer names the number it belongs to.
"""

from __future__ import annotations

import struct
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from kvpd.errors import ErrorCode, RemoteProtocolError, TransferError, transfer_error

LINK_VERSION: Final = 2
GROUP_CHARS_MAX: Final = 128
FRAME_BYTES_MAX: Final = 1 << 20
_HEADER = struct.Struct("<I")

Number = Annotated[int, Meta(ge=0, lt=1 << 62)]
Key = Annotated[bytes, Meta(max_length=96)]
ReqId = Annotated[str, Meta(min_length=1, max_length=512)]
Address = Annotated[str, Meta(max_length=512)]
Name = Annotated[str, Meta(max_length=128)]
Text = Annotated[str, Meta(max_length=4096)]


class Frame(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """The root of all frames; the tag is the class's name."""


class LinkError(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How a transfer or a claim ended without success."""

    code: ErrorCode
    detail: Text = ""
    retry_after_s: Annotated[float, Meta(ge=0)] | None = None

    @classmethod
    def of(cls, error: TransferError) -> LinkError:
        """The frame's form of an exception."""
        return cls(error.code, error.detail[:4096], error.retry_after_s)

    def exception(self) -> TransferError:
        """The exception's form of a frame."""
        return transfer_error(self.code, self.detail, self.retry_after_s)


# ------------------------------------------------------------------ either role


class Attach(Frame, frozen=True):
    """Engine: my first frame. `rank` is the engine rank that I am.

    `group` names the engine whose rank that is, the same for all of its ranks; engines whose requests might bear the
    same names need one each.
    """

    version: int
    role: Literal["sender", "receiver"]
    rank: Annotated[int, Meta(ge=0, lt=4096)] = 0
    group: Annotated[str, Meta(max_length=GROUP_CHARS_MAX)] = ""


class AttachWriter(Frame, frozen=True):
    """A prefill engine's rank, to a receiver on its host: my first frame. Give me your memory, to fill slots in place.

    It does so on behalf of that start of a sender, which has said that this start of the receiver offers it. The answer
    is Attached, as to a decode engine, with a descriptor that may be written through.
    """

    version: int
    rank: Annotated[int, Meta(ge=0, lt=4096)]
    sender_id: Name
    sender_incarnation: Number
    receiver_incarnation: Number


class LetGo(Frame, frozen=True):
    """A writer: its mapping is gone, and it can write into none of the receiver's slots any more.

    The end of the connection without it proves nothing: then the receiver waits for the death of the process.
    """


class RegionInfo(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One rank's buffer: `length` bytes from `offset`, a multiple of the page size, of the file that comes along."""

    rank: int
    length: int
    device: str = "cpu"
    offset: int = 0


class Attached(Frame, frozen=True):
    """Daemon: welcome; here is your rank's region. Slot i is its bytes [i * chunk_bytes, (i + 1) * chunk_bytes)."""

    version: int
    name: str
    chunk_bytes: int
    chunk_tokens: int
    regions: tuple[RegionInfo, ...]
    layout: Text = ""  # what a chunk's bytes mean, in the words of the daemon's configuration
    ranks: int = 1  # how many ranks an engine of this daemon has


class Rejected(Frame, frozen=True):
    """Daemon: your last frame broke a rule; this connection ends."""

    detail: Text


class CancelRequest(Frame, frozen=True):
    """Engine: end every transfer that bears this req_id, wherever it stands. Never fails; twice is harmless."""

    req_id: ReqId


class StatsRequest(Frame, frozen=True):
    """Engine: tell me your counters."""

    call: Number


class Stats(Frame, frozen=True):
    """Daemon: the counters, as /metrics names them."""

    call: Number
    values: dict[str, float]


class TransferEvent(Frame, frozen=True):
    """Daemon: a transfer became ready, or ended. Pushed to every engine attached."""

    state: Literal["ready", "failed", "released"]
    req_id: ReqId
    sender_id: str
    transfer_no: Number
    total_chunks: Number
    error: LinkError | None = None


# ------------------------------------------------------------------ prefill engine and sender


class Open(Frame, frozen=True):
    """Engine: a request of `total_chunks` chunks goes to `receiver`. Not answered: a refusal comes as Ended.

    Every rank of an engine sends one, in any order: the first begins the transfer, the others join it.
    """

    transfer: Number
    req_id: ReqId
    receiver: Address
    total_chunks: int
    notify: Address | None = None


class Stage(Frame, frozen=True):
    """Engine: the keys of the transfer's next batch. Its last chunk is `last_chunk_bytes` long, the others full."""

    transfer: Number
    stage: Number
    keys: Annotated[tuple[Key, ...], Meta(max_length=8192)]
    is_last: bool
    last_chunk_bytes: Number


class Staged(Frame, frozen=True):
    """Daemon: fill these slots. One per key from `first` (position in the stage) on; -1: the receiver has it already.

    A stage larger than the staging buffer comes in several pieces, the next one after the engine has filled this one.
    `piece` grows through all stages of a transfer. The slots are in the daemon's own memory, or, where `place` is not
    0, in that of the receiver which a Place of this number has named.
    """

    transfer: Number
    stage: Number
    piece: Number
    first: Number
    slots: tuple[int, ...]
    is_last_piece: bool
    place: Number = 0


class Place(Frame, frozen=True):
    """Daemon: slots of this place are in the memory of a receiver on this host; get it at `path` with AttachWriter."""

    place: Number
    path: Text
    sender_id: Name
    sender_incarnation: Number
    receiver_incarnation: Number


class PlaceGone(Frame, frozen=True):
    """Daemon: no slot of this place will be staged any more; let go of it when the last one was left."""

    place: Number


class StageDeferred(Frame, frozen=True):
    """Daemon: this early stage waits until the transfer's earlier slots are filled."""

    transfer: Number
    stage: Number


class Filled(Frame, frozen=True):
    """Engine: the piece's slots hold their bytes; put them."""

    transfer: Number
    stage: Number
    piece: Number


class Touch(Frame, frozen=True):
    """Engine: still computing; this is progress."""

    transfer: Number


class Cancel(Frame, frozen=True):
    """Engine: end this transfer. Answered by Ended."""

    transfer: Number


class Close(Frame, frozen=True):
    """Engine: I have left this transfer and write into its slots no more. Sent once for every Open, whatever happened.

    Until it comes, or the engine's process has died, no slot that the engine may be filling is given to anybody else.
    A transfer that has not ended is cancelled by it.
    """

    transfer: Number


class Ended(Frame, frozen=True):
    """Daemon: the transfer is over. Without an error everything has landed, was acknowledged, and the proxy is told."""

    transfer: Number
    error: LinkError | None = None


# ------------------------------------------------------------------ decode engine and receiver


class Claim(Frame, frozen=True):
    """Engine: give me the chunks of `req_id` when they are complete. `sender_id` settles which, where two bear it."""

    claim: Number
    req_id: ReqId
    rank: Annotated[int, Meta(ge=0, lt=4096)]
    timeout_s: Annotated[float, Meta(ge=0, le=1e9)]
    sender_id: str | None = None


class ClaimedChunk(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One chunk: its key, its slot and its length in bytes."""

    key: bytes
    index: int
    length: int


class Claimed(Frame, frozen=True):
    """Daemon: yours until you release them, in request order."""

    claim: Number
    sender_id: str
    transfer_no: Number
    first: Number  # a claim larger than a frame comes in several, in order
    chunks: tuple[ClaimedChunk, ...]
    is_last_piece: bool


class ClaimFailed(Frame, frozen=True):
    """Daemon: there is nothing to claim, and why."""

    claim: Number
    error: LinkError


class Release(Frame, frozen=True):
    """Engine: done with a claim, or no longer waiting for it. Twice is harmless."""

    claim: Number


EngineFrame = (
    Attach
    | AttachWriter
    | LetGo
    | Open
    | Stage
    | Filled
    | Touch
    | Cancel
    | Close
    | CancelRequest
    | Claim
    | Release
    | StatsRequest
)
DaemonFrame = (
    Attached
    | Rejected
    | Place
    | PlaceGone
    | Staged
    | StageDeferred
    | Ended
    | Claimed
    | ClaimFailed
    | TransferEvent
    | Stats
)

CLAIMED_CHUNKS_MAX: Final = 4096  # in one Claimed frame

_encoder = msgspec.msgpack.Encoder()


def encode_frame(frame: Frame) -> bytes:
    """Length and body.

    Raises:
        ValueError: the frame is over FRAME_BYTES_MAX.
    """
    body = _encoder.encode(frame)
    if len(body) > FRAME_BYTES_MAX:
        raise ValueError(f"{type(frame).__name__} takes {len(body)} bytes; a frame holds {FRAME_BYTES_MAX}")
    return _HEADER.pack(len(body)) + body


class _FrameReader:
    """Bytes in, frames out, whatever the cuts between them."""

    def __init__(self, kind: object) -> None:
        self._decoder: msgspec.msgpack.Decoder[object] = msgspec.msgpack.Decoder(kind)
        self._pending = bytearray()

    def _feed(self, data: bytes) -> list[object]:
        """The frames that `data` completes.

        Raises:
            RemoteProtocolError: a frame is too long or is none of this direction's.
        """
        self._pending += data
        frames: list[object] = []
        start = 0
        while len(self._pending) - start >= _HEADER.size:
            (length,) = _HEADER.unpack_from(self._pending, start)
            if length > FRAME_BYTES_MAX:
                raise RemoteProtocolError(f"a frame of {length} bytes; the limit is {FRAME_BYTES_MAX}")
            end = start + _HEADER.size + length
            if len(self._pending) < end:
                break
            frames.append(self._decode(bytes(self._pending[start + _HEADER.size : end])))
            start = end
        del self._pending[:start]
        return frames

    def _decode(self, body: bytes) -> object:
        try:
            return self._decoder.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
            raise RemoteProtocolError(f"{len(body)} bytes that are no frame: {exc}") from exc

    @property
    def in_frame(self) -> bool:
        """Whether the bytes so far end in the middle of a frame."""
        return bool(self._pending)


class EngineFrameReader(_FrameReader):
    """Reads what engines send: the daemon's side."""

    def __init__(self) -> None:
        super().__init__(EngineFrame)

    def feed(self, data: bytes) -> list[EngineFrame]:
        """See `_FrameReader._feed`."""
        return self._feed(data)  # type: ignore[return-value]


class DaemonFrameReader(_FrameReader):
    """Reads what daemons send: the engine's side."""

    def __init__(self) -> None:
        super().__init__(DaemonFrame)

    def feed(self, data: bytes) -> list[DaemonFrame]:
        """See `_FrameReader._feed`."""
        return self._feed(data)  # type: ignore[return-value]
