"""Workers: parts of a benchmark that run in a process of their own, as engines do.

A worker is a module that is run and calls `serve` (or, in trio, `serve_async`) with its functions. Each takes one value
and gives one back, both of types that msgspec knows; they travel as lines of JSON over the worker's stdin and stdout.
It ends when its stdin does. What a function or a thread of its raises ends the worker, and its caller is told.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
import typing
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import trio

from kvpd.bench.processes import Child

CALL_S: Final = 300.0
_READ_BYTES: Final = 1 << 20

T = TypeVar("T")


class Worker(Child):
    """A worker's process, seen from the benchmark; one call at a time."""

    def __init__(self, name: str, module: str, log: Path) -> None:
        super().__init__(name, ["-m", module], log, piped=True)
        self._pending = b""

    def call(self, function: str, argument: object, returns: type[T], *, timeout_s: float = CALL_S) -> T:
        """Call and wait.

        Raises:
            BenchmarkFailed: it has ended, or takes too long.
        """
        self.begin(function, argument)
        return self.result(returns, timeout_s=timeout_s)

    def begin(self, function: str, argument: object) -> None:
        """Call; `result` must follow. Meanwhile other workers may be called."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(msgspec.json.encode((function, argument)) + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError as exc:
            raise self.failure("has ended") from exc

    def result(self, returns: type[T], *, timeout_s: float = CALL_S) -> T:
        """Wait for what the call gave.

        Raises:
            BenchmarkFailed: the worker has ended, or takes longer than `timeout_s` seconds.
        """
        assert self.process.stdout is not None
        descriptor = self.process.stdout.fileno()
        while b"\n" not in self._pending:
            self.wait_readable(descriptor, timeout_s, "answering")
            data = os.read(descriptor, _READ_BYTES)
            if not data:
                raise self.failure(f"ended with status {self.process.wait()} instead of answering")
            self._pending += data
        line, _, self._pending = self._pending.partition(b"\n")
        return msgspec.json.decode(line, type=returns)


def serve(functions: Mapping[str, Callable[[Any], object]]) -> None:
    """A worker's main: answer calls until stdin ends."""
    threading.excepthook = _end_at_once
    types = {name: _argument_type(function) for name, function in functions.items()}
    for line in sys.stdin.buffer:
        name, raw = msgspec.json.decode(line, type=tuple[str, msgspec.Raw])
        _answer(functions[name](msgspec.json.decode(raw, type=types[name])))


async def serve_async(functions: Mapping[str, Callable[[Any], Awaitable[object]]]) -> None:
    """The same in trio, where other tasks run between the calls."""
    types = {name: _argument_type(function) for name, function in functions.items()}
    pending = b""
    async with trio.lowlevel.FdStream(os.dup(sys.stdin.fileno())) as calls:
        async for data in calls:
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                name, raw = msgspec.json.decode(line, type=tuple[str, msgspec.Raw])
                _answer(await functions[name](msgspec.json.decode(raw, type=types[name])))


def _argument_type(function: Callable[[Any], object]) -> Any:
    hints = typing.get_type_hints(function)
    hints.pop("return", None)
    (argument,) = hints.values()
    return argument


def _end_at_once(failure: threading.ExceptHookArgs) -> None:
    """A thread has failed, and the others may wait for it."""
    if failure.exc_value is not None:
        traceback.print_exception(failure.exc_value)
    sys.stderr.flush()
    os._exit(1)


def _answer(value: object) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(value) + b"\n")
    sys.stdout.buffer.flush()
