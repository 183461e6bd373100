"""Marks for tests of what not every machine has: they are skipped where it is missing, with the reason."""

from __future__ import annotations

from typing import Final

import pytest

from kvpd.errors import ConfigError
from kvpd.transports import ucx_py


def _why_not_ucx_py() -> str:
    """What stands in the way of ucx-py here; empty: nothing."""
    try:
        ucx_py.load()
    except ConfigError as exc:
        return str(exc)
    return ""


_WHY_NOT: Final = _why_not_ucx_py()
needs_ucx_py = pytest.mark.skipif(bool(_WHY_NOT), reason=_WHY_NOT)
