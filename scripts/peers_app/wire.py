"""A sender's side of the control messages, in kvpd's words or in LMCache's, spoken to a real receiver's port.

The same measurements drive both. Each peer is one DEALER, a sender of its own. Requests are asked for whole, with all
their keys in one batch, so that the answer with the slots is also the admission.
"""

from __future__ import annotations

import abc
import itertools
import time
from collections import deque
from types import TracebackType
from typing import Final, Self

import attrs
import msgspec
import zmq

from kvpd.core.messages import (
    PROTOCOL_VERSION,
    Ack,
    AllocRequest,
    AllocResponse,
    CancelNotif,
    Heartbeat,
    Hello,
    HostIdentity,
    Message,
    Welcome,
    decode,
    encode,
)
from kvpd.errors import ErrorCode
from kvpd.service.turns import together

_ANSWER_MS: Final = 20_000
_numbers = itertools.count(1)  # peers and keys of one run never share one


class WireFailed(Exception):
    """A receiver did not answer in time, or refused what it must grant."""


@attrs.frozen
class Terms:
    """What requests to a receiver must say about its chunks. The last three are LMCache's."""

    address: str
    chunk_bytes: int
    format: int = 0
    shape: tuple[int, ...] = ()
    dtype: str = ""


class Peer(abc.ABC):
    """One sender. A context manager: leaving drops whatever was not sent."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], terms: Terms) -> None:
        self._terms = terms
        self.number = next(_numbers)
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.IDENTITY, b"bench-%d" % self.number)
        self.socket.setsockopt(zmq.SNDHWM, 100_000)
        self.socket.setsockopt(zmq.RCVHWM, 100_000)
        self.socket.setsockopt(zmq.RCVTIMEO, _ANSWER_MS)
        self.socket.connect(f"tcp://{terms.address}")
        self._keys: dict[int, tuple[int, int]] = {}  # of each request: the first key and how many
        self._heard: deque[str] = deque()  # came together with what was received last

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.socket.close()

    def open(self, *requests: int, chunks: int) -> None:
        """Ask for room for each request and place all of it; numbers of one peer grow."""
        for request in requests:
            first = next(_numbers) << 20
            self._keys[request] = (first, chunks)
            self._open(request, first, chunks)
        self._flush()

    def cancel(self, request: int) -> None:
        """Give a request up, and all of its room back."""
        self._cancel(request, *self._keys.pop(request))
        self._flush()

    def receive(self) -> str:
        """What comes next: `granted` or `cancelled`.

        Raises:
            WireFailed: a refusal, or nothing in time.
        """
        while not self._heard:
            self._heard.extend(self.receive_together())
        return self._heard.popleft()

    def receive_together(self) -> list[str]:
        """What has come together, whatever of it is of interest: `granted` and `cancelled`, in order."""
        try:
            frames = self.socket.recv_multipart()
        except zmq.Again:
            raise WireFailed(f"no answer within {_ANSWER_MS / 1000:g} s") from None
        return [kind for frame in self._split(frames) if (kind := self._understand(frame))]

    @abc.abstractmethod
    def keep_alive(self) -> None:
        """Say that this peer lives, where that must be said."""

    @abc.abstractmethod
    def _open(self, request: int, first_key: int, chunks: int) -> None: ...

    @abc.abstractmethod
    def _cancel(self, request: int, first_key: int, chunks: int) -> None: ...

    @abc.abstractmethod
    def _flush(self) -> None:
        """Send what was said since."""

    @abc.abstractmethod
    def _split(self, frames: list[bytes]) -> list[bytes]:
        """What a ZMQ message of such frames holds."""

    @abc.abstractmethod
    def _understand(self, frame: bytes) -> str:
        """Its meaning; empty where it is of no interest."""


class KvpdPeer(Peer):
    """In kvpd's words. It says that it runs on a host that nobody knows, and never writes a byte."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], terms: Terms) -> None:
        super().__init__(context, terms)
        self._messages = itertools.count(1)
        self._cancels: set[int] = set()  # messages that were not acknowledged yet
        self._said: list[bytes] = []  # leaves together, as what kvpd's sender has to say in a turn of its loop
        name = f"bench-{self.number}"
        self._receiver = 0
        hello = Hello(self.number, 0, 0, PROTOCOL_VERSION, name, terms.chunk_bytes, "", 0, _elsewhere())
        self.socket.send(encode(hello))
        welcome = decode(self.socket.recv())
        if not isinstance(welcome, Welcome):
            raise WireFailed(f"kvpd answers a Hello with {welcome}")
        self._receiver = welcome.receiver_incarnation

    def _send(self, message: Message) -> None:
        self._said.append(encode(message))

    def _flush(self) -> None:
        said, self._said = self._said, []
        for messages in together(said):
            self.socket.send_multipart(messages)

    def _split(self, frames: list[bytes]) -> list[bytes]:
        return frames

    def _open(self, request: int, first_key: int, chunks: int) -> None:
        keys = tuple((first_key + number).to_bytes(8, "little") for number in range(chunks))
        name, size = f"{self.number}-{request}", self._terms.chunk_bytes
        head = (self.number, self._receiver, next(self._messages))
        self._send(AllocRequest(*head, request, name, True, keys, True, chunks, 0, size))

    def _cancel(self, request: int, first_key: int, chunks: int) -> None:
        head = (self.number, self._receiver, next(self._messages))
        self._cancels.add(head[2])
        self._send(CancelNotif(*head, request, (), ErrorCode.CANCELLED, True))

    def _understand(self, frame: bytes) -> str:
        message = decode(frame)
        if isinstance(message, AllocResponse | Ack) and message.error is not None:
            raise WireFailed(f"kvpd refuses: {message.error}")
        if isinstance(message, AllocResponse):
            return "granted"
        # A Heartbeat is acknowledged too, and so is a request that must wait for room.
        if not isinstance(message, Ack) or message.message_id not in self._cancels:
            return ""
        self._cancels.remove(message.message_id)
        return "cancelled"

    def keep_alive(self) -> None:
        oldest = min(self._keys, default=0)
        self._send(Heartbeat(self.number, self._receiver, 0, oldest))
        self._flush()


