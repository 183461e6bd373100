"""What goes wrong, each kind by its name; whatever is broken here is whole again when its function returns."""

from __future__ import annotations

import random
import signal
from collections.abc import Awaitable, Callable
from typing import Final

import trio

from chaos_app import words
from chaos_app.daemons import Daemon, freeze
from chaos_app.engines import Engine
from chaos_app.site import Site, set_link, set_loss
from chaos_app.stage import LEASE_S, Stage
from kvpd.link import LINK_VERSION, Attach, encode_frame

Fault = Callable[[Stage, random.Random], Awaitable[None]]
FAULTS: Final[dict[str, Fault]] = {}
# Between namespaces: what concerns the wire, and some deaths at either end of it.
REMOTE_FAULTS: Final = (
    "network_partitioned",
    "packets_lost",
    "sender_killed",
    "receiver_killed",
    "prefill_engine_killed",
    "decode_engine_killed",
    "abort_storm",
)

_FLOOD_CONNECTIONS: Final = 30
_FLOOD_S: Final = 5.0


def _fault(function: Fault) -> Fault:
    FAULTS[function.__name__] = function
    return function


def _stop_time(rng: random.Random) -> float:
    """Often within the lease, often beyond it."""
    return rng.choice((0.3, 0.8, LEASE_S / 2, LEASE_S + 0.7, LEASE_S + 2))


# ------------------------------------------------------------------ deaths


async def _restart(stage: Stage, daemon: Daemon, number: signal.Signals, rng: random.Random) -> None:
    async with daemon.lock:
        if not await daemon.end(number):
            stage.tally.problem("hangs", f"{daemon.name} did not end on {number.name}")
        await trio.sleep(rng.random())
        async with stage.wire:  # UCX does not start on a device that is down
            await daemon.up(stage.nursery)


@_fault
async def sender_killed(stage: Stage, rng: random.Random) -> None:
    """SIGKILL, and a new incarnation soon after."""
    await _restart(stage, stage.senders[0], signal.SIGKILL, rng)


@_fault
async def receiver_killed(stage: Stage, rng: random.Random) -> None:
    """SIGKILL, and a new incarnation at the same address."""
    await _restart(stage, stage.receivers[0], signal.SIGKILL, rng)


@_fault
async def sender_restarted(stage: Stage, rng: random.Random) -> None:
    """SIGTERM under load: a drain that its timeout cuts short."""
    await _restart(stage, stage.senders[0], signal.SIGTERM, rng)


@_fault
async def receiver_restarted(stage: Stage, rng: random.Random) -> None:
    """SIGTERM under load."""
    await _restart(stage, stage.receivers[0], signal.SIGTERM, rng)


async def _kill_engine(stage: Stage, engine: Engine, rng: random.Random) -> None:
    async with engine.lock:
        await engine.restart(stage.nursery, rng.random() / 2)


@_fault
async def prefill_engine_killed(stage: Stage, rng: random.Random) -> None:
    """It dies wherever it is: while it fills a slot, too."""
    await _kill_engine(stage, rng.choice(stage.prefills), rng)


@_fault
async def decode_engine_killed(stage: Stage, rng: random.Random) -> None:
    """It dies wherever it is: while it reads, too."""
    await _kill_engine(stage, rng.choice(stage.decodes), rng)


# ------------------------------------------------------------------ stops


async def _freeze(process: Daemon | Engine, rng: random.Random) -> None:
    async with process.lock:
        await freeze(process, _stop_time(rng))


@_fault
async def sender_stopped(stage: Stage, rng: random.Random) -> None:
    """SIGSTOP, and SIGCONT before or after its lease has ended."""
    await _freeze(rng.choice(stage.senders), rng)


@_fault
async def receiver_stopped(stage: Stage, rng: random.Random) -> None:
    """SIGSTOP and SIGCONT."""
    await _freeze(rng.choice(stage.receivers), rng)


@_fault
async def prefill_engine_stopped(stage: Stage, rng: random.Random) -> None:
    """It holds staging slots, or a receiver's own, and does nothing."""
    await _freeze(rng.choice(stage.prefills), rng)


@_fault
async def decode_engine_stopped(stage: Stage, rng: random.Random) -> None:
    """It holds claims, and does nothing."""
    await _freeze(rng.choice(stage.decodes), rng)


# ------------------------------------------------------------------ wires


@_fault
async def connections_cut(stage: Stage, rng: random.Random) -> None:
    """Every control connection through the relay ends, several times."""
    for _ in range(rng.randint(1, 4)):
        stage.relay.cut()
        await trio.sleep(rng.random() / 2)


