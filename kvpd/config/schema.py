"""Every setting of kvpd: its key, kind, default and meaning.

An attribute's name is its key in the file. Sizes are bytes and durations seconds, as the names say. A size of 0 at
`buffer_size`, `staging_size` and `chunk_bytes` means that it has not been set; the role that starts needs its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, get_args

import attrs

from kvpd.config.paths import default_engine_socket, default_name
from kvpd.config.values import (
    Address,
    Choice,
    Count,
    DecodeEngines,
    Flag,
    Kind,
    Name,
    PrefillEngines,
    Seconds,
    Size,
    SocketPath,
    Text,
)

Role = Literal["receiver", "sender", "proxy"]
ROLES: Final[tuple[Role, ...]] = get_args(Role)


def _setting(kind: Kind, default: Any, meaning: str) -> Any:
    """A key. Any, because attrs' own `field` is typed as its default's value too."""
    return attrs.field(default=default, metadata={"kind": kind, "meaning": meaning})


def _socket_of(role: Role) -> Any:
    return attrs.Factory(lambda section: default_engine_socket(role, section.name), takes_self=True)


_RECEIVER_TRANSPORT = (
    "what moves the bytes: UCX, by kvpd itself or by ucx-py; local: prefill engines of this host write them, else UCX"
)
_SENDER_TRANSPORT = (
    "what moves the bytes: UCX, by kvpd itself or by ucx-py; auto: engines, where a receiver here is local, else UCX"
)
_UCX_LIBRARY = "path of libucp, or auto: the libucx wheel, then the system's"
_UCX_TLS = "UCX's own list of transports, such as tcp or rc,cma; empty: UCX chooses"
_RANKS = "tensor-parallel ranks of the engine, each with memory of its own; the same on both sides"
_LAYOUT = "what the bytes of a chunk mean, in words of your own; sender and receiver must say the same"


@attrs.frozen(kw_only=True)
class ReceiverConfig:
    """[receiver]: the decode host's daemon."""

    name: str = _setting(Name(), attrs.Factory(lambda: default_name("receiver")), "who it is, to peers and in logs")
    control_address: str = _setting(Address(), "127.0.0.1:7300", "where senders' messages are taken; port 0: any")
    advertise_address: str = _setting(Address(peer=True, word=""), "", "how senders reach it, where that differs")
    engine_socket: str = _setting(SocketPath(), _socket_of("receiver"), "where the decode engine connects")
    buffer_size: int = _setting(
        Size(), 0, "bytes of chunk memory of each rank, rounded down to whole chunks; must be set"
    )
    ranks: int = _setting(Count(1, 64), 1, _RANKS)
    buffer_device: str = _setting(
        Choice(("cpu",), remark=" (memory on a GPU is not supported)"), "cpu", "where that memory is; only cpu so far"
    )
    chunk_bytes: int = _setting(
        Size(), 0, "bytes of a full chunk in one rank, all layers of chunk_tokens tokens; must be set"
    )
    chunk_tokens: int = _setting(Count(1, 1 << 20), 256, "tokens in a full chunk")
    layout: str = _setting(Text(4096), "", _LAYOUT)
    max_prefill_tokens: int = _setting(Count(0, 1 << 40), 0, "longest prompt the buffer must hold; 0: not checked")
    allocation_timeout_s: float = _setting(Seconds(), 30.0, "how long a request may wait for admission")
    queue_depth_max: int = _setting(Count(1, 1_000_000), 1024, "requests that may wait for admission at once")
    progress_timeout_s: float = _setting(Seconds(), 60.0, "how long an idle request may hold room others wait for")
    ready_ttl_s: float = _setting(Seconds(), 60.0, "how long complete chunks wait for their claim")
    claim_grace_s: float = _setting(Seconds(zero="none"), 10.0, "least time to claim again after an engine's death")
    claim_ttl_s: float = _setting(
        Seconds(zero="none"), 0.0, "how long an engine may hold a claim before its connection is cut; 0: for ever"
    )
    bypass_max: int = _setting(
        Count(0, 1_000_000), 0, "smaller requests that may pass a queued one that does not fit; 0: strictly in order"
    )
    verify: Literal["off", "crc32c", "xxh3"] = _setting(
        Choice(("off", "crc32c", "xxh3")), "off", "checksum of every chunk, compared before it may be read"
    )
    lease_s: float = _setting(Seconds(), 10.0, "how long a silent sender is believed alive")
    put_deadline_s: float = _setting(
        Seconds(), 4.0, "how long a cancelled transfer's writes may take before its endpoint is closed"
    )
    drain_timeout_s: float = _setting(Seconds(zero="at once"), 10.0, "how long running transfers may end at shutdown")
    transport: str = _setting(Choice(("ucx", "ucx-py", "local")), "ucx", _RECEIVER_TRANSPORT)
    ucx_library: str = _setting(Text(4096), "auto", _UCX_LIBRARY)
    ucx_tls: str = _setting(Text(1024), "", _UCX_TLS)


