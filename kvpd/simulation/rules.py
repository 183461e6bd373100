"""What can be violated, and how that is said."""

from __future__ import annotations

import enum


class Rule(enum.StrEnum):
    """The invariants of DESIGN section 4, and what follows from them for those outside."""

    CONSERVATION = "invariant 1: conservation"
    WHOLE_OR_NOTHING = "invariant 2: whole or nothing"
    CHARGED = "invariant 3: charged until consumed"
    ONE_WRITER = "invariant 4: one writer"
    FENCE = "invariant 5: fence"
    NOTIFY_AFTER_LANDING = "invariant 6: notify after landing"
    NO_OVERTAKING = "invariant 7: no overtaking"
    ORDER_OF_RESOURCES = "invariant 8: order of resources"
    BOUNDED = "invariant 9: everything is bounded"
    QUIET_MEANS_CLEAN = "invariant 10: quiet means clean"
    TRUTH = "a reader sees its own bytes"
    ONE_END = "a transfer begins once and ends once"
    OWN_TRANSFERS = "peers act only on their own transfers"
    SAME_ANSWER = "a repeat gets the same answer"
    ONLY_ADMISSION_WAITS = "nothing but admission makes a peer wait"
    AS_NAMED = "a claim gets what it names, or is refused"
    PROGRESS = "where nothing goes wrong, everything arrives"


class Violation(Exception):
    """A rule does not hold."""

    def __init__(self, rule: Rule, detail: str) -> None:
        super().__init__(f"{rule.value}: {detail}")
        self.rule = rule
        self.detail = detail
