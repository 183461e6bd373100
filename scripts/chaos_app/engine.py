"""The engines: processes that load the daemons without end, lose them, and attach anew.

    python -m chaos_app.engine prefill NAME SEED SOCKET THREADS RECEIVER...
    python -m chaos_app.engine decode NAME SEED SOCKET THREADS

Each request and each claim ends in one line on standard output, whatever becomes of it. Commands come on standard
input; its end is the engine's. SIGUSR1 writes every thread's stack to standard error.
"""

from __future__ import annotations

import faulthandler
import os
import queue
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import kvpd.client
from chaos_app import words
from chaos_app.payloads import CHUNK_BYTES, Request, content_of, hash_of, request_of
from kvpd.client import ReceiverLink, SenderLink
from kvpd.errors import ErrorCode, KvpdError, LocalProtocolError, TransferError
from kvpd.link import TransferEvent

_CLAIM_TIMEOUT_S: Final = 3.0
_WAITING_CLAIMS_MAX: Final = 1024
_RETRY_S: Final = 0.1
_LATE_SLOTS: Final = 0.01  # this part of all slots is filled late
_LATE_S: Final = 3.0  # at most by so much


class ChangeOfMind(Exception):
    """An engine that gives its request up half-way."""


class Gate:
    """Whether work may begin, and whether any is being done."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._open = False
        self._busy = 0

    def set(self, *, is_open: bool) -> None:
        """Let work begin, or not."""
        with self._changed:
            self._open = is_open
            self._changed.notify_all()

    def wait_idle(self) -> None:
        """Until nothing is being done any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._busy == 0)

    def enter(self) -> None:
        """Begin a piece of work, once it may begin."""
        with self._changed:
            self._changed.wait_for(lambda: self._open)
            self._busy += 1

    def leave(self) -> None:
        """It is done."""
        with self._changed:
            self._busy -= 1
            self._changed.notify_all()


_speaking = threading.Lock()


def tell(event: words.Event) -> None:
    """One line to the conductor. Without a conductor there is nothing left to do."""
    with _speaking:
        try:
            os.write(1, words.encode(event))
        except BrokenPipeError:
            os._exit(0)


# ------------------------------------------------------------------ prefill


class PrefillWorker(threading.Thread):
    """One thread: requests, one after another, over a link of its own."""

    def __init__(self, name: str, seed: str, path: Path, receivers: Sequence[str], gate: Gate) -> None:
        super().__init__(name=name, daemon=True)
        self._label = name
        self._rng = random.Random(seed)
        self._path = path
        self._receivers = receivers
        self._gate = gate
        self._number = 0
        self._running: tuple[SenderLink, str] | None = None

    def run(self) -> None:
        """Attach, and again whenever the daemon is lost."""
        while True:
            self._gate.enter()
            try:
                self._attach()
            except KvpdError:
                tell(words.Unattached())
            finally:
                self._gate.leave()
            time.sleep(_RETRY_S)

    def _attach(self) -> None:
        with kvpd.client.connect_sender(self._path) as link:
            while self._one(link):
                self._gate.leave()
                self._gate.enter()

    def _one(self, link: SenderLink) -> bool:
        """One request. Whether the link is still good."""
        self._number += 1
        request = request_of(f"{self._label}-{self._number}")
        self._running = (link, request.req_id)
        try:
            send(link, request, self._rng.choice(self._receivers), self._rng)
        except ChangeOfMind:
            tell(words.Failed(request.req_id, "given up by its engine"))
        except TransferError as exc:
            tell(words.Failed(request.req_id, str(exc.code)))
            return exc.code is not ErrorCode.PEER_LOST  # which may be our own daemon
        else:
            tell(words.Sent(request.req_id))
        finally:
            self._running = None
        return True

    def abort(self) -> None:
        """Cancel what runs, from another thread, by its name."""
        if (running := self._running) is not None:
            link, req_id = running
            link.cancel(req_id)


