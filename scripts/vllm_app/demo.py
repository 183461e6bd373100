"""`scripts/demo --vllm`: a chat with SmolLM2 through two vLLM servers and kvpd, compared with one vLLM server alone.

Every question is asked twice, with the same words: at the proxy, whose answer is shown as it comes, and at the single
server. Whether the answers are equal is decided by their tokens; where the prompt's KV came from is the decode
server's own count.
"""

from __future__ import annotations

import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path
from typing import Any, Final

import attrs
from demo_app import model
from demo_app.arguments import parse
from demo_app.main import prepared_smollm2
from rich.console import Console
from rich.markup import escape

from vllm_app.asking import Asked, metric
from vllm_app.parts import PartFailed
from vllm_app.stack import ROOT, Served, Stack

_CHAT: Final = "/v1/chat/completions"
_ANSWER_TOKENS: Final = 48
_DOCUMENT_CHARACTERS: Final = 2_500
_CONTEXT: Final = 2_048
_FROM_OUTSIDE: Final = "external_kv_transfer"


class DemoFailed(Exception):
    """A question was not answered; the text says how."""


@attrs.frozen
class Answer:
    """What a server made of a question."""

    text: str
    tokens: tuple[int, ...]
    prompt_tokens: int
    first_s: float
    whole_s: float


def questions() -> list[tuple[str, str]]:
    """What is shown, and what is asked: a short one, and one about a page of this project."""
    page = (ROOT / "README.md").read_text()[:_DOCUMENT_CHARACTERS].rpartition("\n\n")[0]
    short, long = "What is the capital of France?", "In a few sentences: what does kvpd do, and who is it for?"
    return [(short, short), (f"(the beginning of README.md) {long}", f"{page}\n\n{long}")]


