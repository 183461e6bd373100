"""A request's story as the conductor knows it, filled in as its events arrive."""

from __future__ import annotations

import attrs

from demo_app.chunks import KvShape, spans
from demo_app.prompts import Prompt


@attrs.define
class Request:
    """What has become known of one prompt. Durations are in seconds."""

    prompt: Prompt
    prefill_engine: str
    sender: str
    admission_wait_s: float | None = None
    prefill_s: float | None = None
    first_token: int | None = None
    tail_s: float | None = None  # from the last chunk's computation (or admission) until all had landed
    put_s: float | None = None  # in which chunks were on the wire
    notified: bool = False
    continued: bool = False
    copied_bytes: int | None = None
    decoded: tuple[int, ...] | None = None
    alone: tuple[int, ...] | None = None

    @property
    def chunks(self) -> int:
        """How many chunks its KV cache is."""
        return len(spans(len(self.prompt.tokens)))

    def bytes_in(self, shape: KvShape) -> int:
        """How long its KV cache is."""
        return shape.bytes_of(len(self.prompt.tokens))

    @property
    def identical(self) -> bool:
        """Whether the decode engine said what one process alone said."""
        return self.decoded is not None and self.decoded == self.alone
