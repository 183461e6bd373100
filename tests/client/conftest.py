"""The scripted daemon as a fixture."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

try:
    import torch
except ImportError:  # its tests are for those who have it
    torch = None


from .harness import DEADLINE_S, Peer, _names


@pytest.fixture
def daemon(tmp_path: Path) -> Callable[..., Any]:
    """`with daemon(script) as path`: the script runs, with one Peer, in a thread; what it raises fails the test."""

    @contextmanager
    def run(script: Callable[[Peer], None], *, greet: bool = True) -> Iterator[Path]:
        path = tmp_path / f"{next(_names)}.sock"
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
