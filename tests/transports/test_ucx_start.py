"""What UCX data planes refuse to start on, and leave as it was."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from kvpd.errors import ConfigError
from kvpd.transports import _ucp, ucx_py
from kvpd.transports.ucx import open_ucx_data_plane, ucx_version
from kvpd.transports.ucx_py import open_ucx_py_data_plane

from .data_plane_rig import open_pair
from .marks import needs_ucx_py

every_binding = pytest.mark.parametrize(
    "open_plane", [open_ucx_data_plane, pytest.param(open_ucx_py_data_plane, marks=needs_ucx_py)]
)


async def _refused(open_plane: Callable[..., Any], **arguments: Any) -> str:
    """The one problem that opening the data plane is refused for."""
    with pytest.raises(ConfigError) as caught:
        async with open_plane(bytearray(4096), **arguments):
            raise AssertionError("unreachable")
    (problem,) = caught.value.problems
    return problem


async def test_a_library_that_is_not_there_is_named() -> None:
    """The operator must read what to change, and to what."""
    problem = await _refused(open_ucx_data_plane, library="/nowhere/libucp.so.0")
    assert "ucx_library = '/nowhere/libucp.so.0'" in problem
    assert "1.20" in problem
    with pytest.raises(ConfigError, match="/nowhere"):
        ucx_version("/nowhere/libucp.so.0")


@every_binding
async def test_an_old_library_is_refused_with_both_versions(
    open_plane: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before 1.20 the same settings quietly mean a tenth of the speed."""
    monkeypatch.setattr(_ucp, "MIN_VERSION", (99, 0))
    problem = await _refused(open_plane)
    assert ucx_version() in problem
    assert "99.0" in problem


@every_binding
async def test_transports_that_do_not_exist_are_refused(open_plane: Callable[..., Any]) -> None:
    """A misspelt transport must not come up as silence or as another transport."""
    assert "ucx_tls = 'nosuch'" in await _refused(open_plane, tls="nosuch")


@pytest.mark.parametrize("mode", ["ucx-tcp", pytest.param("ucx-py-tcp", marks=needs_ucx_py)])
async def test_the_environment_stays_as_it_was(mode: str) -> None:
    """Engines started by the same process must not inherit our UCX settings."""
    before = dict(os.environ)
    async with open_pair(mode, 4096):
        assert dict(os.environ) == before


# ------------------------------------------------------------------ ucx-py


def _run(program: str) -> str:
    """What a fresh interpreter prints: a module is imported once in a process, and its effects with it."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


async def test_without_ucx_py_it_says_where_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra alone does not help: the wheel is not where pip looks."""
    monkeypatch.setitem(sys.modules, "ucp", None)
    monkeypatch.delitem(sys.modules, "kvpd.transports._ucx_api", raising=False)
    problem = await _refused(open_ucx_py_data_plane)
    for word in ("transport = 'ucx-py'", "kvpd[ucx-py]", "conda", "NVIDIA's package index", "set transport to ucx"):
        assert word in problem


@needs_ucx_py
async def test_another_ucx_py_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the binding knows of ucx-py's inside is true of one version."""
    monkeypatch.setattr(ucx_py.load(), "ucx_py_version", "0.46.0")
    assert "0.46.0" in await _refused(open_ucx_py_data_plane)


def test_ucx_py_is_not_loaded_by_those_who_do_not_use_it() -> None:
    """It brings a second copy of many things along, and prepares UCX its own way."""
    program = """
import sys, trio
from kvpd.service.defaults import data_plane_factory
from kvpd.transports import ucx_py
from kvpd.transports.ucx import open_ucx_data_plane
async def main():
    data_plane_factory("ucx-py", "auto", "")
    async with open_ucx_data_plane(bytearray(4096)):
        print(sorted({"ucp", "kvpd.transports._ucx_api"} & sys.modules.keys()))
trio.run(main)
"""
    assert _run(program) == "[]"


@needs_ucx_py
def test_loading_ucx_py_leaves_the_environment_alone() -> None:
    """It sets variables of UCX, which every process started afterwards would inherit, engines too."""
    program = """
import os
before = dict(os.environ)
from kvpd.transports import ucx_py
ucx_py.load()
print(before == dict(os.environ))
"""
    assert _run(program) == "True"
