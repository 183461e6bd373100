"""Places: receivers' memories on this host that an engine writes into itself, each mapped at its first use.

A receiver gives its slots to others only when it knows that nobody writes into them any more. So a mapping is let go of
in one order: the last transfer that used it was left and its slots are revoked, it is unmapped, the receiver is told.
"""

from __future__ import annotations

import mmap
import threading
from typing import Final

import attrs

from kvpd.client._attach import Attachment, attach_writer, let_go
from kvpd.errors import ErrorCode, KvpdError, TransferFailed
from kvpd.link import Place

_ATTACH_TIMEOUT_S: Final = 5.0


@attrs.define(eq=False)
class _Mapped:
    """One place, from its introduction until it is let go of."""

    frame: Place
    users: set[int] = attrs.field(factory=set)  # transfers with slots in it that were not left
    is_gone: bool = False  # no slot of it will be staged any more
    attaching: threading.Lock = attrs.field(factory=threading.Lock)
    attachment: Attachment | None = None


class Places:
    """All places of one link. Threads share it."""

    def __init__(self, rank: int, chunk_bytes: int) -> None:
        self._rank = rank
        self._chunk_bytes = chunk_bytes
        self._lock = threading.Lock()
        self._places: dict[int, _Mapped] = {}

    def introduce(self, frame: Place) -> None:
        """The daemon names a place."""
        with self._lock:
            self._places[frame.place] = _Mapped(frame)

    def gone(self, number: int) -> None:
        """The daemon stages no slot of it any more."""
        with self._lock:
            place = self._places.get(number)
            if place is not None:
                place.is_gone = True
        self._let_go_of_unused()

    def all_gone(self) -> None:
        """The link to the daemon has ended."""
        with self._lock:
            for place in self._places.values():
                place.is_gone = True
        self._let_go_of_unused()

    def left(self, transfer: int) -> None:
        """A transfer was left and all of its slots are revoked."""
        with self._lock:
            for place in self._places.values():
                place.users.discard(transfer)
        self._let_go_of_unused()

    def _let_go_of_unused(self) -> None:
        with self._lock:
            unused = [n for n, place in self._places.items() if place.is_gone and not place.users]
            places = [self._places.pop(number) for number in unused]
        for place in places:  # of which nobody has a slot, and nobody will get one
            if place.attachment is not None:
                let_go(place.attachment)

    def region(self, number: int, transfer: int) -> mmap.mmap:
        """The memory of a place, for slots of this transfer, until it is left.

        Raises:
            TransferFailed: the session with that receiver is over, or its memory cannot be had.
        """
        with self._lock:
            place = self._places.get(number)
            if place is None or place.is_gone:
                raise TransferFailed(ErrorCode.PEER_LOST, "the session with the receiver is over")
            place.users.add(transfer)
        with place.attaching:
            if place.attachment is None:
                place.attachment = self._attach(place.frame)
            return place.attachment.region

    def _attach(self, frame: Place) -> Attachment:
        try:
            return attach_writer(frame, self._rank, self._chunk_bytes, _ATTACH_TIMEOUT_S)
        except (KvpdError, OSError, ValueError) as exc:
            detail = (
                f"the receiver's memory cannot be had at {frame.path} ({exc}): run this engine on the receiver's host, "
                'as its user and with a view of that path, or set transport = "ucx" at the sender'
            )
            raise TransferFailed(ErrorCode.TRANSPORT_FAILED, detail[:4096]) from exc
