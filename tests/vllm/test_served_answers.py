"""Over HTTP, whoever asks and however: the answer is a single server's, and its prompt was computed elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from conftest import LENGTHS, PROMPTS, random_prompt
from served import MODEL_NAME, Site
from vllm_app.asking import get

BY_SOURCE = "vllm:prompt_tokens_by_source_total"
MESSAGES: list[Any] = [
    {"role": "system", "content": "some words"},
    {"role": "user", "content": "a word and another word, and then some more of them " * 20},
]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("clients", [1, 12])
def test_tokens_are_a_single_servers(site: Site, clients: int, stream: bool) -> None:
    """Token by token; and the decode server's own count says that all of each prompt but its last came from outside."""
    expected = site.single(PROMPTS)
    before = [site.metric("decode", BY_SOURCE, source=source) for source in ("external_kv_transfer", "local_compute")]
    with ThreadPoolExecutor(clients) as pool:
        outcomes = list(pool.map(lambda prompt: site.ask(prompt, stream=stream), PROMPTS))
    assert [one.tokens for one in outcomes] == expected
    after = [site.metric("decode", BY_SOURCE, source=source) for source in ("external_kv_transfer", "local_compute")]
    assert after[0] - before[0] == sum(length - 1 for length in LENGTHS)
    assert after[1] - before[1] == len(PROMPTS)
    site.check_clean(random_prompt(300, 1))


# ---------------------------------------------------------------------- the official client


@pytest.fixture
def clients(site: Site) -> Iterator[tuple[openai.OpenAI, openai.OpenAI]]:
    """OpenAI's own client, at the proxy and at the single server."""

    def client(server: str) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"http://{site.stack.address(server)}/v1", api_key="any", max_retries=0, timeout=60
        )

    with client("proxy") as proxy, client("single") as single:
        yield proxy, single


def test_openai_chat(clients: tuple[openai.OpenAI, openai.OpenAI]) -> None:
    """Chat is what most programs use; a stream of it must add up to the whole."""
    answers = []
    for client in clients:
        whole = client.chat.completions.create(model=MODEL_NAME, messages=MESSAGES, max_tokens=24, temperature=0)
        stream = client.chat.completions.create(
            model=MODEL_NAME,
            messages=MESSAGES,
            max_completion_tokens=24,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        events = list(stream)
        text = "".join(choice.delta.content or "" for event in events for choice in event.choices)
        assert whole.choices[0].message.role == "assistant"
        assert text == whole.choices[0].message.content
        assert events[-1].usage == whole.usage
        assert len({event.id for event in events}) == 1
        answers.append((text, whole.choices[0].finish_reason, whole.usage))
    assert answers[0] == answers[1]
    assert answers[0][0]


def test_openai_completions(clients: tuple[openai.OpenAI, openai.OpenAI]) -> None:
    """Texts and token ids; several prompts in one request are several transfers."""
    prompt: list[str] = ["a word", "and then some more of them " * 30]
    answers = []
    for client in clients:
        whole = client.completions.create(model=MODEL_NAME, prompt=prompt, max_tokens=16, temperature=0)
        ids = client.completions.create(model=MODEL_NAME, prompt=random_prompt(400, 4), max_tokens=16, temperature=0)
        stream = client.completions.create(
            model=MODEL_NAME, prompt=prompt[1], max_tokens=16, temperature=0, stream=True
        )
        text = "".join(choice.text for event in stream for choice in event.choices)
        texts = [choice.text for choice in whole.choices]
        assert text == texts[1]
        answers.append((texts, ids.choices[0].text, whole.usage))
    assert answers[0] == answers[1]


def test_openai_lists_the_model(clients: tuple[openai.OpenAI, openai.OpenAI], site: Site) -> None:
    """Programs look there for the name to ask for."""
    proxy, single = clients
    assert [one.id for one in proxy.models.list()] == [one.id for one in single.models.list()] == [MODEL_NAME]
    assert get(site.stack.address("proxy"), "/readyz").status == 200


def test_openai_errors_are_the_engines_own(clients: tuple[openai.OpenAI, openai.OpenAI]) -> None:
    """What the engine refuses, the client's own exceptions say: through the proxy as without it."""
    said = []
    for client in clients:
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(model=MODEL_NAME, prompt=random_prompt(3000, 5), max_tokens=8)
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="another", prompt="a word", max_tokens=8)
        said.append(refused.value.message)
    # The prefill engine, which is asked for one token, is the one that refuses: the counts in its words are its own.
    assert all("2048" in message for message in said)


def test_openai_breaks_off_a_stream(clients: tuple[openai.OpenAI, openai.OpenAI], site: Site) -> None:
    """A program that has read enough leaves, and nothing stays taken."""
    stream = clients[0].completions.create(
        model=MODEL_NAME, prompt=random_prompt(500, 6), max_tokens=1400, stream=True, extra_body={"ignore_eos": True}
    )
    with stream:
        assert next(iter(stream)).choices
    site.check_clean(random_prompt(300, 2))
