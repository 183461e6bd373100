"""Planted faults: wrong lines, patched into the cores by tests and nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import pytest

from kvpd.core.ledger import Ledger
from kvpd.simulation.rules import Rule

Patch = pytest.MonkeyPatch


@attrs.frozen
class Plant:
    """A wrong line, the workload that provokes it soonest, and the rules that may be found broken by it.

    A rule that is the name of an exception stands for a check of the core's own.
    """

    name: str
    what: str
    patch: Callable[[Patch], None]
    workload: str
    rules: tuple[str, ...]


class Bed(list[Plant]):
    """Plants that belong together."""

    def plant(self, name: str, workload: str, *rules: Rule | str) -> Callable[[Callable[[Patch], None]], None]:
        """Keep a plant; its docstring says what is wrong."""

        def keep(patch: Callable[[Patch], None]) -> None:
            assert patch.__doc__
            self.append(Plant(name, patch.__doc__, patch, workload, tuple(map(str, rules))))

        return keep


def admit_by(order: Callable[[Sequence[Any]], Sequence[Any]]) -> Callable[[Ledger], Any]:
    """An `admit_next` that tries those who wait in an order of its own."""

    def admit_next(self: Ledger) -> Any:
        for transfer in order(list(self._waiting)):
            if self._waiting[transfer] <= self._pool.unreserved:
                self._reserved[transfer] = self._waiting.pop(transfer)
                self._pool.reserve(self._reserved[transfer])
                return transfer
        return None

    return admit_next
