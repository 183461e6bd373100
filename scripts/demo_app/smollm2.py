"""SmolLM2-135M-Instruct, run by transformers from the directory that `model` prepared."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, LlamaForCausalLM
from transformers.utils import logging

from demo_app.chunks import Array, KvShape, Layers


class SmolLM2:
    """32-bit floats and one thread: what makes the tokens of different processes comparable."""

    def __init__(self, directory: Path) -> None:
        torch.set_num_threads(1)
        logging.disable_progress_bar()
        self._model = LlamaForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
        ).eval()
        config = self._model.config
        self._shape = KvShape(config.num_hidden_layers, config.num_key_value_heads, config.head_dim)
        self._end_tokens = frozenset({int(config.eos_token_id)})

    @property
    def shape(self) -> KvShape:
        """Of one token's keys and values."""
        return self._shape

    @property
    def end_tokens(self) -> frozenset[int]:
        """The end of the assistant's turn."""
        return self._end_tokens

    def new_cache(self) -> Any:
        """A cache of no tokens."""
        return DynamicCache(config=self._model.config)

    def cache_from(self, kv: Array) -> Any:
        """A cache of the tokens in `kv`."""
        cache = self.new_cache()
        for number, (layer_keys, layer_values) in enumerate(torch.from_numpy(kv).unsqueeze(2)):
            cache.update(layer_keys, layer_values, number)
        return cache

    def layers_of(self, cache: Any) -> Layers:
        """The cache's arrays; a step makes new ones."""
        return [(layer.keys[0].numpy(), layer.values[0].numpy()) for layer in cache.layers]

    def step(self, cache: Any, tokens: Sequence[int]) -> int:
        """Append `tokens` to the cache and name the likeliest next one."""
        with torch.inference_mode():
            answer = self._model(input_ids=torch.tensor([list(tokens)]), cache=cache, use_cache=True, logits_to_keep=1)
            return int(answer.logits[0, -1].argmax())
