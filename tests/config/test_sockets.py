"""Addresses by default: engine sockets that fit, are private and are nobody else's, and the port."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from kvpd.config import ReceiverConfig, default_engine_socket, ensure_socket_folder, runtime_folder
from kvpd.errors import ConfigError

from .loading import RECEIVER, load, problems_of


def test_p74_a_socket_path_that_is_too_long_is_refused_with_both_lengths() -> None:
    """The kernel's own message for it names neither the path nor the limit."""
    path = "/" + "x" * 107
    (problem,) = problems_of(flags={"receiver.engine_socket": path})
    assert "108" in problem
    assert "107" in problem
    load(flags={"receiver.engine_socket": "/" + "x" * 106})


def test_p74_a_default_socket_path_is_measured_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made from folders that somebody else named."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/" + "x" * 100)
    with pytest.raises(ConfigError, match=r"engine_socket.*107"):
        load("receiver", flags=RECEIVER)
    load("receiver", flags=RECEIVER | {"receiver.engine_socket": "/run/kvpd/receiver.sock"})


def test_p89_two_senders_of_different_names_do_not_share_a_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several stacks run on one host."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    one = load(flags={"sender.name": "a"}).sender.engine_socket
    other = load(flags={"sender.name": "b"}).sender.engine_socket
    assert one == "/run/user/7/kvpd/sender-a.sock"
    assert other == "/run/user/7/kvpd/sender-b.sock"
    assert load(flags={"receiver.name": "a"}).receiver.engine_socket not in (one, other)


def test_p89_the_default_port_is_outside_the_range_that_the_kernel_gives_away() -> None:
    """A port from 32768 to 60999 may be taken by any outgoing connection."""
    port = int(ReceiverConfig().control_address.rpartition(":")[2])
    assert not 32768 <= port <= 60999


def test_p74_the_default_folder_is_made_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever can connect to an engine socket gets the buffer's descriptor."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    path = Path(default_engine_socket("sender", "a"))
    ensure_socket_folder(path)
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    ensure_socket_folder(path)


def test_p74_a_default_folder_that_others_can_write_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Among the temporary files anybody may have made it first."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    folder = runtime_folder()
    folder.symlink_to(elsewhere)
    with pytest.raises(ConfigError, match="others can write"):
        ensure_socket_folder(folder / "a.sock")
    folder.unlink()
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match="others can write"):
        ensure_socket_folder(folder / "a.sock")


def test_p74_a_folder_that_cannot_be_made_is_refused_by_name(tmp_path: Path) -> None:
    """A file stands in its place."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be made"):
        ensure_socket_folder(tmp_path / "file" / "a.sock")


@pytest.mark.skipif(os.getuid() == 0, reason="root can write everywhere")
def test_p74_a_folder_that_is_not_writable_is_refused_by_name(tmp_path: Path) -> None:
    """The bind would fail later, with less to go by."""
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="not writable"):
        ensure_socket_folder(tmp_path / "a.sock")


def test_without_a_runtime_folder_the_socket_is_among_the_temporary_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers and services often have no XDG_RUNTIME_DIR."""
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    assert runtime_folder().name == f"kvpd-{os.getuid()}"
