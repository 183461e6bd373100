"""Every error kvpd raises, and who must act on it.

KvpdError
├── ConfigError             fix the configuration
├── LocalProtocolError      fix our caller
├── RemoteProtocolError     drop that peer
├── TransportError          abort that request
└── TransferError           one transfer ended without success; `code` says how
    ├── AdmissionRefused    no room was given: too_large, queue_full, draining, admission_timeout, ...
    ├── TransferCancelled   somebody who may asked for it
    └── TransferFailed      everything else: revoked, peer_lost, transport_failed, ...

An AssertionError is a bug of ours: nobody catches it and the process dies.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence


class ErrorCode(enum.StrEnum):
    """Why something was refused or ended: the whole vocabulary, on the wire and in logs and metrics."""

    LEGACY_SENDER = "legacy_sender"
    TOO_LARGE = "too_large"
    QUEUE_FULL = "queue_full"
    DRAINING = "draining"
    ADMISSION_TIMEOUT = "admission_timeout"
    OVERFLOW = "overflow"
    UNDERFLOW = "underflow"
    TOTAL_MISMATCH = "total_mismatch"
    BATCH_OVERLAP = "batch_overlap"
    LAYOUT_MISMATCH = "layout_mismatch"
    PROTOCOL_VERSION = "protocol_version"
    PROTOCOL_ERROR = "protocol_error"
    NO_SESSION = "no_session"
    REVOKED = "revoked"
    CHECKSUM_MISMATCH = "checksum_mismatch"
    CLAIMED = "claimed"
    AMBIGUOUS_REQUEST = "ambiguous_request"
    CANCELLED = "cancelled"
    PEER_LOST = "peer_lost"
    TRANSPORT_FAILED = "transport_failed"
    REQUEST_TIMEOUT = "request_timeout"
    CLAIM_TIMEOUT = "claim_timeout"
    NO_PROGRESS = "no_progress"
    READY_EXPIRED = "ready_expired"


class KvpdError(Exception):
    """The root of every error that kvpd raises on purpose."""


class ConfigError(KvpdError):
    """The configuration cannot work; `problems` lists everything that is wrong with it, a sentence each."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


class LocalProtocolError(KvpdError):
    """Our own caller broke a rule of the interface: the call did nothing."""


class RemoteProtocolError(KvpdError):
    """A peer sent what no correct peer sends: its message counts for nothing."""


class TransportError(KvpdError):
    """The wire failed: what was on its way may or may not have arrived."""


class TransferError(KvpdError):
    """One transfer ended without success.

    `code` is an ErrorCode, `detail` a sentence with the values and limits that matter, and `retry_after_s`
    (seconds, or None) when asking again is worth it.
    """

    def __init__(self, code: ErrorCode, detail: str = "", retry_after_s: float | None = None) -> None:
        super().__init__(f"{code}: {detail}" if detail else str(code))
        self.code = code
        self.detail = detail
        self.retry_after_s = retry_after_s


class AdmissionRefused(TransferError):
    """The receiver gave no room; nothing was placed and nothing is held."""


class TransferCancelled(TransferError):
    """The engine, the proxy or the shutdown asked for the end of it."""


class TransferFailed(TransferError):
    """The transfer was revoked, its peer was lost or its bytes could not be moved; it was rolled back whole."""


_REFUSALS = frozenset(
    {
        ErrorCode.LEGACY_SENDER,
        ErrorCode.TOO_LARGE,
        ErrorCode.QUEUE_FULL,
        ErrorCode.DRAINING,
        ErrorCode.ADMISSION_TIMEOUT,
        ErrorCode.LAYOUT_MISMATCH,
        ErrorCode.PROTOCOL_VERSION,
    }
)


def transfer_error(code: ErrorCode, detail: str = "", retry_after_s: float | None = None) -> TransferError:
    """The exception that stands for `code`."""
    if code in _REFUSALS:
        return AdmissionRefused(code, detail, retry_after_s)
    if code is ErrorCode.CANCELLED:
        return TransferCancelled(code, detail, retry_after_s)
    return TransferFailed(code, detail, retry_after_s)