@attrs.frozen(kw_only=True)
class SenderConfig:
    """[sender]: the prefill host's daemon."""

    name: str = _setting(Name(), attrs.Factory(lambda: default_name("sender")), "who it is, to peers and in logs")
    engine_socket: str = _setting(SocketPath(), _socket_of("sender"), "where the prefill engine connects")
    staging_size: int = _setting(
        Size(), 0, "bytes of chunk memory of each rank, rounded down to whole chunks; must be set"
    )
    ranks: int = _setting(Count(1, 64), 1, _RANKS)
    chunk_bytes: int = _setting(Size(), 0, "bytes of a full chunk, the same as its receivers'; must be set")
    layout: str = _setting(Text(4096), "", _LAYOUT)
    proxy_address: str = _setting(
        Address(peer=True, word=""), "", "whom to tell how a request ended that names no proxy"
    )
    notify_proxy: bool = _setting(Flag(), True, "whether proxies are told at all")
    notify: str = _setting(
        Choice(("ack", "push")),
        "ack",
        "ack: repeated until acknowledged; push: success alone, once, to a proxy that binds PULL",
    )
    put_window_bytes: int = _setting(
        Size(least=4096, zero_word="auto"),
        0,
        "bytes in flight per receiver; auto: 64MiB, over TCP 8MiB; with ucx-py of all receivers together, auto: 8MiB",
    )
    connect_timeout_s: float = _setting(Seconds(), 5.0, "how long a receiver may take to answer the first message")
    request_timeout_s: float = _setting(Seconds(), 300.0, "how long a request may take, from open to its end")
    drain_timeout_s: float = _setting(Seconds(zero="at once"), 10.0, "how long running transfers may end at shutdown")
    transport: str = _setting(Choice(("auto", "ucx", "ucx-py")), "auto", _SENDER_TRANSPORT)
    ucx_library: str = _setting(Text(4096), "auto", _UCX_LIBRARY)
    ucx_tls: str = _setting(Text(1024), "", _UCX_TLS)


