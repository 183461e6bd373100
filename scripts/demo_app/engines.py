"""An engine of the demo: a model in a process of its own, doing what the conductor's commands say.

The same program is prefill engine and decode engine; a command says which of the two it is for a request. A prefill
engine computes in this thread and streams in another, so a chunk travels while the next one is computed, and a request
that must wait for admission computes meanwhile.

Run as `python -m demo_app.engines MODEL DIRECTORY`; it ends when its standard input does.
"""

from __future__ import annotations

import queue
import signal
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, assert_never

import attrs

from demo_app import chunks, words
from demo_app.models import Model, generate, load, prefill
from kvpd import client

_CLAIM_TIMEOUT_S: Final = 60.0
_COMPUTE_TIMEOUT_S: Final = 120.0


@attrs.define
class _Stream:
    """A prompt's chunks on their way from the thread that computes to the one that sends."""

    model: Model
    cache: Any
    command: words.Prefill
    spans: list[tuple[int, int]]
    computed: queue.Queue[float | None]  # when each next chunk was computed; None: no more will come

    def compute(self) -> int:
        """Compute all chunks and return the first new token."""
        first_token = -1
        try:
            for start, stop in self.spans:
                first_token = self.model.step(self.cache, self.command.tokens[start:stop])
                self.computed.put_nowait(time.monotonic())
        finally:
            self.computed.put_nowait(None)
        return first_token

    def send(self) -> words.Sent:
        """Open a transfer, and put each chunk into it once it is computed.

        Raises:
            kvpd.errors.KvpdError: the receiver refused the request or the transfer failed.
            RuntimeError: the computing thread gave up.
        """
        names = chunks.keys(self.command.tokens)
        sent_bytes = 0
        opened_at = idle_since = time.monotonic()
        with (
            client.connect_sender(self.command.socket) as link,
            link.open(self.command.req_id, receiver=self.command.receiver, total_chunks=len(names)) as transfer,
        ):
            for number, (name, span) in enumerate(zip(names, self.spans, strict=True)):
                length = self.model.shape.bytes_of(span[1] - span[0])
                is_last = number == len(names) - 1
                with transfer.stage([name], last=is_last, last_chunk_bytes=length) as slots:
                    staged_at = time.monotonic()
                    if number == 0:
                        words.say(words.Admitted(self.command.req_id, staged_at - opened_at))
                    for slot in slots:
                        computed_at = self._next_chunk()
                        if slot is not None:  # None: the receiver has this chunk already
                            chunks.pack(self.model.layers_of(self.cache), span, slot.view, self.model.shape)
                            sent_bytes += length
                    idle_since = max(staged_at, computed_at)
        return words.Sent(self.command.req_id, len(names), sent_bytes, time.monotonic() - idle_since)

    def _next_chunk(self) -> float:
        computed_at = self.computed.get(timeout=_COMPUTE_TIMEOUT_S)
        if computed_at is None:
            raise RuntimeError("the model failed before all chunks were computed")
        return computed_at


def run_prefill(model: Model, command: words.Prefill) -> None:
    """Compute and stream at once."""
    spans = chunks.spans(len(command.tokens))
    stream = _Stream(model, model.new_cache(), command, spans, queue.Queue(maxsize=len(spans) + 1))
    started_at = time.monotonic()
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="stream") as executor:
        sending = executor.submit(stream.send)
        first_token = stream.compute()
        words.say(words.Prefilled(command.req_id, first_token, time.monotonic() - started_at))
        words.say(sending.result())


def run_continue(model: Model, command: words.Continue) -> None:
    """Take a prompt's cache from the receiver and generate from it."""
    spans = chunks.spans(command.prompt_tokens)
    kv = model.shape.empty(command.prompt_tokens)
    started_at = time.monotonic()
    with client.connect_receiver(command.socket) as link:
        with link.claim(command.req_id, timeout=_CLAIM_TIMEOUT_S) as claimed:
            copied_bytes = sum(len(chunk.view) for chunk in claimed)
            for chunk, span in zip(claimed, spans, strict=True):
                chunks.unpack(chunk.view, span, kv, model.shape)
        # The answer comes after the daemon has seen the release: whoever looks at its slots now finds them free.
        link.stats()
    words.say(words.Claimed(command.req_id, len(spans), copied_bytes, time.monotonic() - started_at))
    _say_generated(model, model.cache_from(kv), command.req_id, command.first_token, command.count, alone=False)


def run_alone(model: Model, command: words.Alone) -> None:
    """Both phases here, as the reference to compare with."""
    cache = model.new_cache()
    first_token = prefill(model, cache, command.tokens)
    _say_generated(model, cache, command.req_id, first_token, command.count, alone=True)


def _say_generated(model: Model, cache: Any, req_id: str, first_token: int, count: int, *, alone: bool) -> None:
    started_at = time.monotonic()
    tokens = generate(model, cache, first_token, count)
    words.say(words.Generated(req_id, tuple(tokens), time.monotonic() - started_at, alone))


def serve(name: str, directory: Path) -> None:
    """Load the model, then obey until the conductor hangs up."""
    started_at = time.monotonic()
    model = load(name, directory)
    words.say(words.Loaded(time.monotonic() - started_at))
    for line in sys.stdin.buffer:
        match words.decode_command(line):
            case words.Prefill() as command:
                run_prefill(model, command)
            case words.Continue() as command:
                run_continue(model, command)
            case words.Alone() as command:
                run_alone(model, command)
            case command:
                assert_never(command)


def main(arguments: Sequence[str]) -> None:
    """`MODEL DIRECTORY`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the conductor's to act on
    name, directory = arguments
    serve(name, Path(directory))


if __name__ == "__main__":
    main(sys.argv[1:])
