"""What must be true of a receiver after every event, by books that are kept from what it says."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import attrs

from kvpd.core.events import Report, ReportName, TransferId
from kvpd.core.messages import Ack, AllocRequest, AllocResponse, CancelNotif, Heartbeat, Hello, PeerMessage, WriteDone
from kvpd.core.receiver import events as ev
from kvpd.simulation.ages import Ages, Stage
from kvpd.simulation.coverage import Coverage, transition
from kvpd.simulation.receiver import SimulatedReceiver
from kvpd.simulation.rules import Rule, Violation
from kvpd.simulation.truth import Truth

_CAUSES = {
    ReportName.TRANSFER_ADMITTED: ("queued", "admit"),
    ReportName.TRANSFER_COMPLETED: ("admitted", "all_written"),
    ReportName.CLAIM_RETURNED: ("claimed", "return"),
    ReportName.TRANSFER_RELEASED: ("claimed", "release"),
    ReportName.TRANSFER_EXPIRED: ("complete", "expire"),
    ReportName.TRANSFER_CLAIMED: ("complete", "claim"),
    ReportName.TRANSFER_FENCED: ("revoked", "fence"),
}


def owner_of(peer: bytes) -> tuple[str, int]:
    """Who really is behind a channel: its name and incarnation. Simulated identities do not lie."""
    name, incarnation, _ = peer.decode().split("/")
    return name, int(incarnation, 16)


@attrs.frozen
class Wanted:
    """A claim that was not answered yet."""

    req_id: str
    rank: int
    sender_id: str | None
    until: float


class ReceiverChecks:
    """One start of a receiver."""

    def __init__(self, receiver: SimulatedReceiver, truth: Truth, coverage: Coverage, audit_every: int) -> None:
        self._receiver = receiver
        self._core = receiver.core
        self._truth = truth
        self._coverage = coverage
        self._audit_every = audit_every
        self._steps = 0
        self._queue: OrderedDict[TransferId, int] = OrderedDict()
        self._bypassed = 0  # how many have passed the head that waits now
        self._reserved: dict[TransferId, int] = {}  # by admitted transfer, what it has not drawn yet
        self._reserved_sum = 0
        self._begun: set[TransferId] = set()
        self._over: set[TransferId] = set()
        self._fenced: set[TransferId] = set()
        self._cancelled: set[TransferId] = set()  # that the receiver was told of
        self._answers: dict[tuple[TransferId, int, int], tuple[int, ...]] = {}
        self._live: dict[str, set[TransferId]] = {}  # by label, those that have not ended
        self._claims: dict[tuple[int, int], Wanted] = {}  # unanswered
        self._ages = Ages(receiver.process)

    def before(self, event: ev.ReceiverEvent) -> None:
        """An event is about to be handled."""
        if isinstance(event, ev.ClaimRequested):
            until = self._receiver.schedule.now + event.timeout_s
            self._claims[event.engine, event.claim] = Wanted(event.req_id, event.rank, event.sender_id, until)

    def after(self, event: ev.ReceiverEvent, actions: Sequence[ev.ReceiverAction]) -> None:
        """An event has been handled."""
        for action in actions:
            if isinstance(action, Report):
                self._reported(event, action)
            elif isinstance(action, ev.SendMessage):
                self._sent(event, action)
            elif isinstance(action, ev.GrantClaim):
                self._granted(action)
            elif isinstance(action, ev.RefuseClaim):
                self._coverage.codes[action.error.code] += 1
                self._claim_answered(action.engine, action.claim)
            elif isinstance(action, ev.AnnounceTransfer) and action.error is not None:
                self._coverage.codes[action.error.code] += 1
        match event:
            case ev.MessageReceived(peer, PeerMessage() as message):
                self._check_answered(peer, message, actions)
            case ev.ClaimReleased(engine, claim):
                self._claims.pop((engine, claim), None)
            case ev.EngineClosed(engine):
                self._claims = {key: at for key, at in self._claims.items() if key[0] != engine}
            case _:
                pass
        self._check_counts()

    # -------------------------------------------------------------- reports

    def _reported(self, event: ev.ReceiverEvent, report: Report) -> None:
        name, transfer, fields = report.name, report.transfer, report.fields
        code = fields.get("code", fields.get("reason"))
        if code is not None:
            self._coverage.codes[str(code)] += 1
        if transfer is None:
            return
        if name in _CAUSES:
            self._coverage.transitions[transition("receiver", *_CAUSES[name])] += 1
        match name:
            case ReportName.TRANSFER_QUEUED:
                self._queued(transfer, str(report.req_id), int(fields["chunks"]))
            case ReportName.TRANSFER_ADMITTED:
                self._admitted(transfer)
            case ReportName.BATCH_ALLOCATED:
                self._drawn(transfer, int(fields["chunks"]))
            case ReportName.TRANSFER_COMPLETED:
                self._completed(transfer)
            case ReportName.TRANSFER_REVOKED:
                was = str(fields["was"])
                self._coverage.transitions[transition("receiver", was, "roll_back")] += 1
                if was == "admitted" and not fields["quarantined"]:
                    self._coverage.transitions[transition("receiver", "revoked", "fence")] += 1
                self._check_owner(event, transfer, "revoked")
                self._ended(transfer, str(report.req_id))
                if fields["quarantined"]:
                    self._await_fence(transfer)
            case ReportName.TRANSFER_CLAIMED:
                self._ages.end(Stage.CLAIM, transfer)
            case ReportName.CLAIM_RETURNED:
                settings = self._receiver.settings
                self._ages.begin(Stage.CLAIM, transfer, max(settings.claim_grace_s, settings.ready_ttl_s))
            case ReportName.TRANSFER_EXPIRED if int(fields["unclaimed_ranks"]) < self._receiver.settings.ranks:
                self._ages.end(Stage.CLAIM, transfer)  # other ranks read it, and its end is theirs
            case ReportName.TRANSFER_EXPIRED | ReportName.TRANSFER_RELEASED:
                self._ended(transfer, str(report.req_id))
            case ReportName.TRANSFER_FENCED:
                self._check_owner(event, transfer, "fenced")
                self._once(self._fenced, transfer, "was fenced")
                self._ages.end(Stage.FENCE, transfer)
            case _:
                pass

    def _once(self, seen: set[TransferId], transfer: TransferId, what: str) -> None:
        if transfer in seen:
            raise Violation(Rule.ONE_END, f"{transfer} {what} twice at {self._receiver.process.name}")
        seen.add(transfer)

    def _queued(self, transfer: TransferId, req_id: str, chunks: int) -> None:
        if transfer not in self._truth.requests:  # a rogue may call two transfers alike
            self._begun.discard(transfer)
            self._answers = {key: answer for key, answer in self._answers.items() if key[0] != transfer}
            self._over.discard(transfer)
            self._fenced.discard(transfer)
        self._once(self._begun, transfer, "began")
        if transfer in self._cancelled and transfer in self._truth.requests:
            raise Violation(Rule.ONE_END, f"{transfer} began after its CancelNotif had been acknowledged")
        self._queue[transfer] = chunks
        self._ages.begin(Stage.ADMISSION, transfer, self._receiver.settings.allocation_timeout_s)
        self._live.setdefault(req_id, set()).add(transfer)

    def _admitted(self, transfer: TransferId) -> None:
        self._ages.end(Stage.ADMISSION, transfer)
        head = next(iter(self._queue), None)
        if head == transfer:
            self._bypassed = 0
        else:
            self._bypassed += 1
            chunks, waiting = self._queue.get(transfer, 0), self._queue.get(head, 0) if head is not None else 0
            if self._bypassed > self._receiver.settings.bypass_max or chunks >= waiting:
                raise Violation(Rule.NO_OVERTAKING, f"{transfer} was admitted before {head}, which came earlier")
        self._reserved[transfer] = self._queue.pop(transfer)
        self._reserved_sum += self._reserved[transfer]

    def _drawn(self, transfer: TransferId, chunks: int) -> None:
        if self._reserved.get(transfer, -1) < chunks:
            left = self._reserved.get(transfer)
            raise Violation(Rule.WHOLE_OR_NOTHING, f"{transfer} drew {chunks} slots of {left} that it had reserved")
        self._reserved[transfer] -= chunks
        self._reserved_sum -= chunks

    def _completed(self, transfer: TransferId) -> None:
        record = self._core._book.get(transfer)
        for rank in range(self._receiver.settings.ranks):
            expected = self._truth.expected(transfer, self._receiver.settings.chunk_bytes, rank)
            if expected is not None:
                assert record is not None
                slots = tuple(record.slots[position] for position in range(len(expected)))
                self._truth.verify(self._receiver, f"{transfer}, complete", slots, rank, expected)
        self._truth.completed.add(transfer)
        self._ages.begin(Stage.CLAIM, transfer, self._receiver.settings.ready_ttl_s)
        self._reserved_sum -= self._reserved.pop(transfer)

    def _ended(self, transfer: TransferId, req_id: str) -> None:
        self._once(self._over, transfer, "ended")
        self._live[req_id].discard(transfer)
        self._ages.end(Stage.ADMISSION, transfer)
        self._ages.end(Stage.CLAIM, transfer)
        if transfer == next(iter(self._queue), None):
            self._bypassed = 0
        self._queue.pop(transfer, None)
        self._reserved_sum -= self._reserved.pop(transfer, 0)

    def _await_fence(self, transfer: TransferId) -> None:
        """Across hosts the fence comes with an answer, or with the end of the session that owes one."""
        record = self._core._book.get(transfer)
        session = self._core._sessions.numbered(record.session_no) if record is not None else None
        if session is not None and not session.same_host:
            settings = self._receiver.settings
            self._ages.begin(Stage.FENCE, transfer, settings.lease_s + settings.repeat_s)

    def _check_owner(self, event: ev.ReceiverEvent, transfer: TransferId, what: str) -> None:
        if not isinstance(event, ev.MessageReceived) or isinstance(event.message, Hello):
            return
        if owner_of(event.peer) != (transfer.sender_id, transfer.incarnation):
            detail = f"{transfer} was {what} by {type(event.message).__name__} from {event.peer.decode()}"
            raise Violation(Rule.OWN_TRANSFERS, detail)

    # -------------------------------------------------------------- messages

    def _sent(self, event: ev.ReceiverEvent, action: ev.SendMessage) -> None:
        message = action.message
        error = message.error if isinstance(message, Ack | AllocResponse) else None
        if error is not None:
            self._coverage.codes[error.code] += 1
        if isinstance(message, AllocResponse) and error is None and message.remote_indexes:
            transfer = TransferId(owner_of(action.peer)[0], message.sender_incarnation, message.transfer_no)
            self._allocated(transfer, message)
        elif isinstance(message, Ack) and error is None and isinstance(event, ev.MessageReceived):
            answered = event.message
            if isinstance(answered, CancelNotif) and answered.message_id == message.message_id:
                self._cancelled.add(TransferId(*owner_of(event.peer), answered.transfer_no))

    def _allocated(self, transfer: TransferId, message: AllocResponse) -> None:
        if transfer not in self._begun or transfer in self._queue:
            raise Violation(Rule.WHOLE_OR_NOTHING, f"{transfer} was given slots before it was admitted")
        key = (transfer, message.first_chunk, len(message.remote_indexes))
        known = self._answers.get(key)
        if known is not None:
            if known != message.remote_indexes and transfer not in self._over:
                detail = f"{transfer}, chunk {message.first_chunk}: {known}, then {message.remote_indexes}"
                raise Violation(Rule.SAME_ANSWER, detail)
            return
        self._answers[key] = message.remote_indexes
        self._coverage.faults["deduplication"] += len(message.already_sent_indexes)
        for index in message.remote_indexes:
            if index >= 0:
                self._truth.allocated(self._receiver, transfer, index)

    def _check_answered(self, peer: bytes, message: PeerMessage, actions: Sequence[ev.ReceiverAction]) -> None:
        """Only admission waits. A batch of an admitted transfer, whose room is reserved, is answered at once."""
        if not isinstance(message, AllocRequest | WriteDone | CancelNotif | Heartbeat):
            return
        if isinstance(message, WriteDone) and self._receiver.settings.verify != "off":
            return  # summing takes its time
        for action in actions:
            if isinstance(action, ev.SendMessage) and action.message.message_id == message.message_id:
                return
        transfer = TransferId(*owner_of(peer), message.transfer_no if isinstance(message, AllocRequest) else -1)
        if transfer in self._queue:
            return
        if transfer in self._reserved:
            raise Violation(Rule.WHOLE_OR_NOTHING, f"a batch of {transfer}, which is admitted, has to wait")
        detail = f"{type(message).__name__} {message.message_id} of {peer.decode()} was not answered at once"
        raise Violation(Rule.ONLY_ADMISSION_WAITS, detail)

    # -------------------------------------------------------------- claims

    def _granted(self, grant: ev.GrantClaim) -> None:
        wanted = self._claim_answered(grant.engine, grant.claim)
        if wanted.sender_id is None and len(self._live.get(wanted.req_id, ())) > 1:
            raise Violation(Rule.AS_NAMED, f"{grant.transfer} was guessed out of those that bear {wanted.req_id}")
        if wanted.sender_id not in (None, grant.transfer.sender_id):
            raise Violation(Rule.AS_NAMED, f"{grant.transfer} was granted to who wants {wanted.sender_id}'s")
        if grant.transfer not in self._truth.completed or grant.transfer in self._over:
            raise Violation(Rule.NOTIFY_AFTER_LANDING, f"{grant.transfer} was granted and is not complete")
        self._truth.granted(self._receiver, grant, wanted.rank)

    def _claim_answered(self, engine: int, claim: int) -> Wanted:
        wanted = self._claims.pop((engine, claim), None)
        if wanted is None:
            raise Violation(Rule.ONE_END, f"claim {claim} of engine {engine} was answered twice")
        return wanted

    # -------------------------------------------------------------- after every event

    def _check_counts(self) -> None:
        core = self._core
        counts = core.counts
        if counts.reserved != self._reserved_sum:
            detail = f"{counts.reserved} slots are reserved at {self._receiver.process.name}, not {self._reserved_sum}"
            raise Violation(Rule.CHARGED, detail)
        if core.queue_depth != len(self._queue):
            raise Violation(Rule.CONSERVATION, f"{core.queue_depth} transfers wait, not {len(self._queue)}")
        self._steps += 1
        if self._steps % self._audit_every == 0:
            core.audit()
            self.check_bounds()

    def check_bounds(self) -> None:
        """Nothing has grown beyond its bound."""
        core, settings = self._core, self._receiver.settings
        sessions = list(core._sessions._by_number.values())
        sizes = {
            "queue_depth_max": (core.queue_depth, settings.queue_depth_max),
            "sessions_max": (core.session_count, settings.sessions_max),
            "claims_max": (core._desk.waiting_count, settings.claims_max),
            "outcomes_max": (
                max((len(s.outcomes) - len(s.transfers) for s in sessions), default=0),
                settings.outcomes_max + settings.queue_depth_max + settings.total_slots,
            ),
            "unanswered RevokeNotifs": (sum(len(s.outbox._sent) for s in sessions), len(self._begun)),
        }
        for name, (size, limit) in sizes.items():
            if size > limit:
                raise Violation(Rule.BOUNDED, f"{name} of {limit} is exceeded: {size}")

    def check_ages(self) -> None:
        """Nobody waits beyond the time that was set."""
        self._ages.check()
        for (engine, claim), wanted in self._claims.items():
            if wanted.until + 1.0 < self._receiver.schedule.now:
                detail = f"claim {claim} of engine {engine} should have been answered by {wanted.until:.2f}"
                raise Violation(Rule.BOUNDED, detail)

    def check_quiet(self) -> None:
        """Nothing runs any more: every slot is free, every table empty."""
        core = self._core
        core.audit()
        if not core.is_clean or self._claims:
            states = ", ".join(f"{t.id} is {t.state.value}" for t in core._book._transfers.values())
            detail = f"{self._receiver.process.name}: {core.counts}, {len(self._claims)} claims unanswered; {states}"
            raise Violation(Rule.QUIET_MEANS_CLEAN, detail)
        closing = [s.number for s in core._sessions._by_number.values() if s.state.value == "closing"]
        if closing:
            raise Violation(Rule.QUIET_MEANS_CLEAN, f"{self._receiver.process.name}: sessions {closing} never end")
