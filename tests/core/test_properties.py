"""Whatever happens, in whatever order: no core ever raises, its invariants hold, and in the end nothing is left."""

from __future__ import annotations

import attrs
from core_parts import SENDER_INCARNATION, regions
from hypothesis import given
from hypothesis import strategies as st
from receiver_world import ReceiverWorld
from sender_world import SenderWorld
from strategies import chunk_keys, codes, lengths, messages, req_ids, totals

from kvpd.core.events import DrainExpired, DrainRequested, RequestCancelled, TimePassed
from kvpd.core.messages import decode, encode
from kvpd.core.receiver import events as rev
from kvpd.core.sender import events as sev

pauses = st.sampled_from([0.0, 0.0, 0.0, 0.0, 0.1, 1.0, 3.0, 11.0, 40.0])
small = st.integers(0, 3)

# ------------------------------------------------------------------ the receiver

CHANNELS = (b"prefill-0-3000", b"prefill-1-3000", b"\xff stranger")

receiver_events: st.SearchStrategy[rev.ReceiverEvent] = st.one_of(
    st.builds(rev.MessageReceived, st.sampled_from(CHANNELS), messages),
    st.builds(rev.MessageReceived, st.sampled_from(CHANNELS[:2]), messages),
    st.builds(rev.MessageReceived, st.sampled_from(CHANNELS[:2]), messages),
    st.builds(rev.ClaimRequested, small, small, req_ids, small, st.sampled_from([0.0, 5.0]), st.none()),
    st.builds(rev.ClaimRequested, small, small, req_ids, st.just(0), st.just(5.0), st.just("prefill-0")),
    st.builds(rev.ClaimReleased, small, small),
    st.builds(rev.SessionOpened, st.integers(1, 6), st.just(regions(4))),
    st.one_of(
        st.builds(rev.MessageRejected, st.sampled_from(CHANNELS), st.just("rubbish")),
        st.builds(rev.SessionFailed, st.integers(1, 6), st.just("no worker")),
        st.builds(rev.SessionClosed, st.integers(1, 6)),
        st.builds(rev.ProcessDied, st.integers(1, 6)),
        st.builds(rev.EngineClosed, small),
        st.builds(rev.EngineDied, small),
        st.builds(RequestCancelled, req_ids),
        st.builds(TimePassed, st.sampled_from([0.0, 1.0, 100.0])),
        st.just(DrainExpired()),
    ),
    st.builds(TimePassed),
)


def check_sent(actions: list[rev.ReceiverAction]) -> None:
    """What a core sends its peer must be able to read, or an answer to one would end the session of all."""
    for action in actions:
        if isinstance(action, rev.SendMessage):
            assert decode(encode(action.message)) == action.message


@given(st.integers(1, 2), st.lists(st.tuples(pauses, receiver_events), min_size=10, max_size=80), st.booleans())
def test_a_receiver_survives_every_sequence_of_events(
    ranks: int, events: list[tuple[float, rev.ReceiverEvent]], drains: bool
) -> None:
    """Stale, repeated, reordered, absurd: it never raises, and when everybody has gone every slot is free."""
    world = ReceiverWorld(slots=4, ranks=ranks, queue_depth_max=3, sessions_max=4, outcomes_max=6, claims_max=4)
    world.connect("prefill-0")
    world.connect("prefill-1")
    for pause, event in events:
        check_sent(world.pass_time(pause))
        check_sent(world.feed(event))
    if drains:
        world.feed(DrainRequested())
    for channel in CHANNELS:
        world.feed(rev.MessageRejected(channel, "gone"))
    for session_no in range(1, 200):
        world.feed(rev.SessionClosed(session_no))
        world.feed(rev.ProcessDied(session_no))
    for _ in range(2):
        for engine in range(4):
            world.feed(rev.EngineDied(engine))
    world.pass_time(200.0)
    assert world.core.is_clean
    assert world.core.session_count == 0
    assert world.core.next_deadline() is None


# ------------------------------------------------------------------ the sender

RECEIVERS = ("decode-0", "decode-1")
receivers = st.sampled_from(RECEIVERS)

stages = st.builds(sev.StageRequested, small, small, chunk_keys, st.booleans(), lengths)

sender_events: st.SearchStrategy[sev.SenderEvent] = st.one_of(
    st.builds(sev.PeerMessageReceived, receivers, messages),
    st.builds(sev.PeerMessageReceived, receivers, messages),
    st.builds(
        sev.OpenRequested,
        *(st.just(-1), small, req_ids, receivers, totals, st.sampled_from([None, "p"])),
        first=st.none() | stages,
    ),
    stages,
    st.builds(sev.PieceFilled, small, small),
    st.builds(sev.EngineLetGo, small),
    st.builds(sev.EndpointOpened, receivers, small),
    st.builds(sev.PutsCompleted, small, small),
    st.builds(sev.PutsDrained, small, st.booleans()),
    st.one_of(
        st.builds(sev.TransferTouched, small),
        st.builds(sev.CancelRequested, small, codes),
        st.builds(RequestCancelled, req_ids),
        st.builds(sev.PeerMessageRejected, receivers, st.just("rubbish")),
        st.builds(sev.EndpointBroken, receivers, small, st.just("broken")),
        st.builds(sev.PutsFailed, small, small, st.just("failed")),
        st.builds(sev.ProxyAcknowledged, st.sampled_from(["p", "q"]), st.just(SENDER_INCARNATION), st.integers(0, 30)),
        st.builds(sev.ClockJumped, st.sampled_from([0.1, 100.0])),
        st.just(DrainExpired()),
    ),
    st.builds(TimePassed),
)


@given(st.lists(st.tuples(pauses, sender_events), min_size=10, max_size=80), st.booleans())
def test_a_sender_survives_every_sequence_of_events(events: list[tuple[float, sev.SenderEvent]], drains: bool) -> None:
    """It never raises, and when its receivers and engines have gone every staging slot is free."""
    world = SenderWorld(staging=2, transfers_max=3, stages_max=2, notifications_max=2, proxy_address="q")
    up = world.connect("decode-0")
    up.admit(up.serial + 1, 4)
    number = 2
    for pause, event in events:
        actions = world.pass_time(pause)
        if isinstance(event, sev.OpenRequested):
            first = event.first and attrs.evolve(event.first, transfer_no=number)
            event, number = attrs.evolve(event, transfer_no=number, first=first), number + 1
        actions += world.feed(event)
        for action in actions:
            if isinstance(action, sev.SendToPeer):
                assert decode(encode(action.message)) == action.message
    if drains:
        world.feed(DrainRequested())
    for receiver in RECEIVERS:
        world.feed(sev.PeerMessageRejected(receiver, "gone"))
    for transfer_no in range(number):
        world.drained(transfer_no)
        world.let_go(transfer_no)
    world.pass_time(400.0)
    assert world.core.is_clean
    world.feed(DrainRequested())  # until then receivers that were lost are tried again
    world.pass_time(600.0)
    assert world.core.peer_count == 0
    assert world.core.next_deadline() is None
