"""From sources to a checked configuration: every problem is found before any is reported."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import attrs

from kvpd.config.rules import DAEMON_RULES, RULES, Rule
from kvpd.config.schema import KEYS, ROLES, SECTIONS, Config, Key, ProxyConfig, ReceiverConfig, Role, SenderConfig
from kvpd.config.sources import Given, Override, collect
from kvpd.config.values import Kind, Size
from kvpd.errors import ConfigError

DEFAULT_SOURCE = "default"


def resolve(
    *roles: Role,
    file: Path | None = None,
    environ: Mapping[str, str] | None = None,
    overrides: Sequence[Override] = (),
) -> Config:
    """The configuration with which `roles` may start. Without a role, each value is checked, and no more.

    Raises:
        ConfigError: `problems` has everything that is wrong, whatever source it came from.
    """
    collected = collect(file, os.environ if environ is None else environ, overrides)
    problems = collected.problems
    values: dict[str, object] = {}
    refused: set[str] = set()
    for path, given in collected.given.items():
        try:
            values[path] = KEYS[path].kind.check(given.value)
        except ValueError as exc:
            problems.append(_sentence(KEYS[path], given, str(exc)))
            refused.add(path)
    sources = {path: collected.given[path].source if path in values else DEFAULT_SOURCE for path in KEYS}
    sections = {name: _make_section(name, values) for name in SECTIONS}
    for role in roles:
        problems += _bad_defaults(role, sections[role], collected.given, refused)
        rules = RULES[role] + DAEMON_RULES[role]
        problems += _broken_rules(rules, role, sections[role], sources, refused)
    if problems:
        raise ConfigError(problems)
    return Config(**sections, sources=sources)


def roles_mentioned(
    file: Path | None, environ: Mapping[str, str] | None = None, overrides: Sequence[Override] = ()
) -> tuple[Role, ...]:
    """The roles of which any key is given: those that a configuration is meant for."""
    given = collect(file, os.environ if environ is None else environ, overrides).given
    return tuple(role for role in ROLES if any(KEYS[path].section == role for path in given))


def validate(section: ReceiverConfig | SenderConfig | ProxyConfig) -> None:
    """Judge a section that a program has built itself.

    Raises:
        ConfigError: `problems` has everything that is wrong with it.
    """
    role: Role = next(role for role in ROLES if isinstance(section, SECTIONS[role]))
    problems: list[str] = []
    refused: set[str] = set()
    sources: dict[str, str] = {}
    for key in (key for key in KEYS.values() if key.section == role):
        given = Given(getattr(section, key.name), "program")
        sources[key.path] = given.source
        try:
            checked = key.kind.check(given.value)
        except ValueError as exc:
            problems.append(_sentence(key, given, str(exc)))
            refused.add(key.path)
            continue
        if isinstance(given.value, str) and not isinstance(checked, str):
            problems.append(_sentence(key, given, f"is text; write {checked!r} in a program"))
            refused.add(key.path)
    problems += _broken_rules(RULES[role], role, section, sources, refused)
    if problems:
        raise ConfigError(problems)


def _make_section(name: str, values: Mapping[str, object]) -> Any:
    return SECTIONS[name](
        **{key.name: values[path] for path, key in KEYS.items() if key.section == name and path in values}
    )


def _bad_defaults(role: Role, section: object, given: Mapping[str, Given], refused: set[str]) -> list[str]:
    """Defaults made from this host's names and folders can be impossible too; they join `refused`."""
    problems = []
    for path, key in KEYS.items():
        if key.section == role and path not in given:
            value = Given(getattr(section, key.name), DEFAULT_SOURCE)
            try:
                key.kind.check(value.value)
            except ValueError as exc:
                problems.append(_sentence(key, value, str(exc)))
                refused.add(path)
    return problems


def _broken_rules(
    rules: Sequence[Rule], role: Role, section: object, sources: Mapping[str, str], refused: Set[str]
) -> list[str]:
    problems = []
    for rule in rules:
        if any(f"{role}.{name}" in refused for name in rule.keys):
            continue
        reason = rule.broken(section)
        if reason is not None:
            key = KEYS[f"{role}.{rule.keys[0]}"]
            problems.append(_sentence(key, Given(getattr(section, key.name), sources[key.path]), reason))
    return problems


def _sentence(key: Key, given: Given, reason: str) -> str:
    shown = list(given.value) if isinstance(given.value, tuple) else given.value
    value = shown if isinstance(shown, bool | int | float) else repr(shown)
    if isinstance(given.value, bool):
        value = str(given.value).lower()
    return f"{key.path} = {value} ({given.source}): {reason}"


@attrs.frozen
class Setting:
    """One value in force; `text` is how a TOML file writes it."""

    section: str
    name: str
    value: object
    text: str
    source: str
    meaning: str


def settings(config: Config) -> list[Setting]:
    """Every value in force, and where it came from, in the order of the schema."""
    lines = []
    for path, key in KEYS.items():
        value = getattr(getattr(config, key.section), key.name)
        source = config.sources.get(path, DEFAULT_SOURCE)
        lines.append(Setting(key.section, key.name, value, _toml(key.kind, value), source, key.meaning))
    return lines


def _toml(kind: Kind, value: object) -> str:
    if isinstance(kind, Size) and isinstance(value, int):
        value = kind.shown(value)
    if isinstance(value, str | tuple):
        return json.dumps(value, ensure_ascii=False)
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
