"""How an engine attaches to its daemon: a socket, a greeting, and the daemon's buffers mapped.

Either all of it succeeds or nothing stays open.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import struct
import time
from pathlib import Path
from typing import Final, Literal

import attrs

from kvpd.errors import LocalProtocolError, RemoteProtocolError, TransportError
from kvpd.link import (
    GROUP_CHARS_MAX,
    LINK_VERSION,
    Attach,
    Attached,
    AttachWriter,
    DaemonFrame,
    DaemonFrameReader,
    LetGo,
    Place,
    Rejected,
    encode_frame,
)

DESCRIPTORS_MAX: Final = 253  # that one message of a Unix socket can carry
SEND_TIMEOUT_S: Final = 30
_RECEIVE_BYTES = 65536

Role = Literal["sender", "receiver"]


@attrs.frozen
class Attachment:
    """An attached connection: what it consists of, and what its daemon said of itself."""

    path: Path
    rank: int
    socket: socket.socket
    reader: DaemonFrameReader
    attached: Attached
    region: mmap.mmap  # of our rank
    early: tuple[DaemonFrame, ...]  # frames that came right behind the greeting


def _connect(connection: socket.socket, where: Path, timeout_s: float) -> None:
    """Wait for a place in the daemon's backlog too, which a socket with Python's own timeout does not: it gets EAGAIN.

    The kernel's timeout for sending bounds a blocking connect on a Unix socket.
    """
    seconds = int(timeout_s)
    timeout = struct.pack("ll", seconds, max(1, int((timeout_s - seconds) * 1e6)))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
    try:
        connection.connect(str(where))
    except BlockingIOError as exc:
        raise TimeoutError from exc


def attach(path: str | os.PathLike[str], role: Role, rank: int, group: str, timeout_s: float) -> Attachment:
    """Connect, greet and map the region of our rank.

    Raises:
        TransportError: nobody answers at `path`, or not within `timeout_s` seconds.
        LocalProtocolError: the daemon refuses us (it has another role, say), or has no region of this rank; or the
            group's name is too long.
        RemoteProtocolError: it speaks another version, or nothing that makes sense.
    """
    if len(group) > GROUP_CHARS_MAX:
        raise LocalProtocolError(
            f"the name of a group has at most {GROUP_CHARS_MAX} characters; {group[:40]!r}… has more"
        )
    return _attach(Path(path), Attach(LINK_VERSION, role, rank, group), timeout_s, writable=role == "sender")


def attach_writer(place: Place, rank: int, chunk_bytes: int, timeout_s: float) -> Attachment:
    """Connect to a receiver on this host, and map our rank's window of its memory, to fill slots of `chunk_bytes`.

    Raises:
        TransportError, LocalProtocolError, RemoteProtocolError: as for `attach`.
    """
    greeting = AttachWriter(LINK_VERSION, rank, place.sender_id, place.sender_incarnation, place.receiver_incarnation)
    attachment = _attach(Path(place.path), greeting, timeout_s, writable=True)
    found = attachment.attached.chunk_bytes
    if found != chunk_bytes:
        let_go(attachment)
        raise RemoteProtocolError(f"chunks of {found} bytes at {place.path}, of {chunk_bytes} at our daemon")
    return attachment


def _attach(where: Path, greeting: Attach | AttachWriter, timeout_s: float, *, writable: bool) -> Attachment:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    descriptors: list[int] = []
    attachment: Attachment | None = None
    try:
        reader = DaemonFrameReader()
        deadline = time.monotonic() + timeout_s
        try:
            _connect(connection, where, timeout_s)
            connection.settimeout(timeout_s)
            connection.sendall(encode_frame(greeting))
            frames = _first_frames(connection, where, reader, descriptors, deadline)
        except TimeoutError as exc:
            raise TransportError(f"the daemon at {where} did not answer within {timeout_s:g} s") from exc
        except OSError as exc:
            raise TransportError(f"cannot reach the daemon at {where}: {exc.strerror or exc}") from exc
        attached = _checked(frames[0], where, len(descriptors))
        region = _mapped(attached, descriptors, where, greeting.rank, writable=writable)
        connection.settimeout(None)
        # A daemon that reads nothing for so long is lost. Only for sending: the reader may wait for ever.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_TIMEOUT_S, 0))
        attachment = Attachment(where, greeting.rank, connection, reader, attached, region, tuple(frames[1:]))
        return attachment
    finally:
        for descriptor in descriptors:  # a mapping keeps what it needs
            os.close(descriptor)
        if attachment is None:
            if isinstance(greeting, AttachWriter):
                _say_let_go(connection)
            connection.close()


def let_go(attachment: Attachment) -> None:
    """Unmap a receiver's memory, say so and disconnect.

    Where an array of the engine's still refers to the memory, it stays mapped as long, and nothing is said: the
    receiver waits for the end of this process.
    """
    with contextlib.suppress(BufferError):
        attachment.region.close()
        _say_let_go(attachment.socket)
    attachment.socket.close()


def _say_let_go(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the receiver is dead, or has ended the connection
        connection.sendall(encode_frame(LetGo()))


def _first_frames(
    connection: socket.socket, where: Path, reader: DaemonFrameReader, descriptors: list[int], deadline: float
) -> list[DaemonFrame]:
    while True:
        connection.settimeout(max(deadline - time.monotonic(), 1e-3))
        data, received, flags, _ = socket.recv_fds(
            connection, _RECEIVE_BYTES, DESCRIPTORS_MAX, flags=socket.MSG_CMSG_CLOEXEC
        )
        descriptors += received
        if not data:
            raise TransportError(f"the daemon at {where} closed the connection instead of answering")
        if flags & socket.MSG_CTRUNC:
            raise TransportError(f"the descriptors from {where} do not fit: this process has too many files open")
        if frames := reader.feed(data):
            return frames


def _checked(frame: DaemonFrame, where: Path, descriptors: int) -> Attached:
    match frame:
        case Attached():
            pass
        case Rejected(detail):
            raise LocalProtocolError(f"the daemon at {where} refuses to attach us: {detail}")
        case _:
            raise RemoteProtocolError(f"the daemon at {where} greets with {type(frame).__name__}")
    if frame.version != LINK_VERSION:
        raise RemoteProtocolError(
            f"the daemon at {where} speaks version {frame.version} of the link, not {LINK_VERSION}"
        )
    if len(frame.regions) != descriptors or not frame.regions:
        raise RemoteProtocolError(f"{descriptors} descriptors from {where} for {len(frame.regions)} regions")
    for region in frame.regions:
        if region.device != "cpu":
            raise RemoteProtocolError(f"a region on {region.device!r} from {where}; only cpu regions can be mapped")
        if not 1 <= frame.chunk_bytes <= region.length:
            raise RemoteProtocolError(
                f"a region of {region.length} bytes from {where} for chunks of {frame.chunk_bytes} bytes"
            )
    return frame


def _mapped(attached: Attached, descriptors: list[int], where: Path, rank: int, *, writable: bool) -> mmap.mmap:
    for descriptor, region in zip(descriptors, attached.regions, strict=True):
        if region.rank == rank:
            # Beyond the end of the file a mapping exists, and kills who touches it.
            size = os.fstat(descriptor).st_size
            if region.offset % mmap.ALLOCATIONGRANULARITY or not 0 <= region.offset <= size - region.length:
                raise RemoteProtocolError(
                    f"a region of {region.length} bytes at {region.offset} from {where} in a file of {size}"
                )
            access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
            return mmap.mmap(descriptor, region.length, access=access, offset=region.offset)
    ranks = [region.rank for region in attached.regions]
    raise LocalProtocolError(f"the daemon at {where} has no region for rank {rank}, only for {ranks}")