@attrs.frozen(kw_only=True)
class ProxyConfig:
    """[proxy]: the one HTTP address in front of the engines."""

    name: str = _setting(Name(), attrs.Factory(lambda: default_name("proxy")), "who it is, in logs")
    address: str = _setting(Address(), "127.0.0.1:8080", "where HTTP requests are taken; port 0: any")
    notify_address: str = _setting(Address(), "127.0.0.1:7400", "where senders tell how transfers end; port 0: any")
    notify_advertise_address: str = _setting(
        Address(peer=True, word=""), "", "how senders reach notify_address, where that differs"
    )
    prefill: tuple[str, ...] = _setting(
        PrefillEngines(), (), "prefill engines, as in http://10.0.0.4:8000; read anew on SIGHUP"
    )
    decode: tuple[str, ...] = _setting(
        DecodeEngines(),
        (),
        "decode engines, each with its receiver, as in http://10.0.0.5:8000+10.0.0.5:7300; read anew on SIGHUP",
    )
    policy: str = _setting(
        Choice(("least_tokens", "round_robin", "sticky")),
        "least_tokens",
        "which engines a request gets: the least loaded, the next, or those its prompt's beginning had before",
    )
    mode: str = _setting(
        Choice(("sequential", "concurrent")), "sequential", "concurrent: decode is asked at once, and waits by itself"
    )
    on_miss: str = _setting(
        Choice(("fail", "recompute")), "fail", "what becomes of a request whose KV cache does not arrive"
    )
    decode_only_fallback: bool = _setting(
        Flag(), False, "whether decode engines compute prompts while no prefill engine is alive"
    )
    connect_timeout_s: float = _setting(Seconds(), 2.0, "how long connecting to an engine may take")
    prefill_timeout_s: float = _setting(Seconds(), 120.0, "how long a prefill engine may take to answer")
    transfer_timeout_s: float = _setting(
        Seconds(), 30.0, "how long after that answer the KV cache may take to be complete"
    )
    first_byte_timeout_s: float = _setting(Seconds(), 120.0, "how long the first bytes of a stream may take")
    stall_timeout_s: float = _setting(Seconds(), 60.0, "how long a stream may pause, at the engine or at the client")
    answer_timeout_s: float = _setting(Seconds(), 600.0, "how long an answer that is no stream may take")
    header_timeout_s: float = _setting(Seconds(), 10.0, "how long a request's headers may take to arrive")
    body_timeout_s: float = _setting(Seconds(), 60.0, "how long a request's body may take to arrive")
    idle_timeout_s: float = _setting(Seconds(), 75.0, "how long a client's connection may wait for its next request")
    probe_interval_s: float = _setting(Seconds(), 5.0, "how often an engine that is alive is asked for /health")
    probe_timeout_s: float = _setting(Seconds(), 2.0, "how long it may take to answer that")
    probe_backoff_max_s: float = _setting(Seconds(), 30.0, "the longest pause between questions to one that is dead")
    drain_timeout_s: float = _setting(Seconds(zero="at once"), 30.0, "how long running requests may end at shutdown")
    body_bytes_max: int = _setting(Size(least=1), 45 << 20, "bytes of one request's body")
    body_memory_max: int = _setting(Size(least=1), 1 << 30, "bytes of all bodies held at once")
    header_count_max: int = _setting(Count(1, 10_000), 100, "headers of one request")
    requests_max: int = _setting(Count(1, 1_000_000), 512, "requests that may run at once")
    connections_max: int = _setting(Count(1, 1_000_000), 2048, "clients' connections at once")


@attrs.frozen(kw_only=True)
class LogConfig:
    """[log]: lines on stderr."""

    format: str = _setting(Choice(("json", "console")), "json", "json: one object a line; console: for people")
    level: str = _setting(Choice(("debug", "info", "warning", "error")), "info", "the least severe that is written")
    queue_depth_max: int = _setting(Count(1, 1_000_000), 10_000, "lines that may wait to be written; more are dropped")
    gather_s: float = _setting(
        Seconds(zero="each line at once"), 0.01, "lines are gathered for so long and written together; 0: each at once"
    )


@attrs.frozen(kw_only=True)
class MetricsConfig:
    """[metrics]: /metrics, /livez and /readyz."""

    address: str = _setting(Address(word="off"), "127.0.0.1:0", "where they are served; port 0: any; off: not at all")


@attrs.frozen(kw_only=True)
class Config:
    """A whole configuration. `sources` maps `section.key` to where its value came from."""

    receiver: ReceiverConfig = attrs.Factory(ReceiverConfig)
    sender: SenderConfig = attrs.Factory(SenderConfig)
    proxy: ProxyConfig = attrs.Factory(ProxyConfig)
    log: LogConfig = attrs.Factory(LogConfig)
    metrics: MetricsConfig = attrs.Factory(MetricsConfig)
    sources: Mapping[str, str] = attrs.field(factory=dict, eq=False, repr=False)


SECTIONS: Final[Mapping[str, type[Any]]] = {
    "receiver": ReceiverConfig,
    "sender": SenderConfig,
    "proxy": ProxyConfig,
    "log": LogConfig,
    "metrics": MetricsConfig,
}


@attrs.frozen
class Key:
    """One setting's description."""

    section: str
    name: str
    kind: Kind
    meaning: str

    @property
    def path(self) -> str:
        """How a flag and a message call it."""
        return f"{self.section}.{self.name}"

    @property
    def variable(self) -> str:
        """How the environment calls it."""
        return f"KVPD_{self.section}_{self.name}".upper()


def _keys_of(section: str, cls: type[Any]) -> list[Key]:
    fields: tuple[attrs.Attribute[Any], ...] = attrs.fields(cls)
    return [Key(section, field.name, field.metadata["kind"], field.metadata["meaning"]) for field in fields]


KEYS: Final[Mapping[str, Key]] = {key.path: key for section, cls in SECTIONS.items() for key in _keys_of(section, cls)}