def send(link: SenderLink, request: Request, receiver: str, rng: random.Random) -> None:
    """A whole request, or, now and then, the beginning of one."""
    total = len(request.keys)
    gives_up_at = rng.randrange(total) if rng.random() < 0.1 else total
    with link.open(request.req_id, receiver=receiver, total_chunks=total, timeout=30.0) as transfer:
        for first in range(0, total, request.batch):
            keys = request.keys[first : first + request.batch]
            with transfer.stage(keys, last_chunk_bytes=request.length(first + len(keys) - 1)) as slots:
                for number, slot in enumerate(slots, first):
                    if number >= gives_up_at:
                        raise ChangeOfMind
                    if slot is not None:
                        if rng.random() < _LATE_SLOTS:  # slots that were given away meanwhile are written over
                            time.sleep(rng.random() * _LATE_S)
                        slot[:] = content_of(request.keys[number], request.length(number))


# ------------------------------------------------------------------ decode


class DecodeEngine:
    """Takes whatever becomes ready: one thread hears of it, several claim, compare and release. It never pauses."""

    def __init__(self, seed: str, path: Path, threads: int) -> None:
        self._path = path
        self._ready: queue.Queue[tuple[ReceiverLink, TransferEvent]] = queue.Queue(_WAITING_CLAIMS_MAX)
        for number in range(threads):
            threading.Thread(target=self._claim, args=(random.Random(f"{seed}/{number}"),), daemon=True).start()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        while True:
            try:
                with kvpd.client.connect_receiver(self._path) as link:
                    for event in link.events():
                        if event.state == "ready":
                            self._ready.put((link, event))
            except KvpdError:
                tell(words.Unattached())
            time.sleep(_RETRY_S)

    def _claim(self, rng: random.Random) -> None:
        while True:
            link, event = self._ready.get()
            try:
                with link.claim(event.req_id, _CLAIM_TIMEOUT_S, sender_id=event.sender_id) as chunks:
                    views = [(chunk.key, chunk.view) for chunk in chunks]
                    wrong = compare(request_of(event.req_id), views)
                    if rng.random() < 0.5:  # a late write would land while it is being read
                        time.sleep(rng.random() * 0.3)
                        wrong += compare(request_of(event.req_id), views)
                    nbytes = sum(len(view) for _, view in views)
                tell(words.Read(event.req_id, len(views), nbytes, tuple(wrong)))
            except TransferError as exc:
                tell(words.Failed(event.req_id, str(exc.code)))
            except LocalProtocolError:
                tell(words.Failed(event.req_id, "the link was closed"))


def compare(request: Request, chunks: Sequence[tuple[bytes, memoryview]]) -> list[str]:
    """What of a claimed request is not as it was sent."""
    wrong = []
    if [key for key, _ in chunks] != list(request.keys):
        wrong.append(f"{request.req_id}: the keys are {[key for key, _ in chunks]!r}")
    for number, (key, view) in enumerate(chunks):
        expected = content_of(key, request.length(number))
        if len(view) != len(expected) or hash_of(view) != hash_of(expected):
            wrong.append(f"{request.req_id}: chunk {number}, {len(view)} bytes of {CHUNK_BYTES}, is not what was sent")
    return wrong


# ------------------------------------------------------------------ main


def main() -> None:
    """Obey until standard input ends."""
    kind, name, seed, path, threads, *receivers = sys.argv[1:]
    faulthandler.register(signal.SIGUSR1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the conductor's to act on
    gate = Gate()
    aborts: list[Callable[[], None]] = []
    if kind == "prefill":
        for number in range(int(threads)):
            label = f"{name}.{number}"
            worker = PrefillWorker(label, f"{seed}/{label}", Path(path), receivers, gate)
            worker.start()
            aborts.append(worker.abort)
    else:
        DecodeEngine(f"{seed}/{name}", Path(path), int(threads))
    tell(words.Up())
    for line in sys.stdin:
        match line.strip():
            case words.RUN:
                gate.set(is_open=True)
            case words.PAUSE:
                gate.set(is_open=False)
                gate.wait_idle()
                tell(words.Paused())
            case words.ABORT:
                for abort in aborts:
                    abort()
    os._exit(0)  # whatever its threads wait for


if __name__ == "__main__":
    main()
