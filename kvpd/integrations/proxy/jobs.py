"""What a completion asks for, and the two bodies that are made of it: the prefill engine's and the decode engine's.

A client's values are never decoded and encoded again: each is passed on as the bytes that it was. The decode engine's
body differs from the client's in the transfer alone; the prefill engine's asks for one token and no stream.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Final

import attrs
import msgspec

from kvpd.integrations.proxy.engines import estimated_tokens
from kvpd.integrations.proxy.errors import Headers, ProxyError
from kvpd.integrations.proxy.exchange import Request
from kvpd.integrations.proxy.limits import PROMPTS_MAX

COMPLETIONS: Final = "/v1/completions"
CHAT_COMPLETIONS: Final = "/v1/chat/completions"
TRANSFER: Final = "kv_transfer_params"

_PREFIX_BYTES: Final = 2048  # of a prompt: what the sticky policy looks at
_ANSWER_TOKENS: Final = 256  # supposed where a request does not say
# What shapes an answer, has no use for a prompt's KV cache, and may be refused beside one token and no stream.
_OF_THE_ANSWER: Final = frozenset(
    {
        "stream",
        "stream_options",
        "max_tokens",
        "max_completion_tokens",
        "min_tokens",
        "n",
        "best_of",
        "use_beam_search",
        "echo",
        "logprobs",
        "top_logprobs",
    }
)

_Fields = dict[str, msgspec.Raw]
_fields_decoder: Final = msgspec.json.Decoder(_Fields)
_list_decoder: Final = msgspec.json.Decoder(list[msgspec.Raw])
_encoder: Final = msgspec.json.Encoder()


@attrs.frozen
class Job:
    """One prompt and what is wanted of it."""

    target: bytes
    headers: Headers
    request_id: str
    fields: _Fields = attrs.field(repr=False)
    is_chat: bool
    is_stream: bool
    prefix: bytes = attrs.field(repr=False)  # a digest of how the prompt begins
    prompt_tokens: int
    answer_tokens: int

    def prefill_body(self, transfer: Mapping[str, Any]) -> bytes:
        """For the prefill engine: the same prompt, one token, no stream."""
        fields: dict[str, Any] = {key: raw for key, raw in self.fields.items() if key not in _OF_THE_ANSWER}
        fields |= {"stream": False, "max_tokens": 1, TRANSFER: transfer}
        if self.is_chat:
            fields["max_completion_tokens"] = 1
        return _encoder.encode(fields)

    def decode_body(self, transfer: Mapping[str, Any] | None) -> bytes:
        """For the decode engine: what the client asked for, and with it the transfer, if there is one."""
        return _encoder.encode(self.fields if transfer is None else {**self.fields, TRANSFER: transfer})

    def release_body(self, transfer: Mapping[str, Any]) -> bytes:
        """For the decode engine: take the transfer and give its memory back, for as little work as there can be."""
        fields: dict[str, Any] = {key: raw for key, raw in self.fields.items() if key not in _OF_THE_ANSWER}
        return _encoder.encode(fields | {"stream": False, "max_tokens": 1, TRANSFER: transfer})


@attrs.frozen
class Work:
    """A request's jobs, one per prompt, and how their answers are joined where there are several."""

    jobs: tuple[Job, ...]
    choices_each: int
    wants_usage: bool

    @property
    def is_stream(self) -> bool:
        """Whether the client asked for a stream."""
        return self.jobs[0].is_stream


