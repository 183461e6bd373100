"""What happened in a run: counted by kind, and what must not happen, told in full."""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

import attrs

from chaos_app import words

_PROBLEMS_MAX: Final = 100


@attrs.define
class Tally:
    """The run's books. `problems` are what must not happen: a run with any of them has failed."""

    faults: Counter[str] = attrs.field(factory=Counter)
    skipped: dict[str, str] = attrs.field(factory=dict)  # faults that could not be tried here, and why
    sent: int = 0
    read: int = 0
    failed: Counter[str] = attrs.field(factory=Counter)
    nbytes: int = 0
    filled_bytes: int = 0  # that engines wrote into receivers' slots in place, as far as their senders lived to tell
    chunks: int = 0
    told: int = 0
    rounds: int = 0
    leaks: int = 0
    corruptions: int = 0
    hangs: int = 0
    crashes: int = 0
    growths: int = 0
    untold: int = 0
    fenced_by_death: int = 0  # slots that had to wait for their sender's death
    problems: list[str] = attrs.field(factory=list)

    def problem(self, kind: str, text: str) -> None:
        """What must not happen has happened."""
        setattr(self, kind, getattr(self, kind) + 1)
        if len(self.problems) < _PROBLEMS_MAX:
            self.problems.append(f"{kind}: {text}")

    def heard(self, side: str, event: words.AnyEvent) -> None:
        """An engine's line."""
        match event:
            case words.Sent():
                self.sent += 1
            case words.Read(_, chunks, nbytes, wrong):
                self.read += 1
                self.chunks += chunks
                self.nbytes += nbytes
                for what in wrong:
                    self.problem("corruptions", what)
            case words.Failed(req_id, code):
                self.failed[f"{side}: {code}"] += 1
                if code == "checksum_mismatch":
                    self.problem("corruptions", f"{req_id} arrived with other checksums than it left with")
            case words.Unattached():
                self.failed[f"{side}: its daemon was not there"] += 1
            case _:
                pass

    @property
    def is_good(self) -> bool:
        """Nothing happened that must not."""
        return not self.problems

    def summary(self) -> dict[str, Any]:
        """All of it, for a machine."""
        return {
            "ok": self.is_good,
            "rounds": self.rounds,
            "faults": dict(sorted(self.faults.items())),
            "skipped": self.skipped,
            "requests_completed": self.sent,
            "requests_verified": self.read,
            "requests_failed": dict(sorted(self.failed.items())),
            "proxy_told": self.told,
            "bytes_verified": self.nbytes,
            "bytes_filled_in_place": self.filled_bytes,
            "slots_fenced_by_death": self.fenced_by_death,
            "leaks": self.leaks,
            "corruptions": self.corruptions,
            "hangs": self.hangs,
            "crashes": self.crashes,
            "growths": self.growths,
            "untold": self.untold,
        }

    def table(self) -> str:
        """All of it, for a person."""
        rows: list[tuple[str, object]] = [("rounds", self.rounds)]
        rows += [(f"fault     {kind}", count) for kind, count in sorted(self.faults.items())]
        rows += [(f"skipped   {kind}", why) for kind, why in sorted(self.skipped.items())]
        rows += [("completed requests", self.sent), ("verified  requests", self.read)]
        rows += [("verified  bytes", f"{self.nbytes:,}"), ("filled    bytes in place", f"{self.filled_bytes:,}")]
        rows += [("told      notifications to the proxy", self.told)]
        rows += [(f"failed    {code}", count) for code, count in sorted(self.failed.items())]
        rows += [("slots that waited for their sender's death", self.fenced_by_death)]
        must = ("leaks", "corruptions", "hangs", "crashes", "growths", "untold")
        rows += [(f"must be 0 {kind}", getattr(self, kind)) for kind in must]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)
