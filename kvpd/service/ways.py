"""A sender's ways to its receivers, one for each session: an endpoint to put through, and perhaps memory to share.

A way is known by the number that the core gave it, and nothing is ever put through one looked up by address.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs

from kvpd.core.sender import events as ev
from kvpd.errors import TransportError
from kvpd.log import get_logger
from kvpd.service.sharing import can_connect
from kvpd.transports.base import DataPlane, Endpoint, RemoteRegion

log = get_logger()


@attrs.frozen
class Offer:
    """Where engines get the memory of the receiver that a session is with, to fill its slots in place."""

    path: str
    receiver_incarnation: int


@attrs.frozen
class Way:
    """A session's endpoint, where each rank's window begins in the memory that it reaches, and the receiver's offer."""

    endpoint: Endpoint
    rank_offsets: tuple[int, ...]
    offer: Offer


class Ways:
    """All of them, those that are being made too. `feed` is told what became of each."""

    def __init__(self, feed: Callable[[ev.EndpointOpened | ev.EndpointBroken], None], *, fills_in_place: bool) -> None:
        self._feed = feed
        self._fills_in_place = fills_in_place
        self._ways: dict[int, Way | None] = {}  # by endpoint number; None: being made

    def begin(self, endpoint_no: int) -> None:
        """A way is about to be opened."""
        self._ways[endpoint_no] = None

    async def open(self, plane: DataPlane, action: ev.OpenEndpoint) -> None:
        """Open a way that has begun, and tell how that went; not if it was closed meanwhile."""
        receiver, endpoint_no, regions = action.receiver, action.endpoint, action.regions
        first = regions[0]  # of one piece of memory, as the core has made sure

        def on_broken(detail: str) -> None:
            self._feed(ev.EndpointBroken(receiver, endpoint_no, detail))

        length = sum(region.length for region in regions)
        remote = RemoteRegion(first.worker_address, first.base_address, length, first.rkey)
        try:
            endpoint = await plane.connect(remote, on_broken)
        except TransportError as exc:
            on_broken(str(exc))
            return
        if endpoint_no not in self._ways:  # the session ended meanwhile
            endpoint.force_close()
            return
        offsets = tuple(region.base_address - first.base_address for region in regions)
        self._ways[endpoint_no] = Way(endpoint, offsets, Offer(action.share, action.incarnation))
        transports = ",".join(sorted(endpoint.transports))
        log.info("endpoint_opened", peer=receiver, transports=transports)
        # There is an endpoint in any case: it notices the receiver's death, and carries what nobody fills in place.
        in_place = self._fills_in_place and bool(action.share) and can_connect(action.share)
        self._feed(ev.EndpointOpened(receiver, endpoint_no, "local" if in_place else transports, in_place))

    def get(self, endpoint_no: int) -> Way | None:
        """The way of this number; None if it is closed, or not open yet."""
        return self._ways.get(endpoint_no)

    def close(self, endpoint_no: int) -> None:
        """Force-close it, now."""
        way = self._ways.pop(endpoint_no)
        if way is not None:
            way.endpoint.force_close()

    def close_all(self) -> None:
        """Force-close all of them, now."""
        for way in self._ways.values():
            if way is not None:
                way.endpoint.force_close()

    @property
    def in_flight_bytes(self) -> int:
        """Bytes posted through all of them and not yet ended."""
        ways = list(self._ways.values())  # at once: another thread than the loop's may ask
        return sum(way.endpoint.in_flight_bytes for way in ways if way is not None)
