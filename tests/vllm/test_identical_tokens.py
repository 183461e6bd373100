"""Whatever the path of a prompt's KV, the tokens are those of a single engine."""

from __future__ import annotations

import threading

import pytest
from conftest import LENGTHS, PROMPTS, Single, StackMaker, random_prompt
from engines import together

import kvpd.client


def test_all_prompts_in_one_batch(make_stack: StackMaker, single: Single) -> None:
    """The plain case: twelve prompts at once, from one token to several chunks."""
    stack = make_stack()
    answers = stack.serve(PROMPTS)
    assert [answer.tokens for answer in answers] == single.tokens(PROMPTS)
    loaded = stack.decode.do("metrics")["vllm:external_prefix_cache_hits"]
    assert loaded == sum(length - 1 for length in LENGTHS)  # all but each prompt's last token came from outside
    stack.check_clean()


def test_chunked_prefill_streams_each_chunk_as_it_completes(make_stack: StackMaker, single: Single) -> None:
    """Chunks that wait for the whole prompt would add their wire time to the first token's."""
    stack = make_stack(prefill_options={"max_num_batched_tokens": 256, "enable_chunked_prefill": True})
    answers = stack.serve(PROMPTS)
    assert [answer.tokens for answer in answers] == single.tokens(PROMPTS)
    batches = [line["transfer"] for line in stack.receiver.said("batch_allocated")]
    assert max(batches.count(transfer) for transfer in batches) > 2
    stack.check_clean()


def test_prefixes_that_the_decode_engine_has_are_skipped(make_stack: StackMaker, single: Single) -> None:
    """A partial local hit shifts where loading begins; off by one block, the tokens are wrong."""
    shared = random_prompt(640, 1)
    prompts = [shared[:cut] + random_prompt(rest, rest) for cut, rest in ((0, 40), (130, 200), (512, 100), (640, 260))]
    single.learn([shared, *prompts])
    caching = {"enable_prefix_caching": True}
    stack = make_stack(prefill_options=caching, decode_options=caching)
    assert stack.serve([shared])[0].tokens == single.tokens([shared])[0]
    answers = [stack.serve([prompt])[0] for prompt in prompts]
    assert [answer.tokens for answer in answers] == single.tokens(prompts)
    values = stack.decode.do("metrics")
    local = 128 + 512 + 640
    assert values["vllm:prefix_cache_hits"] == local
    assert values["vllm:external_prefix_cache_hits"] == 639 + sum(len(prompt) - 1 for prompt in prompts) - local
    stack.check_clean()


def test_p42_a_prompt_that_is_there_whole_still_has_its_last_token_computed(
    make_stack: StackMaker, single: Single
) -> None:
    """Something must be left to sample from: whole chunks, sent twice, with caches on both sides."""
    prompts = [random_prompt(tokens, tokens) for tokens in (256, 512, 1024, 895, 257)]
    single.learn(prompts, 20)
    caching = {"enable_prefix_caching": True}
    stack = make_stack(prefill_options=caching, decode_options=caching)
    for _ in range(2):
        for prompt in prompts:
            assert stack.serve([prompt], 20)[0].tokens == single.tokens([prompt], 20)[0]
    stack.check_clean()


def test_p41_prompts_shorter_than_a_block_complete(make_stack: StackMaker, single: Single) -> None:
    """A transfer of less than a block, or of nothing that decode needs, must end all the same."""
    prompts = [random_prompt(tokens, 41) for tokens in (1, 15, 16, 17, 127)]
    single.learn(prompts)
    stack = make_stack()
    for prompt in prompts:
        assert stack.serve([prompt])[0].tokens == single.tokens([prompt])[0]
    stack.check_clean()


def test_p45_engines_may_have_pools_of_different_sizes(make_stack: StackMaker, single: Single) -> None:
    """Small pools: requests wait for blocks on either side, and neither side's count concerns the other."""
    stack = make_stack(prefill_options={"blocks": 20}, decode_options={"blocks": 17})
    answers = together(lambda: stack.serve(PROMPTS))[0]
    assert [answer.tokens for answer in answers] == single.tokens(PROMPTS)
    stack.check_clean()


