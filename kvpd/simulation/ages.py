"""How long a transfer may stay where it is at a receiver: every wait has its end."""

from __future__ import annotations

import enum

import attrs

from kvpd.core.events import TransferId
from kvpd.simulation.rules import Rule, Violation
from kvpd.simulation.schedule import Process

_SLACK_S = 2.0


class Stage(enum.Enum):
    """What a transfer waits for."""

    ADMISSION = "its admission or its timeout"
    CLAIM = "its claim or its expiry"
    FENCE = "its fence"


@attrs.frozen
class Due:
    """When a wait must be over, if its process has stood still for no longer than this."""

    at: float
    stood_still_s: float


class Ages:
    """The waits of one receiver's transfers."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._due: dict[tuple[Stage, TransferId], Due] = {}

    def begin(self, stage: Stage, transfer: TransferId, seconds: float) -> None:
        """A wait begins, which must be over in so many seconds."""
        self._due[stage, transfer] = Due(self._process.schedule.now + seconds, self._process.stood_still_s)

    def end(self, stage: Stage, transfer: TransferId) -> None:
        """It is over."""
        self._due.pop((stage, transfer), None)

    def check(self) -> None:
        """Nobody waits too long, not counting the time that the process stood still."""
        now, stood_still_s = self._process.schedule.now, self._process.stood_still_s
        for (stage, transfer), due in self._due.items():
            if now > due.at + stood_still_s - due.stood_still_s + _SLACK_S:
                detail = f"{transfer} waits for {stage.value} at {self._process.name}, since {due.at:.2f} in vain"
                raise Violation(Rule.BOUNDED, detail)
