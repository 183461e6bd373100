"""What must hold between settings of one role before it may start.

A rule looks only at values that are themselves fine: one bad value is reported once, not once per rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import attrs

from kvpd.config.schema import ProxyConfig, ReceiverConfig, SenderConfig
from kvpd.core.messages import CHUNKS_MAX
from kvpd.transports.addresses import InprocAddress, parse_endpoint


@attrs.frozen
class Rule:
    """`broken` says why the values of `keys` cannot go together, or None. The first key is the one to blame."""

    keys: tuple[str, ...]
    broken: Callable[[Any], str | None]


def _memory_rules(size_key: str, what: str) -> tuple[Rule, ...]:
    """What holds for the memory of either role."""

    def unset(config: ReceiverConfig | SenderConfig) -> str | None:
        if getattr(config, size_key) == 0:
            return f"must be set, for {what} has no default; write a size of at least one chunk, as in 8GiB"
        return None

    def chunk_unset(config: ReceiverConfig | SenderConfig) -> str | None:
        if config.chunk_bytes == 0:
            return "must be set, for it depends on the model; write the bytes of one full chunk, all layers together"
        return None

    def holds_nothing(config: ReceiverConfig | SenderConfig) -> str | None:
        size = getattr(config, size_key)
        if 0 < size < config.chunk_bytes:
            return f"{size} bytes hold no chunk of {config.chunk_bytes} bytes; raise it to that or more"
        return None

    def too_many(config: ReceiverConfig | SenderConfig) -> str | None:
        slots = getattr(config, size_key) // config.chunk_bytes if config.chunk_bytes else 0
        if slots > CHUNKS_MAX:
            return f"makes {slots} chunks; the limit is {CHUNKS_MAX}, use larger chunks or less memory"
        return None

    return (
        Rule((size_key,), unset),
        Rule(("chunk_bytes",), chunk_unset),
        Rule((size_key, "chunk_bytes"), holds_nothing),
        Rule((size_key, "chunk_bytes"), too_many),
    )


def _prefill_does_not_fit(config: ReceiverConfig) -> str | None:
    if not config.chunk_bytes or not config.buffer_size or not config.max_prefill_tokens:
        return None
    needed = math.ceil(config.max_prefill_tokens / config.chunk_tokens)
    held = config.buffer_size // config.chunk_bytes
    if needed <= held:
        return None
    return (
        f"needs {needed} chunks of {config.chunk_tokens} tokens and the buffer holds {held}; "
        f"raise receiver.buffer_size to {needed * config.chunk_bytes} bytes or lower max_prefill_tokens"
    )


def _library_of_ucx_py(config: ReceiverConfig | SenderConfig) -> str | None:
    if config.transport != "ucx-py" or config.ucx_library == "auto":
        return None
    return "cannot be chosen with transport ucx-py, which loads its own libucp; leave it at auto"


def _put_deadline_too_long(config: ReceiverConfig) -> str | None:
    # A sender must see its writes ended before its lease is, and have as long again to say so.
    if config.put_deadline_s < config.lease_s / 2:
        return None
    return f"must be under half of lease_s, {config.lease_s / 2:g}; lower it, or raise lease_s"


def _progress_timeout_too_short(config: ReceiverConfig) -> str | None:
    if config.progress_timeout_s > 2 * config.put_deadline_s:
        return None
    return f"must exceed twice put_deadline_s, {2 * config.put_deadline_s:g}; raise it, or lower put_deadline_s"


def _advertised_nowhere(config: ReceiverConfig) -> str | None:
    bound = parse_endpoint(config.control_address)
    if config.advertise_address or isinstance(bound, InprocAddress) or not bound.is_wildcard:
        return None
    return "is every address of this host, and senders need one; set receiver.advertise_address to one they can reach"


def _advertised_nowhere_by_proxy(config: ProxyConfig) -> str | None:
    bound = parse_endpoint(config.notify_address)
    if config.notify_advertise_address or isinstance(bound, InprocAddress) or not bound.is_wildcard:
        return None
    return "is every address of this host, and senders need one; set proxy.notify_advertise_address"


def _no_decode_engines(config: ProxyConfig) -> str | None:
    return None if config.decode else "must name at least one engine, as in http://10.0.0.5:8000+10.0.0.5:7300"


def _no_prefill_engines(config: ProxyConfig) -> str | None:
    if config.prefill or config.decode_only_fallback:
        return None
    return "must name at least one engine, as in http://10.0.0.4:8000, or decode_only_fallback must be true"


def _body_does_not_fit(config: ProxyConfig) -> str | None:
    if config.body_memory_max >= config.body_bytes_max:
        return None
    return f"must hold one body of body_bytes_max, {config.body_bytes_max} bytes; raise it, or lower that"


def _more_requests_than_connections(config: ProxyConfig) -> str | None:
    if config.requests_max <= config.connections_max:
        return None
    return f"exceeds connections_max, {config.connections_max}, and each request needs one; lower it, or raise that"


def _inproc_at(key: str) -> Rule:
    def unreachable(config: ReceiverConfig | SenderConfig | ProxyConfig) -> str | None:
        if getattr(config, key).startswith("inproc://"):
            return "reaches nobody outside its own process; write host:port"
        return None

    return Rule((key,), unreachable)


_LIBRARY_RULE: Final = Rule(("ucx_library", "transport"), _library_of_ucx_py)

RULES: Final[dict[str, tuple[Rule, ...]]] = {
    "receiver": (
        *_memory_rules("buffer_size", "the buffer"),
        _LIBRARY_RULE,
        Rule(("max_prefill_tokens", "buffer_size", "chunk_bytes", "chunk_tokens"), _prefill_does_not_fit),
        Rule(("put_deadline_s", "lease_s"), _put_deadline_too_long),
        Rule(("progress_timeout_s", "put_deadline_s"), _progress_timeout_too_short),
        Rule(("control_address", "advertise_address"), _advertised_nowhere),
    ),
    "sender": (*_memory_rules("staging_size", "the staging buffer"), _LIBRARY_RULE),
    "proxy": (
        Rule(("decode",), _no_decode_engines),
        Rule(("prefill", "decode_only_fallback"), _no_prefill_engines),
        Rule(("notify_address", "notify_advertise_address"), _advertised_nowhere_by_proxy),
        Rule(("body_memory_max", "body_bytes_max"), _body_does_not_fit),
        Rule(("requests_max", "connections_max"), _more_requests_than_connections),
    ),
}

# A program may join both sides within its own process; a daemon has nobody there to talk to.
DAEMON_RULES: Final[dict[str, tuple[Rule, ...]]] = {
    "receiver": (_inproc_at("control_address"), _inproc_at("advertise_address")),
    "sender": (_inproc_at("proxy_address"),),
    "proxy": (_inproc_at("address"), _inproc_at("notify_address"), _inproc_at("notify_advertise_address")),
}
