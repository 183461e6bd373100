"""The engine socket's file: private, removed at the end, never taken from anybody who uses it."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest
import trio

from kvpd.errors import ConfigError
from kvpd.service.engine_link import listen


def leave_stale(path: Path) -> None:
    """A socket file whose daemon was killed."""
    with socket.socket(socket.AF_UNIX) as raw:
        raw.bind(str(path))


async def test_it_is_for_its_user_alone_and_gone_at_the_end(tmp_path: Path) -> None:
    """Whoever may connect may read every request's KV."""
    path = tmp_path / "engine.sock"
    with listen(str(path)):
        found = path.lstat()
        assert stat.S_ISSOCK(found.st_mode)
        assert stat.S_IMODE(found.st_mode) == 0o600
    assert not path.exists()


async def test_the_umask_is_what_it_was(tmp_path: Path) -> None:
    """It belongs to the whole process, and the program that embeds us has files of its own."""
    before = os.umask(0o022)
    try:
        with listen(str(tmp_path / "engine.sock")):
            assert os.umask(0o022) == 0o022
    finally:
        os.umask(before)


async def test_a_missing_folder_is_made_for_its_user_alone(tmp_path: Path) -> None:
    """The runtime folder is empty after a boot."""
    path = tmp_path / "run" / "kvpd" / "engine.sock"
    with listen(str(path)):
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


async def test_a_stale_socket_is_replaced(tmp_path: Path) -> None:
    """P74: a daemon that was killed must be able to start again."""
    path = tmp_path / "engine.sock"
    leave_stale(path)
    with trio.fail_after(10), listen(str(path)) as listener:
        async with await trio.open_unix_socket(str(path)), await listener.accept():
            pass
    assert not path.exists()


async def test_a_live_one_is_left_alone(tmp_path: Path) -> None:
    """The engines of the daemon that listens there must not lose it."""
    path = tmp_path / "engine.sock"
    with trio.fail_after(10), listen(str(path)) as listener:
        with pytest.raises(ConfigError, match="listens there already"), listen(str(path)):
            pass
        # The probe is a connection like any other; behind it an engine still gets through.
        async with await trio.open_unix_socket(str(path)), await listener.accept(), await listener.accept():
            pass


async def test_a_live_one_with_a_full_backlog_is_left_alone(tmp_path: Path) -> None:
    """So busy that it does not accept: still no reason to take its place."""
    path = tmp_path / "engine.sock"
    with socket.socket(socket.AF_UNIX) as busy, socket.socket(socket.AF_UNIX) as first:
        busy.bind(str(path))
        busy.listen(0)
        first.connect(str(path))
        with pytest.raises(ConfigError, match="listens there already"), listen(str(path)):
            pass
    assert path.exists()


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
async def test_what_is_no_socket_is_left_alone(tmp_path: Path, kind: str) -> None:
    """A typing error in a path must not delete somebody's file; a link is not followed."""
    path = tmp_path / "engine.sock"
    match kind:
        case "file":
            path.write_text("precious")
        case "folder":
            path.mkdir()
        case "link":
            leave_stale(tmp_path / "elsewhere.sock")
            path.symlink_to(tmp_path / "elsewhere.sock")
    with pytest.raises(ConfigError, match="no socket of this user"), listen(str(path)):
        pass
    assert path.lstat()
    if kind == "file":
        assert path.read_text() == "precious"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
async def test_another_users_socket_is_left_alone(tmp_path: Path) -> None:
    """P74: somebody else put it there, perhaps to be connected to."""
    path = tmp_path / "engine.sock"
    leave_stale(path)
    os.chown(path, 12345, 12345)
    with pytest.raises(ConfigError, match="no socket of this user"), listen(str(path)):
        pass
    assert path.exists()


async def test_a_path_that_is_too_long_is_an_error_that_names_it(tmp_path: Path) -> None:
    """P74: a Unix socket's path holds 107 bytes."""
    path = tmp_path / ("x" * 120)
    with pytest.raises(ConfigError, match=r"x{120}.*choose another path"), listen(str(path)):
        pass
    assert not path.exists()


async def test_a_successors_socket_is_not_removed(tmp_path: Path) -> None:
    """A daemon that ends late must not take the path from the one that has replaced it."""
    path = tmp_path / "engine.sock"
    with listen(str(path)):
        path.unlink()
        with socket.socket(socket.AF_UNIX) as successor:
            successor.bind(str(path))
    assert path.exists()


async def test_a_path_that_somebody_removed_is_no_error(tmp_path: Path) -> None:
    """A cleaner of temporary files was there first."""
    path = tmp_path / "engine.sock"
    with listen(str(path)):
        path.unlink()
    assert not path.exists()
