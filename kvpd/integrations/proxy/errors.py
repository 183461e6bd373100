"""What a client is told when there is no answer from an engine, and how an engine can let the proxy down.

KvpdError
├── Refused               the whole answer to a client: status, headers and body
│   ├── ProxyError        the proxy's own, in the form that OpenAI's clients understand
│   └── EngineAnswer      an engine's, passed on as it is
├── EngineFailed          an engine gave no answer; `status` is what a client gets to see of that
│   ├── EngineUnreachable no connection
│   ├── EngineBroken      it broke off, or speaks something else than HTTP
│   └── EngineTooSlow     not within its time
├── AttemptFailed         one try with one pair of engines; perhaps another one works
└── ClientGone            nobody is there to be answered
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Final

import orjson

from kvpd.errors import ErrorCode, KvpdError
from kvpd.integrations.proxy.limits import RETRY_AFTER_S

if TYPE_CHECKING:
    from kvpd.integrations.proxy.engines import Engine

Headers = list[tuple[bytes, bytes]]

_TYPES: Final = {
    400: "invalid_request_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    501: "invalid_request_error",
    502: "bad_gateway",
    503: "service_unavailable",
    504: "gateway_timeout",
}


class Refused(KvpdError):
    """A client's whole answer, which is not what it hoped for."""

    def __init__(self, text: str, status: int, headers: Headers, body: bytes) -> None:
        super().__init__(text)
        self.status = status
        self.headers = headers
        self.body = body


class ProxyError(Refused):
    """The proxy's own refusal. `code` is a word for programs, `message` a sentence for people."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        retry_after_s: float | None = None,
        headers: Sequence[tuple[bytes, bytes]] = (),
    ) -> None:
        self.code = code
        self.message = message
        every: Headers = [(b"content-type", b"application/json"), *headers]
        if retry_after_s is not None:
            every.append((b"retry-after", b"%d" % max(1, math.ceil(retry_after_s))))
        kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "internal_error")
        super().__init__(f"{code}: {message}", status, every, _body(message, kind, code))


def _body(message: str, kind: str, code: str) -> bytes:
    return orjson.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}})


class EngineAnswer(Refused):
    """An engine's own answer, status and all: it knows better than the proxy what was wrong."""

    def __init__(self, status: int, headers: Headers, body: bytes) -> None:
        super().__init__(f"an engine answered {status}", status, headers, body)


class EngineFailed(KvpdError):
    """No answer from an engine. The text has its address, which is for the log and not for clients."""

    status: ClassVar[int] = 502
    code: ClassVar[str] = "engine_failed"
    words: ClassVar[str] = "failed"

    def refusal(self, kind: str) -> ProxyError:
        """What a client is told; `kind` is the engine's."""
        retry_after_s = RETRY_AFTER_S if self.status == 503 else None
        return ProxyError(self.status, self.code, f"the {kind} engine {self.words}", retry_after_s=retry_after_s)


class EngineUnreachable(EngineFailed):
    """It cannot be connected to: it has not started yet, or is gone."""

    status = 503
    code = "engine_unreachable"
    words = "cannot be reached now"


class EngineBroken(EngineFailed):
    """It closed the connection before its answer was whole, or its answer is no HTTP."""

    code = "engine_broken"
    words = "broke off, or does not speak HTTP"


class EngineTooSlow(EngineFailed):
    """It did not answer in time."""

    status = 504
    code = "engine_timeout"
    words = "did not answer in time"


class AttemptFailed(KvpdError):
    """One try has failed: `refused` is the answer if there is no other.

    `blamed` are the engines not to ask again, `avoided` those to ask only if there are no others. `can_retry` says
    whether other engines might do better, `can_recompute` whether a decode engine alone might, `was_heard` whether the
    engine got the request at all, and `may_arrive` whether the KV cache may still come all the same.
    """

    def __init__(
        self,
        refused: Refused,
        *,
        blamed: Sequence[Engine] = (),
        avoided: Sequence[Engine] = (),
        can_retry: bool = True,
        can_recompute: bool = True,
        was_heard: bool = True,
        may_arrive: bool = False,
    ) -> None:
        super().__init__(str(refused))
        self.refused = refused
        self.blamed = tuple(blamed)
        self.avoided = tuple(avoided)
        self.can_retry = can_retry
        self.can_recompute = can_recompute
        self.was_heard = was_heard
        self.may_arrive = may_arrive


class ClientGone(KvpdError):
    """The client has closed its connection, or reads no more."""


# How a transfer's end looks to a client: status, and whether asking again is worth it. Everything else is a 502.
_REFUSALS: Final = {
    ErrorCode.QUEUE_FULL: 429,
    ErrorCode.ADMISSION_TIMEOUT: 503,
    ErrorCode.DRAINING: 503,
    ErrorCode.TOO_LARGE: 413,
    ErrorCode.REQUEST_TIMEOUT: 504,
}
# The two sides have lost each other: what the sender holds for lost may be whole at its receiver.
_PARTED: Final = frozenset({ErrorCode.PEER_LOST, ErrorCode.TRANSPORT_FAILED})
_NO_ROOM: Final = frozenset({ErrorCode.QUEUE_FULL, ErrorCode.ADMISSION_TIMEOUT, ErrorCode.DRAINING})


def transfer_failed(code: ErrorCode, detail: str, retry_after_s: float | None) -> AttemptFailed:
    """What a transfer that ended with `code` means: no room is told to the client, anything else is tried again."""
    is_no_room = code in _NO_ROOM
    if is_no_room and retry_after_s is None:
        retry_after_s = RETRY_AFTER_S
    message = f"the prompt's KV cache was not moved: {detail or code}"
    refused = ProxyError(_REFUSALS.get(code, 502), str(code), message, retry_after_s=retry_after_s)
    is_hopeless = is_no_room or code is ErrorCode.TOO_LARGE
    return AttemptFailed(refused, can_retry=not is_hopeless, can_recompute=not is_no_room, may_arrive=code in _PARTED)
