"""What the proxy and the engines' connectors say to each other about a transfer, in `kv_transfer_params`.

The proxy draws the transfer's id, which joins a request at one engine with its other half at the other.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

import attrs
import msgspec

from kvpd.errors import ErrorCode


@attrs.define
class Transfer:
    """One try's transfer, and who has to see to it that its room is given back."""

    transfer_id: str = attrs.field(factory=lambda: uuid.uuid4().hex)
    may_arrive: bool = True  # also when the client leaves before the prefill engine has said anything
    is_handed_over: bool = False  # to the decode engine, which frees it whatever becomes of the request

    def hand_over(self) -> None:
        """The decode engine knows of it."""
        self.is_handed_over = True

    def for_prefill(self, receiver: str, notify: str) -> dict[str, Any]:
        """To the engine that computes: where to send the KV cache, and whom to tell when it is complete."""
        return {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "transfer_id": self.transfer_id,
            "receiver": receiver,
            "notify": notify,
        }

    def for_decode(self, params: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """To the engine that generates: what the other one's connector has for it, and the id."""
        own = {"do_remote_prefill": True, "do_remote_decode": False, "transfer_id": self.transfer_id}
        return {**(params or {}), **own}


class TransferFault(msgspec.Struct):
    """How a connector says in its engine's answer that the KV cache did not leave."""

    code: str
    detail: str = ""
    retry_after_s: float | None = None

    @property
    def error_code(self) -> ErrorCode:
        """The code, or what stands for all that are not known here."""
        return ErrorCode(self.code) if self.code in set(ErrorCode) else ErrorCode.TRANSPORT_FAILED


class _Word(msgspec.Struct):
    error: TransferFault | None = None


class _PrefillAnswer(msgspec.Struct):
    kv_transfer_params: dict[str, Any] | None = None


def read_prefill_answer(body: bytes) -> tuple[dict[str, Any], TransferFault | None]:
    """What a connector says in a prefill engine's answer: words for the other connector, and what went wrong.

    Raises:
        msgspec.MsgspecError: it is no answer.
    """
    params = msgspec.json.decode(body, type=_PrefillAnswer).kv_transfer_params or {}
    return params, msgspec.convert(params, _Word).error
