"""Everything that a receiver's decisions depend on, and the bounds of everything it keeps."""

from __future__ import annotations

import attrs

from kvpd.core.messages import HostIdentity, Verify


@attrs.frozen
class ReceiverSettings:
    """Everything that the receiver's decisions depend on. Times in seconds."""

    receiver_id: str
    incarnation: int
    total_slots: int
    chunk_bytes: int
    layout: str = ""
    ranks: int = 1
    host: HostIdentity = attrs.field(factory=HostIdentity)
    allocation_timeout_s: float = 30.0
    queue_depth_max: int = 1024
    progress_timeout_s: float = 60.0
    ready_ttl_s: float = 60.0
    claim_grace_s: float = 10.0
    claim_ttl_s: float = 0.0  # 0: a claim may be held for ever
    bypass_max: int = 0
    verify: Verify = "off"
    share: str = ""  # where engines on this host are given the memory, to fill slots in place; empty: nowhere
    lease_s: float = 10.0
    put_deadline_s: float = 4.0
    sessions_max: int = 1024
    claims_max: int = 65536
    outcomes_max: int = 1 << 18

    @property
    def repeat_s(self) -> float:
        """How often an unanswered message is sent again."""
        return self.lease_s / 3
