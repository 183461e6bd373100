"""Claims: who reads a complete transfer, and who waits for one.

An engine may read only what is COMPLETE, and nothing but its release or its process's death takes it away again. A
claim that names a req_id which two live transfers bear is ambiguous and refused: guessing would hand out wrong bytes.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from kvpd.core.receiver.events import ClaimRequested
from kvpd.core.receiver.transfers import Transfer
from kvpd.core.states import ReceiverState
from kvpd.errors import ErrorCode, TransferError, transfer_error

ClaimKey = tuple[int, int]  # engine, its number for the claim


@attrs.frozen
class Held:
    """A granted claim."""

    transfer: Transfer
    rank: int


def _key(claim: ClaimRequested) -> ClaimKey:
    return claim.engine, claim.claim


class ClaimDesk:
    """All claims, waiting and granted."""

    def __init__(self) -> None:
        self._waiting: dict[ClaimKey, ClaimRequested] = {}
        self._waiting_by_req_id: dict[str, dict[ClaimKey, ClaimRequested]] = {}
        self._held: dict[ClaimKey, Held] = {}

    @property
    def waiting_count(self) -> int:
        """Claims that wait."""
        return len(self._waiting)

    @property
    def is_empty(self) -> bool:
        """Nobody waits and nobody reads."""
        return not self._waiting and not self._held

    def knows(self, claim: ClaimRequested) -> bool:
        """Whether the engine has used this number already for a claim that has not ended."""
        return _key(claim) in self._waiting or _key(claim) in self._held

    def judge(self, claim: ClaimRequested, bearing: Iterable[Transfer]) -> Transfer | TransferError | None:
        """The transfer to grant, why the claim can never be granted, or None: it must wait."""
        candidates = [t for t in bearing if claim.sender_id is None or t.id.sender_id == claim.sender_id]
        if len(candidates) > 1:
            names = ", ".join(str(t.id) for t in candidates[:4])
            return transfer_error(
                ErrorCode.AMBIGUOUS_REQUEST, f"{len(candidates)} transfers bear {claim.req_id!r} ({names}): name one"
            )
        if not candidates:
            return None
        (transfer,) = candidates
        if transfer.state not in (ReceiverState.COMPLETE, ReceiverState.CLAIMED):
            return None
        if claim.rank not in transfer.ranks_unclaimed:
            return transfer_error(ErrorCode.CLAIMED, f"rank {claim.rank} of {claim.req_id!r} was claimed before")
        return transfer

    def wait(self, claim: ClaimRequested) -> None:
        """Keep a claim until something happens to its req_id."""
        self._waiting[_key(claim)] = claim
        self._waiting_by_req_id.setdefault(claim.req_id, {})[_key(claim)] = claim

    def waiting_for(self, req_id: str) -> list[ClaimRequested]:
        """The claims that wait for this req_id, in the order they came."""
        return list(self._waiting_by_req_id.get(req_id, {}).values())

    def stop_waiting(self, key: ClaimKey) -> ClaimRequested | None:
        """The claim waits no longer; None if it did not."""
        claim = self._waiting.pop(key, None)
        if claim is not None:
            same = self._waiting_by_req_id[claim.req_id]
            del same[key]
            if not same:
                del self._waiting_by_req_id[claim.req_id]
        return claim

    def hold(self, claim: ClaimRequested, transfer: Transfer) -> None:
        """The claim is granted."""
        transfer.ranks_unclaimed.remove(claim.rank)
        transfer.ranks_reading.add(claim.rank)
        self._held[_key(claim)] = Held(transfer, claim.rank)

    def held(self, key: ClaimKey) -> Held:
        """The granted claim of this key."""
        return self._held[key]

    def let_go(self, key: ClaimKey) -> Held | None:
        """The engine reads it no more; None if it did not. The rank is neither reading nor unclaimed now."""
        held = self._held.pop(key, None)
        if held is not None:
            held.transfer.ranks_reading.remove(held.rank)
        return held

    def waiting_of(self, engine: int) -> list[ClaimKey]:
        """The claims that this engine waits for."""
        return [key for key in self._waiting if key[0] == engine]

    def held_by(self, engine: int) -> list[ClaimKey]:
        """The claims that this engine reads."""
        return [key for key in self._held if key[0] == engine]
