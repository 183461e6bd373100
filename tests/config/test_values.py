"""Single values: the ways to write each kind of them, and every other way is refused."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpd.config import ReceiverConfig, settings
from kvpd.errors import ConfigError

from .loading import MIB, RECEIVER, load, problems_of


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
