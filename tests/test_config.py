"""Configuration: everything is checked before anything starts, and every refusal can be acted on."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpd.config import (
    Config,
    Override,
    ReceiverConfig,
    Role,
    SenderConfig,
    default_engine_socket,
    ensure_socket_folder,
    resolve,
    roles_mentioned,
    runtime_folder,
    settings,
    validate,
)
from kvpd.errors import ConfigError

MIB = 1 << 20
RECEIVER = {"receiver.buffer_size": "8MiB", "receiver.chunk_bytes": "1MiB"}
SENDER = {"sender.staging_size": "8MiB", "sender.chunk_bytes": "1MiB"}


def load(
    *roles: Role,
    flags: Mapping[str, str] | None = None,
    env: Mapping[str, str] | None = None,
    file: Path | None = None,
) -> Config:
    """Resolve, without this process's environment."""
    overrides = [Override(path, text) for path, text in (flags or {}).items()]
    return resolve(*roles, file=file, environ=env or {}, overrides=overrides)


def problems_of(
    *roles: Role,
    flags: Mapping[str, str] | None = None,
    env: Mapping[str, str] | None = None,
    file: Path | None = None,
) -> tuple[str, ...]:
    """What is wrong."""
    with pytest.raises(ConfigError) as caught:
        load(*roles, flags=flags, env=env, file=file)
    return caught.value.problems


@pytest.fixture
def written(tmp_path: Path) -> Callable[[str], Path]:
    """Writes a file."""

    def write(text: str) -> Path:
        file = tmp_path / "kvpd.toml"
        file.write_text(text, encoding="utf-8")
        return file

    return write


# ------------------------------------------------------------------ sources


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


# ------------------------------------------------------------------ values


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("8GiB", 8 << 30), ("64MiB", 64 * MIB), ("1.5GiB", 3 << 29), ("1_000", 1000), ("4096", 4096), ("1 KiB", 1024)],
)
def test_sizes_are_bytes_or_binary_units(text: str, nbytes: int) -> None:
    """The ways of writing a size that have one meaning."""
    assert load(flags={"receiver.buffer_size": text}).receiver.buffer_size == nbytes


@pytest.mark.parametrize("text", ["100 gigs", "8GB", "8gib", "-1", "0.3KiB", "", "GiB", "1e9", "9999999TiB", "nan"])
def test_other_sizes_are_refused(text: str) -> None:
    """8GB means two different numbers to two readers."""
    (problem,) = problems_of(flags={"receiver.buffer_size": text})
    assert repr(text) in problem or text in problem


@given(st.integers(min_value=0, max_value=1 << 50))
def test_a_size_is_shown_as_it_can_be_written(nbytes: int) -> None:
    """Whatever `config show` makes of a size, it is that size."""
    config = load(flags={"receiver.buffer_size": str(nbytes)})
    (shown,) = [line.text for line in settings(config) if line.name == "buffer_size"]
    assert load(flags={"receiver.buffer_size": shown.strip('"')}).receiver.buffer_size == nbytes


def test_the_put_window_may_be_left_to_the_transport() -> None:
    """Over TCP another window is right than over shared memory, and kvpd knows which it is."""
    assert load(flags={"sender.put_window_bytes": "auto"}) == load()
    assert load(flags={"sender.put_window_bytes": "8MiB"}).sender.put_window_bytes == 8 * MIB
    assert len(problems_of(flags={"sender.put_window_bytes": "7"})) == 1


@pytest.mark.parametrize("text", ["0.5s", "-1", "nan", "inf", "1e300", "soon", "0"])
def test_p91_a_duration_is_a_positive_number_of_seconds(text: str) -> None:
    """A unit, a negative number or a zero that could mean `never` or `at once` is asked about, not guessed."""
    (problem,) = problems_of(flags={"receiver.allocation_timeout_s": text})
    assert "receiver.allocation_timeout_s" in problem
    assert "seconds" in problem


def test_p91_a_quoted_duration_in_a_file_is_refused(written: Callable[[str], Path]) -> None:
    """A type that is silently converted hides the mistake beside it."""
    (problem,) = problems_of(file=written('[receiver]\nready_ttl_s = "30"\n'))
    assert "quotes" in problem


def test_p91_zero_is_allowed_where_it_means_something() -> None:
    """A drain of 0 seconds cancels at once, and a grace of 0 seconds is none."""
    config = load(flags={"receiver.drain_timeout_s": "0", "receiver.claim_grace_s": "0"})
    assert (config.receiver.drain_timeout_s, config.receiver.claim_grace_s) == (0, 0)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("receiver.name", "a/b"),
        ("receiver.name", ""),
        ("receiver.name", "x" * 65),
        ("receiver.chunk_tokens", "0"),
        ("receiver.chunk_tokens", "2.5"),
        ("receiver.queue_depth_max", "0"),
        ("receiver.buffer_device", "cuda"),
        ("receiver.layout", "x" * 5000),
        ("sender.notify", "maybe"),
        ("sender.notify_proxy", "yes"),
        ("sender.transport", "smoke-signals"),
        ("sender.transport", "local"),
        ("receiver.transport", "auto"),
        ("log.format", "xml"),
        ("metrics.address", "9400"),
        ("metrics.address", "127.0.0.1:99999"),
        ("receiver.control_address", "::1:7300"),
        ("receiver.advertise_address", "0.0.0.0:7300"),
        ("receiver.advertise_address", "decode-0:0"),
        ("sender.proxy_address", "*:9500"),
    ],
)
def test_an_impossible_value_is_refused(path: str, text: str) -> None:
    """One of each kind of value, and each limit."""
    (problem,) = problems_of(flags={path: text})
    assert problem.startswith(f"{path} = ")


