"""Engines, daemons between them, and what a single engine answers."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs
import pytest
import tiny_llama
import vllm_app.stack
from demo_app.model import read_shape
from e2e.daemons import Daemon, Fleet
from engines import CHUNK_BYTES, CHUNK_TOKENS, Answer, Engine, together
from served import MODEL_NAME, Site

PROJECT: Final = Path(__file__).parents[2]
# Daemons run from the other environment: this one has only what the connector imports of kvpd.
IN_MAIN_ENVIRONMENT: Final = ("sh", "-c", f'shift; exec "{PROJECT}/.venv/bin/python" "$@"', "sh")
LENGTHS: Final = (1, 2, 17, 127, 128, 129, 255, 256, 257, 512, 600, 900)


def random_prompt(tokens: int, seed: int) -> list[int]:
    """Tokens that are none of the special ones."""
    source = random.Random(seed)
    return [source.randrange(2, tiny_llama.VOCABULARY) for _ in range(tokens)]


PROMPTS: Final = [random_prompt(length, length) for length in LENGTHS]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model."""
    return tiny_llama.make(tmp_path_factory.mktemp("model") / "tiny-llama")


@pytest.fixture(scope="session")
def hosts(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Engine]]:
    """Two processes that import vLLM once; each test starts its own engines in them."""
    folder = tmp_path_factory.mktemp("engines")
    with Engine("prefill", folder, model) as prefill, Engine("decode", folder, model) as decode:
        yield prefill, decode


