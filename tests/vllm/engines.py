"""vLLM engines for tests, each in a process of its own that outlives its engines: importing vLLM takes seconds."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import attrs

HOST: Final = Path(__file__).parent / "engine_host.py"
DEADLINE_S: Final = 90.0
BLOCK_TOKENS: Final = 128
CHUNK_TOKENS: Final = 256
BLOCK_BYTES: Final = 262_144  # of the tiny model: 4 layers, 2 heads of 32, float32, K and V
CHUNK_BYTES: Final = CHUNK_TOKENS // BLOCK_TOKENS * BLOCK_BYTES


@attrs.frozen
class Answer:
    """What became of one request."""

    tokens: list[int]
    finish: str | None
    params: dict[str, Any] | None
    cached: int


class Engine:
    """A process that runs an engine. A context manager: leaving ends it."""

    def __init__(self, name: str, folder: Path, model: Path) -> None:
        self.name = name
        self._model = model
        self.log = folder / f"{name}.log"
        self._spawn()

    def _spawn(self) -> None:
        environment = {
            **os.environ,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        answers, to_us = os.pipe()
        self._answers = os.fdopen(answers, "rb")
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, HOST, str(to_us)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=environment,
                pass_fds=[to_us],
            )
        os.close(to_us)

    def do(self, name: str, **arguments: Any) -> Any:
        """Run a command of the host's; waits for its answer, and fails the test after DEADLINE_S."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": name, **arguments}).encode() + b"\n")
        self.process.stdin.flush()
        alarm = threading.Timer(DEADLINE_S, self.process.kill)
        alarm.start()
        try:
            line = self._answers.readline()
        finally:
            alarm.cancel()
        assert line, f"{self.name} died in {name}:\n{self.text()[-6000:]}"
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"{name}: {answer['error']}\n{self.text()[-3000:]}")
        return answer["answer"]

    def start(self, kv: Mapping[str, Any] | None = None, *, blocks: int = 128, **options: Any) -> Self:
        """A new engine, after the end of the old one."""
        if self.process.poll() is not None:  # an earlier test's engine did not end
            self._close()
            self._spawn()
        self.do("stop")
        options = {"kv_cache_memory_bytes": blocks * BLOCK_BYTES, "enable_prefix_caching": False, **options}
        defaults = {
            # vLLM wants room for one request of the longest length; a block is its own.
            "max_model_len": min(2048, (blocks - 2) * BLOCK_TOKENS),
            "block_size": BLOCK_TOKENS,
            "gpu_memory_utilization": 0.05,
            "dtype": "float32",
        }
        self.do("start", model=str(self._model), kv=kv, **{**defaults, **options})
        return self

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[Mapping[str, Any] | None] | None = None,
        max_tokens: int = 12,
        **sampling: Any,
    ) -> list[Answer]:
        """Greedy continuations, all prompts at once."""
        params = params or [None] * len(prompts)
        answers = self.do("generate", prompts=prompts, params=params, max_tokens=max_tokens, **sampling)
        return [Answer(one["tokens"][0], one["finish"], one["params"], one["cached"] or 0) for one in answers]

    def drain(self) -> int:
        """Let it finish what it still holds; blocks in use after that."""
        return int(self.do("drain")["blocks_in_use"])

    def text(self) -> str:
        """What it logged."""
        return self.log.read_text(errors="replace")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        assert self.process.stdin is not None
        self.process.kill()
        self.process.wait(DEADLINE_S)
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self._answers.close()


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Run calls at once, each in a thread; their results, or the first failure."""
    results: list[Any] = [None] * len(calls)
    failures: list[BaseException] = []

    def run(number: int) -> None:
        try:
            results[number] = calls[number]()
        except BaseException as exc:  # noqa: BLE001  raised again below
            failures.append(exc)

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * DEADLINE_S)
        assert not thread.is_alive(), "a call does not end"
    if failures:
        raise failures[0]
    return results
