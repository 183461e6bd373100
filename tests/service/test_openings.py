"""What a sender is told of a prefill engine's openings: with the first batch, where that has come with them."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from kvpd.core.sender import events as ev
from kvpd.link import LINK_VERSION, Attach, Frame, Open, Stage
from kvpd.service.engines import PrefillEngine

from .worlds import World, in_virtual_time


class Out:
    """An engine that reads nothing."""

    def send(self, frame: Frame) -> None:
        pass

    def cut_off(self, detail: str) -> None:
        pass


def opening(number: int) -> Open:
    return Open(number, f"req-{number}", "127.0.0.1:7300", 1)


def staging(number: int) -> Stage:
    return Stage(number, 0, (b"key",), True, 64)


@in_virtual_time
async def test_an_opening_and_its_first_batch_are_told_together(
    memory_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two messages to the receiver become one, and two answers; an opening that comes alone waits for nothing."""
    told: list[tuple[type[ev.SenderEvent], bool]] = []
    async with memory_world.sender() as sender:
        feed = sender.feed

        def note(event: ev.SenderEvent) -> None:
            told.append((type(event), isinstance(event, ev.OpenRequested) and event.first is not None))
            feed(event)

        monkeypatch.setattr(sender, "feed", note)
        engine = PrefillEngine(sender, Out(), Attach(LINK_VERSION, "sender"))
        for frame in (opening(1), staging(1), opening(2), opening(3), staging(2), staging(3)):
            engine.handle(frame)
        engine.handle(opening(4))
        await trio.testing.wait_all_tasks_blocked()
        staged, opened = (ev.StageRequested, False), (ev.OpenRequested, False)
        assert told == [
            (ev.OpenRequested, True),
            opened,
            opened,
            staged,
            staged,
            opened,
        ]


@in_virtual_time
async def test_an_opening_whose_engine_goes_in_the_same_turn_never_was(memory_world: World) -> None:
    """Nobody waits for it, and nothing of it is left."""
    async with memory_world.sender() as sender:
        engine = PrefillEngine(sender, Out(), Attach(LINK_VERSION, "sender"))
        engine.handle(opening(1))
        engine.closed()
        await trio.testing.wait_all_tasks_blocked()
        assert sender.core.transfer_count == 0
        assert not engine.holds_memory
