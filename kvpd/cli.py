"""The `kvpd` command: it gathers a configuration, judges it whole, and only then starts anything.

Exit status: 0 for success, 2 for a command line or a configuration that cannot work, else what the daemon says.
"""

from __future__ import annotations

import contextlib
import json
import platform
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

import kvpd
from kvpd.errors import ConfigError, KvpdError

if TYPE_CHECKING:
    # The command must answer --help at once, so what takes long to import is imported where it is used.
    from kvpd.config import Config, Override, Role

BAD_CONFIGURATION: Final = 2
_ROLE = click.Choice(["receiver", "sender", "proxy"])


def _show_version(context: click.Context, _parameter: click.Parameter, wanted: bool) -> None:
    if not wanted or context.resilient_parsing:
        return
    import zmq  # noqa: PLC0415

    click.echo(f"kvpd {kvpd.__version__}")
    click.echo(f"python {platform.python_version()}")
    click.echo(f"ucx {_ucx_version()}")
    click.echo(f"libzmq {zmq.zmq_version()} (pyzmq {zmq.pyzmq_version()})")
    context.exit()


def _ucx_version() -> str:
    try:
        from kvpd.transports.ucx import ucx_version  # noqa: PLC0415

        return str(ucx_version())
    except (ImportError, OSError, KvpdError) as exc:
        return f"not found ({exc})"


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Show the versions of kvpd, Python, UCX and ZMQ, and exit.",
)
def main() -> None:
    """Move KV caches from prefill engines to decode engines.

    On the decode host runs a receiver, on each prefill host a sender. Engines connect to the daemon of their host
    with kvpd.client. A proxy gives them all one HTTP address.

    \b
    Examples:
      kvpd serve receiver --config /etc/kvpd.toml
      kvpd serve sender --set sender.staging_size=2GiB --set sender.chunk_bytes=3MiB
      kvpd config check --config /etc/kvpd.toml
    """


def _split_override(_context: click.Context, _parameter: click.Parameter, values: tuple[str, ...]) -> list[Override]:
    from kvpd.config import Override  # noqa: PLC0415

    overrides = []
    for value in values:
        path, equals, text = value.partition("=")
        if not equals:
            raise click.BadParameter(f"{value!r} has no value; write section.key=value, as in log.level=debug")
        overrides.append(Override(path.strip(), text.strip(), "--set"))
    return overrides


