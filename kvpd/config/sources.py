"""Where values come from, in rising priority: defaults, a TOML file, the environment, flags.

Nothing is ignored: a key or a variable that is not known is a problem, with the nearest name that is.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from kvpd.config.schema import KEYS, SECTIONS, Key

_PREFIX = "KVPD_"
_VARIABLES = {key.variable: key for key in KEYS.values()}


@attrs.frozen
class Override:
    """A flag: `flag` is how the user wrote it, `path` is `section.key`, and the value is still text."""

    path: str
    text: str
    flag: str = "--set"


@attrs.frozen
class Given:
    """A value that somebody gave, not yet checked."""

    value: object
    source: str


@attrs.define
class Collected:
    """What all sources gave together, the strongest for each key, and what was wrong with them."""

    given: dict[str, Given] = attrs.field(factory=dict)
    problems: list[str] = attrs.field(factory=list)


def collect(file: Path | None, environ: Mapping[str, str], overrides: Sequence[Override]) -> Collected:
    """Everything given."""
    collected = Collected()
    if file is not None:
        _read_file(file, collected)
    _read_environment(environ, collected)
    for override in overrides:
        _read_override(override, collected)
    return collected


def _read_file(file: Path, collected: Collected) -> None:
    try:
        tables = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as exc:
        collected.problems.append(f"{file}: cannot be read ({exc.strerror}); name a file that can")
        return
    except UnicodeDecodeError as exc:
        collected.problems.append(f"{file}: is not UTF-8 at byte {exc.start}; save it as UTF-8 text")
        return
    except tomllib.TOMLDecodeError as exc:
        collected.problems.append(f"{file}: is not TOML: {exc}; correct it there")
        return
    for section, table in tables.items():
        _read_section(section, table, file, collected)


def _read_section(section: str, table: Any, file: Path, collected: Collected) -> None:
    if section not in SECTIONS:
        collected.problems.append(f"[{section}] ({file}): no such section; {_nearest(section, SECTIONS)}")
        return
    if not isinstance(table, dict):
        collected.problems.append(f"{section} = {table!r} ({file}): is no section; write [{section}] above its keys")
        return
    for name, value in table.items():
        path = f"{section}.{name}"
        if path not in KEYS:
            collected.problems.append(f"{path} ({file}): no such key; {_nearest_key(section, name)}")
        else:
            collected.given[path] = Given(value, str(file))


def _read_environment(environ: Mapping[str, str], collected: Collected) -> None:
    for variable in sorted(name for name in environ if name.startswith(_PREFIX)):
        key = _VARIABLES.get(variable)
        if key is None:
            collected.problems.append(
                f"{variable} (environment): no such setting; {_nearest(variable, _VARIABLES, _PREFIX)}"
            )
            continue
        _give(key, environ[variable], f"environment {variable}", collected)


def _read_override(override: Override, collected: Collected) -> None:
    key = KEYS.get(override.path)
    if key is not None:
        _give(key, override.text, override.flag, collected)
        return
    section, _, name = override.path.partition(".")
    remedy = _nearest_key(section, name) if section in SECTIONS else _nearest(override.path, KEYS)
    collected.problems.append(f"{override.path} ({override.flag}): no such key; {remedy}")


def _give(key: Key, text: str, source: str, collected: Collected) -> None:
    collected.given[key.path] = Given(key.kind.from_text(text), source)


def _nearest_key(section: str, name: str) -> str:
    """The same key of another section, or the nearest of this one."""
    elsewhere = [path for path, key in KEYS.items() if key.name == name]
    if elsewhere:
        return f"there is {' and '.join(elsewhere)}"
    # Without the section, which all candidates share and which would make every one of them look near.
    return _nearest(name, [key.name for key in KEYS.values() if key.section == section])


def _nearest(name: str, known: Iterable[str], shared_prefix: str = "") -> str:
    by_rest = {word.removeprefix(shared_prefix): word for word in known}
    # Cutoff 0: the nearest is named however far it is.
    (close,) = difflib.get_close_matches(name.removeprefix(shared_prefix), by_rest, n=1, cutoff=0.0)
    return f"the nearest is {by_rest[close]}, and `kvpd config show` lists all"
