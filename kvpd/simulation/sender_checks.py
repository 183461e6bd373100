"""What must be true of a sender after every event, by books that are kept from what it hears and says."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from kvpd.core.events import Report, ReportName
from kvpd.core.messages import AllocResponse, Notification, ProxyNotif
from kvpd.core.sender import events as ev
from kvpd.errors import TransferError
from kvpd.simulation.coverage import Coverage, transition
from kvpd.simulation.rules import Rule, Violation
from kvpd.simulation.sender import SimulatedSender
from kvpd.simulation.truth import Truth, Use

_SLACK_S = 2.0


class SenderChecks:
    """One start of a sender."""

    def __init__(
        self, sender: SimulatedSender, truth: Truth, coverage: Coverage, audit_every: int, ending_max_s: float
    ) -> None:
        self._sender = sender
        self._core = sender.core
        self._truth = truth
        self._coverage = coverage
        self._audit_every = audit_every
        self._ending_max_s = ending_max_s  # from a cancel until its transfer is settled
        self._steps = 0
        self._opened: dict[int, float] = {}  # live, and since when
        self._proxies: dict[int, str] = {}  # of those, the ones whose end a proxy must hear of
        self._untold: dict[int, str] = {}  # ended in this step, and its proxy was not told yet
        self._opens: dict[int, ev.OpenRequested] = {}
        self._known: set[int] = set()  # not refused at once
        self._admitted: set[int] = set()
        self._allocated: set[tuple[int, int]] = set()  # transfer, position of a batch's first chunk
        self._ended: dict[int, TransferError | None] = {}
        self._ending: dict[int, float] = {}  # cancelled and not settled, and since when
        self._let_go: set[int] = set()
        self._notified: dict[int, int] = {}  # by transfer, the id of its one notification
        self.told: dict[int, str] = {}  # by transfer, the proxy that must hear of it
        self._given_up: set[int] = set()

    def before(self, event: ev.SenderEvent) -> None:
        """An event is about to be handled."""
        match event:
            case ev.OpenRequested(number):
                self._opened[number] = self._sender.schedule.now
                proxy = event.notify or self._sender.settings.proxy_address
                if proxy is not None:
                    self._proxies[number] = proxy
                self._opens[number] = event
            case ev.PieceFilled(number, piece):
                for use in self._uses(number):
                    use.is_filled |= use.piece == piece
            case ev.EngineLetGo(number):
                self._let_go.add(number)
            case ev.PeerMessageReceived(_, AllocResponse() as message) if message.error is None:
                self._allocated.add((message.transfer_no, message.first_chunk))
            case _:
                pass

    def _uses(self, number: int) -> list[Use]:
        sender = self._sender
        slots = range(len(sender.staging))
        uses = (self._truth.staged.get((sender, local)) for local in slots)
        return [use for use in uses if use is not None and use.number == number]

    def after(self, event: ev.SenderEvent, actions: Sequence[ev.SenderAction]) -> None:
        """An event has been handled."""
        if isinstance(event, ev.OpenRequested) and not self._begins(event, actions):
            self._proxies.pop(event.transfer_no, None)  # the first rank's open stands for all
        for action in actions:
            match action:
                case Report():
                    self._reported(action)
                case ev.GrantPiece():
                    self._granted(action)
                case ev.PostPuts():
                    self._posted(action)
                case ev.FinishTransfer(number, error):
                    self._finished(number, error)
                case ev.NotifyProxy(proxy, notif):
                    self._notifies(proxy, notif)
                case _:
                    pass
        for number, proxy in self._untold.items():
            raise Violation(Rule.ONE_END, f"{self._sender.identity(number)} has ended, and {proxy} is not told")
        if self._ending:
            self._check_settled()
        self._steps += 1
        if self._steps % self._audit_every == 0:
            self._core.audit()
            self.check_bounds()

    def _begins(self, event: ev.OpenRequested, actions: Sequence[ev.SenderAction]) -> bool:
        """Whether an open begins a transfer, or is refused one: not if it joins another rank's, which may be over."""
        names = {action.name for action in actions if isinstance(action, Report)}
        if ReportName.TRANSFER_OPENED in names:
            return True
        others = [one for one in self._opens.values() if one.req_id == event.req_id and one.rank != event.rank]
        has_failed = any(self._ended.get(one.transfer_no) is not None for one in others)
        return ReportName.TRANSFER_JOINED not in names and not has_failed

    def _reported(self, report: Report) -> None:
        code = report.fields.get("code")
        if code is not None:
            self._coverage.codes[str(code)] += 1
        if report.transfer is None:
            return
        number = report.transfer.transfer_no
        match report.name:
            case ReportName.ADMISSION_GRANTED:
                self._admitted.add(number)
                self._cover("opening", "admitted")
            case ReportName.TRANSFER_OPENED:
                self._known.add(number)
            case ReportName.TRANSFER_FAILED | ReportName.TRANSFER_CANCELLED:
                self._cover("transferring" if number in self._admitted else "opening", "cancel")
            case ReportName.TRANSFER_DONE:
                self._cover("transferring", "all_acknowledged")
            case ReportName.PROXY_NOTIFICATION_DROPPED:
                self._given_up.add(number)
                self.told.pop(number, None)
            case _:
                pass

    def _cover(self, state: str, cause: str) -> None:
        self._coverage.transitions[transition("sender", state, cause)] += 1

    # -------------------------------------------------------------- staging and puts

    def _granted(self, grant: ev.GrantPiece) -> None:
        sender, number = self._sender, grant.transfer_no
        transfer = sender.identity(number)
        first = [0, *accumulate(self._truth.requests[transfer].batches)][grant.stage]
        if (transfer.transfer_no, first) not in self._allocated:
            detail = f"{sender.process.name} stages transfer {number}, chunk {first}, before it has remote room"
            raise Violation(Rule.ORDER_OF_RESOURCES, detail)
        if grant.place:
            memory = sender.memory_at(grant.place)
            for entry in grant.entries:
                if entry is not None:
                    self._truth.may_put(memory, transfer, entry)
            return
        offset = self._opens[number].rank * sender.settings.staging_slots
        for local in [offset + entry.local for entry in grant.entries if entry is not None]:
            use = self._truth.staged.get((sender, local))
            if use is not None and self._is_in_use(use):
                detail = f"staging slot {local} of {sender.process.name} goes to transfer {number} and is {use}'s"
                raise Violation(Rule.ONE_WRITER, detail)
            self._truth.staged[sender, local] = Use(number, grant.piece)

    def _is_in_use(self, use: Use) -> bool:
        """Whether an engine may still write the slot, or a put read it (a stuck one reads it into quarantine)."""
        if not use.is_filled and use.number not in self._let_go:
            return True
        batch = self._sender.batches.get((use.number, use.piece))
        return batch is not None and not batch.is_done and not batch.given_up

    def _posted(self, action: ev.PostPuts) -> None:
        sender = self._sender
        endpoint = sender.endpoints.get(action.endpoint)
        if endpoint is None:
            return
        transfer = sender.identity(action.transfer_no)
        for put in action.puts:
            self._truth.may_put(endpoint.target.memory, transfer, put)

    # -------------------------------------------------------------- ends

    def _finished(self, number: int, error: TransferError | None) -> None:
        sender = self._sender
        if number in self._ended or number not in self._opened:
            raise Violation(Rule.ONE_END, f"transfer {number} of {sender.process.name} ended twice")
        self._ended[number] = error
        del self._opened[number]
        if number in self._proxies:
            self._untold[number] = self._proxies.pop(number)
        if error is not None:
            self._coverage.codes[error.code] += 1
            self._ending[number] = sender.schedule.now
        elif sender.identity(number) not in self._truth.completed:
            detail = f"{sender.identity(number)} is done, and its receiver never had it complete"
            raise Violation(Rule.NOTIFY_AFTER_LANDING, detail)

    def _notifies(self, proxy: str, notif: Notification) -> None:
        number = notif.transfer_no
        transfer = self._sender.identity(number)
        if number not in self._ended:
            raise Violation(Rule.NOTIFY_AFTER_LANDING, f"{proxy} is told of {transfer}, which has not ended")
        error = self._ended[number]
        if isinstance(notif, ProxyNotif):
            if transfer not in self._truth.completed or error is not None:
                raise Violation(Rule.NOTIFY_AFTER_LANDING, f"{transfer} was announced to {proxy} and is not complete")
        elif error is None or notif.error.code is not error.code:
            raise Violation(Rule.ONE_END, f"{proxy} is told {notif.error.code} of {transfer}, which ended by {error}")
        self._untold.pop(number, None)
        if self._notified.setdefault(number, notif.message_id) != notif.message_id:
            raise Violation(Rule.ONE_END, f"{transfer} was announced to {proxy} twice")
        if number not in self._given_up:
            self.told[number] = proxy

    def _check_settled(self) -> None:
        shares = self._core._shares
        for number in [number for number in self._ending if number not in shares]:
            del self._ending[number]
            if number in self._known:  # one that was refused at once never was anything
                self._cover("cancelling", "settled")

    # -------------------------------------------------------------- bounds

    def check_bounds(self) -> None:
        """Nothing has grown beyond its bound."""
        core, settings = self._core, self._sender.settings
        queues = core._notifier._proxies
        sizes = {
            "transfers_max": (sum(t.is_live for t in core._transfers.values()), settings.transfers_max),
            "peers_max": (core.peer_count, settings.peers_max),
            "stages_max": (max((len(s.stages) for s in core._shares.values()), default=0), settings.stages_max),
            "notifications_max": (
                max((len(q.pending) for q in queues.values()), default=0),
                settings.notifications_max,
            ),
            "proxies_max": (len(queues), settings.proxies_max),
        }
        for name, (size, limit) in sizes.items():
            if size > limit:
                raise Violation(Rule.BOUNDED, f"{name} of {limit} is exceeded at {self._sender.process.name}: {size}")

    def check_ages(self) -> None:
        """Nobody waits beyond the time that was set, not counting the time that this process stood still."""
        now, settings, stood_still_s = (
            self._sender.schedule.now,
            self._sender.settings,
            self._sender.process.stood_still_s,
        )
        for number, since in self._opened.items():
            if now > since + settings.request_timeout_s + stood_still_s + _SLACK_S:
                raise Violation(Rule.BOUNDED, f"transfer {number} of {self._sender.process.name} has never ended")
        # Its puts drain or are cut off, then its CancelNotif is answered, or the lease ends and with it the session.
        for number in self._ending:
            share = self._core._shares.get(number)
            # In place nothing but the engine itself ends that, and a transfer ends for all ranks.
            if share is not None and any(other.is_filling for other in share.transfer.shares.values()):
                self._ending[number] = now
        for number, since in self._ending.items():
            if now > since + self._ending_max_s + stood_still_s + _SLACK_S:
                raise Violation(Rule.BOUNDED, f"transfer {number} of {self._sender.process.name} is cancelled for ever")

    def check_quiet(self) -> None:
        """Nothing runs any more: every slot is free, every table empty, every proxy told."""
        core, name = self._core, self._sender.process.name
        core.audit()
        if not core.is_clean or core._lingering or self._sender.requests:
            states = ", ".join(f"{t.number} is {t.state.value}" for t in core._transfers.values())
            free = ", ".join(f"{staging.free_count} of {staging.total_slots}" for staging in core.staging)
            detail = f"{name}: {free} staging slots are free; {states}"
            pending = f"{core.notifications_pending} notifications wait, {len(core._lingering)} transfers linger"
            raise Violation(Rule.QUIET_MEANS_CLEAN, f"{detail}; {pending}")
        if self._opened:
            raise Violation(Rule.QUIET_MEANS_CLEAN, f"{name}: transfers {sorted(self._opened)} have never ended")
