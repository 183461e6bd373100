"""What scripts/bench-peers runs: kvpd beside the systems that its users could pick instead, on one machine, in one run.

The conductor (`main`) and kvpd run from .venv; the peers' own processes run from .venv-peers and import nothing of
kvpd. Everything that is compared is measured by the same code, in turns, and its bytes are verified.
"""
