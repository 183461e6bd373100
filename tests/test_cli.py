"""The `kvpd` command: nothing starts with a configuration that cannot work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvpd.cli import main

Run = Callable[..., Result]


@pytest.fixture
def run() -> Run:
    """Runs the command in this process, without whatever KVPD_ variables there are."""
    clean: dict[str, str | None] = {name: None for name in os.environ if name.startswith("KVPD_")}

    def invoke(*arguments: str, env: dict[str, str] | None = None) -> Result:
        return CliRunner(env={**clean, **(env or {})}).invoke(main, arguments, catch_exceptions=False)

    return invoke


def test_version_names_everything_a_bug_report_needs(run: Run) -> None:
    """UCX and libzmq are where many bugs live."""
    result = run("--version")
    assert result.exit_code == 0
    names = [line.split()[0] for line in result.stdout.splitlines()]
    assert names == ["kvpd", "python", "ucx", "libzmq"]


@pytest.mark.parametrize(
    "arguments", [(), ("serve",), ("config",), ("config", "check"), ("config", "show"), ("bench",)]
)
def test_every_command_explains_itself(run: Run, arguments: tuple[str, ...]) -> None:
    """With an example where there is something to type."""
    result = run(*arguments, "--help")
    assert result.exit_code == 0
    assert "Usage: " in result.stdout
    if arguments != ("config",):
        assert "Example" in result.stdout


def test_a_bad_configuration_is_refused_whole_with_status_2(run: Run) -> None:
    """All problems, on stderr, before anything is bound."""
    result = run("serve", "receiver", "--set", "receiver.lease_s=soon", "--log-level", "loud")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "4 problems" in result.stderr
    for part in ("lease_s = 'soon' (--set)", "log.level = 'loud' (--log-level)", "buffer_size", "chunk_bytes"):
        assert part in result.stderr


def test_a_file_that_does_not_exist_is_refused_with_status_2(run: Run, tmp_path: Path) -> None:
    """The default must not be used instead."""
    result = run("config", "check", "--config", str(tmp_path / "none.toml"), "--role", "sender")
    assert result.exit_code == 2
    assert "none.toml" in result.stderr


@pytest.mark.parametrize("arguments", [("serve", "cook"), ("serve",), ("config", "check", "--set", "log.level")])
def test_a_command_line_that_makes_no_sense_has_status_2(run: Run, arguments: tuple[str, ...]) -> None:
    """The same as for a configuration, for who scripts it."""
    assert run(*arguments).exit_code == 2


def test_check_judges_the_roles_that_the_configuration_mentions(run: Run, tmp_path: Path) -> None:
    """One file may serve both hosts."""
    file = tmp_path / "kvpd.toml"
    file.write_text('[receiver]\nbuffer_size = "8MiB"\nchunk_bytes = "1MiB"\n')
    result = run("config", "check", "--config", str(file))
    assert (result.exit_code, result.stdout) == (0, "good for: receiver\n")
    result = run("config", "check", "--config", str(file), env={"KVPD_SENDER_NAME": "p"})
    assert result.exit_code == 2
    assert "sender.staging_size" in result.stderr


def test_check_of_nothing_is_not_a_success(run: Run) -> None:
    """A forgotten --config must not pass for a good one."""
    assert run("config", "check").exit_code == 2


def test_show_prints_a_file_and_where_each_value_came_from(run: Run) -> None:
    """`kvpd config show --explain > kvpd.toml` is how to begin."""
    flags = ("--set", "sender.staging_size=2GiB", "--log-format", "console")
    result = run("config", "show", "--explain", *flags, env={"KVPD_SENDER_NAME": "p0"})
    assert result.exit_code == 0
    tables = tomllib.loads(result.stdout)
    assert tables["sender"]["staging_size"] == "2GiB"
    assert tables["sender"]["name"] == "p0"
    assert tables["log"]["format"] == "console"
    (line,) = [line for line in result.stdout.splitlines() if line.startswith('name = "p0"')]
    assert line.endswith("# environment KVPD_SENDER_NAME")
    table = json.loads(run("config", "show", "--json", *flags).stdout)
    assert table["sender.staging_size"] == {"value": 2 << 30, "source": "--set"}
    assert table["log.format"]["source"] == "--log-format"
    assert table["log.level"]["source"] == "default"


def test_the_command_answers_without_importing_what_a_daemon_needs() -> None:
    """Nor does `import kvpd`: an engine must be able to use the client without trio and torch."""
    program = "import sys, kvpd, kvpd.cli; sys.exit(bool({'trio', 'torch', 'zmq', 'structlog'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_the_client_is_importable_where_trio_and_torch_are_not() -> None:
    """An engine's process has its own ideas of what is installed."""
    program = "import sys; sys.modules.update(trio=None, torch=None, zmq=None); import kvpd; kvpd.client"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_the_module_runs_as_the_command() -> None:
    """Where the scripts folder is not on PATH."""
    ran = subprocess.run(
        [sys.executable, "-m", "kvpd", "--help"], check=True, timeout=60, capture_output=True, text=True
    )
    assert ran.stdout.startswith("Usage: kvpd ")


def test_a_name_that_the_package_does_not_have_is_an_attribute_error() -> None:
    """Lazy exports must not turn a misspelling into anything else."""
    import kvpd  # noqa: PLC0415

    with pytest.raises(AttributeError, match="Recevier"):
        getattr(kvpd, "Recevier")  # noqa: B009  a checker would refuse the plain form
    assert set(kvpd.__all__) >= {"Sender", "Receiver", "client", "__version__"}
