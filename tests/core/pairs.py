"""A world of real cores, joined by queues, in which every byte is accounted for.

The world plays everything around the cores: channels that lose, puts that land late, engines that fill and read,
processes that die. It remembers what lies in every slot and asserts the truth as it goes: a write lands only in a slot
that its transfer may still write, a claim hands out exactly the chunks of its request, a proxy is told only of what is
complete. `step` takes a number and lets one enabled thing happen; `settle` lets everything go on fairly to its end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import attrs
from core_parts import CHUNK, OWN_HOST

from kvpd.core.events import Report, TransferId
from kvpd.core.messages import AnyMessage, FailNotif, HostIdentity, decode, encode
from kvpd.core.pool import SlotState
from kvpd.core.receiver import ReceiverCore, ReceiverSettings
from kvpd.core.receiver import events as rev
from kvpd.core.sender import SenderCore, SenderSettings
from kvpd.core.sender import events as sev

Op = Callable[[], None]
SLOTS, STAGING, TRANSFERS_MAX = 4, 3, 4


@attrs.define(eq=False)
class Put:
    """One chunk on its way. Once cut off it carries what it had read, and may land until the fence.

    On one host the sender's kernel may be the one that writes, and then it has ended when the transport says so; or it
    is TCP, and then the session's worker takes in what is under way for as long as it lives. Either may be.
    """

    number: int
    piece: int
    endpoint: int
    worker: tuple[int, int]  # of which start of the receiver, of which session
    slot: sev.StagedSlot
    cut_off: bytes | None = None
    landed: bool = False
    ended: bool = False  # its sender was told so


@attrs.define(eq=False)
class Job:
    """What a prefill engine does for one transfer."""

    number: int
    names: tuple[bytes, ...]
    staged: int = 0
    stages: int = 0
    # Pieces to fill: (piece, its keys with their slots).
    granted: list[tuple[int, list[tuple[bytes, sev.StagedSlot]]]] = attrs.field(factory=list)
    stage_keys: dict[int, tuple[bytes, ...]] = attrs.field(factory=dict)
    ended: bool = False
    failed: bool = False
    told: bool = False  # its proxy, of its end
    let_go: bool = False
    cancelling: bool = False
    tainted: bool = False  # a put failed or was cut off


@attrs.define(eq=False)
class Node:
    """One start of a sender's process, with its engine, its memory and its wire."""

    name: str
    incarnation: int
    core: SenderCore
    same_host: bool
    staging: list[bytes] = attrs.field(factory=lambda: [b""] * STAGING)
    jobs: dict[int, Job] = attrs.field(factory=dict)
    puts: list[Put] = attrs.field(factory=list)
    workers: dict[int, tuple[int, int]] = attrs.field(factory=dict)  # endpoint → (receiver's start, session)
    opening: list[int] = attrs.field(factory=list)  # endpoints
    connected: bool = False
    up: list[bytes] = attrs.field(factory=list)
    down: list[bytes] = attrs.field(factory=list)
    alive: bool = True

    @property
    def channel(self) -> bytes:
        """The identity of its control channel."""
        return f"{self.name}-{self.incarnation}".encode()


