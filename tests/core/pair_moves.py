"""What may happen next in a pair world: its engines, its faults, its clock; and how it comes to rest."""

from __future__ import annotations

from collections.abc import Iterator

from core_parts import CHUNK, regions
from pairs import SLOTS, TRANSFERS_MAX, Job, Node, Op, Pair

from kvpd.core.events import RequestCancelled, TimePassed, TransferId
from kvpd.core.messages import Region
from kvpd.core.receiver import events as rev
from kvpd.core.sender import events as sev


class PairMoves(Pair):
    """A pair world that can be moved."""

    def step(self, choice: int) -> None:
        """Let one of the things happen that may: mostly good ones, so that transfers get far before they fail."""
        kind, pick = choice % 32, choice // 32
        match kind:
            case 0:
                ops = list(self._faults())
            case 1 | 2 | 3 | 4:
                ops = list(self._initiatives(pick))
            case 7 | 8:
                ops = list(self._cuts())
            case 5 | 6:
                ops = [lambda: self.pass_time(0.4), lambda: self.pass_time(2.0)]
            case _:
                ops = list(self._good())
        if ops:
            ops[pick % len(ops)]()

    def _good(self) -> Iterator[Op]:
        """What happens in a world where everybody does their part."""
        for node in [*self.nodes, *self.graves]:
            yield from self.wire_ops(node)
        for node in self.nodes:
            yield from self.transport_ops(node)
            yield from self._engine_ops(node)
        yield from self._receiver_ops()
        yield from self._decode_ops()
        for node, message_id in self.proxy_heard:
            yield lambda n=node, m=message_id: self._proxy_acknowledges(n, m)  # type: ignore[misc]

    # ---------------------------------------------------------- the prefill engines

    def _engine_ops(self, node: Node) -> Iterator[Op]:
        for job in node.jobs.values():
            if job.granted:
                yield lambda job=job: self._fill(node, job)  # type: ignore[misc]
            if job.ended and not job.let_go:
                yield lambda job=job: self._let_go(node, job)  # type: ignore[misc]
            if not job.ended and job.staged < len(job.names):
                yield lambda job=job: self._stage(node, job, 2)  # type: ignore[misc]

    def _open(self, node: Node, choice: int) -> None:
        number = len(node.jobs) + 1
        total = choice % SLOTS + 1
        # Some chunks are the same in every request: they deduplicate.
        names = tuple(
            f"common-{i}".encode() if (choice >> i) & 1 else f"{node.name}/{node.incarnation}/{number}/{i}".encode()
            for i in range(total)
        )
        node.jobs[number] = Job(number, names)
        self.names[TransferId(node.name, node.incarnation, number)] = names
        self.tell(node, sev.OpenRequested(number, 1, self._req_id(node, number), "decode-0", total))

    def _req_id(self, node: Node, number: int) -> str:
        return f"{node.name}/{node.incarnation}/{number}"

    def _stage(self, node: Node, job: Job, most: int) -> None:
        names = job.names[job.staged : job.staged + most]
        stage = job.stages
        job.stages += 1
        job.staged += len(names)
        job.stage_keys[stage] = names
        self.tell(node, sev.StageRequested(job.number, stage, names, job.staged == len(job.names), CHUNK))

    def _fill(self, node: Node, job: Job) -> None:
        piece, chunks = job.granted.pop(0)
        for name, slot in chunks:
            assert not self._others_use(node, job, slot.local), "two engines fill one staging slot"
            node.staging[slot.local] = name
        self.tell(node, sev.PieceFilled(job.number, piece))

    def _others_use(self, node: Node, job: Job, local: int) -> bool:
        filling = (slot for j in node.jobs.values() if j is not job for _, chunks in j.granted for _, slot in chunks)
        putting = (p.slot for p in node.puts if p.number != job.number and not p.landed and p.cut_off is None)
        return any(slot.local == local for slots in (filling, putting) for slot in slots)

    def _let_go(self, node: Node, job: Job) -> None:
        job.let_go = True
        job.granted.clear()
        self.tell(node, sev.EngineLetGo(job.number))

    def _proxy_acknowledges(self, node: Node, message_id: int) -> None:
        self.proxy_heard.remove((node, message_id))
        if node.alive:
            self.tell(node, sev.ProxyAcknowledged("proxy", node.incarnation, message_id))

    # ---------------------------------------------------------- the receiver's service and the decode engine

    def _receiver_ops(self) -> Iterator[Op]:
        for session_no in self.to_open:
            yield lambda s=session_no: self._session_opened(s)  # type: ignore[misc]
        for session_no in self.to_close:
            yield lambda s=session_no: self._session_closed(s)  # type: ignore[misc]
        for session_no, node in self.watched.items():
            if not node.alive:
                yield lambda s=session_no: self.process_died(s)  # type: ignore[misc]

    def _session_opened(self, session_no: int) -> None:
        self.to_open.remove(session_no)
        if session_no not in self.to_close:
            self.sessions[session_no] = self.session_nodes[session_no]
        (region,) = regions(SLOTS)
        worker = f"{self.receiver.settings.incarnation}/{session_no}".encode()
        region = Region(0, worker, region.base_address, region.length, region.rkey)
        self.tell_receiver(rev.SessionOpened(session_no, (region,)))

    def _session_closed(self, session_no: int) -> None:
        self.to_close.remove(session_no)
        self.sessions.pop(session_no, None)
        self.tell_receiver(rev.SessionClosed(session_no))

    def _decode_ops(self) -> Iterator[Op]:
        for transfer in sorted(self.complete - self.claimed):
            yield lambda t=transfer: self._claim(t)  # type: ignore[misc]
        for claim in self.claims:
            yield lambda c=claim: self._release(c)  # type: ignore[misc]

    def _claim(self, transfer: TransferId) -> None:
        self.claimed.add(transfer)
        self.last_claim += 1
        req_id = f"{transfer.sender_id}/{transfer.incarnation}/{transfer.transfer_no}"
        self.tell_receiver(rev.ClaimRequested(self.engine, self.last_claim, req_id, 0, 5.0))

    def _release(self, claim: int) -> None:
        self.check_claim(self.claims.pop(claim))  # nobody has written into it meanwhile
        self.tell_receiver(rev.ClaimReleased(self.engine, claim))

    def _decode_dies(self) -> None:
        for grant in self.claims.values():
            self.check_claim(grant)
            self.claimed.discard(grant.transfer)
        self.claims.clear()
        engine, self.engine = self.engine, self.engine + 1
        self.tell_receiver(rev.EngineClosed(engine))
        self.tell_receiver(rev.EngineDied(engine))

    # ---------------------------------------------------------- faults, and the clock

    def _initiatives(self, choice: int) -> Iterator[Op]:
        for node in self.nodes:
            if len(node.jobs) < TRANSFERS_MAX:
                yield lambda node=node: self._open(node, choice >> 3)  # type: ignore[misc]
            for job in node.jobs.values():
                if not job.ended and job.staged < len(job.names):
                    yield lambda n=node, job=job: self._stage(n, job, 1)  # type: ignore[misc]
                if not job.ended:
                    yield lambda n=node, job=job: self.tell(n, sev.TransferTouched(job.number))  # type: ignore[misc]

    def _cuts(self) -> Iterator[Op]:
        """Where corruption begins, if anywhere: the end of a transfer whose slots somebody may still write."""
        for node in self.nodes:
            for job in node.jobs.values():
                flying = any(p.number == job.number and not p.landed and p.cut_off is None for p in node.puts)
                if job.cancelling and flying:
                    yield lambda n=node, job=job: self._give_up_draining(n, job)  # type: ignore[misc]
                elif flying or (job.granted and not job.ended):
                    yield lambda n=node, job=job: self.tell(n, sev.CancelRequested(job.number))  # type: ignore[misc]

    def _faults(self) -> Iterator[Op]:
        yield self.kill_receiver
        yield self._decode_dies
        for session_no in self.to_open:
            yield lambda s=session_no: self._session_failed(s)  # type: ignore[misc]
        for transfer in sorted(self.names):
            yield lambda t=transfer: self.tell_receiver(RequestCancelled(self._label(t)))  # type: ignore[misc]
        for i, node in enumerate(self.nodes):
            yield lambda i=i: self.kill_sender(i)  # type: ignore[misc]
            yield from self._sender_faults(node)

    def _label(self, transfer: TransferId) -> str:
        return f"{transfer.sender_id}/{transfer.incarnation}/{transfer.transfer_no}"

    def _session_failed(self, session_no: int) -> None:
        self.to_open.remove(session_no)
        self.tell_receiver(rev.SessionFailed(session_no, "no device"))

    def _sender_faults(self, node: Node) -> Iterator[Op]:
        yield node.up.clear
        yield node.down.clear
        yield lambda: self.tell(node, sev.ClockJumped(5.0))
        for job in node.jobs.values():
            if not job.ended:
                yield lambda job=job: self.tell(node, sev.CancelRequested(job.number))  # type: ignore[misc]
            if not job.let_go:
                yield lambda job=job: self._let_go(node, job)  # type: ignore[misc]
            if job.cancelling:
                yield lambda job=job: self._give_up_draining(node, job)  # type: ignore[misc]
        for endpoint in list(node.workers):
            yield lambda e=endpoint: self._break_endpoint(node, e)  # type: ignore[misc]
        for put in node.puts:
            yield lambda put=put: self._fail_put(node, put)  # type: ignore[misc]

    def _give_up_draining(self, node: Node, job: Job) -> None:
        """The put deadline has passed: the transport is cut off, and what is under way may land or not."""
        for put in node.puts:
            if put.number == job.number:
                self.cut(node, put)
        self.drained(node, job)

    def _break_endpoint(self, node: Node, endpoint: int) -> None:
        if endpoint in node.opening:
            node.opening.remove(endpoint)
        for put in node.puts:
            if put.endpoint == endpoint:
                self.cut(node, put)
        self.tell(node, sev.EndpointBroken("decode-0", endpoint, "broken"))

    def _fail_put(self, node: Node, put: object) -> None:
        for other in node.puts:
            if other is put:
                self.cut(node, other)
                self.tell(node, sev.PutsFailed(other.number, other.piece, "endpoint timeout"))
                return

    def pass_time(self, seconds: float) -> None:
        """Every deadline of every core is met when it is due."""
        until = self.now + seconds
        while True:
            due = [(at, node) for node in self.nodes if (at := node.core.next_deadline()) is not None]
            receiver_at = self.receiver.next_deadline()
            at = min([at for at, _ in due] + ([receiver_at] if receiver_at is not None else []), default=until)
            if at >= until:
                break
            self.now = max(self.now, at)
            if receiver_at == at:
                self.tell_receiver(TimePassed())
            for node in [node for t, node in due if t == at]:
                self.tell(node, TimePassed())
        self.now = until

    # ---------------------------------------------------------- rest

    def settle(self) -> None:
        """Everybody does their part, and time passes, until nothing is left to do."""
        for _ in range(400):
            for _ in range(2000):
                op = next(self._good(), None)
                if op is None:
                    break
                op()
            else:
                raise AssertionError("the world does not come to rest")
            for node in self.nodes:
                self._abandon_dead_puts(node)
            self.pass_time(0.5)

    def _abandon_dead_puts(self, node: Node) -> None:
        """A transport reports puts to a worker that is no more, sooner or later."""
        for put in list(node.puts):
            if not put.landed and put.cut_off is None and not self.can_land(node, put):
                self._fail_put(node, put)
