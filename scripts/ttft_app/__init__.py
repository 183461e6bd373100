"""Time to first token over HTTP, of one vLLM server and of pairs of them with kvpd and with NixlConnector between.

`nixl_connector` runs inside vLLM, from .venv-ttft; `nixl_proxy` and everything else from .venv.
"""
