"""Who does what, when: the demo's processes are started, told, waited for and stopped.

Nothing here polls: each step waits for the events that end it, and an event that should not have come, like the end of
a process, ends the demo with that process's last words.
"""

from __future__ import annotations

import queue
import signal
import time
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, assert_never

import attrs
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from demo_app import words
from demo_app.children import ChildFailed, Exited, Family, Logged, Said
from demo_app.chunks import CHUNK_TOKENS, KvShape
from demo_app.requests import Request
from kvpd.core.events import ReportName

NEW_TOKENS: Final = 64
_START_TIMEOUT_S: Final = 180.0
_TRANSFER_TIMEOUT_S: Final = 300.0
_STOP_TIMEOUT_S: Final = 30.0
_HTTP_TIMEOUT_S: Final = 5.0
_RECEIVER = "receiver"
_DECODE = "decode"
_PROXY = "proxy"
TRANSPORT: Final = "ucx"
_STAGING_CHUNKS = 2  # one on the wire while the next one is filled
# Which lines of the receiver's log are shown, and how.
_TOLD: Final = {
    ReportName.TRANSFER_QUEUED: "waits for room for {chunks} chunks",
    ReportName.TRANSFER_ADMITTED: "admitted whole after {queued_s:.3f} s",
    ReportName.TRANSFER_COMPLETED: "all {chunks} chunks have landed",
    ReportName.TRANSFER_CLAIMED: "claimed by the decode engine",
    ReportName.TRANSFER_RELEASED: "released, its {chunks} slots are free",
}

Metrics = Mapping[tuple[str, str], float]  # by sample name and `state` label, empty where there is none


@attrs.frozen
class Verdict:
    """What the daemons left: their exit statuses, and the receiver's slots just before it was told to end."""

    statuses: Mapping[str, int]
    slots_free: int
    slots_total: int


