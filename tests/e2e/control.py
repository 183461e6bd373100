"""A stranger at a receiver's control port: says whatever a test wants, well-formed or not."""

from __future__ import annotations

from types import TracebackType
from typing import Self

import zmq

from kvpd.core.messages import AnyMessage, Message, decode, encode

from .daemons import DEADLINE_S


class Stranger:
    """A DEALER of its own context. A context manager: leaving drops whatever was not sent."""

    def __init__(self, address: str, identity: bytes, *, queue: int = 10_000, receive_bytes: int = -1) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.IDENTITY, identity),
            (zmq.SNDHWM, 10_000),
            (zmq.RCVHWM, queue),
            (zmq.RCVBUF, receive_bytes),
            (zmq.SNDTIMEO, int(DEADLINE_S * 1000)),
            (zmq.RCVTIMEO, int(DEADLINE_S * 1000)),
        ):
            self._socket.setsockopt(option, value)
        self._socket.connect(f"tcp://{address}")

    def send(self, message: Message) -> None:
        """A message of the protocol."""
        self._socket.send(encode(message))

    def send_frames(self, *frames: bytes) -> None:
        """Any frames at all."""
        self._socket.send_multipart(frames)

    def receive(self) -> AnyMessage:
        """The next answer."""
        return decode(self._socket.recv())

    def receive_waiting(self) -> list[AnyMessage]:
        """The answers that are here, or come within a moment of each other."""
        answers = []
        while self._socket.poll(100):
            answers.append(self.receive())
        return answers

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()
        self._context.term()
