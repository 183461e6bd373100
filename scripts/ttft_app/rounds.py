"""Who is asked when: every system once a round, for every length, in an order that turns with the rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, TypeVar

from demo_app.prompts import pages
from tokenizers import Tokenizer

from ttft_app.measuring import BenchFailed, Sample, ask, measure
from ttft_app.systems import SYSTEMS, System, Systems

T = TypeVar("T")
_WARM_UP_TOKENS: Final = 16  # of the request that begins each turn and is not measured


def turned(things: Sequence[T], number: int) -> list[T]:
    """In round `number`: another one begins in each round, and every second cycle runs backwards."""
    start = number % len(things)
    order = [*things[start:], *things[:start]]
    return order[::-1] if number // len(things) % 2 else order


class Texts:
    """Prompts out of this project's documents; no two begin with the same token position."""

    def __init__(self, root: Path, model: Path) -> None:
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self._tokens: list[int] = tokenizer.encode("\n\n".join(page.text for page in pages(root))).ids
        self._next = 0

    def take(self, length: int) -> list[int]:
        """The next `length` tokens; from the beginning again, one token later, when the documents are used up."""
        if self._next + length > len(self._tokens):
            self._next = self._next % length + 1
        start, self._next = self._next, self._next + length
        return self._tokens[start : self._next]


def run(
    stack: Systems,
    texts: Texts,
    lengths: Sequence[int],
    rounds: int,
    say: Callable[[str], None],
    keep: Callable[[list[Sample]], None] = lambda _: None,
) -> list[Sample]:
    """Everything once unmeasured, then round after round; `keep` gets all samples so far after each.

    Raises:
        BenchFailed: a request was not answered.
        PartFailed: a part of the stack failed.
    """
    for system in SYSTEMS:  # the first request of a kind pays for connections, handshakes and first touches
        with stack.running(system):
            for length in lengths:
                ask(stack, system, texts.take(length))
    samples: list[Sample] = []
    for number in range(rounds):
        prompts = {length: texts.take(length) for length in lengths}
        for system in turned(SYSTEMS, number):
            with stack.running(system):
                ask(stack, system, texts.take(_WARM_UP_TOKENS))
                samples += [measure(stack, system, prompts[length], number) for length in turned(lengths, number)]
        say(f"round {number + 1} of {rounds}: " + _brief(samples, number))
        keep(samples)
    return samples


def _brief(samples: Sequence[Sample], number: int) -> str:
    """One round for a line: each system's times in the order of the prompts' lengths."""

    def times(system: System) -> str:
        own = sorted((one.length, one.first_s) for one in samples if one.round == number and one.system == system.name)
        return "/".join(f"{first_s * 1e3:.0f}" for _, first_s in own)

    return ", ".join(f"{system.name} {times(system)}" for system in SYSTEMS) + " ms"


def faults(samples: Sequence[Sample]) -> list[str]:
    """What was not as it must be: other tokens than the single server's, or a prompt that was computed twice."""
    if not samples:
        raise BenchFailed("nothing was measured")
    alone = {(one.length, one.round): one.tokens for one in samples if one.system == SYSTEMS[0].name}
    found = []
    for one in samples:
        if one.tokens != alone[one.length, one.round]:
            found.append(
                f"{one.system}: other tokens than the single server's for {one.length} tokens, round {one.round + 1}"
            )
        if one.system != SYSTEMS[0].name and one.from_outside < one.length - 1:
            found.append(
                f"{one.system}: {one.from_outside} of {one.length} tokens came from outside, round {one.round + 1}"
            )
    return found
