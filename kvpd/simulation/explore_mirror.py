"""Senders that differ in nothing but their names: of two states that are each other's mirror image one is searched.

The image of a core is a copy in which the two names are exchanged, wherever they stand: in identities, in keys, in
labels. It is made once for each numbered state of a core.
"""

from __future__ import annotations

from typing import Any

import attrs
import msgspec

from kvpd.core.events import TransferId
from kvpd.core.receiver.events import ClaimRequested
from kvpd.core.sender import SenderSettings
from kvpd.simulation.explore_cores import Copier, Cores
from kvpd.simulation.explore_state import Decode, Prefill, Put, State, TransferKey
from kvpd.simulation.explore_world import World


def swap_text(text: str) -> str:
    """The names of the two senders exchanged."""
    return text.replace("s0", "\0").replace("s1", "s0").replace("\0", "s1") if "s" in text else text


def swap_key(key: bytes) -> bytes:
    """The same, of a chunk's key."""
    return key.replace(b"s0", b"\0").replace(b"s1", b"s0").replace(b"\0", b"s1")


class _Swapper(Copier):
    """Copies in which the names are exchanged."""

    def copy(self, value: Any) -> Any:
        """See `Copier`."""
        if isinstance(value, str):
            return type(value)(swap_text(value)) if type(value) is str else value
        if type(value) is bytes:
            return swap_key(value)
        if isinstance(value, TransferId):
            return value._replace(sender_id=swap_text(value.sender_id))
        if isinstance(value, ClaimRequested | SenderSettings):
            fields: dict[str, Any] = {f.name: getattr(value, f.name) for f in attrs.fields(type(value))}
            changes: Any = {name: swap_text(text) for name, text in fields.items() if type(text) is str}
            return attrs.evolve(value, **changes)
        return super().copy(value)

    def message(self, message: Any) -> Any:
        """See `Copier`."""
        fields = {name: self.copy(getattr(message, name)) for name in message.__struct_fields__}
        return msgspec.structs.replace(message, **fields)


class Mirror:
    """The mirror images of one world's states."""

    def __init__(self, world: World) -> None:
        self._world = world
        requests = world.config.requests
        images = [
            (1 - r.sender, swap_text(r.req_id), tuple(tuple(map(swap_key, b)) for b in r.batches)) for r in requests
        ]
        plain = [(r.sender, r.req_id, r.batches) for r in requests]
        assert world.config.senders == 2, "two senders are exchanged"
        assert not world.config.in_place, "what engines fill in place is not exchanged"
        assert not world.config.verifies, "checksums tell one sender's chunks from the other's"
        assert sorted(images) == sorted(plain), "the senders differ in more than their names"
        self._requests = [plain.index(image) for image in images]
        self._labels = [world.labels.index(swap_text(label)) for label in world.labels]
        self._senders: dict[int, int] = {}
        self._receivers: dict[int, int] = {}
        self._messages: dict[int, int] = {}

    def least(self, state: State) -> State:
        """The lesser of a state and its image."""
        return min(state, self.image(state))

    def image(self, state: State) -> State:
        """The same with the senders exchanged."""
        first, second = state.senders
        message, worker = self._message, self._world
        return State(
            (
                self._core(self._senders, worker.sender_cores, second),
                self._core(self._senders, worker.sender_cores, first),
            ),
            self._core(self._receivers, worker.receiver_cores, state.receiver),
            tuple(
                sorted(
                    c._replace(sender=1 - c.sender, up=tuple(map(message, c.up)), down=tuple(map(message, c.down)))
                    for c in state.connections
                )
            ),
            tuple(
                sorted(
                    t._replace(
                        sender=1 - t.sender,
                        pieces=tuple(
                            p._replace(puts=_swap_puts(p.puts), keys=tuple(map(swap_key, p.keys))) for p in t.pieces
                        ),
                    )
                    for t in state.tasks
                )
            ),
            tuple(sorted(e._replace(sender=1 - e.sender) for e in state.endpoints)),
            tuple(sorted(i._replace(owner=_swap(i.owner), put=_swap_puts((i.put,))[0]) for i in state.loose)),
            tuple(sorted(s._replace(sender=1 - s.sender) for s in state.sessions)),
            tuple(map(swap_key, state.memory)),
            tuple(_swap_prefill(state.prefill[at]) for at in self._requests),
            tuple(_swap_decode(state.decode[at]) for at in self._labels),
            state.decode_engine,
            tuple(map(_swap, state.queue)),
            tuple(sorted(map(_swap, state.opened))),
            tuple(sorted(map(_swap, state.complete))),
            state.verifying,
            tuple((1 - sender, message(number)) for sender, number in state.notifications),
            state.budget,
        )

    def _core(self, known: dict[int, int], cores: Cores[Any], number: int) -> int:
        image = known.get(number)
        if image is None:
            image = known[number] = cores.add(_Swapper().copy(cores.entries[number].core))
            known[image] = number
        return image

    def _message(self, number: int) -> int:
        image = self._messages.get(number)
        if image is None:
            messages = self._world.messages
            image = self._messages[number] = messages.number(_Swapper().message(messages[number]))
            self._messages[image] = number
        return image


def _swap(transfer: TransferKey) -> TransferKey:
    return 1 - transfer[0], transfer[1], transfer[2]


def _swap_puts(puts: tuple[Put, ...]) -> tuple[Put, ...]:
    return tuple([Put(put.local, put.slot, swap_key(put.key)) for put in puts])


def _swap_prefill(prefill: Prefill) -> Prefill:
    if not prefill.filling:
        return prefill
    return prefill._replace(filling=tuple(g._replace(puts=_swap_puts(g.puts)) for g in prefill.filling))


def _swap_decode(decode: Decode) -> Decode:
    if not decode.ready and not decode.reading:
        return decode
    return decode._replace(
        ready=tuple(sorted(map(_swap, decode.ready))),
        reading=tuple((slot, swap_key(key)) for slot, key in decode.reading),
    )
