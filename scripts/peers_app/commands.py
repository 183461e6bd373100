"""A child's conversation with the conductor: a line of JSON each way, on the standard streams that it was started with.

Whatever libraries print goes to standard error instead.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

Words = dict[str, Any]


class Commands:
    """The child's end. `descriptor` is readable when there is something to read, or the conductor is gone."""

    def __init__(self) -> None:
        self.descriptor = 0
        self._out = os.dup(1)
        os.dup2(2, 1)
        self._pending = b""

    def next(self) -> Words:
        """The next command; ends the process when the conductor has ended the conversation."""
        while b"\n" not in self._pending:
            data = os.read(self.descriptor, 65536)
            if not data:
                # Not `exit`: some libraries' threads and destructors would keep a finished child.
                sys.stderr.flush()
                os._exit(0)
            self._pending += data
        line, self._pending = self._pending.split(b"\n", 1)
        words: Words = json.loads(line)
        return words

    def reply(self, **words: Any) -> None:
        """Answer."""
        os.write(self._out, json.dumps(words).encode() + b"\n")