def test_a_receiver_smaller_than_all_requests_together(make_stack: StackMaker, single: Single) -> None:
    """Requests are admitted one after the other, whole: neither engine may hold what the other waits for."""
    stack = make_stack(receiver_slots=5, sender_slots=2)
    params = stack.outgoing(len(PROMPTS))
    into = [{"do_remote_prefill": True, "transfer_id": one["transfer_id"]} for one in params]
    _, answers = together(
        lambda: stack.prefill.generate(PROMPTS, params, 1),
        lambda: stack.decode.generate(PROMPTS, into),
    )
    assert [answer.tokens for answer in answers] == single.tokens(PROMPTS)
    stack.check_clean()


def test_an_admission_that_is_deferred_delays_and_changes_nothing(make_stack: StackMaker, single: Single) -> None:
    """Admission overlaps with computing: the prefill engine's answer does not wait for room at the receiver."""
    stack = make_stack(receiver_slots=8)
    with kvpd.client.connect_sender(stack.sender.socket) as link:
        blocker = link.open("blocker", receiver=stack.receiver.address, total_chunks=8)
        stack.receiver.wait_for("transfer_admitted")
        params = stack.compute(PROMPTS[-3:])  # returns, although nothing was admitted
        assert len(stack.receiver.said("transfer_admitted")) == 1
        timer = threading.Timer(1.0, blocker.cancel)
        timer.start()
        answers = stack.decode.generate(PROMPTS[-3:], params)
        timer.join()
        link.cancel("blocker")
        with pytest.raises(kvpd.TransferCancelled), blocker, blocker.stage([b"never"]):
            pass
    assert [answer.tokens for answer in answers] == single.tokens(PROMPTS[-3:])
    assert max(line["queued_s"] for line in stack.receiver.said("transfer_admitted")) >= 0.9
    stack.check_clean()


def test_p43_preemption_on_the_decode_side(make_stack: StackMaker, single: Single) -> None:
    """A preempted request has lost its blocks, and its transfer is used up: it is computed, not counted twice."""
    prompts = [random_prompt(250, seed) for seed in range(4)]
    single.learn(prompts, 40)
    stack = make_stack(decode_options={"blocks": 10})
    answers = stack.serve(prompts, 40)
    assert [answer.tokens for answer in answers] == single.tokens(prompts, 40)
    assert stack.decode.do("metrics")["vllm:num_preemptions"] > 0
    stack.check_clean()


def test_one_spoiled_chunk_changes_the_tokens(make_stack: StackMaker, single: Single) -> None:
    """The negative control: if this passed with the right tokens, every other test here would prove nothing."""
    stack = make_stack()
    stack.decode.do("corrupt")
    answers = stack.serve(PROMPTS[-4:])
    assert all(answer.tokens != tokens for answer, tokens in zip(answers, single.tokens(PROMPTS[-4:]), strict=True))
    stack.check_clean()


def test_p49_a_second_turn_continues_the_first(make_stack: StackMaker, single: Single) -> None:
    """Turn two reuses turn one's blocks, of which some were loaded and some computed here."""
    first = random_prompt(300, 49)
    caching = {"enable_prefix_caching": True}
    single.learn([first], 20)
    second = first + single.tokens([first], 20)[0] + random_prompt(90, 50)
    single.learn([second], 20)
    stack = make_stack(prefill_options=caching, decode_options=caching)
    for turn in (first, second):
        assert stack.serve([turn], 20)[0].tokens == single.tokens([turn], 20)[0]
    stack.check_clean()


def test_equal_prefixes_cross_the_wire_once(make_stack: StackMaker, single: Single) -> None:
    """Chunks are named by their content: what the receiver still has from one request, another need not send."""
    prompt = random_prompt(700, 7)
    single.learn([prompt])
    stack = make_stack()
    params = stack.compute([prompt])
    stack.receiver.wait_for("transfer_completed")
    params += stack.compute([prompt])
    stack.receiver.wait_for("transfer_completed", 2)
    assert stack.receiver.said("transfer_completed")[1]["deduplicated"] == 3
    answers = stack.decode.generate([prompt, prompt], params)
    assert [answer.tokens for answer in answers] == single.tokens([prompt, prompt])
    stack.check_clean()
