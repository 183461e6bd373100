"""The scripted daemon, and an engine's link to it, as fixtures."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvpd import client

from .harness import DEADLINE_S, Daemon, Decode, Peer, Prefill, Script, names, says_nothing


@pytest.fixture
def daemon(tmp_path: Path) -> Daemon:
    """`with daemon(script) as path`: the script runs, with one Peer, in a thread; what it raises fails the test.

    Behind the script, what the engine still says is read until it has gone.
    """

    @contextmanager
    def run(script: Script = says_nothing, *, greet: bool = True) -> Iterator[Path]:
        path = tmp_path / f"{next(names)}.sock"
        failures: list[BaseException] = []
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(str(path))
            listener.listen()
            listener.settimeout(DEADLINE_S)

            def serve() -> None:
                connection, _ = listener.accept()
                connection.settimeout(DEADLINE_S)
                peer = Peer(connection)
                try:
                    if greet:
                        peer.greet()
                    script(peer)
                    while peer.next() is not None:
                        pass
                except BaseException as exc:  # noqa: BLE001  raised again in the test's own thread
                    failures.append(exc)
                finally:
                    peer.close()

            thread = threading.Thread(target=serve)
            thread.start()
            try:
                yield path
            finally:
                thread.join(2 * DEADLINE_S)
            assert not thread.is_alive()
        if failures:
            raise failures[0]

    return run


@pytest.fixture
def prefill(daemon: Daemon) -> Prefill:
    """`with prefill(script) as link`: a prefill engine's link to a daemon that runs this script."""

    @contextmanager
    def attach(
        script: Script = says_nothing, *, greet: bool = True, rank: int = 0, group: str = ""
    ) -> Iterator[client.SenderLink]:
        with daemon(script, greet=greet) as path, client.connect_sender(path, rank=rank, group=group) as link:
            yield link

    return attach


@pytest.fixture
def decode(daemon: Daemon) -> Decode:
    """`with decode(script) as link`: a decode engine's link to a daemon that runs this script."""

    @contextmanager
    def attach(script: Script = says_nothing, *, greet: bool = True) -> Iterator[client.ReceiverLink]:
        with daemon(script, greet=greet) as path, client.connect_receiver(path) as link:
            yield link

    return attach