class Conductor:
    """One run of the demo."""

    def __init__(
        self, family: Family, console: Console, requests: list[Request], shape: KvShape, scratch: Path
    ) -> None:
        self._family = family
        self._console = console
        self._requests = {request.prompt.req_id: request for request in requests}
        self._shape = shape
        self._scratch = scratch
        self._slots_total = max(request.chunks for request in requests)
        self._ready: dict[str, Mapping[str, Any]] = {}
        self._loaded: set[str] = set()
        self._proxy_address = ""
        self._leaving: set[str] = set()
        self._statuses: dict[str, int] = {}
        self._started_at = time.monotonic()

    # -------------------------------------------------------------- the steps

    def start(self, model_name: str, folder: Path) -> None:
        """Start every process, and return when each is ready."""
        self._begin("Starting a receiver, two senders, three engines and a proxy")
        for engine in self._engines:
            self._family.start_program(engine, "engines", model_name, str(folder))
        self._family.start_program(_PROXY, "proxy")
        common: dict[str, object] = {
            "transport": TRANSPORT,
            "chunk_bytes": self._shape.chunk_bytes,
            "layout": f"float32 [{self._shape.layers}, 2, {self._shape.kv_heads}, tokens, {self._shape.head_dim}]",
        }
        self._start_daemon(
            _RECEIVER,
            "receiver",
            common
            | {
                "control_address": "127.0.0.1:0",
                "buffer_size": self._slots_total * self._shape.chunk_bytes,
                "chunk_tokens": CHUNK_TOKENS,
                # The second request waits until the first was computed and read, then until the decode engine has
                # continued the first: on a slow machine that takes long.
                "allocation_timeout_s": _TRANSFER_TIMEOUT_S,
                "ready_ttl_s": _TRANSFER_TIMEOUT_S,
            },
        )
        self._wait(lambda: self._proxy_address != "", "the proxy to listen", _START_TIMEOUT_S)
        for request in self._requests.values():
            own = {"staging_size": _STAGING_CHUNKS * self._shape.chunk_bytes, "proxy_address": self._proxy_address}
            self._start_daemon(request.sender, "sender", common | own)
        self._wait(lambda: self._daemons <= self._ready.keys(), "the daemons to be ready", _START_TIMEOUT_S)
        self._wait(lambda: self._engines <= self._loaded, "the engines to load their models", _START_TIMEOUT_S)

    def transfer(self) -> None:
        """Send every request to its prefill engine, and return when the decode engine has continued each."""
        self._begin(f"Two requests at once, into a buffer of {self._slots_total} chunks")
        receiver = str(self._ready[_RECEIVER]["control_address"])
        for req_id, request in self._requests.items():
            self._tell("conductor", f"{req_id}: {len(request.prompt.tokens)} tokens, {request.chunks} chunks")
            socket = str(self._ready[request.sender]["engine_socket"])
            command = words.Prefill(req_id, request.prompt.tokens, socket, receiver)
            self._family[request.prefill_engine].say(command)
        self._wait(
            lambda: all(r.decoded is not None and r.tail_s is not None for r in self._requests.values()),
            "all requests to be transferred and continued",
            _TRANSFER_TIMEOUT_S,
        )

    def stop_daemons(self) -> Verdict:
        """Read what the daemons count, then have them drain and end."""
        for request in self._requests.values():
            request.put_s = self._metrics_of(request.sender)["kvpd_put_seconds_sum", ""]
        receiver = self._metrics_of(_RECEIVER)
        slots_free = int(receiver["kvpd_slots", "free"])
        slots_total = int(sum(value for (name, _), value in receiver.items() if name == "kvpd_slots"))
        self._leaving |= self._daemons
        for daemon in self._daemons:
            self._family[daemon].signal(signal.SIGTERM)
        self._wait(lambda: self._daemons <= self._statuses.keys(), "the daemons to drain and end", _STOP_TIMEOUT_S)
        for daemon, status in sorted(self._statuses.items()):
            how = f"ended with status {status}"
            self._tell(daemon, how if status == 0 else str(self._family[daemon].failure(how)))
        return Verdict(dict(self._statuses), slots_free, slots_total)

    def compare(self) -> None:
        """Have each prompt done by one process from its first token to its last; no daemon is left to help it."""
        self._begin("The same prompts again, each in one process from its first token to its last")
        for req_id, request in self._requests.items():
            self._family[request.prefill_engine].say(words.Alone(req_id, request.prompt.tokens, NEW_TOKENS))
        self._wait(
            lambda: all(request.alone is not None for request in self._requests.values()),
            "the engines to do both phases alone",
            _TRANSFER_TIMEOUT_S,
        )

    # -------------------------------------------------------------- what happens

    @property
    def _engines(self) -> set[str]:
        return {_DECODE, *(request.prefill_engine for request in self._requests.values())}

    @property
    def _daemons(self) -> set[str]:
        return {_RECEIVER, *(request.sender for request in self._requests.values())}

    def _start_daemon(self, name: str, role: str, settings: Mapping[str, object]) -> None:
        own = {"name": name, "engine_socket": self._scratch / f"{name}.sock"}
        self._family.start_daemon(name, role, {f"{role}.{key}": value for key, value in {**own, **settings}.items()})

    def _wait(self, done: Callable[[], bool], what: str, timeout_s: float) -> None:
        """Take what happens until `done`.

        Raises:
            ChildFailed: it was not within `timeout_s`, or a process ended that should not have.
        """
        deadline = time.monotonic() + timeout_s
        while not done():
            try:
                happening = self._family.next(max(0.0, deadline - time.monotonic()))
            except queue.Empty as exc:
                raise ChildFailed(f"waited {timeout_s:g} s for {what}, in vain") from exc
            match happening:
                case Exited(child, status) if child in self._leaving:
                    self._statuses[child] = status
                case Exited(child, status):
                    raise self._family[child].failure(f"ended with status {status}")
                case Logged(child, fields):
                    self._take_log_line(child, fields)
                case Said(child, event):
                    self._take_event(child, event)
                case _:
                    assert_never(happening)

    def _take_log_line(self, child: str, fields: Mapping[str, Any]) -> None:
        if fields.get("message") == "ready" and child in self._daemons:
            self._ready[child] = fields
            self._tell(child, f"ready, engines connect to {fields['engine_socket']}")
        elif child == _RECEIVER and fields.get("message") in _TOLD:
            self._tell(child, f"{fields['req_id']}: {_TOLD[fields['message']].format_map(fields)}")

    def _take_event(self, child: str, event: words.AnyEvent) -> None:
        match event:
            case words.Listening(address):
                self._proxy_address = address
                self._tell(child, f"listening on {address}")
            case words.Loaded(seconds):
                self._loaded.add(child)
                self._tell(child, f"model loaded in {seconds:.1f} s")
            case words.Generated(req_id, tokens, seconds, alone):
                self._take_generated(child, self._requests[req_id], tokens, seconds, alone)
            case _:
                self._take_step(child, self._requests[event.req_id], event)

    def _take_step(
        self,
        child: str,
        request: Request,
        event: words.Admitted | words.Prefilled | words.Sent | words.Notified | words.Claimed,
    ) -> None:
        """One step of a request's way."""
        req_id = request.prompt.req_id
        match event:
            case words.Admitted(_, wait_s):
                request.admission_wait_s = wait_s
                self._tell(child, f"{req_id}: first slot after {wait_s:.3f} s")
            case words.Prefilled(_, first_token, seconds):
                request.first_token, request.prefill_s = first_token, seconds
                self._tell(child, f"{req_id}: computed in {seconds:.1f} s")
                self._continue_if_possible(request)
            case words.Sent(_, _, sent_bytes, tail_s):
                request.tail_s = tail_s
                self._tell(child, f"{req_id}: sent, {sent_bytes / 1e6:.1f} MB; the last of it in {tail_s * 1e3:.0f} ms")
            case words.Notified(_, sender_id, receiver_id):
                request.notified = True
                self._tell(child, f"{req_id}: {sender_id} says that it is whole at {receiver_id}")
                self._continue_if_possible(request)
            case words.Claimed(_, _, copied_bytes, seconds):
                request.copied_bytes = copied_bytes
                self._tell(child, f"{req_id}: claimed, copied out and released in {seconds * 1e3:.0f} ms")
            case _:
                assert_never(event)

    def _continue_if_possible(self, request: Request) -> None:
        """What a proxy does: the decode engine's turn has come when the KV has landed and the first token is known."""
        if request.notified and request.first_token is not None and not request.continued:
            request.continued = True
            prompt = request.prompt
            socket = str(self._ready[_RECEIVER]["engine_socket"])
            self._family[_DECODE].say(
                words.Continue(prompt.req_id, len(prompt.tokens), request.first_token, NEW_TOKENS, socket)
            )

    def _take_generated(
        self, child: str, request: Request, tokens: tuple[int, ...], seconds: float, alone: bool
    ) -> None:
        how = "alone, both phases" if alone else "from the KV cache it was sent"
        self._tell(child, f"{request.prompt.req_id}: {len(tokens)} tokens generated in {seconds:.1f} s, {how}")
        if alone:
            request.alone = tokens
        else:
            request.decoded = tokens

    def _metrics_of(self, daemon: str) -> Metrics:
        url = f"http://{self._ready[daemon]['metrics_address']}/metrics"
        with urllib.request.urlopen(url, timeout=_HTTP_TIMEOUT_S) as answer:
            families = text_string_to_metric_families(answer.read().decode())
        return {
            (sample.name, sample.labels.get("state", "")): sample.value
            for family in families
            for sample in family.samples
        }

    def _begin(self, step: str) -> None:
        self._started_at = time.monotonic()
        self._console.print(f"\n[bold]{step}[/]", soft_wrap=True)

    def _tell(self, child: str, text: str) -> None:
        elapsed_s = time.monotonic() - self._started_at
        self._console.print(f"[dim]{elapsed_s:7.2f} s[/]  [cyan]{child:<10}[/]  {text}", soft_wrap=True)
