"""Whether two daemons can work together: judged on Hello, before anything is held."""

from __future__ import annotations

from typing import Protocol

from kvpd.core.messages import PROTOCOL_VERSION, ErrorInfo, Hello
from kvpd.errors import ErrorCode


class Terms(Protocol):
    """What a receiver insists on."""

    @property
    def chunk_bytes(self) -> int: ...

    @property
    def layout(self) -> str: ...

    @property
    def lease_s(self) -> float: ...


def judge_hello(hello: Hello, terms: Terms, *, draining: bool) -> ErrorInfo | None:
    """Why this sender is refused, with both sides' values, or None. Equal byte counts are not equal layouts."""
    if hello.protocol_version != PROTOCOL_VERSION:
        return ErrorInfo(
            ErrorCode.PROTOCOL_VERSION,
            f"the sender speaks version {hello.protocol_version}, this receiver {PROTOCOL_VERSION}",
        )
    if not hello.sender_id:
        return ErrorInfo(ErrorCode.PROTOCOL_ERROR, "a sender without a name")
    if hello.chunk_bytes != terms.chunk_bytes:
        return ErrorInfo(
            ErrorCode.LAYOUT_MISMATCH,
            f"the sender's chunk_bytes is {hello.chunk_bytes}, this receiver's {terms.chunk_bytes}",
        )
    if hello.layout != terms.layout:
        return ErrorInfo(
            ErrorCode.LAYOUT_MISMATCH,
            f"the sender's layout is {hello.layout[:128]!r}, this receiver's {terms.layout[:128]!r}",
        )
    if draining:
        return ErrorInfo(ErrorCode.DRAINING, "this receiver is shutting down", retry_after_s=terms.lease_s)
    return None
