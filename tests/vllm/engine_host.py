"""A vLLM engine in a process of its own, driven by JSON lines: a command on stdin, its answer on a pipe.

Run as a program by `engines.Engine`. The engine steps only while a command runs, so a test decides when it does.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from types import SimpleNamespace
from typing import Any

import torch
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown, get_kv_transfer_group
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from kvpd.integrations.vllm.engine import refuse_unsupported

LIMIT_S = 60.0


class Host:
    """At most one engine at a time."""

    def __init__(self) -> None:
        self.llm: Any = None

    # ------------------------------------------------------------------ commands

    def start(self, model: str, kv: dict[str, Any] | None, **options: Any) -> dict[str, Any]:
        """Make an engine; `kv` is its kv_transfer_config."""
        began = time.monotonic()
        transfer = None if kv is None else KVTransferConfig(**kv)
        self.llm = LLM(
            model=model, enforce_eager=True, disable_log_stats=False, kv_transfer_config=transfer, seed=0, **options
        )
        return {"seconds": time.monotonic() - began}

    def generate(
        self, prompts: list[list[int]], params: list[dict[str, Any] | None], max_tokens: int, **sampling: Any
    ) -> list[dict[str, Any]]:
        """Continuations, greedy ones unless asked otherwise, with each request's kv_transfer_params."""
        settings = [
            SamplingParams(
                max_tokens=max_tokens,
                ignore_eos=True,
                extra_args=None if one is None else {"kv_transfer_params": one},
                **{"temperature": 0, **sampling},
            )
            for one in params
        ]
        outputs = self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], settings, use_tqdm=False)
        return [
            {
                "tokens": [list(choice.token_ids) for choice in output.outputs],
                "finish": output.outputs[0].finish_reason if output.outputs else None,
                "params": output.kv_transfer_params,
                "cached": output.num_cached_tokens,
            }
            for output in outputs
        ]

    def abort_after(self, prompt: list[int], params: dict[str, Any], steps: int) -> dict[str, Any]:
        """Submit a request, step `steps` times, abort it."""
        engine = self.llm.llm_engine
        sampling = SamplingParams(
            temperature=0, max_tokens=16, ignore_eos=True, extra_args={"kv_transfer_params": params}
        )
        engine.add_request("to-abort", {"prompt_token_ids": prompt}, sampling)
        for _ in range(steps):
            engine.step()
        engine.abort_request(["to-abort"])
        return self.drain()

    def hear(self, transfer_ids: list[str]) -> dict[str, Any]:
        """Wait until the receiver has told this engine that these transfers are ready."""
        board = self._scheduler().connector._board
        deadline = time.monotonic() + LIMIT_S
        while not all(board.is_ready(transfer_id) for transfer_id in transfer_ids):
            if (left := deadline - time.monotonic()) <= 0:
                raise TimeoutError(f"the receiver does not say that all of {transfer_ids} are ready")
            board.wait(left)
        return {}

    def drain(self) -> dict[str, Any]:
        """Step until the engine holds nothing for anybody; how many blocks are in use then."""
        scheduler = self._scheduler()
        deadline = time.monotonic() + LIMIT_S
        while scheduler.has_requests():
            if time.monotonic() > deadline:
                raise TimeoutError(f"the engine still holds {list(scheduler.requests)}")
            self.llm.llm_engine.step()
        pool = scheduler.kv_cache_manager.block_pool
        # One block is vLLM's own, the null block.
        return {"blocks_in_use": pool.num_gpu_blocks - pool.get_num_free_blocks() - 1, "blocks": pool.num_gpu_blocks}

    def metrics(self) -> dict[str, float]:
        """Counters of vLLM's own: requests' preemptions, cache hits and ours."""
        values = {}
        for metric in self.llm.get_metrics():
            value = getattr(metric, "value", None)
            values[metric.name] = float(getattr(metric, "sum", 0.0) if value is None else value)
        return values

    def corrupt(self) -> dict[str, Any]:
        """From now on, one byte of each block that is loaded is not what was sent."""
        blocks = get_kv_transfer_group()._decode._blocks
        scatter = blocks.scatter

        def spoiled(chunk: memoryview, chunk_blocks: int, skip: int, block_ids: Any) -> None:
            copy = bytearray(chunk)
            for start in range(0, len(copy), 64):
                copy[start + 3] ^= 0x40  # the highest bits of a float's exponent
            scatter(memoryview(copy), chunk_blocks, skip, block_ids)

        blocks.scatter = spoiled
        return {}

    def refusal(self, kinds: list[str], sizes: dict[str, int]) -> str | None:
        """What the connector says of a model with these kinds of attention, and of an engine of these sizes."""
        common: dict[str, Any] = {"block_size": 16, "num_kv_heads": 2, "head_size": 8, "dtype": torch.float32}
        specs = {
            "full": lambda: FullAttentionSpec(**common),
            "window": lambda: SlidingWindowSpec(**common, sliding_window=64),
        }
        groups = [SimpleNamespace(kv_cache_spec=specs[kind]()) for kind in kinds]
        try:
            refuse_unsupported(
                SimpleNamespace(parallel_config=SimpleNamespace(**sizes)), SimpleNamespace(kv_cache_groups=groups)
            )
        except ValueError as exc:
            return str(exc)
        return None

    def stop(self) -> dict[str, Any]:
        """End the engine; another one may be started."""
        if self.llm is not None:
            self.llm.llm_engine.engine_core.shutdown()
            self.llm = None
        ensure_kv_transfer_shutdown()  # also where an engine did not start
        gc.collect()
        return {}

    def _scheduler(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.scheduler


def main() -> None:
    """Until stdin ends. Answers go to the descriptor that the command line names; stdout is vLLM's."""
    answers = os.fdopen(int(sys.argv[1]), "w", buffering=1)
    host = Host()
    for line in sys.stdin:
        command = json.loads(line)
        name = command.pop("do")
        try:
            answer = {"answer": getattr(host, name)(**command)}
        except Exception as exc:  # noqa: BLE001  told to the test, which fails by it
            answer = {"error": f"{type(exc).__name__}: {exc}"}
        answers.write(json.dumps(answer) + "\n")
    host.stop()


if __name__ == "__main__":
    main()
