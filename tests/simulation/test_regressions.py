"""What the simulation has found in the cores, in its smallest form, so that it cannot come back."""

from __future__ import annotations

import attrs
import pytest

from kvpd.core.messages import AllocRequest, Message
from kvpd.simulation.network import Line, Way
from kvpd.simulation.scenario import Scenario, Style
from kvpd.simulation.workload import draw
from kvpd.simulation.world import World


def _one_eager_request() -> Scenario:
    """One request, staged before it is admitted, in a world where nothing else goes wrong."""
    scenario = draw(0, "calm")
    request = attrs.evolve(scenario.requests[0], style=Style.EAGER)
    return attrs.evolve(scenario, requests=(request,), faults=())


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_a_transfer_survives_the_loss_of_what_opened_it(lost: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by the workload `lossy`, seed 0: the opening AllocRequest was lost, the batch behind it was answered
    "not known here", and the request failed with peer_lost instead of waiting for the repeat.
    """
    send = Line.send
    left = lost

    def losing(self: Line, way: Way, message: Message) -> None:
        nonlocal left
        if isinstance(message, AllocRequest) and left > 0:
            left -= 1
            if left == 0 or lost == 1 or message.keys == ():
                return
        send(self, way, message)

    monkeypatch.setattr(Line, "send", losing)
    outcome = World(_one_eager_request(), audit_every=1).run()
    assert outcome.failure is None


def test_reconnecting_keeps_to_the_bound_of_receivers() -> None:
    """A session that is opened anew, because its end left slots without a fence, counts like any other."""
    outcome = World(draw(3095, "tight-limits")).run()
    assert outcome.failure is None
