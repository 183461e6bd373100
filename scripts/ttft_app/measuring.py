"""One request to one system: when its first token came, its tokens, and the stages that it went through.

The stages come from two kinds of sources: what a proxy's and vLLM's metrics have grown by, which is exact because one
request runs at a time, and the times of kvpd's log lines, which are on the clock that the client's own times are on.
"""

from __future__ import annotations

import datetime
import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import attrs
from prometheus_client.parser import text_string_to_metric_families
from vllm_app.asking import Asked, get

from ttft_app.systems import KVPD, NIXL, SINGLE, System, Systems

ANSWER_TOKENS: Final = 8
_LINES_TIMEOUT_S: Final = 30.0

# What is read before and after a request: of which part, and the metric's sample. Seconds, but for the last two.
_ENGINE_SUMS: Final = {
    "queued": "vllm:request_queue_time_seconds_sum",
    "computed": "vllm:request_prefill_time_seconds_sum",
}
_PROXY_SUMS: Final = {
    "prefill_request": "kvpd_prefill_seconds_sum",
    "word": "kvpd_transfer_wait_seconds_sum",
    "first_byte": "kvpd_first_byte_seconds_sum",
}
_LOADED: Final = {"loaded": "vllm:kvpd_load_seconds_sum", "read": "vllm:nixl_xfer_time_seconds_sum"}
_SOURCES: Final = "vllm:prompt_tokens_by_source_total"


class BenchFailed(Exception):
    """Something was not measured; the text says what."""


@attrs.frozen
class Sample:
    """One measured request. Seconds."""

    system: str
    length: int
    round: int
    first_s: float
    alone_s: float  # the same prompt's time at the system's own prefill server, which then answers by itself
    tokens: tuple[int, ...]
    from_outside: int  # tokens of the prompt that came from another engine
    stages: Mapping[str, float]


@attrs.frozen
class Answer:
    """What the client saw. `began` and `first` are seconds since the epoch."""

    began: float
    first: float
    tokens: tuple[int, ...]


def ask(stack: Systems, system: System, prompt: Sequence[int]) -> Answer:
    """Ask for a stream.

    Raises:
        BenchFailed: it is no whole answer.
    """
    body = {
        "model": stack.served.name,
        "prompt": list(prompt),
        "max_tokens": ANSWER_TOKENS,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "return_token_ids": True,
    }
    began = time.time()
    clock = time.perf_counter()
    first_s = 0.0
    tokens: list[int] = []
    with Asked(stack.address(system.entrance), "POST", "/v1/completions", body) as asked:
        if asked.answer.status != 200:
            reply = asked.read()
            raise BenchFailed(f"{system.name} answers {reply.status}: {reply.body.decode(errors='replace')[:1000]}")
        for event in asked.events():
            if "error" in event:
                raise BenchFailed(f"{system.name} breaks off: {event['error']}")
            for choice in event["choices"]:
                tokens += choice.get("token_ids") or []
            if tokens and not first_s:
                first_s = time.perf_counter() - clock
    if len(tokens) != ANSWER_TOKENS:
        raise BenchFailed(f"{system.name} gave {len(tokens)} tokens instead of {ANSWER_TOKENS}")
    return Answer(began, began + first_s, tuple(tokens))


def measure(stack: Systems, system: System, prompt: Sequence[int], number: int) -> Sample:
    """Ask the system, and its prefill server alone; every second round the other way round. `number` is the round's.

    One and the same program may compute a tenth faster in one process than in another, for as long as both live. What
    a transfer adds is therefore what it adds to the time of the very process that computed the prompt.

    Raises:
        BenchFailed: there is no whole answer.
        PartFailed: a line of a daemon's log did not come.
    """
    if system is SINGLE:
        sample = _measured(stack, system, prompt, number)
        return attrs.evolve(sample, alone_s=sample.first_s)
    alone = ask(stack, system.alone, prompt) if number % 2 else None
    sample = _measured(stack, system, prompt, number)
    alone = alone or ask(stack, system.alone, prompt)
    return attrs.evolve(sample, alone_s=alone.first - alone.began)


