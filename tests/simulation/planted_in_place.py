"""Wrong lines about slots that engines fill in place: each frees one that somebody may still write."""

from __future__ import annotations

from typing import Any

import msgspec

from kvpd.core.receiver.peers import Peers as ReceiverPeers
from kvpd.core.receiver.sessions import Session
from kvpd.core.sender import SenderCore
from kvpd.core.sender.records import Share
from kvpd.simulation.in_place import Writers
from kvpd.simulation.rules import Rule

from .planting import Bed, Patch

IN_PLACE = Bed()


@IN_PLACE.plant("in-place-drained-too-early", "in-place", Rule.FENCE, "AssertionError")
def _puts_alone_count(patch: Patch) -> None:
    """A transfer has drained when its puts have, and no engine is asked."""
    patch.setattr(Share, "writes_ended", property(lambda self: self.puts_ended))


@IN_PLACE.plant("in-place-undrained-is-drained", "in-place", Rule.FENCE, Rule.NOTIFY_AFTER_LANDING)
def _overdue_is_drained(patch: Patch) -> None:
    """Past the put deadline the receiver is told that nothing can land any more."""
    send = SenderCore._send_cancel_notif

    def wrong(self: SenderCore, transfer: Any, now: float, *, drained: bool) -> None:
        send(self, transfer, now, drained=True)

    patch.setattr(SenderCore, "_send_cancel_notif", wrong)


@IN_PLACE.plant("in-place-hello-says-too-much", "in-place", Rule.FENCE)
def _all_has_ended(patch: Patch) -> None:
    """Every Hello says that nothing of an earlier session is being written."""
    patch.setattr(SenderCore, "_earlier_puts_ended", lambda self, receiver: True)


@IN_PLACE.plant("in-place-no-wait-before-hello", "in-place", Rule.FENCE)
def _overdue_is_forgotten(patch: Patch) -> None:
    """An engine that is overdue in a lost session is forgotten when the next Hello is said."""
    say_hello = SenderCore._say_hello

    def wrong(self: SenderCore, peer: Any, now: float) -> None:
        overdue, self._overdue = self._overdue, {}
        say_hello(self, peer, now)
        self._overdue = overdue

    patch.setattr(SenderCore, "_say_hello", wrong)


@IN_PLACE.plant("in-place-undrained-frees", "in-place", Rule.FENCE)
def _any_cancel_is_a_fence(patch: Patch) -> None:
    """A receiver takes every CancelNotif in a session that goes on for a drained one."""
    cancel_notif = ReceiverPeers._cancel_notif

    def wrong(self: ReceiverPeers, session: Session, message: Any, now: float) -> None:
        cancel_notif(self, session, msgspec.structs.replace(message, drained=message.drained or message.goes_on), now)

    patch.setattr(ReceiverPeers, "_cancel_notif", wrong)


@IN_PLACE.plant("in-place-death-is-fence-enough", "in-place", Rule.FENCE)
def _engines_are_forgotten(patch: Patch) -> None:
    """A sender's death is the fence, and its engines live on and write."""

    def when_gone(self: Writers, session_no: int, call: Any) -> None:
        call()

    patch.setattr(Writers, "when_gone", when_gone)


@IN_PLACE.plant("in-place-latecomers-are-let-in", "in-place", Rule.FENCE)
def _dead_senders_engines_get_it(patch: Patch) -> None:
    """An engine gets the memory on behalf of a sender that is known to be dead, after its slots were freed."""

    def admit(self: Writers, start: Any, holder: object) -> bool:
        return True

    patch.setattr(Writers, "admit", admit)
