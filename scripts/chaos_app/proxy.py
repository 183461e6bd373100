"""A stand-in for the proxy: a ROUTER that acknowledges notifications, and is not there for a while now and then."""

from __future__ import annotations

import trio

from kvpd.core.messages import FailNotif, ProxyAck, ProxyNotif, decode, encode
from kvpd.errors import RemoteProtocolError
from kvpd.transports.base import ControlTransport


class Proxy:
    """Remembers, for a round, which requests it was told of."""

    def __init__(self, control: ControlTransport, address: str) -> None:
        self.address = address
        self.told: set[str] = set()
        self.contradicted: set[str] = set()  # requests of which one transfer was told as ready, and as failed
        self._was_ready: dict[tuple[str, int, int], bool] = {}  # by transfer, in this round
        self._control = control
        self._scope = trio.CancelScope()
        self._changed = trio.Event()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; after `down`, not before its time is over."""
        started = False
        while True:
            self._down_s = 0.0
            with trio.CancelScope() as self._scope:
                async with self._control.serve(self.address) as server:
                    if not started:
                        task_status.started()
                        started = True
                    while True:
                        peer, frame = await server.receive()
                        try:
                            message = decode(frame)
                        except RemoteProtocolError:
                            continue
                        if isinstance(message, ProxyNotif | FailNotif):
                            self._hear(message)
                            try:
                                answer = ProxyAck(message.sender_incarnation, message.message_id)
                                server.send_nowait(peer, encode(answer))
                            except (trio.WouldBlock, trio.BrokenResourceError):
                                continue  # it asks again
            await trio.sleep(self._down_s)

    def _hear(self, message: ProxyNotif | FailNotif) -> None:
        is_ready = isinstance(message, ProxyNotif)
        key = message.sender_id, message.sender_incarnation, message.transfer_no
        if self._was_ready.setdefault(key, is_ready) is not is_ready:
            self.contradicted.add(message.req_id)
        if not is_ready:
            return  # whether a request is to fail is for its engines to say
        self.told.add(message.req_id)
        self._changed.set()
        self._changed = trio.Event()

    def begin_round(self) -> None:
        """Forget what was told before."""
        self.told.clear()
        self.contradicted.clear()
        self._was_ready.clear()

    def down(self, seconds: float) -> None:
        """Be gone for so long."""
        self._down_s = seconds
        self._scope.cancel()

    async def until_told(self, req_ids: set[str], bound_s: float) -> set[str]:
        """Wait until it was told of all of these; those that it was not told of within the bound."""
        with trio.move_on_after(bound_s):
            while not req_ids <= self.told:
                await self._changed.wait()
        return req_ids - self.told
