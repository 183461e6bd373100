"""Turns the quantised SmolLM2 of a gguf file into 16-bit safetensors with its tokenizer.

Run as `python -m demo_app.convert SOURCE TARGET`; it says on a line of its own which of `model.STEPS` begins.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from demo_app.model import STEPS

_NOT_CONFIGURATION = ("quantization_config", "_name_or_path", "_model_name_or_path", "transformers_version")


def convert(source: Path, target: Path) -> None:
    """Write the model at `source` into the folder `target`."""
    logging.disable_progress_bar()
    _announce(2)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    _announce(3)
    packed = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    fields = {name: value for name, value in packed.config.to_dict().items() if name not in _NOT_CONFIGURATION}
    # transformers refuses to save a model that came from gguf, so its weights move into a fresh one.
    model = LlamaForCausalLM(LlamaConfig(**fields))
    misfit = model.load_state_dict(packed.state_dict(), strict=False)
    model.tie_weights()
    if misfit.unexpected_keys or set(misfit.missing_keys) - {"lm_head.weight"}:
        sys.exit(f"the weights do not fit the model: {misfit}")
    _announce(4)
    model.to(torch.bfloat16).eval().save_pretrained(target)
    tokenizer.save_pretrained(target)


def _announce(step: int) -> None:
    print(STEPS[step], flush=True)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
