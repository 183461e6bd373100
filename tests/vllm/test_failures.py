"""Whatever goes wrong, a request gets the right tokens or a clean error, and nothing stays taken."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from conftest import IN_MAIN_ENVIRONMENT, PROMPTS, Single, StackMaker, random_prompt, transfer_config
from e2e.daemons import Fleet
from engines import CHUNK_BYTES, Answer, Engine

import kvpd.client

SOME = PROMPTS[-3:]
POLICIES = ["recompute", "fail"]


def check_failed(policy: str, answers: list[Answer], tokens: list[list[int]]) -> None:
    """The policy was followed: computed here, or failed."""
    if policy == "recompute":
        assert [answer.tokens for answer in answers] == tokens
    else:
        assert [answer.finish for answer in answers] == ["error"] * len(answers)
        assert [answer.tokens for answer in answers] == [[]] * len(answers)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_lost_transfer_follows_the_policy(make_stack: StackMaker, single: Single, policy: str) -> None:
    """It had arrived and is gone: the receiver says so, and nobody waits for a timeout."""
    stack = make_stack(policy=policy, decode_extra={"load_timeout_s": 3600})
    params = stack.compute(SOME)
    stack.receiver.wait_for("transfer_completed", len(SOME))
    with kvpd.client.connect_receiver(stack.receiver.socket) as link:
        for one in params:
            link.cancel(one["transfer_id"])
        stack.receiver.wait_quiet()
    check_failed(policy, stack.decode.generate(SOME, params), single.tokens(SOME))
    stack.check_clean()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_transfer_that_never_comes_follows_the_policy(make_stack: StackMaker, single: Single, policy: str) -> None:
    """vLLM itself would wait for ever."""
    stack = make_stack(policy=policy, decode_extra={"load_timeout_s": 0.5})
    params = [{"do_remote_prefill": True, "transfer_id": f"never-{number}"} for number in range(len(SOME))]
    check_failed(policy, stack.decode.generate(SOME, params), single.tokens(SOME))
    assert "load_timeout_s = 0.5 s" in stack.decode.text()
    stack.check_clean()


def test_p44_what_has_expired_is_computed_and_never_read(make_stack: StackMaker, single: Single) -> None:
    """A slot whose time is over may hold somebody else's KV already."""
    stack = make_stack(
        policy="recompute", receiver_settings={"ready_ttl_s": 0.2}, decode_extra={"load_timeout_s": 3600}
    )
    params = stack.compute(SOME)
    stack.receiver.wait_for("transfer_expired", len(SOME))
    assert [one.tokens for one in stack.decode.generate(SOME, params)] == single.tokens(SOME)
    stack.check_clean()


def test_daemons_may_die_and_return(make_stack: StackMaker, single: Single, tmp_path: Any) -> None:
    """Engines outlive their daemons: what was on its way is lost cleanly, what comes later is served."""
    stack = make_stack(policy="recompute", decode_extra={"load_timeout_s": 3600})
    params = stack.compute(SOME)
    # Its log says that they are complete a moment before it tells the engine, and it may be killed in between.
    stack.decode.do("hear", transfer_ids=[one["transfer_id"] for one in params])
    stack.receiver.kill()
    assert [one.tokens for one in stack.decode.generate(SOME, params)] == single.tokens(SOME)
    stack.sender.kill()
    answers = stack.prefill.generate(SOME, stack.outgoing(len(SOME)), 1)
    assert [one.finish for one in answers] == ["length"] * len(SOME)
    assert stack.prefill.drain() == 0
    assert stack.decode.drain() == 0
    with Fleet(tmp_path) as fleet:
        settings: dict[str, object] = {"chunk_bytes": CHUNK_BYTES}
        stack.receiver = fleet.start(
            "receiver",
            "r",
            {**settings, "buffer_size": 64 * CHUNK_BYTES, "control_address": "127.0.0.1:0"},
            prefix=IN_MAIN_ENVIRONMENT,
        ).wait_ready()
        stack.sender = fleet.start(
            "sender",
            "s",
            {**settings, "staging_size": 16 * CHUNK_BYTES, "notify_proxy": "false"},
            prefix=IN_MAIN_ENVIRONMENT,
        ).wait_ready()
        stack.receiver.wait_for("engine_attached")
        assert [one.tokens for one in stack.serve(SOME)] == single.tokens(SOME)
        assert stack.receiver.said("transfer_claimed")
        stack.check_clean()