class Demo:
    """One run."""

    def __init__(self, console: Console, stack: Stack) -> None:
        self._console = console
        self._stack = stack

    def ask(self, server: str, question: str, on_text: Callable[[str], None]) -> Answer:
        """Ask for a stream; `on_text` gets its pieces as they come.

        Raises:
            DemoFailed: there is no whole answer.
            PartFailed: the same, and a part of the stack is gone.
        """
        body = {
            "model": self._stack.served.name,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": _ANSWER_TOKENS,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        try:
            return self._listen(server, body, on_text)
        except (OSError, EOFError, HTTPException) as exc:
            self._stack.check()
            raise DemoFailed(f"{server} does not answer: {exc!r}") from exc

    def _listen(self, server: str, body: dict[str, Any], on_text: Callable[[str], None]) -> Answer:
        began = time.monotonic()
        first_s: float | None = None
        texts: list[str] = []
        tokens: list[int] = []
        prompt_tokens = 0
        with Asked(self._stack.address(server), "POST", _CHAT, body) as asked:
            if asked.answer.status != 200:
                reply = asked.read()
                self._stack.check()
                raise DemoFailed(f"{server} answers {reply.status}: {reply.body.decode(errors='replace')[:1000]}")
            for event in asked.events():
                if "error" in event:
                    raise DemoFailed(f"{server} breaks off: {event['error']}")
                if event.get("usage"):
                    prompt_tokens = int(event["usage"]["prompt_tokens"])
                for choice in event["choices"]:
                    tokens += choice.get("token_ids") or []
                    text = choice["delta"].get("content") or ""
                    if text and first_s is None:
                        first_s = time.monotonic() - began
                    texts.append(text)
                    on_text(text)
        whole_s = time.monotonic() - began
        return Answer("".join(texts), tuple(tokens), prompt_tokens, whole_s if first_s is None else first_s, whole_s)

    def show(self, number: int, shown: str, asked: str) -> tuple[Answer, int, bool]:
        """Ask both: the proxy's answer, how many of its prompt's tokens came from outside, and whether all is equal."""
        self._begin(f"Question {number}, at the proxy, http://{self._stack.address('proxy')}{_CHAT}")
        self._console.print(f"  > {shown}", soft_wrap=True, markup=False)
        self._console.print("  < ", end="")
        before = self._from_outside()
        answer = self.ask("proxy", asked, lambda text: self._console.print(text, end="", soft_wrap=True, markup=False))
        outside = self._from_outside() - before
        self._console.print()
        self._tell(
            f"{answer.prompt_tokens} tokens of prompt, {outside} of them from the prefill server by kvpd; "
            f"first word after {answer.first_s:.2f} s, {len(answer.tokens)} tokens in {answer.whole_s:.2f} s"
        )
        alone = self.ask("single", asked, lambda _: None)
        is_equal = answer.tokens == alone.tokens and answer.text == alone.text and bool(answer.tokens)
        verdict = "[green]identical[/]" if is_equal else f"[red]DIFFERENT[/]: {escape(repr(alone.text))}"
        self._tell(
            f"the single server: {verdict}; first word after {alone.first_s:.2f} s, "
            f"{len(alone.tokens)} tokens in {alone.whole_s:.2f} s"
        )
        return answer, outside, is_equal

    def _from_outside(self) -> int:
        address = self._stack.address("decode")
        return int(metric(address, "vllm:prompt_tokens_by_source_total", source=_FROM_OUTSIDE))

    def _begin(self, step: str) -> None:
        self._console.print(f"\n[bold]{step}[/]", soft_wrap=True)

    def _tell(self, text: str) -> None:
        self._console.print(f"  {text}", soft_wrap=True)


def run(console: Console, folder: Path, logs: Path) -> list[str]:
    """Do it all, print it all, and say what was not as it should be.

    Raises:
        PartFailed: a process ended or did not get ready.
        DemoFailed: a question was not answered.
    """
    began = time.monotonic()

    def say(text: str) -> None:
        console.print(f"[dim]{time.monotonic() - began:7.1f} s[/]  {text}", soft_wrap=True, highlight=False)

    console.print(
        "\n[bold]Starting a receiver, a sender, three vLLM servers (prefill, decode, single) and the proxy[/]"
    )
    console.print("Three servers on few cores take a minute or two.")
    served = Served(
        folder,
        model.SMOLLM2_NAME,
        model.read_shape(folder),
        context=_CONTEXT,
        room=2 * _CONTEXT,
        receiver_chunks=16,
        sender_chunks=8,
    )
    faults: list[str] = []
    results = []
    with Stack(served, logs, say, with_single=True) as stack:
        demo = Demo(console, stack)
        for number, (shown, asked) in enumerate(questions(), start=1):
            answer, outside, is_equal = demo.show(number, shown, asked)
            results.append((answer, outside, is_equal))
            if not is_equal:
                faults.append(f"question {number}: the answer differs from the single server's")
            if outside != answer.prompt_tokens - 1:  # the last one is computed, to have something to sample from
                faults.append(f"question {number}: {outside} of {answer.prompt_tokens} prompt tokens came through kvpd")
        taken = int(metric(stack.address("receiver"), "kvpd_slots")) - int(
            metric(stack.address("receiver"), "kvpd_slots", state="free")
        )
        if taken:
            faults.append(f"{taken} of the receiver's slots were not free at the end")
        console.print("\n[bold]Stopping all of it[/]")
        statuses = stack.stop()
    console.print("  exit statuses: " + ", ".join(f"{name} {status}" for name, status in statuses.items()))
    faults += [
        f"{name} ended with status {statuses[name]}" for name in ("receiver", "sender", "proxy") if statuses[name]
    ]
    _print_last_line(results)
    return faults


def _print_last_line(results: list[tuple[Answer, int, bool]]) -> None:
    """For programs."""
    summary = {
        "identical": all(is_equal for _, _, is_equal in results),
        "requests": len(results),
        "prompt_tokens": sum(answer.prompt_tokens for answer, _, _ in results),
        "prompt_tokens_from_outside": sum(outside for _, outside, _ in results),
        "answer_tokens": sum(len(answer.tokens) for answer, _, _ in results),
        "first_word_s": [round(answer.first_s, 3) for answer, _, _ in results],
    }
    sys.stdout.flush()
    print(json.dumps(summary), flush=True)


def main() -> int:
    """Exit status 0, 1 or (by argparse) 2; 130 after Ctrl-C."""
    options = parse()
    console = Console(highlight=False)
    complaints = Console(stderr=True, highlight=False, markup=False)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds, and so ends every process
    logs: Path = options.keep_logs or Path(tempfile.mkdtemp(prefix="kvpd-demo-vllm-logs-"))
    try:
        logs.mkdir(parents=True, exist_ok=True)
        folder = prepared_smollm2(console)
        console.print(f"logs: {logs}", soft_wrap=True)
        faults = run(console, folder, logs)
    except (model.ModelUnavailable, PartFailed, DemoFailed, OSError) as error:
        faults = [str(error)]
    except KeyboardInterrupt:
        complaints.print("scripts/demo: interrupted; every process that it started is gone")
        return 130
    for fault in faults:
        complaints.print(f"scripts/demo: {fault}", soft_wrap=True)
    if faults:
        complaints.print(f"scripts/demo: the logs are in {logs}", soft_wrap=True)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