class _LmMessage(msgspec.Struct, tag=True):
    """LMCache's messages are tagged maps; these have its names and fields."""


class _LmAllocRequest(_LmMessage, tag="AllocRequest"):
    keys: list[str]
    fmt: int
    shape: list[int]
    dtype: str
    last_chunk_toks: int
    req_id: str
    is_last_batch: bool
    total_chunks: int


class _LmCancelNotif(_LmMessage, tag="CancelNotif"):
    req_id: str
    keys: list[str]


class _LmAllocResponse(_LmMessage, tag="AllocResponse"):
    remote_indexes: list[int]
    already_sent_indexes: list[int] = []


_lm_encoder = msgspec.msgpack.Encoder()
_lm_decoder = msgspec.msgpack.Decoder(_LmAllocResponse)
_TOKENS_AXIS: Final = 2  # of LMCache's shape


class LmcachePeer(Peer):
    """In LMCache's words, version 0.5.6.

    A batch is never called the last one: LMCache would give up the reservation at that moment, and room must stay
    taken until it is given back here.
    """

    def _send(self, message: _LmMessage) -> None:
        self.socket.send_multipart([b"", _lm_encoder.encode(message)])

    def _flush(self) -> None:
        """Each of its messages has left by itself."""

    def _split(self, frames: list[bytes]) -> list[bytes]:
        return frames[-1:]

    def keep_alive(self) -> None:
        """Nobody asks."""

    def _names(self, first_key: int, chunks: int) -> list[str]:
        return [f"bench@1@0@{first_key + number:x}@{self._terms.dtype}" for number in range(chunks)]

    def _open(self, request: int, first_key: int, chunks: int) -> None:
        terms = self._terms
        keys, name = self._names(first_key, chunks), f"{self.number}-{request}"
        tokens = terms.shape[_TOKENS_AXIS]
        self._send(_LmAllocRequest(keys, terms.format, list(terms.shape), terms.dtype, tokens, name, False, chunks))

    def _cancel(self, request: int, first_key: int, chunks: int) -> None:
        self._send(_LmCancelNotif(f"{self.number}-{request}", self._names(first_key, chunks)))

    def _understand(self, frame: bytes) -> str:
        indexes = _lm_decoder.decode(frame).remote_indexes
        if -1 in indexes:
            raise WireFailed("LMCache refuses")
        return "granted" if indexes else "cancelled"


def _elsewhere() -> HostIdentity:
    """A host of its own: what this process says of its writes is all that a receiver has to go by."""
    return HostIdentity("bench-peers", "", 1, 1)


def connect(system: str, context: zmq.Context[zmq.Socket[bytes]], terms: Terms) -> Peer:
    """A new sender that speaks to that system."""
    return {"kvpd": KvpdPeer, "LMCache": LmcachePeer}[system](context, terms)


class Clock:
    """Keeps peers alive while somebody waits: `due` says when it is time."""

    def __init__(self, interval_s: float = 3.0) -> None:
        self._interval_s = interval_s
        self._next = time.monotonic() + interval_s

    def keep(self, peers: list[Peer]) -> None:
        """Let all of them speak, where it is time."""
        if time.monotonic() >= self._next:
            for peer in peers:
                peer.keep_alive()
            self._next = time.monotonic() + self._interval_s