def test_an_abort_at_any_moment_releases_everything(make_stack: StackMaker, single: Single) -> None:
    """Before it came, while it is loaded, after; on the prefill side before its first chunk and in its midst."""
    stack = make_stack(
        prefill_options={"max_num_batched_tokens": 256, "enable_chunked_prefill": True},
        decode_extra={"load_timeout_s": 3600},
    )
    prompt = PROMPTS[-1]
    for steps in (0, 1, 2, 3):
        stack.prefill.do("abort_after", prompt=prompt, params=stack.outgoing(1)[0], steps=steps)
    for steps in (0, 1, 2, 5):
        never = {"do_remote_prefill": True, "transfer_id": f"never-{steps}"}
        stack.decode.do("abort_after", prompt=prompt, params=never, steps=steps)
        (params,) = stack.compute([prompt])
        stack.decode.do("abort_after", prompt=prompt, params=params, steps=steps)
        # Once more: a front end whose client has gone submits the same parameters again, to be aborted at once.
        stack.decode.do("abort_after", prompt=prompt, params=params, steps=0)
    stack.check_clean()
    assert [one.tokens for one in stack.serve(SOME)] == single.tokens(SOME)
    stack.check_clean()


def test_a_transfer_that_lands_after_its_abort_is_freed(make_stack: StackMaker) -> None:
    """A request may be aborted before its KV has even been announced."""
    stack = make_stack()
    (params,) = stack.outgoing(1)
    into = {"do_remote_prefill": True, "transfer_id": params["transfer_id"]}
    stack.decode.do("abort_after", prompt=PROMPTS[-1], params=into, steps=1)
    stack.prefill.generate([PROMPTS[-1]], [params], 1)
    stack.check_clean()


@pytest.mark.parametrize("announced", [True, False], ids=["in its parameters", "in its keys"])
def test_another_models_kv_is_refused(make_stack: StackMaker, single: Single, announced: bool) -> None:
    """Equal byte counts prove nothing. The field that differs is named, whatever the proxy passes on."""
    stack = make_stack(policy="recompute", decode_extra={"model": "another"})
    params = stack.compute(SOME)
    if not announced:
        params = [{"do_remote_prefill": True, "transfer_id": one["transfer_id"]} for one in params]
    assert [one.tokens for one in stack.decode.generate(SOME, params)] == single.tokens(SOME)
    assert stack.decode.do("metrics")["vllm:kvpd_failed_loads"] == len(SOME)
    text = stack.decode.text()
    assert "layout_mismatch" in text
    assert ("model is another here" if announced else "the engines differ in model;") in text
    stack.check_clean()


def test_p48_another_dtype_of_the_same_size_is_refused(make_stack: StackMaker) -> None:
    """A chunk of twice the tokens of half the width has the same length."""
    stack = make_stack(decode_options={"dtype": "bfloat16", "blocks": 64}, decode_extra={"chunk_tokens": 512})
    (params,) = stack.compute(SOME[-1:])
    answers = stack.decode.generate(SOME[-1:], [{"do_remote_prefill": True, "transfer_id": params["transfer_id"]}])
    check_failed("fail", answers, [])
    assert "the engines differ in dtype, kv_dtype, chunk_tokens" in stack.decode.text()
    stack.check_clean()


def test_another_prompts_kv_is_refused(make_stack: StackMaker, single: Single) -> None:
    """A proxy that mixes up two requests must not have one answered from the other's prompt."""
    other = random_prompt(len(SOME[0]), 77)
    single.learn([other])
    stack = make_stack(policy="recompute")
    params = stack.compute(SOME[:1])
    assert stack.decode.generate([other], params)[0].tokens == single.tokens([other])[0]
    assert "was computed from other tokens" in stack.decode.text()
    stack.check_clean()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_refused_admission_ends_with_its_reason(make_stack: StackMaker, single: Single, policy: str) -> None:
    """It is never a request that hangs: the answer names the reason, and the decode engine need not wait."""
    chunked = {"max_num_batched_tokens": 256, "enable_chunked_prefill": True, "max_num_seqs": 1}
    stack = make_stack(policy=policy, receiver_slots=2, prefill_options=chunked, decode_extra={"load_timeout_s": 3600})
    prompt = PROMPTS[-1]
    # The second is refused while it still waits to be computed, which fails it by the prefill engine's own policy.
    first, second = stack.prefill.generate([prompt, prompt], stack.outgoing(2), 1)
    assert first.params is not None
    assert first.params["error"]["code"] == "too_large"
    assert "4 chunks do not fit the buffer's 2" in first.params["error"]["detail"]
    assert second.finish == ("error" if policy == "fail" else "length")
    check_failed(policy, stack.decode.generate([prompt], [first.params]), single.tokens([prompt]))
    stack.check_clean()


