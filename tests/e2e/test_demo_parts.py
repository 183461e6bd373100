"""The demo's parts, each by itself: its verdict is worth something only if these are right."""

from __future__ import annotations

import json
import queue
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq
from demo_app import arguments, chunks, model, prompts, report, words
from demo_app.children import Exited, Family, Happening, Said
from demo_app.chunks import CHUNK_TOKENS, KvShape
from demo_app.conductor import Verdict
from demo_app.models import Model, generate, prefill
from demo_app.prompts import Prompt
from demo_app.requests import Request
from demo_app.tiny import TinyLlama
from hypothesis import given
from hypothesis import strategies as st

from kvpd.core.messages import ErrorInfo, FailNotif, ProxyAck, ProxyNotif, decode, encode
from kvpd.errors import ErrorCode

SHAPE = KvShape(layers=3, kv_heads=2, head_dim=4)
DEADLINE_S = 30.0
CLEAN = Verdict({"receiver": 0, "sender-0": 0}, slots_free=6, slots_total=6)

# ------------------------------------------------------------------ chunks


@given(st.integers(1, 5_000))
def test_chunks_cover_a_prompt_and_only_the_last_is_short(tokens: int) -> None:
    """A gap or an overlap would shift every position behind it."""
    spans = chunks.spans(tokens)
    assert [place for start, stop in spans for place in range(start, stop)] == list(range(tokens))
    assert all(stop - start == CHUNK_TOKENS for start, stop in spans[:-1])


def test_a_token_changes_the_name_of_its_chunk_and_of_those_behind_it() -> None:
    """A chunk's bytes depend on all tokens before it: equal names for unequal pasts would mix two requests."""
    tokens = [7] * 1_000
    changed = [*tokens[:300], 8, *tokens[301:]]
    before, after = chunks.keys(tokens), chunks.keys(changed)
    assert [ours == theirs for ours, theirs in zip(before, after, strict=True)] == [True, False, False, False]
    assert {len(name) for name in before} == {32}
    assert len(set(before)) == 4


@pytest.mark.parametrize("tokens", [1, CHUNK_TOKENS - 1, CHUNK_TOKENS, CHUNK_TOKENS + 1, 900])
def test_a_cache_survives_its_way_through_slots(tokens: int) -> None:
    """Bit for bit, the last chunk in a slot that is longer than it."""
    source = np.random.default_rng(tokens)
    kv = source.standard_normal(SHAPE.empty(tokens).shape).astype(np.float32)
    layers = [(layer[0], layer[1]) for layer in kv]
    received = SHAPE.empty(tokens)
    for start, stop in chunks.spans(tokens):
        slot = bytearray(b"\xaa" * SHAPE.chunk_bytes)
        chunks.pack(layers, (start, stop), memoryview(slot), SHAPE)
        own = SHAPE.bytes_of(stop - start)
        assert slot[own:] == b"\xaa" * (SHAPE.chunk_bytes - own)
        chunks.unpack(memoryview(slot)[:own].toreadonly(), (start, stop), received, SHAPE)
    assert received.tobytes() == kv.tobytes()


def test_the_real_models_chunk_is_as_long_as_documented() -> None:
    """30 layers, keys and values, 3 heads of 64, 256 tokens, 4 bytes."""
    assert KvShape(layers=30, kv_heads=3, head_dim=64).chunk_bytes == 11_796_480


# ------------------------------------------------------------------ the tiny model


def moved(tiny: Model, cache: object, tokens: int, skip: int = -1) -> object:
    """The cache as a decode engine rebuilds it from chunks; chunk number `skip` never arrives."""
    kv = tiny.shape.empty(tokens)
    kv[:] = 0
    for number, span in enumerate(chunks.spans(tokens)):
        if number != skip:
            slot = memoryview(bytearray(tiny.shape.chunk_bytes))
            chunks.pack(tiny.layers_of(cache), span, slot, tiny.shape)
            chunks.unpack(slot, span, kv, tiny.shape)
    return tiny.cache_from(kv)


