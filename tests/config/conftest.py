"""A configuration file as a fixture."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def written(tmp_path: Path) -> Callable[[str], Path]:
    """Writes a file."""

    def write(text: str) -> Path:
        file = tmp_path / "kvpd.toml"
        file.write_text(text, encoding="utf-8")
        return file

    return write