def _measured(stack: Systems, system: System, prompt: Sequence[int], number: int) -> Sample:
    """Ask, and find out what the time was spent with."""
    before = _counters(stack, system)
    answer = ask(stack, system, prompt)
    stages = {name: value - before.get(name, 0.0) for name, value in _counters(stack, system).items()}
    outside = int(stages.pop("from_outside", 0.0))
    if "proxy.first_byte" in stages:
        waited_s = stages["proxy.prefill_request"] + stages["proxy.word"]
        stages["decode_request"] = stages["proxy.first_byte"] - waited_s
    if system in KVPD:
        stack.wait_until(
            lambda: len(_lines(stack, answer.began)) == len(_LINES), "the transfer's lines", _LINES_TIMEOUT_S
        )
        stages |= _timeline(_lines(stack, answer.began), answer, stages["prefill.computed"])
    first_s = answer.first - answer.began
    return Sample(system.name, len(prompt), number, first_s, 0.0, answer.tokens, outside, stages)


# ------------------------------------------------------------------ metrics


def _counters(stack: Systems, system: System) -> dict[str, float]:
    if system is SINGLE:
        return _read(stack, "single", {f"decode.{name}": sample for name, sample in _ENGINE_SUMS.items()})
    found = _read(stack, system.prefill, {f"prefill.{name}": sample for name, sample in _ENGINE_SUMS.items()})
    loaded = "read" if system is NIXL else "loaded"
    wanted = {f"decode.{name}": sample for name, sample in _ENGINE_SUMS.items()}
    found |= _read(stack, system.decode, {**wanted, f"decode.{loaded}": _LOADED[loaded], "from_outside": _SOURCES})
    return found | _read(stack, system.entrance, {f"proxy.{name}": sample for name, sample in _PROXY_SUMS.items()})


def _read(stack: Systems, part: str, wanted: Mapping[str, str]) -> dict[str, float]:
    text = get(stack.address(part), "/metrics").body.decode()
    names = {sample: name for name, sample in wanted.items()}
    found = dict.fromkeys(wanted, 0.0)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = names.get(sample.name)
            if name is not None and sample.labels.get("source", "external_kv_transfer") == "external_kv_transfer":
                found[name] += sample.value
    return found


# ------------------------------------------------------------------ log lines


_LINES: Final = {
    "transfer_opened": "sender",
    "admission_granted": "sender",
    "transfer_done": "sender",
    "transfer_completed": "receiver",
    "transfer_claimed": "receiver",
    "transfer_released": "receiver",
}


def _lines(stack: Systems, began: float) -> dict[str, dict[str, Any]]:
    """What both daemons have said so far of the transfer that was opened since then; there is one at most."""
    opened = [line for line in stack["sender"].said("transfer_opened") if _time(line) >= began]
    if not opened:
        return {}
    req_id = opened[-1]["req_id"]
    return {
        message: line
        for message, part in _LINES.items()
        for line in stack[part].said(message)
        if line["req_id"] == req_id
    }


def _timeline(lines: Mapping[str, Mapping[str, Any]], answer: Answer, computed_s: float) -> dict[str, float]:
    """Stages one after the other, which add up to the time to first token; and some that run beside them."""
    moments = [_time(lines[message]) for message in _MOMENTS]
    way_in, whole, to_claim, copied, answered = (
        later - earlier for earlier, later in itertools.pairwise([answer.began, *moments, answer.first])
    )
    return {
        "log.way_in": way_in,
        "log.landed": whole - computed_s,
        "log.to_claim": to_claim,
        "log.copied": copied,
        "log.answered": answered,
        "beside.admission": float(lines["admission_granted"]["waited_s"]),
        "beside.done": _time(lines["transfer_done"]) - _time(lines["transfer_completed"]),
    }


_MOMENTS: Final = ("transfer_opened", "transfer_completed", "transfer_claimed", "transfer_released")


def _time(line: Mapping[str, Any]) -> float:
    """When a line was made, in seconds since the epoch."""
    return datetime.datetime.fromisoformat(line["@timestamp"]).timestamp()