def test_another_process_model_continues_a_moved_cache_with_the_same_tokens() -> None:
    """It is what the demo compares; two models from one seed stand for two processes."""
    tokens = prompts.at_random(model.TINY_VOCABULARY)[1].tokens
    ours, theirs = TinyLlama(), TinyLlama()
    cache = ours.new_cache()
    first_token = prefill(ours, cache, tokens)
    continued = generate(theirs, moved(ours, cache, len(tokens)), first_token, 32)
    assert continued == generate(ours, cache, first_token, 32)
    assert len(continued) == 32


@pytest.mark.parametrize("lost", [0, 1, 3])
def test_a_chunk_that_never_arrived_changes_the_tokens(lost: int) -> None:
    """A comparison that cannot fail proves nothing."""
    tokens = prompts.at_random(model.TINY_VOCABULARY)[1].tokens
    tiny = TinyLlama()
    cache = tiny.new_cache()
    first_token = prefill(tiny, cache, tokens)
    damaged = moved(tiny, cache, len(tokens), skip=lost)
    assert generate(tiny, damaged, first_token, 32) != generate(tiny, cache, first_token, 32)


# ------------------------------------------------------------------ prompts


def count_words(text: str) -> list[int]:
    """A tokenizer good enough to measure with."""
    return [sum(word.encode()) for word in text.split()]


def write_pages(root: Path, sizes: dict[str, int]) -> None:
    """Documents of so many paragraphs of fifty words each."""
    for name, paragraphs in sizes.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        paragraph = " ".join(f"{Path(name).stem}{word}" for word in range(50))
        (root / name).write_text("\n\n".join([paragraph] * paragraphs))


@pytest.mark.parametrize(
    "sizes",
    [
        {"docs/ARCHITECTURE.md": 400, "README.md": 90},
        {"README.md": 16, "CHANGELOG.md": 17},
        {"docs/A.md": 5, "docs/B.md": 6, "docs/C.md": 7, "README.md": 20, "kvpd/none.py": 0},
    ],
)
def test_prompts_are_long_enough_for_several_chunks_and_no_longer_than_promised(
    tmp_path: Path, sizes: dict[str, int]
) -> None:
    """However long the documents are that day; and the second request's chunks must not be in the receiver yet."""
    write_pages(tmp_path, sizes)
    made = prompts.from_documents(tmp_path, count_words)
    assert all(prompts.TOKENS_MIN <= len(prompt.tokens) <= prompts.TOKENS_MAX for prompt in made)
    names = [name for prompt in made for name in chunks.keys(prompt.tokens)]
    assert len(names) == len(set(names))


def test_a_paragraph_that_is_too_long_does_not_end_a_prompt_early(tmp_path: Path) -> None:
    """Documents have tables."""
    table = " ".join(["cell"] * 3_000)
    text = " ".join(["word"] * 350)
    (tmp_path / "README.md").write_text("\n\n".join([text, table, text, text]))
    write_pages(tmp_path, {"CHANGELOG.md": 20})
    first, _ = prompts.from_documents(tmp_path, count_words)
    assert first.title == "README.md"
    assert prompts.TOKENS_MIN <= len(first.tokens) <= prompts.TOKENS_MAX


def test_documents_that_are_too_short_are_refused(tmp_path: Path) -> None:
    """A prompt of one chunk would show nothing."""
    write_pages(tmp_path, {"README.md": 10})
    with pytest.raises(prompts.DocumentsTooShort, match="a prompt needs 700"):
        prompts.from_documents(tmp_path, count_words)


def test_without_documents_the_docstrings_serve() -> None:
    """The demo must run in a checkout of any day."""
    root = Path(__file__).parents[2]
    titles = [page.title for page in prompts.pages(root)]
    assert "kvpd/errors.py" in titles


