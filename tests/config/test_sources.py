"""Where settings come from: who has the last word, what no source may say, and how a refusal reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvpd.config import Override, resolve, roles_mentioned, settings
from kvpd.errors import ConfigError

from .loading import load, problems_of


def test_a_flag_beats_the_environment_which_beats_the_file_which_beats_the_default(
    tmp_path: Path, written: Callable[[str], Path]
) -> None:
    """Whoever is nearest to the start of the process has the last word."""
    toml = "[receiver]\nlease_s = 20\nclaim_grace_s = 21\nready_ttl_s = 22\n"
    env = {"KVPD_RECEIVER_CLAIM_GRACE_S": "31", "KVPD_RECEIVER_READY_TTL_S": "32", "PATH": "/bin"}
    config = load(file=written(toml), env=env, flags={"receiver.ready_ttl_s": "42"})
    receiver = config.receiver
    assert (receiver.drain_timeout_s, receiver.lease_s, receiver.claim_grace_s, receiver.ready_ttl_s) == (
        10,
        20,
        31,
        42,
    )
    assert config.sources["receiver.drain_timeout_s"] == "default"
    assert config.sources["receiver.lease_s"] == str(tmp_path / "kvpd.toml")
    assert config.sources["receiver.claim_grace_s"] == "environment KVPD_RECEIVER_CLAIM_GRACE_S"
    assert config.sources["receiver.ready_ttl_s"] == "--set"


def test_all_problems_of_all_sources_are_told_at_once(written: Callable[[str], Path]) -> None:
    """Mending a file one error at a time is one restart for each."""
    problems = problems_of(
        "receiver",
        file=written('[receiver]\nlease_s = "30"\nbuffer_size = "100 gigs"\n'),
        env={"KVPD_LOG_LEVEL": "loud"},
        flags={"receiver.chunk_tokens": "many"},
    )
    assert len(problems) == 5  # chunk_bytes is missing, too
    for key in (
        "receiver.lease_s",
        "receiver.buffer_size",
        "log.level",
        "receiver.chunk_tokens",
        "receiver.chunk_bytes",
    ):
        assert sum(problem.startswith(f"{key} = ") for problem in problems) == 1


def test_a_refusal_names_key_value_source_and_remedy(tmp_path: Path, written: Callable[[str], Path]) -> None:
    """The reader of a refusal should not have to look anything up."""
    (problem,) = problems_of(file=written('[receiver]\nbuffer_size = "100 gigs"\n'))
    for part in ("receiver.buffer_size", "100 gigs", str(tmp_path / "kvpd.toml"), "8GiB"):
        assert part in problem


@pytest.mark.parametrize(
    ("toml", "nearest"),
    [
        ("[receiver]\nbuffer_sise = 1\n", "buffer_size"),
        ("[reciever]\nbuffer_size = 1\n", "receiver"),
        ("[sender]\nbuffer_size = 1\n", "receiver.buffer_size"),
        ("[proxy]\nprefil = []\n", "prefill"),
        ("receiver = 1\n", "[receiver]"),
    ],
)
def test_p88_an_unknown_key_is_an_error_that_names_the_nearest(
    toml: str, nearest: str, written: Callable[[str], Path]
) -> None:
    """A misspelt key that is ignored is a setting that silently is not in force."""
    (problem,) = problems_of(file=written(toml))
    assert nearest in problem


@pytest.mark.parametrize("variable", ["KVPD_RECEIVER_BUFFERSIZE", "KVPD_RECIEVER_BUFFER_SIZE", "KVPD_BUFFER_SIZE"])
def test_p88_an_unknown_variable_is_an_error_that_names_the_nearest(variable: str) -> None:
    """The environment is where a misspelling is seen least."""
    (problem,) = problems_of(env={variable: "1"})
    assert variable in problem
    assert "KVPD_RECEIVER_BUFFER_SIZE" in problem


def test_p88_an_unknown_flag_is_an_error_that_names_the_nearest() -> None:
    """So is `--set` with a key that does not exist, with or without a section."""
    problems = problems_of(flags={"log.lvl": "debug", "buffer_size": "1"})
    assert "level" in problems[0]
    assert "receiver.buffer_size" in problems[1]


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"[receiver]\nlease_s = 1\nlease_s = 2\n", "overwrite"),
        (b"receiver:\n\tlease_s: 1\n", "not TOML"),
        (b'[receiver]\nname = "\xff"\n', "UTF-8"),
        (None, "cannot be read"),
    ],
)
def test_p88_a_file_that_is_none_is_refused_by_name(content: bytes | None, word: str, tmp_path: Path) -> None:
    """A key given twice, YAML, bytes that are no text, and a file that is not there."""
    file = tmp_path / "kvpd.toml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        resolve(file=file, environ={})
    (problem,) = caught.value.problems
    assert str(file) in problem
    assert word in problem


def test_p88_an_empty_file_sets_nothing(written: Callable[[str], Path]) -> None:
    """It is valid, and a role that needs a value says so itself."""
    assert load(file=written("")) == load()
    assert len(problems_of("receiver", file=written(""))) == 2


def test_the_roles_mentioned_are_those_with_a_value() -> None:
    """`kvpd config check` judges what the configuration is meant for."""
    assert roles_mentioned(None, {}, []) == ()
    assert roles_mentioned(None, {"KVPD_SENDER_NAME": "p"}, [Override("log.level", "info")]) == ("sender",)


def test_settings_show_every_value_and_can_be_read_back(written: Callable[[str], Path]) -> None:
    """What `kvpd config show` prints is a file with the same meaning."""
    config = load(
        "receiver", flags={"receiver.buffer_size": "8MiB", "receiver.chunk_bytes": "1000", "receiver.lease_s": "12.5"}
    )
    rows: dict[str, list[str]] = {}
    for line in settings(config):
        rows.setdefault(line.section, [f"[{line.section}]"]).append(f"{line.name} = {line.text}")
    text = "\n".join(row for section in rows.values() for row in section)
    assert 'buffer_size = "8MiB"' in text
    assert load("receiver", file=written(text)) == config
