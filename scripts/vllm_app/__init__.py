"""Two vLLM servers, kvpd between them and the proxy in front, on one machine: for `scripts/demo --vllm` and tests/vllm.

Runs in both environments, .venv and .venv-vllm: it starts what needs the one or the other as processes of their own.
"""