def test_random_prompts_are_the_same_every_time_and_as_long_as_promised() -> None:
    """The processes of two runs can then be compared."""
    made = prompts.at_random(model.TINY_VOCABULARY)
    assert made == prompts.at_random(model.TINY_VOCABULARY)
    assert all(prompts.TOKENS_MIN <= len(prompt.tokens) <= prompts.TOKENS_MAX for prompt in made)


# ------------------------------------------------------------------ the prepared model


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    """A folder with a stamp, made from `source` with version 1."""
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 30, "num_key_value_heads": 3, "head_dim": 64}')
    (tmp_path / "model.safetensors").write_bytes(bytes(range(256)))
    model.write_stamp(tmp_path, "source", {"torch": "1"})
    return tmp_path


def test_a_prepared_model_is_taken_as_it_is(prepared: Path) -> None:
    """Making it again takes half a minute."""
    assert model.is_valid(prepared, "source", {"torch": "1"})
    assert model.read_shape(prepared) == KvShape(layers=30, kv_heads=3, head_dim=64)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("model.safetensors", bytes(255)),
        ("model.safetensors", bytes(256)),
        ("config.json", b""),
        ("stamp.json", b"{"),
        ("stamp.json", b'{"source_hash": "source", "versions": {"torch": "1"}, "files": {}}'),
    ],
)
def test_a_damaged_model_is_made_again(prepared: Path, name: str, content: bytes) -> None:
    """Half a file on a full disk, or a flipped bit, would be other tokens."""
    (prepared / name).write_bytes(content)
    assert not model.is_valid(prepared, "source", {"torch": "1"})


def test_a_missing_file_makes_the_model_anew(prepared: Path) -> None:
    """Somebody may have tidied up."""
    (prepared / "model.safetensors").unlink()
    assert not model.is_valid(prepared, "source", {"torch": "1"})
    assert not model.is_valid(prepared / "nowhere", "source", {"torch": "1"})


def test_a_model_from_or_with_something_else_is_made_again(prepared: Path) -> None:
    """Another converter may give other weights."""
    assert not model.is_valid(prepared, "another source", {"torch": "1"})
    assert not model.is_valid(prepared, "source", {"torch": "2"})


def test_the_cache_folder_is_the_users_choice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And a relative one is none, as the specification of these folders has it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert model.cache_folder() == tmp_path / "kvpd"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert model.cache_folder() == Path.home() / ".cache" / "kvpd"


# ------------------------------------------------------------------ processes


def heard_until(family: Family, wanted: type[Happening]) -> Happening:
    """The first happening of that kind.

    Raises:
        queue.Empty: there was none within DEADLINE_S.
    """
    deadline = time.monotonic() + DEADLINE_S
    while True:
        happening = family.next(max(0.0, deadline - time.monotonic()))
        if isinstance(happening, wanted):
            return happening


