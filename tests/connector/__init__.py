"""The parts of the vLLM connector that need no vLLM; tests/vllm has the rest."""
