"""What a simulation has exercised: a kind of fault, a transition or an error that never came was never tested."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import attrs

from kvpd.core.states import RECEIVER_TRANSITIONS, SENDER_TRANSITIONS
from kvpd.errors import ErrorCode
from kvpd.simulation.scenario import CONSEQUENCES, SERVICE_KINDS, FaultKind

# What the cores never produce: a revoked transfer is answered with the reason of its end.
UNREACHABLE = frozenset({ErrorCode.REVOKED})


def transition(side: str, state: str, cause: str) -> str:
    """How a transition is called in the table."""
    return f"{side}: {state}, {cause}"


@attrs.define
class Coverage:
    """Counts of everything that happened."""

    faults: Counter[str] = attrs.field(factory=Counter)
    transitions: Counter[str] = attrs.field(factory=Counter)
    codes: Counter[str] = attrs.field(factory=Counter)

    def add(self, other: Coverage) -> None:
        """Another run's counts too."""
        self.faults.update(other.faults)
        self.transitions.update(other.transitions)
        self.codes.update(other.codes)

    def missing(self, *, service: bool = False) -> list[str]:
        """What never happened."""
        lacking = [f"fault {name}" for name in _lacking(self.faults, expected_faults(service=service))]
        if service:
            return lacking
        lacking += [f"transition {name}" for name in _lacking(self.transitions, expected_transitions())]
        lacking += [f"error {name}" for name in _lacking(self.codes, expected_codes())]
        return lacking


def _lacking(counts: Counter[str], expected: Iterable[str]) -> list[str]:
    return [name for name in expected if not counts[name]]


def expected_faults(*, service: bool = False) -> list[str]:
    """Every kind of fault and what must follow from some; or those that a run over the real service knows."""
    if service:
        return [str(kind) for kind in FaultKind if kind in SERVICE_KINDS]
    return [*map(str, FaultKind), *CONSEQUENCES]


def expected_transitions() -> list[str]:
    """Every transition of both state machines."""
    receiver = [transition("receiver", s.value, c.name.lower()) for s, c in RECEIVER_TRANSITIONS]
    return receiver + [transition("sender", s.value, c.name.lower()) for s, c in SENDER_TRANSITIONS]


def expected_codes() -> list[str]:
    """Every error that the cores can produce."""
    return [str(code) for code in ErrorCode if code not in UNREACHABLE]