@pytest.mark.parametrize(
    ("value", "kind"), [("true", "chunk_tokens"), ("[1]", "name"), ("1", "layout"), ("{}", "lease_s")]
)
def test_a_wrong_type_in_a_file_is_refused(value: str, kind: str, written: Callable[[str], Path]) -> None:
    """TOML has types, and `true` is no number of tokens."""
    (problem,) = problems_of(file=written(f"[receiver]\n{kind} = {value}\n"))
    assert problem.startswith(f"receiver.{kind} = ")


@given(st.text(max_size=40))
def test_no_text_at_all_can_do_more_than_be_refused(text: str) -> None:
    """A refusal is the only error that a value may cause, for every key."""
    for key in attrs.fields(ReceiverConfig):
        with contextlib.suppress(ConfigError):
            load("receiver", flags=RECEIVER | {f"receiver.{key.name}": text})


# ------------------------------------------------------------------ combinations


@pytest.mark.parametrize(("role", "keys"), [("receiver", RECEIVER), ("sender", SENDER)])
def test_the_role_that_starts_needs_its_memory_set(role: Role, keys: dict[str, str]) -> None:
    """There is no size that would be right everywhere, and the other role's does not matter."""
    load(role, flags=keys)
    problems = problems_of(role)
    assert [problem.split(" ")[0] for problem in problems] == list(keys)
    assert all("must be set" in problem for problem in problems)


@pytest.mark.parametrize(("role", "size"), [("receiver", "buffer_size"), ("sender", "staging_size")])
def test_memory_for_less_than_one_chunk_is_refused_with_both_numbers(role: Role, size: str) -> None:
    """A daemon that can never move anything should not start."""
    (problem,) = problems_of(role, flags={f"{role}.{size}": "1000", f"{role}.chunk_bytes": "1001"})
    assert "1000" in problem
    assert "1001" in problem


def test_more_chunks_than_the_protocol_can_number_are_refused() -> None:
    """The receiver would otherwise start, and no sender could read its Welcome."""
    (problem,) = problems_of("receiver", flags={"receiver.buffer_size": "1GiB", "receiver.chunk_bytes": "1"})
    assert "16777216" in problem


def test_the_longest_prompt_must_fit_the_buffer() -> None:
    """Otherwise it would be refused as too large when it comes, at night."""
    flags = RECEIVER | {"receiver.max_prefill_tokens": "2049"}  # 8 chunks of 256 tokens hold 2,048
    (problem,) = problems_of("receiver", flags=flags)
    assert "9 chunks" in problem
    assert "holds 8" in problem
    load(
        "receiver",
        flags=(flags | {"receiver.max_prefill_tokens": "2048"}),
    )


@pytest.mark.parametrize(("role", "keys"), [("receiver", RECEIVER), ("sender", SENDER)])
def test_ucx_py_brings_its_own_library(role: Role, keys: dict[str, str]) -> None:
    """A path that is quietly ignored hides which UCX is at work."""
    flags = keys | {f"{role}.transport": "ucx-py"}
    load(role, flags=flags)
    (problem,) = problems_of(role, flags=flags | {f"{role}.ucx_library": "/usr/lib64/libucp.so.0"})
    assert problem.startswith(f"{role}.ucx_library = ")
    assert "transport ucx-py" in problem
    load(role, flags=flags | {f"{role}.transport": "ucx", f"{role}.ucx_library": "/usr/lib64/libucp.so.0"})


@pytest.mark.parametrize(
    ("flags", "blamed"),
    [
        ({"receiver.put_deadline_s": "5"}, "receiver.put_deadline_s"),
        ({"receiver.lease_s": "8"}, "receiver.put_deadline_s"),
        ({"receiver.progress_timeout_s": "8"}, "receiver.progress_timeout_s"),
        ({"receiver.control_address": "0.0.0.0:7300"}, "receiver.control_address"),
        ({"receiver.control_address": "tcp://[::]:7300"}, "receiver.control_address"),
        ({"receiver.control_address": "*:7300"}, "receiver.control_address"),
        ({"receiver.control_address": "inproc://x"}, "receiver.control_address"),
    ],
)
def test_values_that_cannot_go_together_are_refused(flags: dict[str, str], blamed: str) -> None:
    """Each is fine alone."""
    (problem,) = problems_of("receiver", flags=RECEIVER | flags)
    assert problem.startswith(f"{blamed} = ")


def test_a_wildcard_may_be_bound_when_another_address_is_advertised() -> None:
    """Bind and advertise are two settings."""
    flags = RECEIVER | {"receiver.control_address": "0.0.0.0:0", "receiver.advertise_address": "decode-0:7300"}
    load("receiver", flags=flags)


def test_a_bad_value_is_not_reported_again_by_the_rules_that_need_it() -> None:
    """One mistake, one sentence."""
    problems = problems_of(
        "receiver", flags=RECEIVER | {"receiver.put_deadline_s": "soon", "receiver.chunk_bytes": "x"}
    )
    assert len(problems) == 2


def test_a_section_made_by_a_program_is_judged_by_the_same_rules() -> None:
    """kvpd.Receiver takes one, and may join a sender of its own process."""
    good = ReceiverConfig(buffer_size=8 * MIB, chunk_bytes=MIB, control_address="inproc://receiver")
    validate(good)
    validate(SenderConfig(staging_size=8 * MIB, chunk_bytes=MIB))
    with pytest.raises(ConfigError, match="put_deadline_s"):
        validate(attrs.evolve(good, put_deadline_s=9.0))
    with pytest.raises(ConfigError, match="in a program"):
        validate(attrs.evolve(good, buffer_size="8MiB"))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="lease_s"):
        validate(attrs.evolve(good, lease_s=float("nan")))


# ------------------------------------------------------------------ sockets


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
