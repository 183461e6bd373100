"""A proxy for NixlConnector: `kvpd serve proxy` without its wait for a sender's word, for there is no sender.

With NixlConnector the decode engine reads from the prefill engine by itself, as the prefill engine's answer tells it
to. So the same HTTP code serves both systems, and a difference between them is not one between two web frameworks.
Takes the arguments of `kvpd`.
"""

from __future__ import annotations

from kvpd import cli
from kvpd.integrations.proxy import server
from kvpd.integrations.proxy.engines import Engine
from kvpd.integrations.proxy.exchange import Sink
from kvpd.integrations.proxy.flow import Flow
from kvpd.integrations.proxy.jobs import Job
from kvpd.integrations.proxy.transfer import Transfer


class NixlFlow(Flow):
    """Prefill, and with what its answer says, decode."""

    async def _one_by_one(
        self, job: Job, prefill: Engine, decode: Engine, transfer: Transfer, sink: Sink, began: float
    ) -> None:
        with decode.load(job.prompt_tokens):
            params = await self._prefill(job, prefill, decode, transfer)
        await self._decode(job, decode, transfer, sink, began, params)


def main() -> None:
    """`kvpd`, with the other flow."""
    vars(server)["Flow"] = NixlFlow
    cli.main()


if __name__ == "__main__":
    main()