def exchange(address: str, frames: Sequence[bytes], answers: int) -> list[bytes]:
    """Send frames as a sender's daemon does; as many answers as come, the last within DEADLINE_S."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, int(DEADLINE_S * 1e3))
        socket.connect(address)
        for frame in frames:
            socket.send(frame)
        return [socket.recv() for _ in range(answers)]


def test_the_proxy_acknowledges_every_repeat_and_tells_of_a_request_once() -> None:
    """A sender repeats until it is heard; a decode engine must start once. Rubbish ends nothing."""
    notices = [ProxyNotif(req_id, number, "receiver", "sender", 5, number) for number, req_id in enumerate("ab")]
    failed = FailNotif("c", 7, "receiver", "sender", 5, 7, ErrorInfo(ErrorCode.CANCELLED))
    with Family(None) as family:
        family.start_program("proxy", "proxy")
        listening = heard_until(family, Said)
        assert isinstance(listening, Said)
        assert isinstance(listening.event, words.Listening)
        frames = [
            b"rubbish",
            encode(ProxyAck(5, 1)),
            encode(notices[0]),
            encode(failed),
            encode(notices[0]),
            encode(notices[1]),
        ]
        answers = exchange(listening.event.address, frames, answers=4)
        told = [heard_until(family, Said), heard_until(family, Said)]
    assert [decode(answer) for answer in answers] == [ProxyAck(5, number) for number in (0, 7, 0, 1)]
    assert told == [Said("proxy", words.Notified(req_id, "sender", "receiver")) for req_id in "ab"]


def test_a_process_that_fails_is_reported_with_its_last_words(tmp_path: Path) -> None:
    """The user sees why, and finds it in the kept logs."""
    with Family(tmp_path) as family:
        family.start_program("nobody", "no_such_program")
        exited = heard_until(family, Exited)
        complaint = str(family["nobody"].failure("ended"))
    assert exited == Exited("nobody", 1)
    assert "no_such_program" in complaint
    assert "no_such_program" in (tmp_path / "nobody.log").read_text()


def test_leaving_a_family_ends_its_processes() -> None:
    """Ctrl-C leaves this way too."""
    with Family(None) as family:
        family.start_program("proxy", "proxy")
        heard_until(family, Said)
    assert heard_until(family, Exited) == Exited("proxy", 0)
    with pytest.raises(queue.Empty):
        family.next(0.0)


def test_what_is_said_between_processes_arrives_as_it_was() -> None:
    """A line that is no word of theirs is refused, not guessed at."""
    command = words.Prefill("r", (1, 2, 3), "/run/s.sock", "tcp://127.0.0.1:7300")
    event = words.Generated("r", (4, 5), 0.5, alone=True)
    assert words.decode_command(words.encode(command)) == command
    assert words.decode_event(words.encode(event)) == event
    with pytest.raises(msgspec.MsgspecError):
        words.decode_event(words.encode(command))


# ------------------------------------------------------------------ verdict


def finished(number: int, alone: tuple[int, ...]) -> Request:
    """A request whose decode engine said 1, 2, 3."""
    prompt = Prompt(f"request-{number}", "title", "question?", tuple(range(700 + number)))
    return Request(
        prompt,
        f"prefill-{number}",
        f"sender-{number}",
        admission_wait_s=0.25,
        put_s=0.5,
        copied_bytes=1_000_000_000,
        decoded=(1, 2, 3),
        alone=alone,
    )


def test_only_identical_tokens_and_free_slots_and_clean_ends_are_a_success() -> None:
    """The exit status is what a script sees."""
    good, bad = [finished(0, (1, 2, 3)), finished(1, (1, 2, 3))], [finished(0, (1, 2, 3)), finished(1, (1, 2))]
    assert report.faults(good, CLEAN) == []
    assert report.faults(bad, CLEAN) == ["request-1: the tokens differ from those of one process alone"]
    held = Verdict(CLEAN.statuses, slots_free=5, slots_total=6)
    assert report.faults(good, held) == ["1 of the receiver's 6 slots were not free at the end"]
    unclean = Verdict({"receiver": 0, "sender-0": 1}, slots_free=6, slots_total=6)
    assert report.faults(good, unclean) == ["sender-0 ended with status 1"]


def test_the_last_line_is_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    """With the keys that its readers were promised."""
    report.print_last_line([finished(0, (1, 2, 3)), finished(1, (1, 2))])
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line) == {
        "identical": False,
        "requests": 2,
        "chunks": 6,
        "bytes": 2_000_000_000,
        "admission_wait_s": [0.25, 0.25],
        "goodput_gb_s": 2.0,
        "transport": "ucx",
    }


def test_the_command_line_is_judged_before_anything_is_installed(capsys: pytest.CaptureFixture[str]) -> None:
    """A typing error must not cost gigabytes."""
    assert arguments.parse([]).model == "smollm2"
    assert arguments.parse(["--model", "tiny", "--keep-logs", "logs"]).keep_logs == Path("logs")
    with pytest.raises(SystemExit) as refused:
        arguments.parse(["--model", "huge"])
    assert refused.value.code == 2
    assert "huge" in capsys.readouterr().err
