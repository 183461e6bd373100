"""NIXL: an agent on each side, the UCX backend, memory of the host. With its progress thread, or without.

Without the thread whoever waits makes the progress: the source by asking for its transfers' state, the sink by asking
for notifications. With it the sink need not ask at all, and looks for notifications now and then.
"""

from __future__ import annotations

import base64
import importlib
import os
import select
from typing import Any, Final

import numpy as np

from peers_app.memory import Buffer
from peers_app.movers.base import Address, Chunks, End, Sink, Source

_LOOK_S: Final = 0.0002  # how often a side with a progress thread looks; NIXL has nothing to wait on


def _make_agent(name: str, *, has_thread: bool) -> Any:
    api = importlib.import_module("nixl_cu12._api")
    return api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=has_thread, backends=["UCX"]))


class _NixlEnd(End):
    def __init__(self, buffer: Buffer, role: str, *, has_thread: bool) -> None:
        super().__init__(buffer)
        self.has_thread = has_thread
        self.name = f"{role}-{os.getpid()}"
        self.agent = _make_agent(self.name, has_thread=has_thread)
        self.registered = self.agent.register_memory([(buffer.address, buffer.length, 0, "")], "DRAM")
        assert self.registered
        self.peer = ""
        self._early: list[bytes] = []

    def metadata(self) -> str:
        """What the other agent must know of this one."""
        return base64.b64encode(self.agent.get_agent_metadata()).decode()

    def _know(self, metadata: str) -> None:
        peer = self.agent.add_remote_agent(base64.b64decode(metadata))
        self.peer = peer.decode() if isinstance(peer, bytes) else peer

    def tell(self, words: bytes) -> None:
        self.agent.send_notif(self.peer, words)

    def heard(self) -> list[bytes]:
        return [words for said in self.agent.get_new_notifs().values() for words in said]

    def wait(self, commands: int) -> None:
        select.select([commands], [], [], _LOOK_S if self.has_thread else 0)

    def descriptors(self, address: int, slots: int, chunk_bytes: int) -> Any:
        """A list of a buffer's slots."""
        starts = address + np.arange(slots, dtype=np.uint64) * np.uint64(chunk_bytes)
        lengths = np.full(slots, chunk_bytes, dtype=np.uint64)
        rows = np.stack([starts, lengths, np.zeros(slots, dtype=np.uint64)], axis=1)
        return self.agent.get_xfer_descs(rows, "DRAM")


class NixlSource(_NixlEnd, Source):
    """See `Source`. Descriptor lists of all slots are prepared once per chunk length."""

    has_notice = True

    def __init__(self, buffer: Buffer, *, has_thread: bool) -> None:
        super().__init__(buffer, "source", has_thread=has_thread)
        self.introduction = self.metadata()
        self._remote_address = 0
        self._remote_bytes = 0
        self._sides: dict[int, tuple[Any, Any]] = {}

    def connect(self, address: Address) -> None:
        self._know(address["metadata"])
        self._remote_address, self._remote_bytes = address["base"], address["length"]
        self.agent.make_connection(self.peer)

    def prepare(self, chunk_bytes: int) -> None:
        if chunk_bytes not in self._sides:
            slots = self.buffer.length // chunk_bytes
            remote_slots = self._remote_bytes // chunk_bytes
            here = self.descriptors(self.buffer.address, slots, chunk_bytes)
            there = self.descriptors(self._remote_address, remote_slots, chunk_bytes)
            self._sides[chunk_bytes] = (
                self.agent.prep_xfer_dlist("NIXL_INIT_AGENT", here),
                self.agent.prep_xfer_dlist(self.peer, there),
            )

    def begin(self, chunks: Chunks, notice: bytes = b"") -> Any:
        here, there = self._sides[chunks.chunk_bytes]
        local, remote = np.array(chunks.local, dtype=np.int32), np.array(chunks.remote, dtype=np.int32)
        handle = self.agent.make_prepped_xfer("WRITE", here, local, there, remote, notice)
        self._checked(self.agent.transfer(handle))
        return handle

    def is_done(self, write: Any) -> bool:
        if self._checked(self.agent.check_xfer_state(write)) == "PROC":
            return False
        write.release()
        return True

    def _checked(self, state: str) -> str:
        if state == "ERR":
            raise RuntimeError("NIXL reports a failed transfer")
        return state


class NixlSink(_NixlEnd, Sink):
    """See `Sink`."""

    def __init__(self, buffer: Buffer, *, has_thread: bool) -> None:
        super().__init__(buffer, "sink", has_thread=has_thread)
        self.address = {"metadata": self.metadata(), "base": buffer.address, "length": buffer.length}

    def meet(self, introduction: str) -> None:
        self._know(introduction)

    def wait(self, commands: int) -> None:
        if not self.has_thread:
            self._early += super().heard()  # the call that makes progress
        super().wait(commands)

    def heard(self) -> list[bytes]:
        early, self._early = self._early, []
        return early + super().heard()


def make_end(system: str, role: str, tls: str, buffer: Buffer) -> End:
    """See `peers_app.mover`. UCX takes its transports from the environment."""
    has_thread = system == "nixl"
    if role == "source":
        return NixlSource(buffer, has_thread=has_thread)
    return NixlSink(buffer, has_thread=has_thread)
