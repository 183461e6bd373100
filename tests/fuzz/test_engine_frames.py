"""Engines that say anything at all, in any order, to daemons over real cores: they are sent away at most.

Every invariant is checked after every step; and when the engines have died, no slot of either side is held by anybody.
"""

from __future__ import annotations

from typing import Final

import attrs
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from service.worlds import World, run_in_virtual_time

from kvpd import link
from kvpd.errors import RemoteProtocolError
from kvpd.link import Attach, EngineFrame, Frame, encode_frame
from kvpd.service.engines import DecodeEngine, PrefillEngine

STAGING: Final = 4
SLOTS: Final = 6
LIMIT_S: Final = 7200.0

# Few values, so that frames meet each other.
numbers = st.integers(0, 3)
req_ids = st.sampled_from(["r0", "r1", "r2", "x" * 512])
addresses = st.sampled_from(["receiver", "receiver", "receiver", "127.0.0.1:9", "", "nonsense", "http://x"])
keys = st.lists(st.sampled_from([b"a", b"b", b"c", b"d", b"", b"k" * 96]), max_size=6).map(tuple)
lengths = st.sampled_from([64, 64, 64, 1, 0, 65, (1 << 62) - 1])
totals = st.sampled_from([1, 2, 3, 4, 6, 7, 0, -1, 1 << 62, -(1 << 62)])

prefill_frames: st.SearchStrategy[EngineFrame] = st.one_of(
    st.builds(link.Open, numbers, req_ids, addresses, totals, st.sampled_from([None, None, "127.0.0.1:9", "?"])),
    st.builds(link.Open, numbers, req_ids, st.just("receiver"), st.integers(1, 6)),
    st.builds(link.Stage, numbers, numbers, keys, st.booleans(), lengths),
    st.builds(link.Stage, numbers, st.just(0), keys, st.booleans(), st.just(64)),
    st.builds(link.Filled, numbers, numbers, numbers),
    st.builds(link.Filled, numbers, st.just(0), st.just(0)),
    st.builds(link.Touch, numbers),
    st.builds(link.Cancel, numbers),
    st.builds(link.Close, numbers),
    st.builds(link.CancelRequest, req_ids),
    st.builds(link.StatsRequest, numbers),
    st.builds(link.Release, numbers),
)
decode_frames: st.SearchStrategy[EngineFrame] = st.one_of(
    st.builds(link.Claim, numbers, req_ids, st.just(0), st.sampled_from([0.0, 1.0, 1e9]), st.sampled_from([None, "x"])),
    st.builds(link.Claim, numbers, req_ids, st.just(0), st.just(50.0)),
    st.builds(link.Claim, numbers, req_ids, numbers, st.just(1.0)),
    st.builds(link.Release, numbers),
    st.builds(link.CancelRequest, req_ids),
    st.builds(link.StatsRequest, numbers),
    st.builds(link.Close, numbers),
)


@attrs.frozen
class Say:
    """One of two prefill engines, or one of two decode engines, says something."""

    is_prefill: bool
    engine: int
    frame: EngineFrame


@attrs.frozen
class Wait:
    """Nothing is said for so long."""

    seconds: float


@attrs.frozen
class Leave:
    """An engine's connection ends; its process may live a little longer."""

    is_prefill: bool
    engine: int


engines = st.integers(0, 1)
moves = st.one_of(
    st.builds(Say, st.just(True), engines, prefill_frames),
    st.builds(Say, st.just(True), engines, prefill_frames),
    st.builds(Say, st.just(False), engines, decode_frames),
    st.builds(Wait, st.sampled_from([0.01, 0.01, 0.5, 20.0, 70.0])),
    st.builds(Leave, st.booleans(), engines),
)


class Out:
    """Where a daemon's frames go: every one of them must fit the wire."""

    def send(self, frame: Frame) -> None:
        encode_frame(frame)

    def cut_off(self, detail: str) -> None:
        raise AssertionError(f"it holds nothing for too long: {detail}")


class Crowd:
    """The engines of one example; whoever is sent away or leaves is followed by another one."""

    def __init__(self, world_address: str, make_prefill: object, make_decode: object) -> None:
        self._address = world_address
        self._makers = {True: make_prefill, False: make_decode}
        self._engines = {(kind, n): self._make(kind) for kind in (True, False) for n in range(2)}
        self._dying: list[PrefillEngine | DecodeEngine] = []

    def _make(self, is_prefill: bool) -> PrefillEngine | DecodeEngine:
        return self._makers[is_prefill]()  # type: ignore[operator,no-any-return]

    def say(self, move: Say) -> None:
        """As the engine link does: a frame that breaks a rule ends the connection."""
        frame = move.frame
        if isinstance(frame, link.Open) and frame.receiver == "receiver":
            frame = link.Open(frame.transfer, frame.req_id, self._address, frame.total_chunks, frame.notify)
        try:
            self._engines[move.is_prefill, move.engine].handle(frame)
        except RemoteProtocolError:
            self.leave(move.is_prefill, move.engine)

    def leave(self, is_prefill: bool, number: int) -> None:
        """The connection ends."""
        engine = self._engines[is_prefill, number]
        self._engines[is_prefill, number] = self._make(is_prefill)
        engine.closed()
        if engine.holds_memory:
            self._dying.append(engine)

    def bury(self) -> None:
        """The processes of those that left have died."""
        for engine in self._dying:
            engine.died()
        self._dying.clear()


async def play(script: list[Say | Wait | Leave]) -> None:
    """Two daemons, and engines that follow a script."""
    async with (
        World() as world,
        world.receiver(slots=SLOTS, queue_depth_max=3, allocation_timeout_s=30.0, ready_ttl_s=40.0) as receiver,
        world.sender(staging=STAGING, request_timeout_s=100.0, notify_proxy=False) as sender,
    ):
        crowd = Crowd(
            receiver.address,
            lambda: PrefillEngine(sender, Out(), Attach(1, "sender")),
            lambda: DecodeEngine(receiver, Out(), Attach(1, "receiver")),
        )
        with trio.fail_after(LIMIT_S):
            for move in script:
                match move:
                    case Say():
                        crowd.say(move)
                    case Wait(seconds):
                        await trio.sleep(seconds)
                    case Leave(is_prefill, number):
                        crowd.leave(is_prefill, number)
            for is_prefill in (True, False):
                for number in range(2):
                    crowd.leave(is_prefill, number)
            crowd.bury()
            await world.until_clean(sender, receiver)
            assert sender.core.staging[0].free_count == STAGING


@settings(
    max_examples=150,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(st.lists(moves, min_size=10, max_size=60))
def test_whatever_engines_say_nothing_breaks_and_nothing_stays(script: list[Say | Wait | Leave]) -> None:
    """An engine is a program of somebody else's: its mistakes are its own."""
    run_in_virtual_time(play, script)
