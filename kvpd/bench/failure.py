"""How a benchmark fails."""

from __future__ import annotations

import click


class BenchmarkFailed(click.ClickException):
    """The measurement cannot be had, or cannot be trusted; the message says why. Exit status 1."""
