"""Mooncake's transfer engine over TCP, with its peer-to-peer handshake; words go over a TCP connection of our own."""

from __future__ import annotations

import importlib
from typing import Any

from peers_app.memory import Buffer
from peers_app.movers.base import Address, Chunks, End, Sink, Source
from peers_app.movers.lines import LineEnd, ListeningEnd


def _make_engine(buffer: Buffer) -> Any:
    engine = importlib.import_module("mooncake.engine").TransferEngine()
    if status := engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""):
        raise RuntimeError(f"Mooncake's engine does not start: {status}")
    if status := engine.register_memory(buffer.address, buffer.length):
        raise RuntimeError(f"Mooncake does not take the buffer: {status}")
    return engine


class MooncakeSource(LineEnd, Source):
    """See `Source`."""

    def __init__(self, buffer: Buffer) -> None:
        super().__init__(buffer)
        self._engine = _make_engine(buffer)
        self._segment = ""
        self._remote_address = 0

    def connect(self, address: Address) -> None:
        self._segment, self._remote_address = address["segment"], address["base"]
        self.dial(address["port"])

    def begin(self, chunks: Chunks, notice: bytes = b"") -> Any:
        size = chunks.chunk_bytes
        writes = []
        for local, remote in zip(chunks.local, chunks.remote, strict=True):
            here, there = self.buffer.address + local * size, self._remote_address + remote * size
            writes.append(self._engine.transfer_submit_write(self._segment, here, there, size))
            if writes[-1] < 0:
                raise RuntimeError(f"Mooncake refuses a write: {writes[-1]}")
        return writes

    def is_done(self, write: Any) -> bool:
        while write:
            status = self._engine.transfer_check_status(write[-1])
            if status < 0:
                raise RuntimeError(f"Mooncake reports a failed write: {status}")
            if status == 0:
                return False
            write.pop()
        return True


class MooncakeSink(ListeningEnd, Sink):
    """See `Sink`. Its engine has threads of its own that receive."""

    def __init__(self, buffer: Buffer) -> None:
        super().__init__(buffer)
        self._engine = _make_engine(buffer)
        segment = f"127.0.0.1:{self._engine.get_rpc_port()}"
        self.address |= {"segment": segment, "base": buffer.address, "length": buffer.length}


def make_end(system: str, role: str, tls: str, buffer: Buffer) -> End:
    """See `peers_app.mover`."""
    return MooncakeSource(buffer) if role == "source" else MooncakeSink(buffer)
