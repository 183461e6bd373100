"""What must be set, and values that are each fine alone and cannot go together."""

from __future__ import annotations

import attrs
import pytest

from kvpd.config import ReceiverConfig, Role, SenderConfig, validate
from kvpd.errors import ConfigError

from .loading import MIB, RECEIVER, SENDER, load, problems_of


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
    found = load("receiver", flags=flags).receiver
    assert (found.control_address, found.advertise_address) == ("0.0.0.0:0", "decode-0:7300")


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