def test_p37_a_transfer_id_serves_one_request(make_stack: StackMaker, single: Single) -> None:
    """Several prompts, or several choices, that share one set of parameters must not share one transfer."""
    stack = make_stack(policy="recompute")
    (shared,) = stack.outgoing(1)
    answers = stack.prefill.generate(SOME, [shared] * len(SOME), 1)
    params = [answer.params or {} for answer in answers]
    assert ["error" in one for one in params] == [False, True, True]
    assert "each needs its own" in params[1]["error"]["detail"]
    assert [one.tokens for one in stack.decode.generate(SOME, params)] == single.tokens(SOME)
    stack.check_clean()
    choices = stack.decode.do(
        "generate", prompts=SOME, params=stack.compute(SOME), max_tokens=12, n=2, temperature=1.0, seed=7
    )
    assert [[len(tokens) for tokens in one["tokens"]] for one in choices] == [[12, 12]] * len(SOME)
    assert stack.decode.do("metrics")["vllm:kvpd_failed_loads"] == 0
    stack.check_clean()


def test_p38_prompt_logprobs_are_computed_where_they_are_asked_for(make_stack: StackMaker, single: Single) -> None:
    """KV from outside has no hidden states: vLLM computes the prompt itself, and the transfer is freed unread."""
    stack = make_stack()
    params = stack.compute(SOME)
    answers = stack.decode.generate(SOME, params, prompt_logprobs=1)
    assert [one.tokens for one in answers] == single.tokens(SOME)
    stack.check_clean()


def test_p40_token_logprobs_change_nothing(make_stack: StackMaker, single: Single) -> None:
    """They concern what is generated, which both engines compute as ever."""
    stack = make_stack()
    params = stack.outgoing(len(SOME))
    prefilled = stack.prefill.generate(SOME, params, 1, logprobs=5)
    answers = stack.decode.generate(SOME, [one.params or {} for one in prefilled], logprobs=5)
    assert [one.tokens for one in answers] == single.tokens(SOME)
    stack.check_clean()


def test_a_daemon_with_other_chunks_stops_the_engine_at_its_start(hosts: tuple[Engine, Engine], tmp_path: Any) -> None:
    """Found at the first request, it would be found by a user."""
    with Fleet(tmp_path) as fleet:
        settings = {"chunk_bytes": 4096, "staging_size": 65536, "notify_proxy": "false"}
        sender = fleet.start("sender", "s", settings, prefix=IN_MAIN_ENVIRONMENT).wait_ready()
        with pytest.raises(RuntimeError, match=f"Set chunk_bytes = {CHUNK_BYTES} for both daemons"):
            hosts[0].start(transfer_config("kv_producer", {"sender_socket": str(sender.socket)}))
        sender.signal(signal.SIGTERM)
        assert sender.wait() == 0


def test_a_daemon_of_another_layout_stops_the_engine_at_its_start(hosts: tuple[Engine, Engine], tmp_path: Any) -> None:
    """Equal byte counts are not equal layouts: what the operator wrote is compared before anything moves."""
    with Fleet(tmp_path) as fleet:
        settings = {"chunk_bytes": CHUNK_BYTES, "staging_size": 4 * CHUNK_BYTES, "layout": "model=another"}
        sender = fleet.start("sender", "s", settings, prefix=IN_MAIN_ENVIRONMENT).wait_ready()
        with pytest.raises(RuntimeError, match="configured with layout = 'model=another'"):
            hosts[0].start(transfer_config("kv_producer", {"sender_socket": str(sender.socket)}))
        sender.signal(signal.SIGTERM)
        assert sender.wait() == 0


@pytest.mark.parametrize(
    ("kinds", "sizes", "words"),
    [
        (["full", "window"], {}, "2 groups of KV caches"),
        (["window"], {}, "SlidingWindowSpec is not supported"),
        (["full"], {"decode_context_parallel_size": 2}, "decode_context_parallel_size = 2"),
        (["full"], {"pipeline_parallel_size": 2}, "pipeline_parallel_size = 2"),
    ],
)
def test_p46_p47_what_is_not_supported_is_refused_as_the_engine_starts(
    hosts: tuple[Engine, Engine], kinds: list[str], sizes: dict[str, int], words: str
) -> None:
    """Hybrid models, tokens spread over ranks, half of the layers: accepted and then wrong would be worse."""
    assert hosts[0].do("refusal", kinds=["full"], sizes={"tensor_parallel_size": 2}) is None
    assert words in hosts[0].do("refusal", kinds=kinds, sizes=sizes)


def test_what_moved_is_counted_in_vllms_own_metrics(make_stack: StackMaker) -> None:
    """Whoever runs vLLM looks there first."""
    stack = make_stack()
    assert stack.serve([PROMPTS[-1]])[0].finish == "length"
    stack.receiver.wait_quiet()
    stack.serve([PROMPTS[0]])  # counts are taken at the next step
    blocks = -(-len(PROMPTS[-1]) // 128)
    assert stack.prefill.do("metrics")["vllm:kvpd_sent_bytes"] >= blocks * CHUNK_BYTES // 2
    assert stack.decode.do("metrics")["vllm:kvpd_received_bytes"] == blocks * CHUNK_BYTES // 2
    stack.check_clean()
