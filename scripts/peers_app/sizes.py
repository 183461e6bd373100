"""How much is moved, in what pieces, and how often."""

from __future__ import annotations

from typing import Final

import attrs

KIB: Final = 1 << 10
MIB: Final = 1 << 20


@attrs.frozen
class Sizes:
    """One run's sizes. A buffer holds at least as many chunks as are in flight, whatever their length."""

    rounds: int
    control_rounds: int
    buffer_bytes: int
    pass_bytes: int  # moved per measured pass
    chunk_bytes: tuple[int, ...]
    in_flight: int  # chunks of a raw pass
    job_chunks: int  # chunks of a request
    job_depth: int  # requests under way
    alloc_requests: int
    alloc_outstanding: int
    waiters: int
    wake_ups: int
    idle_waiters: tuple[int, ...]  # how many wait while CPU is measured
    idle_s: float
    scenario_s: float  # what each scenario may take until it counts as stuck
    small_requests: int  # that come after the large one in the scenario of starvation

    def chunks_in_pass(self, chunk_bytes: int) -> int:
        """How many chunks a pass moves: whole rounds of what is in flight."""
        return max(self.pass_bytes // chunk_bytes // self.in_flight, 1) * self.in_flight

    def slots_touched(self, chunk_bytes: int) -> int:
        """How many slots a pass writes."""
        return min(self.chunks_in_pass(chunk_bytes), self.buffer_bytes // chunk_bytes)

    def job_requests(self, chunk_bytes: int) -> int:
        """How many requests a job moves."""
        return max(self.pass_bytes // (chunk_bytes * self.job_chunks), 2 * self.job_depth)


FULL: Final = Sizes(
    rounds=5,
    control_rounds=3,
    buffer_bytes=256 * MIB,
    pass_bytes=512 * MIB,
    chunk_bytes=(256 * KIB, MIB, 8 * MIB, 32 * MIB),
    in_flight=8,
    job_chunks=4,
    job_depth=2,
    alloc_requests=4000,
    alloc_outstanding=64,
    waiters=100,
    wake_ups=300,
    idle_waiters=(100, 1000, 10_000),
    idle_s=5.0,
    scenario_s=30.0,
    small_requests=200,
)
QUICK: Final = Sizes(
    rounds=1,
    control_rounds=1,
    buffer_bytes=64 * MIB,
    pass_bytes=128 * MIB,
    chunk_bytes=(MIB, 8 * MIB),
    in_flight=8,
    job_chunks=4,
    job_depth=2,
    alloc_requests=600,
    alloc_outstanding=64,
    waiters=100,
    wake_ups=50,
    idle_waiters=(100, 1000),
    idle_s=1.0,
    scenario_s=12.0,
    small_requests=100,
)


def size_text(length: int) -> str:
    """A length as people write it: `256 KiB`, `8 MiB`."""
    return f"{length // MIB} MiB" if length >= MIB else f"{length // KIB} KiB"
