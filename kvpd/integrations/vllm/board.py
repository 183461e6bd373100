"""What the receiver has said of each transfer, for a scheduler that asks thousands of times a second.

Its own thread listens to the receiver's pushed events; the scheduler reads and writes memory. Transfers that the
scheduler wants no more are cancelled at the receiver, now and again should they become ready later.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import OrderedDict
from typing import Final, TypeVar

from kvpd.client import ReceiverLink
from kvpd.errors import ErrorCode, TransferError
from kvpd.integrations.vllm.links import LinkKeeper, spawn
from kvpd.integrations.vllm.log import engine_log
from kvpd.integrations.vllm.metadata import Failure
from kvpd.link import TransferEvent

T = TypeVar("T")
REMEMBERED_MAX: Final = 65_536  # transfers of each kind; the oldest are forgotten, as the receiver forgets them too
RECONNECT_FIRST_S: Final = 0.1
RECONNECT_LAST_S: Final = 5.0


class Board:
    """Ready and failed transfers by id."""

    def __init__(self, link: LinkKeeper[ReceiverLink]) -> None:
        self._link = link
        self._lock = threading.Lock()
        self._ready: OrderedDict[str, float] = OrderedDict()
        self._failed: OrderedDict[str, Failure] = OrderedDict()
        self._unwanted: OrderedDict[str, float] = OrderedDict()
        self._cancels: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._news = threading.Event()  # something was said since the scheduler last waited for it
        spawn("kvpd-events", self._listen)
        spawn("kvpd-cancel", self._cancel)

    # ------------------------------------------------------------------ the scheduler's thread: memory alone

    def is_ready(self, transfer_id: str) -> bool:
        """Whether all of it is at the receiver, and may be claimed."""
        return transfer_id in self._ready

    def failure(self, transfer_id: str) -> Failure | None:
        """Why it will never be ready, if that is known."""
        return self._failed.get(transfer_id)

    def wait(self, seconds: float) -> None:
        """Until the receiver has said something that was not waited for yet, `seconds` at most."""
        self._news.wait(seconds)
        self._news.clear()

    def forget(self, transfer_id: str) -> None:
        """It was handed to the worker."""
        with self._lock:
            self._ready.pop(transfer_id, None)
            self._failed.pop(transfer_id, None)

    def discard(self, transfer_id: str, *, at_once: bool) -> None:
        """Nobody here will claim it: free its room, at once or when all of it has landed. Twice is harmless."""
        with self._lock:
            is_ready = self._ready.pop(transfer_id, None) is not None
            self._failed.pop(transfer_id, None)
            _remember(self._unwanted, transfer_id, time.monotonic())
        if at_once or is_ready:
            self._cancels.put(transfer_id)

    def close(self) -> None:
        """End both threads."""
        self._closed.set()
        self._cancels.put(None)
        self._link.close()

    # ------------------------------------------------------------------ the threads

    def _listen(self) -> None:
        wait_s = RECONNECT_FIRST_S
        while not self._closed.is_set():
            try:
                link = self._link.link()
                wait_s = RECONNECT_FIRST_S
                engine_log.info("receiver_reached", receiver=link.name)
                self._note_all(link)
            except TransferError as exc:
                # Said a few times in an outage, not every five seconds of a long one.
                if not self._closed.is_set() and wait_s < RECONNECT_LAST_S:
                    engine_log.warning("receiver_not_reached", again_in_s=wait_s, detail=str(exc))
            self._closed.wait(wait_s)
            wait_s = min(2 * wait_s, RECONNECT_LAST_S)

    def _note_all(self, link: ReceiverLink) -> None:
        """Until the link is lost, which is raised, or closed."""
        try:
            for event in link.events():
                self._note(event)
        finally:
            self._link.drop(link)
            self._receiver_lost()

    def _note(self, event: TransferEvent) -> None:
        with self._lock:
            match event.state:
                case "ready":
                    _remember(self._ready, event.req_id, time.monotonic())
                    self._failed.pop(event.req_id, None)  # another attempt has come through
                    unwanted = event.req_id in self._unwanted
                case "failed":
                    error = event.error
                    failure = Failure(error.code, error.detail, error.retry_after_s) if error else _UNSAID
                    self._ready.pop(event.req_id, None)
                    _remember(self._failed, event.req_id, failure)
                    unwanted = False
                case "released":
                    self._ready.pop(event.req_id, None)
                    _remember(self._failed, event.req_id, _USED)
                    self._unwanted.pop(event.req_id, None)
                    unwanted = False
        self._news.set()
        if unwanted:
            self._cancels.put(event.req_id)

    def _receiver_lost(self) -> None:
        """What was ready went with it."""
        with self._lock:
            for transfer_id in self._ready:
                _remember(self._failed, transfer_id, _LOST)
            self._ready.clear()
            self._unwanted.clear()
        self._news.set()

    def _cancel(self) -> None:
        while (transfer_id := self._cancels.get()) is not None:
            try:
                self._link.link().cancel(transfer_id)
            except TransferError:
                continue  # the receiver is gone, and the transfer with it


_UNSAID: Final = Failure(ErrorCode.REVOKED, "the receiver did not say why")
_USED: Final = Failure(ErrorCode.CLAIMED, "its KV was claimed and released before; a transfer serves one request")
_LOST: Final = Failure(ErrorCode.PEER_LOST, "the receiver daemon was lost while it held the request")


def _remember(where: OrderedDict[str, T], transfer_id: str, value: T) -> None:
    where[transfer_id] = value
    where.move_to_end(transfer_id)
    if len(where) > REMEMBERED_MAX:
        where.popitem(last=False)
