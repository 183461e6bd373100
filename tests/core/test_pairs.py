"""Real senders and a real receiver, joined by queues: whatever happens between them, no byte is ever wrong."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pair_moves import PairMoves

choices = st.lists(st.integers(0, (1 << 20) - 1), min_size=50, max_size=300)


@pytest.mark.parametrize("same_host", [False, True])
@given(senders=st.integers(1, 2), steps=choices)
def test_whatever_happens_no_byte_is_wrong_and_in_the_end_nothing_is_left(
    same_host: bool, senders: int, steps: list[int]
) -> None:
    """Losses, cancels, crashes and restarts of either side, puts that land late: the whole promise in one test."""
    world = PairMoves(senders, same_host=same_host)
    for choice in steps:
        world.step(choice)
    world.settle()
    for node in world.nodes:
        assert node.core.is_clean
        assert all(job.ended for job in node.jobs.values())
    if same_host:  # a living process may still write what its lost session left: only its death frees that
        for i in range(senders):
            world.kill_sender(i)
        world.settle()
    assert world.receiver.is_clean
