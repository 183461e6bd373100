"""The end of a turn: once for each who asked, after what woke together; and messages that travel together."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from kvpd.service.turns import BYTES_TOGETHER_MAX, MESSAGES_TOGETHER_MAX, TurnEnd, together


async def test_whoever_asks_is_called_once_when_all_that_woke_together_has_run() -> None:
    """A message for each event would wake ZMQ's thread and the peer as often."""
    seen: list[str] = []
    start, turn_end = trio.Event(), TurnEnd()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(turn_end.run)

        async def work(name: str) -> None:
            await start.wait()
            seen.append(name)
            turn_end.call(flush)
            turn_end.call(flush)

        def flush() -> None:
            seen.append("flush")

        for name in ("a", "b", "c"):
            nursery.start_soon(work, name)
        await trio.testing.wait_all_tasks_blocked()
        start.set()
        await trio.testing.wait_all_tasks_blocked()
        assert sorted(seen[:3]) == ["a", "b", "c"]
        assert seen[3:] == ["flush"]
        turn_end.call(flush)
        await trio.testing.wait_all_tasks_blocked()
        assert seen[4:] == ["flush"]
        nursery.cancel_scope.cancel()


async def test_who_asks_from_a_callback_is_called_in_the_turn_after() -> None:
    """A drop that is counted may cause a message: it must not wait for the next event."""
    seen: list[int] = []
    turn_end = TurnEnd()

    def again() -> None:
        seen.append(len(seen))
        if len(seen) < 3:
            turn_end.call(again)

    async with trio.open_nursery() as nursery:
        turn_end.call(again)  # before it runs
        nursery.start_soon(turn_end.run)
        await trio.testing.wait_all_tasks_blocked()
        assert seen == [0, 1, 2]
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("sizes", "groups"),
    [
        ([], []),
        ([1], [1]),
        ([1] * MESSAGES_TOGETHER_MAX, [MESSAGES_TOGETHER_MAX]),
        ([1] * (MESSAGES_TOGETHER_MAX + 1), [MESSAGES_TOGETHER_MAX, 1]),
        ([BYTES_TOGETHER_MAX, 1], [1, 1]),
        ([BYTES_TOGETHER_MAX // 2] * 4, [2, 2]),
        ([1, BYTES_TOGETHER_MAX * 2, 1], [1, 1, 1]),
    ],
)
def test_groups_are_bounded_in_messages_and_in_bytes(sizes: list[int], groups: list[int]) -> None:
    """A queue is bounded in groups; a long message travels alone, and nothing is lost or moved."""
    messages = [bytes([number % 256]) * size for number, size in enumerate(sizes)]
    found = list(together(messages))
    assert [len(group) for group in found] == groups
    assert [message for group in found for message in group] == messages
