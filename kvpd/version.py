"""Which kvpd this is, as it was installed."""

from __future__ import annotations

import importlib.metadata
from typing import Final

VERSION: Final = importlib.metadata.version("kvpd")
