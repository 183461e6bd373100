"""A stand-in proxy: it hears that a request is whole at its receiver, acknowledges, and tells the conductor.

A sender repeats a notification until it is acknowledged, so each one is acknowledged every time it comes and passed on
the first time only. Run as `python -m demo_app.proxy`; it ends by SIGTERM.
"""

from __future__ import annotations

import signal
import sys

import zmq

from demo_app import words
from kvpd.core.messages import FailNotif, ProxyAck, ProxyNotif, decode, encode
from kvpd.errors import RemoteProtocolError


def serve() -> None:
    """Answer until the process is told to end."""
    seen: set[tuple[str, int, int]] = set()  # bounded by the demo's own two requests
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        words.say(words.Listening(f"tcp://127.0.0.1:{port}"))
        while True:
            peer, *frames = socket.recv_multipart()
            notice = _read(frames)
            if notice is None:
                continue
            socket.send_multipart([peer, encode(ProxyAck(notice.sender_incarnation, notice.message_id))])
            if isinstance(notice, FailNotif):
                continue  # its prefill engine fails too, and says so
            identity = (notice.sender_id, notice.sender_incarnation, notice.transfer_no)
            if identity not in seen:
                seen.add(identity)
                words.say(words.Notified(notice.req_id, notice.sender_id, notice.receiver_id))


def _read(frames: list[bytes]) -> ProxyNotif | FailNotif | None:
    try:
        message = decode(frames[0]) if len(frames) == 1 else None
    except RemoteProtocolError as error:
        print(f"dropped: {error}", file=sys.stderr)
        return None
    return message if isinstance(message, ProxyNotif | FailNotif) else None


def _leave(_signal: int, _frame: object) -> None:
    sys.exit(0)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _leave)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the conductor's to act on
    serve()