def _sources(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that say where a configuration comes from."""
    for option in (
        click.option("--log-level", metavar="LEVEL", help="The same as --set log.level=LEVEL."),
        click.option("--log-format", metavar="FORMAT", help="The same as --set log.format=FORMAT: json or console."),
        click.option(
            "--set",
            "overrides",
            multiple=True,
            metavar="SECTION.KEY=VALUE",
            callback=_split_override,
            help="Set one value; may be repeated. Stronger than the environment (KVPD_<SECTION>_<KEY>) and the file.",
        ),
        click.option(
            "--config",
            "file",
            type=click.Path(path_type=Path),
            help="A TOML file with [receiver], [sender], [proxy], [log] and [metrics].",
        ),
    ):
        command = option(command)
    return command


def _all_overrides(overrides: list[Override], log_format: str | None, log_level: str | None) -> list[Override]:
    from kvpd.config import Override  # noqa: PLC0415

    flags = (("log.format", log_format, "--log-format"), ("log.level", log_level, "--log-level"))
    return overrides + [Override(path, text, flag) for path, text, flag in flags if text is not None]


@contextlib.contextmanager
def _problems_reported() -> Iterator[None]:
    try:
        yield
    except ConfigError as exc:
        count = len(exc.problems)
        click.echo(f"kvpd: this configuration cannot work: {count} problem{'s' * (count != 1)}", err=True)
        for problem in exc.problems:
            click.echo(f"  {problem}", err=True)
        sys.exit(BAD_CONFIGURATION)


@main.command()
@click.argument("role", type=_ROLE)
@_sources
@click.option(
    "--address-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the addresses really bound to this file, as JSON, once they are.",
)
def serve(
    role: Role,
    file: Path | None,
    overrides: list[Override],
    log_format: str | None,
    log_level: str | None,
    address_file: Path | None,
) -> None:
    """Run a daemon until it is told to stop.

    SIGTERM and Ctrl-C let running transfers end, within drain_timeout_s; a second signal leaves at once. SIGHUP has a
    proxy read its engines from its file anew.

    \b
    Examples:
      kvpd serve receiver --set receiver.buffer_size=8GiB --set receiver.chunk_bytes=3MiB
      KVPD_SENDER_STAGING_SIZE=2GiB kvpd serve sender --config kvpd.toml --log-format console
      kvpd serve proxy --set proxy.prefill=http://10.0.0.4:8000 --set proxy.decode=http://10.0.0.5:8000+10.0.0.5:7300
    """
    from kvpd.config import resolve  # noqa: PLC0415

    everything = _all_overrides(overrides, log_format, log_level)
    with _problems_reported():
        config = resolve(role, file=file, overrides=everything)
        if role == "proxy":
            sys.exit(_serve_proxy(config, lambda: resolve(role, file=file, overrides=everything), address_file))
        from kvpd.service.serve import run  # noqa: PLC0415

        sys.exit(run(role, config, address_file=address_file))


def _serve_proxy(config: Config, read_again: Callable[[], Config], address_file: Path | None) -> int:
    try:
        from kvpd.integrations.proxy.serve import run  # noqa: PLC0415
    except ModuleNotFoundError as exc:
        if exc.name != "h11":
            raise
        raise ConfigError(["the proxy needs the package h11, which is not installed; install kvpd[proxy]"]) from exc
    return run(config, read_again=read_again, address_file=address_file)


@main.command(add_help_option=False, context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def bench(arguments: tuple[str, ...]) -> None:
    """Measure kvpd on this machine, beside what bounds it."""
    from kvpd.bench.command import main as bench_command  # noqa: PLC0415

    bench_command.main(list(arguments), prog_name="kvpd bench")


@main.group()
def config() -> None:
    """Look at a configuration without starting anything."""


@config.command()
@_sources
@click.option("--role", type=_ROLE, help="Who is to start with it. Default: every role that has a value of its own.")
def check(
    file: Path | None, overrides: list[Override], log_format: str | None, log_level: str | None, role: Role | None
) -> None:
    """Say everything that is wrong with a configuration: exit status 0 if nothing is, else 2.

    \b
    Example:
      kvpd config check --config kvpd.toml --role receiver
    """
    from kvpd.config import resolve, roles_mentioned  # noqa: PLC0415

    everything = _all_overrides(overrides, log_format, log_level)
    roles = (role,) if role else roles_mentioned(file, overrides=everything)
    with _problems_reported():
        resolve(*roles, file=file, overrides=everything)
        if not roles:
            raise ConfigError(["no value of any role is given; name the file with --config, or a --role"])
    click.echo(f"good for: {', '.join(roles)}")


@config.command()
@_sources
@click.option("--json", "as_json", is_flag=True, help="One JSON object: section.key, its value and its source.")
@click.option("--explain", is_flag=True, help="Also say what each key means.")
def show(
    file: Path | None,
    overrides: list[Override],
    log_format: str | None,
    log_level: str | None,
    as_json: bool,
    explain: bool,
) -> None:
    """Print every value in force and where it came from, as a TOML file that can be used as one.

    \b
    Examples:
      kvpd config show --explain > kvpd.toml
      kvpd config show --config kvpd.toml --json
    """
    from kvpd.config import resolve, settings  # noqa: PLC0415

    with _problems_reported():
        lines = settings(resolve(file=file, overrides=_all_overrides(overrides, log_format, log_level)))
    if as_json:
        table = {f"{line.section}.{line.name}": {"value": line.value, "source": line.source} for line in lines}
        click.echo(json.dumps(table, indent=2))
        return
    section = ""
    width = min(60, max(len(f"{line.name} = {line.text}") for line in lines))
    for line in lines:
        if line.section != section:
            click.echo(f"{chr(10) if section else ''}[{line.section}]")
            section = line.section
        if explain:
            click.echo(f"# {line.meaning}")
        click.echo(f"{f'{line.name} = {line.text}':<{width}}  # {line.source}")
