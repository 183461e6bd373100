"""Slots that engines fill in place, searched to the end; and wrong lines about them that the search must find."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvpd.core.messages import Heartbeat
from kvpd.core.receiver.peers import Peers as ReceiverPeers
from kvpd.core.receiver.sessions import Session
from kvpd.core.sender.base import SenderBase
from kvpd.core.sender.peers import Peers as SenderPeers
from kvpd.core.sender.records import Share
from kvpd.simulation.explore import search
from kvpd.simulation.explore_state import WorldConfig
from kvpd.simulation.explore_worlds import WORLDS, request

from .explore_planting import Planted, find, with_faults, wrap

IN_PLACE = WorldConfig(
    "in place", (request(0, 0, 1),), slots=1, same_host=True, in_place=True, patient=frozenset({"connect"})
)


@pytest.mark.parametrize("name", ["in-place", "in-place-crash", "in-place-lost", "in-place-ranks"])
def test_a_small_world_is_exhausted_and_holds(name: str) -> None:
    """No state of it frees a slot that an engine may still write, and a clean ending is always in reach."""
    result = search(WORLDS[name], seconds_max=100.0)
    assert result.counterexample is None, str(result.counterexample)
    assert result.is_exhausted


def asks_no_engine(patch: pytest.MonkeyPatch) -> None:
    """A transfer has drained when its puts have."""
    patch.setattr(Share, "writes_ended", property(lambda self: self.puts_ended))


def ends_by_its_worker(patch: pytest.MonkeyPatch) -> None:
    """The end of a session's worker is the fence, also of what engines write by themselves."""
    patch.setattr(Session, "is_fenced", property(lambda self: self.worker_destroyed))


def takes_undrained_for_drained(patch: pytest.MonkeyPatch) -> None:
    """The receiver frees the slots of every CancelNotif in a session that goes on."""

    def cancel_notif(old: Any, self: Any, session: Any, message: Any, now: float) -> None:
        old(self, session, msgspec.structs.replace(message, drained=message.drained or message.goes_on), now)

    wrap(patch, ReceiverPeers, "_cancel_notif", cancel_notif)


def says_too_much(patch: pytest.MonkeyPatch) -> None:
    """Every Hello says that all writes of earlier sessions have ended."""
    patch.setattr(SenderBase, "_earlier_puts_ended", lambda self, receiver: True)


def never_makes_up_for_it(patch: pytest.MonkeyPatch) -> None:
    """What a Hello could not say is said by no heartbeat."""

    def heartbeat(old: Any, self: Any, session: Any, message: Heartbeat, now: float) -> None:
        old(self, session, msgspec.structs.replace(message, puts_ended=False), now)

    wrap(patch, ReceiverPeers, "_heartbeat", heartbeat)


def waits_for_ever(patch: pytest.MonkeyPatch) -> None:
    """The transfer of an engine that has let go is not ended."""
    patch.setattr(SenderPeers, "_engine_let_go", lambda self, number, now: None)


PLANTED = [
    Planted("drained-too-early", with_faults(IN_PLACE, cancel=1), asks_no_engine, "late write"),
    Planted(
        "worker-is-fence-enough", with_faults(IN_PLACE, sender_restarts=1, slow=1), ends_by_its_worker, "late write"
    ),
    Planted("undrained-frees", with_faults(IN_PLACE, cancel=1, slow=1), takes_undrained_for_drained, "late write"),
    Planted("hello-says-too-much", with_faults(IN_PLACE, slow=3), says_too_much, "late write"),
    Planted("never-said-later", with_faults(IN_PLACE, slow=3), never_makes_up_for_it, "no clean ending"),
    Planted("engine-is-not-heard", with_faults(IN_PLACE, cancel=1), waits_for_ever, "no clean ending"),
]


@pytest.mark.parametrize("budget", [{"cancel": 1, "slow": 1}, {"sender_restarts": 1, "slow": 1}, {"slow": 3}], ids=str)
def test_nothing_is_found_where_nothing_was_planted(budget: dict[str, int]) -> None:
    """The worlds of the planted faults hold as they are."""
    result = search(with_faults(IN_PLACE, **budget), seconds_max=100.0)
    assert result.counterexample is None, str(result.counterexample)
    assert result.is_exhausted


@pytest.mark.parametrize("planted", [pytest.param(planted, id=planted.name) for planted in PLANTED])
def test_a_planted_fault_is_found(planted: Planted, monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that cannot fail proves nothing."""
    planted.patch(monkeypatch)
    assert planted.what in str(find(planted.world))