def read_work(request: Request) -> Work:
    """The jobs of a request.

    Raises:
        ProxyError: it is none, or asks for what disaggregated engines cannot do.
    """
    try:
        fields = _fields_decoder.decode(request.body)
    except (msgspec.MsgspecError, RecursionError) as exc:
        raise _bad("invalid_json", f"the body must be a JSON object: {exc}") from exc
    is_chat = request.path == CHAT_COMPLETIONS
    _refuse_unsupported(fields)
    is_stream = _read(fields, "stream", bool | None) or False
    common = _Common(request, is_chat, is_stream, _answer_tokens(fields))
    prompts = None if is_chat else _prompts(fields)
    if prompts is None:
        jobs: tuple[Job, ...] = (common.job(request.request_id, fields),)
    else:
        jobs = tuple(
            common.job(f"{request.request_id}-{number}", {**fields, "prompt": prompt})
            for number, prompt in enumerate(prompts)
        )
    choices_each = (_read(fields, "n", int | None) or 1) if len(jobs) > 1 else 1
    options = _read(fields, "stream_options", dict[str, Any] | None) or {}
    return Work(jobs, choices_each, bool(options.get("include_usage")))


@attrs.frozen
class _Common:
    request: Request
    is_chat: bool
    is_stream: bool
    answer_tokens: int

    def job(self, request_id: str, fields: _Fields) -> Job:
        raw = memoryview(fields.get("messages" if self.is_chat else "prompt", msgspec.Raw(b"")))
        return Job(
            target=self.request.target,
            headers=self.request.forwarded(),
            request_id=request_id,
            fields=fields,
            is_chat=self.is_chat,
            is_stream=self.is_stream,
            prefix=hashlib.blake2b(raw[:_PREFIX_BYTES], digest_size=32).digest(),
            prompt_tokens=estimated_tokens(raw.nbytes),
            answer_tokens=self.answer_tokens,
        )


def _refuse_unsupported(fields: _Fields) -> None:
    if TRANSFER in fields:
        # It names whose KV cache is read: that is not for clients to choose.
        raise _bad("not_for_clients", f"{TRANSFER} cannot be set in a request")
    unsupported = None
    if not _is_absent(fields, "prompt_logprobs"):
        unsupported = "prompt_logprobs"
    elif _read(fields, "echo", bool | None) and not _is_absent(fields, "logprobs"):
        unsupported = "echo together with logprobs"
    if unsupported is not None:
        # The engine that answers has a prompt's keys and values, and never the states that these come from.
        raise _bad("unsupported_in_disaggregated_mode", f"{unsupported} is unsupported in disaggregated mode")


def _prompts(fields: _Fields) -> list[msgspec.Raw] | None:
    """The prompts, where there are several; None: there is one, or none."""
    raw = memoryview(fields.get("prompt", msgspec.Raw(b"")))
    if bytes(raw[:1]) != b"[" or _is_token_list(raw):
        return None
    prompts = _list_decoder.decode(raw)
    if not prompts:
        raise _bad("empty_prompt", "prompt is an empty list; give at least one prompt")
    if len(prompts) > PROMPTS_MAX:
        raise _bad("too_many_prompts", f"{len(prompts)} prompts in one request; the limit is {PROMPTS_MAX}")
    return prompts if len(prompts) > 1 else None


def _is_token_list(raw: memoryview) -> bool:
    """Whether a prompt is one list of token ids, which may be megabytes long: only its beginning is looked at."""
    return bytes(raw[:1]) == b"[" and bytes(raw[1:64]).lstrip()[:1].isdigit()


def _answer_tokens(fields: _Fields) -> int:
    for key in ("max_completion_tokens", "max_tokens"):
        if isinstance(tokens := _read(fields, key, int | None), int):
            return max(0, tokens)
    return _ANSWER_TOKENS


def _is_absent(fields: _Fields, key: str) -> bool:
    return key not in fields or bytes(fields[key]) == b"null"


def _read(fields: _Fields, key: str, kind: Any) -> Any:
    """A value that the proxy must understand. One of another kind is the engine's to refuse, but for our decisions."""
    if key not in fields:
        return None
    try:
        return msgspec.json.decode(fields[key], type=kind)
    except msgspec.MsgspecError as exc:
        raise _bad("invalid_value", f"{key} has a value that cannot be used: {exc}") from exc


def _bad(code: str, message: str) -> ProxyError:
    return ProxyError(400, code, message)