class Pair:
    """One receiver, some senders."""

    def __init__(self, senders: int, *, same_host: bool) -> None:
        self.now = 0.0
        self.starts = 0
        self.same_host = same_host
        self.ever_complete: set[TransferId] = set()  # at receivers that are no more, too
        self.names: dict[TransferId, tuple[bytes, ...]] = {}
        self.graves: list[Node] = []
        self.proxy_heard: list[tuple[Node, int]] = []
        self.nodes: list[Node] = []
        self._start_receiver()
        self.nodes = [self._start_sender(f"prefill-{i}") for i in range(senders)]

    # ---------------------------------------------------------- processes

    def _start_receiver(self) -> None:
        self.starts += 1
        settings = ReceiverSettings(
            "decode-0", self.starts, SLOTS, CHUNK, host=OWN_HOST, allocation_timeout_s=20.0, progress_timeout_s=15.0
        )
        self.receiver = ReceiverCore(settings)
        self.slots = [b""] * SLOTS
        self.sessions: dict[int, Node] = {}  # whose worker exists
        self.to_open: list[int] = []
        self.to_close: list[int] = []
        self.watched: dict[int, Node] = {}
        self.claims: dict[int, rev.GrantClaim] = {}
        self.last_claim = 0
        self.engine = 1
        self.claimed: set[TransferId] = set()
        self.complete: set[TransferId] = set()
        self.session_nodes: dict[int, Node] = {}  # who said Hello

    def _start_sender(self, name: str) -> Node:
        self.starts += 1
        place = OWN_HOST if self.same_host else HostIdentity("another", "another")
        host = HostIdentity(place.boot_id, place.pid_namespace, self.starts, 1)
        settings = SenderSettings(
            name, self.starts, STAGING, CHUNK, host=host, proxy_address="proxy", request_timeout_s=60.0
        )
        return Node(name, self.starts, SenderCore(settings), self.same_host)

    def kill_sender(self, i: int) -> None:
        node = self.nodes[i]
        node.alive = node.connected = False
        node.down.clear()
        for put in node.puts:
            self.cut(node, put)
        self.graves.append(node)
        self.nodes[i] = self._start_sender(node.name)

    def kill_receiver(self) -> None:
        for node in self.nodes:
            node.down.clear()
        self._start_receiver()

    def process_died(self, session_no: int) -> None:
        del self.watched[session_no]
        self.tell_receiver(rev.ProcessDied(session_no))

    # ---------------------------------------------------------- events and actions

    def tell_receiver(self, event: rev.ReceiverEvent) -> None:
        actions = self.receiver.handle(event, now=self.now)
        self.receiver.audit()
        for action in actions:
            match action:
                case rev.SendMessage(peer, message):
                    for node in self.nodes:
                        if node.connected and node.channel == peer:
                            node.down.append(encode(message))
                case rev.OpenSession(session_no, process):
                    assert isinstance(event, rev.MessageReceived)
                    node = next(n for n in [*self.nodes, *self.graves] if n.channel == event.peer)
                    self.to_open.append(session_no)
                    self.session_nodes[session_no] = node
                    if process is not None:
                        self.watched[session_no] = node
                case rev.CloseSession(session_no):
                    self.to_close.append(session_no)
                case rev.ForgetSession(session_no):
                    self.watched.pop(session_no, None)
                case rev.GrantClaim():
                    self.check_claim(action)
                    self.claims[action.claim] = action
                case rev.AnnounceTransfer(rev.Outcome.READY, transfer):
                    self.complete.add(transfer)
                    self.ever_complete.add(transfer)
                case rev.AnnounceTransfer() | rev.RefuseClaim() | Report():
                    pass

    def check_claim(self, grant: rev.GrantClaim) -> None:
        assert tuple(chunk.key for chunk in grant.chunks) == self.names[grant.transfer]
        for chunk in grant.chunks:
            assert self.slots[chunk.index] == chunk.key, f"slot {chunk.index} of {grant.transfer} holds other bytes"

    def tell(self, node: Node, event: sev.SenderEvent) -> None:
        actions = node.core.handle(event, now=self.now)
        node.core.audit()
        for action in actions:
            match action:
                case sev.ConnectPeer():
                    node.connected = True
                case sev.DisconnectPeer():
                    node.connected = False
                    node.down.clear()
                case sev.SendToPeer(_, message):
                    assert node.connected
                    node.up.append(encode(message))
                case sev.OpenEndpoint(_, endpoint, regions):
                    start, session = regions[0].worker_address.decode().split("/")
                    node.workers[endpoint] = int(start), int(session)
                    node.opening.append(endpoint)
                case sev.CloseEndpoint(_, endpoint):
                    del node.workers[endpoint]
                    for put in node.puts:
                        if put.endpoint == endpoint:
                            self.cut(node, put)
                case sev.GrantPiece(number, stage, piece, first, entries):
                    names = node.jobs[number].stage_keys[stage][first:]
                    chunks = [(n, e) for n, e in zip(names, entries, strict=False) if e is not None]
                    node.jobs[number].granted.append((piece, chunks))
                case sev.PostPuts(number, piece, endpoint, puts):
                    assert endpoint in node.workers
                    node.puts += [Put(number, piece, endpoint, node.workers[endpoint], slot) for slot in puts]
                case sev.CancelTransfer(number):
                    node.jobs[number].cancelling = True
                case sev.FinishTransfer(number, error):
                    node.jobs[number].ended = True
                    node.jobs[number].failed = error is not None
                case sev.NotifyProxy(_, message):
                    job = node.jobs[message.transfer_no]
                    assert job.ended, "a proxy is told of a transfer that has not ended"
                    assert job.failed == isinstance(message, FailNotif), "a proxy is told of another end"
                    identity = TransferId(node.name, node.incarnation, message.transfer_no)
                    assert job.failed or identity in self.ever_complete
                    job.told = True
                    self.proxy_heard.append((node, message.message_id))
                case sev.DeferStage() | Report():
                    pass
        assert all(job.told for job in node.jobs.values() if job.ended), "a proxy is not told of an end"

    def cut(self, node: Node, put: Put) -> None:
        if not put.landed and put.cut_off is None:
            put.cut_off = node.staging[put.slot.local]
            node.jobs[put.number].tainted = True

    # ---------------------------------------------------------- what may happen next

    def wire_ops(self, node: Node) -> Iterator[Op]:
        if node.up:
            yield lambda: self._deliver_up(node)
        if node.down:
            yield lambda: self._deliver_down(node)
        for put in node.puts:
            if not put.landed and self.can_land(node, put):
                yield lambda put=put: self.land(node, put)  # type: ignore[misc]

    def _deliver_up(self, node: Node) -> None:
        self.tell_receiver(rev.MessageReceived(node.channel, decode(node.up.pop(0))))

    def _deliver_down(self, node: Node) -> None:
        message: AnyMessage = decode(node.down.pop(0))
        self.tell(node, sev.PeerMessageReceived("decode-0", message))

    def can_land(self, node: Node, put: Put) -> bool:
        if put.cut_off is None and put.endpoint not in node.workers:
            return False
        start, session = put.worker
        if start != self.receiver.settings.incarnation:
            return False
        return session in self.sessions or (node.same_host and node.alive and not put.ended)

    def land(self, node: Node, put: Put) -> None:
        content = node.staging[put.slot.local] if put.cut_off is None else put.cut_off
        slot = self.receiver._book.pool.slot(put.slot.remote)
        assert slot.state in (SlotState.WRITING, SlotState.QUARANTINED), f"a write landed in a {slot.state} slot"
        assert slot.key == content, "a write landed in somebody else's slot"
        self.slots[put.slot.remote] = content
        put.landed = True

    def transport_ops(self, node: Node) -> Iterator[Op]:
        for endpoint in node.opening:
            yield lambda endpoint=endpoint: self._endpoint_opened(node, endpoint)  # type: ignore[misc]
        for (number, piece), puts in self._pieces(node).items():
            if all(put.landed and put.cut_off is None for put in puts):
                yield lambda n=number, p=piece: self._completed(node, n, p)  # type: ignore[misc]
        for job in node.jobs.values():
            busy = any(p.number == job.number and not p.landed and p.cut_off is None for p in node.puts)
            if job.cancelling and not busy:
                yield lambda job=job: self.drained(node, job)  # type: ignore[misc]

    def _pieces(self, node: Node) -> dict[tuple[int, int], list[Put]]:
        pieces: dict[tuple[int, int], list[Put]] = {}
        for put in node.puts:
            pieces.setdefault((put.number, put.piece), []).append(put)
        return pieces

    def _endpoint_opened(self, node: Node, endpoint: int) -> None:
        node.opening.remove(endpoint)
        self.tell(node, sev.EndpointOpened("decode-0", endpoint))

    def _completed(self, node: Node, number: int, piece: int) -> None:
        node.puts = [put for put in node.puts if (put.number, put.piece) != (number, piece)]
        self.tell(node, sev.PutsCompleted(number, piece))

    def drained(self, node: Node, job: Job) -> None:
        job.cancelling = False
        node.puts = [put for put in node.puts if put.number != job.number or put.cut_off is not None]
        for put in node.puts:
            put.ended |= put.number == job.number
        self.tell(node, sev.PutsDrained(job.number, not job.tainted))
