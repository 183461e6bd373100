"""Over HTTP, whatever goes or dies: every client gets a single server's tokens or a clean error, and soon.

Afterwards the next request is served, no slot of either daemon and no block of either engine is taken.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from conftest import random_prompt
from served import BOUND_S, Futures, Outcome, Site
from vllm_app.asking import Asked
from vllm_app.stack import DAEMON_TIMEOUT_S

import kvpd.client

CLIENTS = 12
LONG = 1900
NEXT = random_prompt(300, 99)
LEFT = {"outcome": "client_cancelled"}


def taken_by_an_engine(sender: str, receiver: str, count: Callable[[], dict[str, float]]) -> dict[str, float]:
    """What `count` says while an engine fills two chunks, which it then does not send."""
    with kvpd.client.connect_sender(sender) as link, contextlib.suppress(InterruptedError):
        transfer = link.open("held", receiver=receiver, total_chunks=2)
        with transfer, transfer.stage([b"a", b"b"], last=True):
            taken = count()
            raise InterruptedError
    return taken


def test_what_somebody_holds_is_seen(site: Site) -> None:
    """The control: a count that is always nothing would pass every test below."""
    sender, receiver = site.stack.told("sender", "engine_socket"), site.stack.told("receiver", "control_address")
    assert taken_by_an_engine(sender, receiver, site.slots_taken) == {"receiver": 2, "sender": 2}
    with site.begin(random_prompt(1000, 98), stream=True, max_tokens=1000) as asked:
        events = asked.events()
        assert all(next(events)["choices"] for _ in range(10))
        held = site.held()
    assert held["decode vllm:kv_cache_usage_perc"] > 0
    assert held["decode vllm:num_requests_running"] == held["proxy"] == 1
    site.check_clean(NEXT)


def left(site: Site) -> float:
    """How many clients have left before they had their answers, as the proxy counts."""
    return site.metric("proxy", "kvpd_requests_total", **LEFT)


def check_left(site: Site, before: float, count: int) -> None:
    """The proxy has seen that so many have left."""
    site.stack.wait_until(lambda: left(site) - before >= count, "the proxy to see them leave", DAEMON_TIMEOUT_S)
    assert left(site) - before == count


def test_clients_leave_while_their_prompts_are_computed(site: Site) -> None:
    """Half of them do; what they had is given back, and the others' answers are not touched."""
    prompts = [random_prompt(LONG, 1000 + number) for number in range(2 * CLIENTS)]
    expected = site.single(prompts[:CLIENTS])
    before, seen = left(site), len(site.stack["sender"].said("transfer_opened"))
    with ThreadPoolExecutor(CLIENTS) as pool, ExitStack() as leaving:
        futures = site.ask_all(prompts[:CLIENTS], [True, False] * (CLIENTS // 2), pool)
        # Engines compute prompts in the order in which they came: those of the second half are far from done.
        site.stack.wait_until(
            lambda: len(site.stack["sender"].said("transfer_opened")) >= seen + CLIENTS,
            "all transfers to be opened",
            DAEMON_TIMEOUT_S,
        )
        for prompt in prompts[CLIENTS:]:
            leaving.enter_context(site.begin(prompt))
        site.stack.wait_until(
            lambda: len(site.stack["sender"].said("transfer_opened")) > seen + CLIENTS,
            "the first of those who leave to be known",
            DAEMON_TIMEOUT_S,
        )
        leaving.close()
        assert [future.result(BOUND_S).tokens for future in futures] == expected
    check_left(site, before, CLIENTS)
    site.check_clean(NEXT)


def test_clients_leave_in_the_midst_of_their_streams(site: Site) -> None:
    """The decode engine would go on for a thousand tokens."""
    before = left(site)
    with ExitStack() as leaving:
        asked: list[Asked] = [
            leaving.enter_context(site.begin(random_prompt(200, 2000 + number), stream=True, max_tokens=1500))
            for number in range(CLIENTS)
        ]
        for one in asked:
            assert next(one.events())["choices"][0]["token_ids"]
    check_left(site, before, CLIENTS)
    site.check_clean(NEXT)


def under_load(site: Site, seed: int, fault: Callable[[], None]) -> list[Outcome]:
    """Clients, half of them streaming, whom `fault` meets when some have their answers and most have not.

    Each gets the right tokens or a clean error, in time.
    """
    prompts = [random_prompt(LONG - 50 * number, seed + number) for number in range(2 * CLIENTS)]
    expected = site.single(prompts)
    # Two waves: the second one asks as the first one's clients are served, or meet the fault.
    with ThreadPoolExecutor(CLIENTS) as pool:
        before = len(site.stack["receiver"].said("transfer_completed"))
        futures: Futures = site.ask_all(prompts, [True, False] * CLIENTS, pool)
        site.stack.wait_until(
            lambda: len(site.stack["receiver"].said("transfer_completed")) >= before + 3,
            "some transfers to be complete",
            DAEMON_TIMEOUT_S,
        )
        fault()
        outcomes = [future.result(2 * BOUND_S) for future in futures]
    check(outcomes, expected)
    return outcomes


def check(outcomes: Sequence[Outcome], expected: Sequence[list[int]]) -> None:
    """Right tokens or a clean error, in time."""
    for outcome, tokens in zip(outcomes, expected, strict=True):
        if outcome.error is None:
            assert outcome.tokens == tokens
        else:
            assert outcome.is_clean_error, outcome
            assert outcome.tokens == tokens[: len(outcome.tokens)]  # those that came before it
        assert outcome.seconds < BOUND_S
    said = [(outcome.status, outcome.error, round(outcome.seconds, 1)) for outcome in outcomes]
    sys.stdout.write(f"{said}\n")  # shown if the test fails


@pytest.mark.parametrize("daemon", ["sender", "receiver"])
def test_a_daemon_dies_under_load_and_comes_back(site: Site, daemon: str) -> None:
    """What was on its way is lost, said, and perhaps tried again; engines and the proxy outlive it."""

    def fault() -> None:
        site.stack[daemon].kill()
        site.stack.restart(daemon)

    outcomes = under_load(site, 3000 if daemon == "sender" else 4000, fault)
    assert any(outcome.error is None for outcome in outcomes)
    site.check_clean(NEXT)


def test_a_daemon_is_away_and_comes_back(site: Site) -> None:
    """While it is away each request ends by an error; nobody has to restart an engine afterwards."""
    for daemon in ("sender", "receiver"):
        site.stack[daemon].kill()
        outcomes = [site.ask(random_prompt(300, 5000 + number), stream=bool(number)) for number in range(2)]
        assert all(outcome.is_clean_error and not outcome.tokens for outcome in outcomes), outcomes
        # What the prefill engine's connector knows when the answer leaves is in it; else nothing arrives.
        assert {outcome.error["code"] for outcome in outcomes if outcome.error} <= {"peer_lost", "transfer_lost"}
        site.stack.restart(daemon)
        site.check_clean(NEXT)


@pytest.mark.timeout(420)  # a vLLM server starts in the midst of it
def test_the_prefill_server_dies_under_load_and_comes_back(site: Site) -> None:
    """Its requests are ended or answered; while it is away clients are told so at once; then it is found again."""
    under_load(site, 6000, site.stack["prefill"].kill)
    refused = site.ask(NEXT)
    assert (refused.status, refused.error and refused.error["code"]) == (503, "no_prefill_engine")
    site.stack.wait_until(lambda: not site.slots_taken(), "all slots to be free", DAEMON_TIMEOUT_S)
    site.stack.restart("prefill")
    site.check_clean(NEXT)
