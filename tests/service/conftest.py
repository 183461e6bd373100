"""The worlds that the tests of this folder run in."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

from .worlds import World

_ALWAYS = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}

settings.register_profile("service", max_examples=60, derandomize=True, **_ALWAYS)  # type: ignore[arg-type]
settings.register_profile("service-long", max_examples=1000, print_blob=True, **_ALWAYS)  # type: ignore[arg-type]
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE_SERVICE", "service"))


@pytest.fixture(params=["memory", "zmq"])
def world(request: pytest.FixtureRequest) -> World:
    """A world on each kind of control channel: what holds must hold on both."""
    return World(request.param)


@pytest.fixture
def memory_world() -> World:
    """A world whose network can be cut and slowed down."""
    return World("memory")


@pytest.fixture(params=["memory", "zmq"])
def transport(request: pytest.FixtureRequest) -> str:
    """The kind of control channels, for tests that make a world of their own."""
    return str(request.param)
