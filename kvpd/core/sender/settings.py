"""Everything that a sender's decisions depend on, and the bounds of everything it keeps."""

from __future__ import annotations

import attrs

from kvpd.core.messages import HostIdentity


@attrs.frozen
class SenderSettings:
    """Times in seconds, sizes in bytes."""

    sender_id: str
    incarnation: int
    staging_slots: int  # of each rank
    chunk_bytes: int
    layout: str = ""
    ranks: int = 1  # engines that together hold a request's KV, each with a staging buffer of its own
    host: HostIdentity = attrs.field(factory=HostIdentity)
    proxy_address: str | None = None  # of requests that name none; None: nobody is told
    notify_is_acknowledged: bool = True
    connect_timeout_s: float = 5.0
    request_timeout_s: float = 300.0
    hello_repeat_s: float = 1.0
    # After a session was lost, until it is opened anew; then a quarter of how long it is gone, within these two.
    reconnect_s: float = 1.0
    reconnect_max_s: float = 600.0
    peers_max: int = 1024
    transfers_max: int = 65536
    stages_max: int = 64  # of one rank of a transfer that are not staged yet
    latecomers_max: int = 65536  # ended transfers that are remembered for the ranks that have not opened them
    notifications_max: int = 10_000  # of one proxy
    proxies_max: int = 256
    notify_repeat_s: float = 1.0
    notify_backoff_max_s: float = 10.0
    notify_give_up_s: float = 300.0