class Single:
    """What one engine by itself answers: asked once for each prompt, however many tests use it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._known: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def learn(self, prompts: Sequence[Sequence[int]], max_tokens: int = 12) -> None:
        """Ask now. The engine that is used for it must not be in use."""
        unknown = [prompt for prompt in prompts if (tuple(prompt), max_tokens) not in self._known]
        if unknown:
            self._engine.start()
            for prompt, answer in zip(unknown, self._engine.generate(unknown, None, max_tokens), strict=True):
                self._known[tuple(prompt), max_tokens] = answer.tokens

    def tokens(self, prompts: Sequence[Sequence[int]], max_tokens: int = 12) -> list[list[int]]:
        """What was learned."""
        return [self._known[tuple(prompt), max_tokens] for prompt in prompts]


@pytest.fixture(scope="session")
def single(hosts: tuple[Engine, Engine]) -> Single:
    """See `Single`; it knows PROMPTS."""
    single = Single(hosts[0])
    single.learn(PROMPTS)
    return single


@attrs.define
class Stack:
    """Two engines and the daemons between them."""

    prefill: Engine
    decode: Engine
    sender: Daemon
    receiver: Daemon
    serial: int = 0
    prefill_settings: dict[str, Any] = attrs.Factory(dict)

    def outgoing(self, count: int) -> list[dict[str, Any]]:
        """Parameters for prefill requests, each with a transfer id of its own."""
        self.serial += 1
        return [
            {"do_remote_decode": True, "transfer_id": f"t{self.serial}-{number}", "receiver": self.receiver.address}
            for number in range(count)
        ]

    def compute(self, prompts: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
        """Prefill them; the parameters for the decode engine."""
        params = self.outgoing(len(prompts))
        answers = self.prefill.generate(prompts, params, 1)
        return [answer.params or {} for answer in answers]

    def serve(self, prompts: Sequence[Sequence[int]], max_tokens: int = 12) -> list[Answer]:
        """Prefill, then decode: what a proxy does, for all prompts at once."""
        return self.decode.generate(prompts, self.compute(prompts), max_tokens)

    def check_clean(self) -> None:
        """When no request is alive, no block and no slot is taken anywhere."""
        assert self.prefill.drain() == 0
        assert self.decode.drain() == 0
        self.receiver.wait_quiet()
        assert set(self.receiver.slots()) == {"free"}
        staging = self.sender.metrics()
        assert staging["kvpd_staging_slots{state=used}"] == 0
        assert staging["kvpd_staging_slots{state=free}"] > 0


StackMaker = Callable[..., Stack]


@pytest.fixture
def make_stack(hosts: tuple[Engine, Engine], single: Single, tmp_path: Path) -> Iterator[StackMaker]:
    """Makes a test's stack: settings of the daemons, options of the engines, the failure policy, the connector's own.

    `single` is asked for first, because it borrows one of the engines.
    """
    prefill, decode = hosts
    daemons: list[Daemon] = []
    with Fleet(tmp_path) as fleet:

        def make(
            *,
            prefill_options: Mapping[str, Any] | None = None,
            decode_options: Mapping[str, Any] | None = None,
            prefill_extra: Mapping[str, Any] | None = None,
            decode_extra: Mapping[str, Any] | None = None,
            receiver_slots: int = 64,
            receiver_settings: Mapping[str, Any] | None = None,
            sender_slots: int = 16,
            policy: str = "fail",
            ranks: int = 1,
        ) -> Stack:
            chunk_bytes = CHUNK_BYTES // ranks
            receiver = fleet.start(
                "receiver",
                "r",
                {
                    "chunk_bytes": chunk_bytes,
                    "buffer_size": receiver_slots * chunk_bytes,
                    "ranks": ranks,
                    "control_address": "127.0.0.1:0",
                    **(receiver_settings or {}),
                },
                prefix=IN_MAIN_ENVIRONMENT,
            )
            settings = {
                "chunk_bytes": chunk_bytes,
                "staging_size": sender_slots * chunk_bytes,
                "ranks": ranks,
                "notify_proxy": "false",
            }
            sender = fleet.start("sender", "s", settings, prefix=IN_MAIN_ENVIRONMENT)
            daemons.extend((receiver.wait_ready(), sender.wait_ready()))
            out = {"sender_socket": str(sender.socket), **(prefill_extra or {})}
            into = {"receiver_socket": str(receiver.socket), **(decode_extra or {})}
            parallel = {"tensor_parallel_size": ranks}
            together(
                lambda: prefill.start(
                    transfer_config("kv_producer", out, policy), **parallel, **(prefill_options or {})
                ),
                lambda: decode.start(
                    transfer_config("kv_consumer", into, policy), **parallel, **(decode_options or {})
                ),
            )
            return Stack(prefill, decode, sender, receiver)

        yield make
        for daemon in daemons:  # shown if the test fails
            sys.stdout.write(f"----- {daemon.name}\n{daemon.text[-20_000:]}\n")
        for engine in hosts:
            if engine.process.poll() is None:
                engine.do("stop")


def transfer_config(role: str, extra: Mapping[str, Any], policy: str = "fail") -> dict[str, Any]:
    """What --kv-transfer-config would say."""
    return {
        "kv_connector": "KvpdConnector",
        "kv_connector_module_path": "kvpd.integrations.vllm",
        "kv_role": role,
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": {"chunk_tokens": CHUNK_TOKENS, **extra},
    }


@pytest.fixture(scope="session")
def servers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The whole stack over HTTP, with a single server beside; started once, for that takes the most of a minute."""
    served = vllm_app.stack.Served(
        folder=model,
        name=MODEL_NAME,
        shape=read_shape(model),
        context=2048,
        room=128 * 128,
        # Without caches of their own, everything that the decode server did not compute has come from outside.
        flags=["--no-enable-prefix-caching", "--max-num-batched-tokens", "512"],
        # What is lost is to be noticed while a test waits for it.
        settings={"proxy.transfer_timeout_s": 5, "proxy.requests_max": 64},
        connector={"load_timeout_s": 10},
    )
    logs = tmp_path_factory.mktemp("servers")
    with vllm_app.stack.Stack(served, logs, print, with_single=True) as stack:
        yield Site(stack)


@pytest.fixture
def site(servers: Site) -> Iterator[Site]:
    """The stack for one test; if it fails, what each part has written meanwhile is shown."""
    logs = {path: path.stat().st_size for path in servers.stack.logs.iterdir()}
    yield servers
    for path in sorted(servers.stack.logs.iterdir()):
        text = path.read_bytes()[logs.get(path, 0) :].decode(errors="replace")
        sys.stdout.write(f"----- the end of what {path.name} has got\n{text[-10_000:]}\n")
    servers.stack.check()