@_fault
async def control_partitioned(stage: Stage, rng: random.Random) -> None:
    """The control connections stay and carry nothing; the data plane is not affected."""
    stage.relay.dry()
    try:
        await trio.sleep(_stop_time(rng))
    finally:
        stage.relay.flow()


@_fault
async def network_partitioned(stage: Stage, rng: random.Random) -> None:
    """The wire between two hosts is gone for a while: control, data and notifications at once."""
    async with stage.wire:
        await set_link(is_up=False)
        try:
            await trio.sleep(_stop_time(rng))
        finally:
            with trio.CancelScope(shield=True):
                await set_link(is_up=True)


@_fault
async def packets_lost(stage: Stage, rng: random.Random) -> None:
    """A tenth of all packets to the senders is lost for a while."""
    async with stage.wire:
        await set_loss(10)
        try:
            await trio.sleep(1 + 3 * rng.random())
        finally:
            with trio.CancelScope(shield=True):
                await set_loss(0)


@_fault
async def proxy_down(stage: Stage, rng: random.Random) -> None:
    """Nobody hears notifications for a while."""
    stage.proxy.down(rng.choice((0.2, 1.0, 3.0)))


# ------------------------------------------------------------------ storms and rubbish


@_fault
async def abort_storm(stage: Stage, rng: random.Random) -> None:
    """Everything that runs is cancelled at once, again and again."""
    for _ in range(rng.randint(1, 20)):
        for engine in stage.prefills:
            await engine.say(words.ABORT)
        await trio.sleep(rng.random() / 20)


@_fault
async def engine_socket_flooded(stage: Stage, rng: random.Random) -> None:
    """Rubbish, half frames, silence and Attach with rubbish behind it, on many connections at once."""
    daemon = stage.any_daemon(rng)
    with trio.move_on_after(_FLOOD_S):
        async with trio.open_nursery() as nursery:
            for _ in range(_FLOOD_CONNECTIONS):
                nursery.start_soon(_rubbish, daemon, random.Random(rng.random()))


async def _rubbish(daemon: Daemon, rng: random.Random) -> None:
    attach = encode_frame(Attach(LINK_VERSION, "receiver" if daemon.role == "receiver" else "sender"))
    beginning = rng.choice((b"", attach, attach, attach[:5], b"\xff\xff\xff\xff", b"GET / HTTP/1.1\r\n\r\n"))
    try:
        async with await trio.open_unix_socket(str(daemon.socket)) as stream:
            await stream.send_all(beginning)
            for _ in range(rng.randrange(8)):
                await stream.send_all(rng.randbytes(rng.choice((1, 7, 300, 5000))))
            if rng.random() < 0.5:
                await trio.sleep(rng.random() * 2)
    except (OSError, trio.BrokenResourceError):
        return  # refused or cut off, as it should be


@_fault
async def control_port_flooded(stage: Stage, rng: random.Random) -> None:
    """Random messages from a peer, and plain TCP connections that speak HTTP, bytes or nothing."""
    receiver = rng.choice(stage.receivers)
    with trio.move_on_after(_FLOOD_S):
        async with stage.control.connect(receiver.address, b"rubbish/%d" % rng.getrandbits(32)) as client:
            for _ in range(500):
                try:
                    client.send_nowait(rng.randbytes(rng.choice((0, 1, 20, 2000))))
                except trio.WouldBlock:
                    break
            host, _, port = receiver.address.rpartition(":")
            for _ in range(_FLOOD_CONNECTIONS):
                try:
                    async with await trio.open_tcp_stream(host, int(port)) as stream:
                        await stream.send_all(rng.choice((b"GET / HTTP/1.1\r\n\r\n", rng.randbytes(60), b"\xff")))
                except (OSError, trio.BrokenResourceError):
                    break  # the receiver is down: another fault
            await trio.sleep(rng.random())


class Deck:
    """Kinds of faults in a random order; none comes again before all have come."""

    def __init__(self, rng: random.Random, kinds: list[str]) -> None:
        self._rng = rng
        self._kinds = kinds
        self._deck: list[str] = []

    def draw(self) -> str:
        """The next kind."""
        if not self._deck:
            self._deck = self._rng.sample(self._kinds, len(self._kinds))
        return self._deck.pop()


def kinds_at(site: Site) -> list[str]:
    """What can go wrong there."""
    if not site.is_remote:
        return [kind for kind in FAULTS if kind not in ("network_partitioned", "packets_lost")]
    return [kind for kind in REMOTE_FAULTS if kind != "packets_lost" or site.loses_packets]
