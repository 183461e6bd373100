"""Claims: an engine reads a complete transfer, and its room is free again when every rank has released it."""

from __future__ import annotations

from kvpd.core.events import ReportName, TransferId
from kvpd.core.messages import ErrorInfo
from kvpd.core.receiver import events as ev
from kvpd.core.receiver.base import ReceiverBase
from kvpd.core.receiver.transfers import Transfer
from kvpd.core.states import ReceiverCause, ReceiverState
from kvpd.errors import ErrorCode, TransferError, transfer_error


class Reading(ReceiverBase):
    """Claims and releases."""

    def _claim_requested(self, claim: ev.ClaimRequested, now: float) -> None:
        if self._desk.knows(claim):
            self._refuse_claim(claim, transfer_error(ErrorCode.PROTOCOL_ERROR, f"claim {claim.claim} is in use"))
            return
        if claim.rank >= self.settings.ranks:
            detail = f"rank {claim.rank}; this receiver has {self.settings.ranks}"
            self._refuse_claim(claim, transfer_error(ErrorCode.PROTOCOL_ERROR, detail))
            return
        if self._settle_claim(claim, now):
            return
        if self._desk.waiting_count >= self.settings.claims_max:
            detail = f"{self._desk.waiting_count} claims wait; the limit is {self.settings.claims_max}"
            self._refuse_claim(claim, transfer_error(ErrorCode.QUEUE_FULL, detail, 1.0))
            return
        self._desk.wait(claim)
        self._timers.set(("claim", (claim.engine, claim.claim)), now + claim.timeout_s)

    def _settle_claim(self, claim: ev.ClaimRequested, now: float) -> bool:
        """Grant or refuse a claim, if that can be said already."""
        verdict = self._desk.judge(claim, self._book.bearing(claim.req_id))
        if verdict is None:
            return False
        self._stop_waiting((claim.engine, claim.claim))
        if isinstance(verdict, TransferError):
            self._refuse_claim(claim, verdict)
            return True
        transfer = verdict
        self._desk.hold(claim, transfer)
        if self.settings.claim_ttl_s:
            self._timers.set(("overdue", (claim.engine, claim.claim)), now + self.settings.claim_ttl_s)
        if transfer.state is ReceiverState.COMPLETE:
            transfer.move(ReceiverCause.CLAIM)
        if not transfer.ranks_unclaimed:
            self._timers.clear(("ready", transfer.id))
        self._report_of(
            ReportName.TRANSFER_CLAIMED,
            transfer,
            engine=claim.engine,
            rank=claim.rank,
            waited_s=now - (transfer.ready_until - self.settings.ready_ttl_s),
        )
        self._actions.append(ev.GrantClaim(claim.engine, claim.claim, transfer.id, self._book.chunks(transfer)))
        return True

    def _recheck_claims(self, req_id: str, now: float) -> None:
        for claim in self._desk.waiting_for(req_id):
            self._settle_claim(claim, now)

    def _stop_waiting(self, key: tuple[int, int]) -> None:
        self._timers.clear(("claim", key))
        self._desk.stop_waiting(key)

    def _fail_waiting(self, req_id: str, error: ErrorInfo) -> None:
        for claim in self._desk.waiting_for(req_id):
            self._stop_waiting((claim.engine, claim.claim))
            self._refuse_claim(claim, transfer_error(error.code, error.detail, error.retry_after_s))

    def _refuse_claim(self, claim: ev.ClaimRequested, error: TransferError) -> None:
        self._actions.append(ev.RefuseClaim(claim.engine, claim.claim, error))
        self._report(ReportName.CLAIM_REFUSED, req_id=claim.req_id, engine=claim.engine, code=error.code)

    def _claim_timed_out(self, key: tuple[int, int]) -> None:
        claim = self._desk.stop_waiting(key)
        assert claim is not None
        states = ", ".join(f"{t.id} is {t.state.value}" for t in self._book.bearing(claim.req_id))
        detail = f"not complete within {claim.timeout_s:g} s: {states or 'no transfer of this req_id is known'}"
        self._refuse_claim(claim, transfer_error(ErrorCode.CLAIM_TIMEOUT, detail[:1024]))

    def _claim_overdue(self, key: tuple[int, int]) -> None:
        """An engine that hangs is cut off. Its chunks come back when its process is dead, and not before."""
        held = self._desk.held(key)
        detail = f"a claim was held for more than claim_ttl_s of {self.settings.claim_ttl_s:g} s"
        self._report_of(ReportName.CLAIM_OVERDUE, held.transfer, engine=key[0], rank=held.rank)
        self._actions.append(ev.CutEngine(key[0], detail))

    def _claim_released(self, key: tuple[int, int], now: float) -> None:
        self._stop_waiting(key)
        self._timers.clear(("overdue", key))
        held = self._desk.let_go(key)
        if held is not None:
            self._release_if_read(held.transfer, now)

    def _release_if_read(self, transfer: Transfer, now: float) -> None:
        """When every rank has read it, a transfer's room is free again."""
        if transfer.ranks_reading or transfer.ranks_unclaimed:
            return
        self._timers.clear(("ready", transfer.id))
        self._book.release(transfer)
        self._gone(transfer, None)
        self._report_of(ReportName.TRANSFER_RELEASED, transfer, chunks=transfer.total_chunks)
        self._announce(ev.Outcome.RELEASED, transfer)

    def _engine_died(self, engine: int, now: float) -> None:
        """Its claims return once, for another engine to read; a second death with them in hand drops them."""
        for key in self._desk.waiting_of(engine):
            self._stop_waiting(key)
        for key in self._desk.held_by(engine):
            self._timers.clear(("overdue", key))
            held = self._desk.let_go(key)
            assert held is not None
            transfer = held.transfer
            if held.rank in transfer.ranks_returned:
                self._release_if_read(transfer, now)
                continue
            transfer.ranks_returned.add(held.rank)
            transfer.ranks_unclaimed.add(held.rank)
            if not transfer.ranks_reading and len(transfer.ranks_unclaimed) == self.settings.ranks:
                transfer.move(ReceiverCause.RETURN)
            until = max(transfer.ready_until, now + self.settings.claim_grace_s)
            self._timers.set(("ready", transfer.id), until)
            self._report_of(ReportName.CLAIM_RETURNED, transfer, engine=engine, rank=held.rank)
            self._recheck_claims(transfer.req_id, now)

    def _expire(self, transfer_id: TransferId, now: float) -> None:
        transfer = self._book.get(transfer_id)
        assert transfer is not None
        error = ErrorInfo(ErrorCode.READY_EXPIRED, f"nobody claimed it within {self.settings.ready_ttl_s:g} s")
        self._report_of(ReportName.TRANSFER_EXPIRED, transfer, unclaimed_ranks=len(transfer.ranks_unclaimed))
        if transfer.state is ReceiverState.CLAIMED:
            # Some ranks never came; the others finish reading.
            transfer.ranks_unclaimed.clear()
            self._release_if_read(transfer, now)
            return
        self._book.expire(transfer)
        self._gone(transfer, error)
        self._announce(ev.Outcome.FAILED, transfer, error)
