"""Daemons for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.daemons import Fleet


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    """Daemons of the test's own. None outlives it."""
    with Fleet(tmp_path) as fleet:
        yield fleet
