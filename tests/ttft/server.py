"""A vLLM server as far as the benchmark looks at one; run by itself, with vLLM's flags.

It "computes" by counting on from the prompt's last token, moves one chunk through kvpd's daemons where it is told to,
and keeps vLLM's counters. The variable `WRONG` names a role whose tokens are to be wrong, `COMPUTES` one that counts
nothing as sent to it.
"""

from __future__ import annotations

import http.server
import json
import os
import sys
from collections import Counter
from typing import Any

import kvpd.client


def flag(name: str) -> str:
    """The value of a flag, or nothing."""
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else ""


CONFIG: dict[str, Any] = json.loads(flag("--kv-transfer-config") or "{}")
SOCKETS = CONFIG.get("kv_connector_extra_config", {})
ROLE = "nixl-" * ("sender_socket" not in SOCKETS and "receiver_socket" not in SOCKETS) + CONFIG.get("kv_role", "single")
COUNTS: Counter[str] = Counter()
SOURCE = 'vllm:prompt_tokens_by_source_total{source="external_kv_transfer"}'


def send(params: dict[str, Any]) -> None:
    """One chunk."""
    with (
        kvpd.client.connect_sender(SOCKETS["sender_socket"]) as link,
        link.open(
            params["transfer_id"], receiver=params["receiver"], total_chunks=1, notify=params["notify"]
        ) as transfer,
        transfer.stage([params["transfer_id"].encode()], last=True) as slots,
    ):
        for slot in slots:
            assert slot is not None
            slot[:] = b"k" * len(slot)


def take(params: dict[str, Any]) -> None:
    """All chunks."""
    with (
        kvpd.client.connect_receiver(SOCKETS["receiver_socket"]) as link,
        link.claim(params["transfer_id"], timeout=20) as chunks,
    ):
        assert [bytes(chunk.view[:1]) for chunk in chunks] == [b"k"]


class Handler(http.server.BaseHTTPRequestHandler):
    """Completions, health and metrics."""

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        """Health, or the counters."""
        lines = [f"{name} {value}" for name, value in COUNTS.items()] if self.path == "/metrics" else []
        self.reply("text/plain", "".join(line + "\n" for line in lines))

    def do_POST(self) -> None:
        """A completion."""
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        params = body.get("kv_transfer_params") or {}
        COUNTS["vllm:request_queue_time_seconds_sum"] += 0.25  # type: ignore[assignment]
        COUNTS["vllm:request_prefill_time_seconds_sum"] += 0.5  # type: ignore[assignment]
        if params.get("do_remote_decode"):
            if "sender_socket" in SOCKETS:
                send(params)
            self.reply("application/json", json.dumps({"kv_transfer_params": {"remote_block_ids": [[1]]}}))
            return
        if params.get("do_remote_prefill"):
            if "receiver_socket" in SOCKETS:
                take(params)
            else:
                assert params["remote_block_ids"] == [[1]]
            COUNTS[SOURCE] += len(body["prompt"]) - 1 if os.environ.get("COMPUTES") != ROLE else 0
        first = body["prompt"][-1] + (os.environ.get("WRONG") == ROLE)
        events = [{"choices": [{"token_ids": [first + number]}]} for number in range(body["max_tokens"])]
        self.reply("text/event-stream", "".join(f"data: {json.dumps(one)}\n\n" for one in events) + "data: [DONE]\n\n")

    def reply(self, content_type: str, text: str) -> None:
        """A whole answer."""
        data = text.encode()
        self.send_response(200)
        self.send_header("content-type", content_type)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


server = http.server.ThreadingHTTPServer(("127.0.0.1", int(flag("--port"))), Handler)
sys.stdout.write("INFO:     Application startup complete.\n")
sys.stdout.flush()
server.serve_forever()
