"""How the property tests run: the same examples every time in CI, twenty times as many on request."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

_ALWAYS = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}

settings.register_profile("default", max_examples=50, derandomize=True, **_ALWAYS)  # type: ignore[arg-type]
settings.register_profile("long", max_examples=1000, print_blob=True, **_ALWAYS)  # type: ignore[arg-type]
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
