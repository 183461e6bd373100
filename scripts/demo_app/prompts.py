"""Two long prompts: the project's own documents with a question about them.

Each prompt is between TOKENS_MIN and TOKENS_MAX tokens long, and no two begin alike, so that none of the second one's
chunks is in the receiver already.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import attrs
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

TOKENS_MIN: Final = 700
TOKENS_MAX: Final = 1_500
# One prompt of six chunks and one of four, neither ending with a full one.
SMOLLM2_TARGETS: Final = (1_450, 1_000)
TINY_TARGETS: Final = (1_450, 900)

_QUESTIONS: Final = {
    "README.md": "What does kvpd do, and who is it for?",
    "docs/ARCHITECTURE.md": "Which parts does kvpd have, and how do they work together?",
    "docs/PROTOCOL.md": "Which messages do the sender and the receiver exchange?",
    "docs/OPERATIONS.md": "How does one install and configure kvpd?",
    "CHANGELOG.md": "What can a user of kvpd notice in this version?",
}
_FALLBACK_QUESTION = "What is this text about?"
_PREFERENCE = ("docs/ARCHITECTURE.md", "README.md", "docs/PROTOCOL.md", "docs/OPERATIONS.md")
_PAGE_CHARACTERS_MIN = 400  # a page shorter than this says nothing that one could ask about

_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)

Encode = Callable[[str], list[int]]


class DocumentsTooShort(Exception):
    """The project's documents do not make the prompts; the text says what is missing."""


@attrs.frozen
class Prompt:
    """What one request asks."""

    req_id: str
    title: str
    question: str
    tokens: tuple[int, ...]


@attrs.frozen
class Page:
    """A document of the project."""

    title: str
    text: str

    @property
    def question(self) -> str:
        """What to ask about it."""
        return _QUESTIONS.get(self.title, _FALLBACK_QUESTION)


def pages(root: Path) -> list[Page]:
    """The project's documents, best first; where there are none, the docstrings of its modules."""
    candidates = [*_PREFERENCE, *sorted(f"docs/{path.name}" for path in (root / "docs").glob("*.md")), "CHANGELOG.md"]
    found = [Page(name, (root / name).read_text()) for name in dict.fromkeys(candidates) if (root / name).is_file()]
    modules = [Page(str(path.relative_to(root)), _docstrings(path)) for path in sorted((root / "kvpd").rglob("*.py"))]
    return [page for page in found + modules if len(page.text) >= _PAGE_CHARACTERS_MIN]


def _docstrings(path: Path) -> str:
    """What a module says about itself, its classes and its functions."""
    parts = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, _DOCUMENTED)]
    return "\n\n".join(text for part in parts if (text := ast.get_docstring(part)))


class Chat:
    """A prepared model's tokenizer and chat template, without the seconds that importing transformers takes."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._template = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(
            (folder / "chat_template.jinja").read_text()
        )

    def encode(self, question: str) -> list[int]:
        """The tokens of a conversation that begins with the user's `question`, up to the assistant's turn."""
        messages = [{"role": "user", "content": question}]
        text = self._template.render(messages=messages, add_generation_prompt=True)
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of generated tokens."""
        return str(self._tokenizer.decode(list(tokens)))


def from_documents(root: Path, encode: Encode) -> list[Prompt]:
    """A prompt for each of SMOLLM2_TARGETS; `encode` gives the tokens of what a user says.

    Raises:
        DocumentsTooShort: all documents together do not make them.
    """
    supply = iter(pages(root))
    return [_fit(number, supply, target, encode) for number, target in enumerate(SMOLLM2_TARGETS)]


def _fit(number: int, supply: Iterator[Page], tokens_max: int, encode: Encode) -> Prompt:
    """The longest prompt of at most `tokens_max` tokens, from whole paragraphs of as few pages as will do."""
    taken: list[str] = []
    first: Page | None = None
    best: list[int] = []
    for page in supply:
        first = first or page
        for paragraph in re.split(r"\n\s*\n", page.text.strip()):
            text = "\n\n".join([*taken, paragraph])
            tokens = encode(f"{text}\n\nAnswer in a few sentences. {first.question}")
            if len(tokens) > tokens_max:
                if len(best) >= TOKENS_MIN:
                    return Prompt(f"request-{number}", first.title, first.question, tuple(best))
                continue  # one paragraph that is too long, a table perhaps, must not end the prompt early
            taken.append(paragraph)
            best = tokens
        if first is not None and len(best) >= TOKENS_MIN:
            return Prompt(f"request-{number}", first.title, first.question, tuple(best))
    raise DocumentsTooShort(f"the project's documents make {len(best)} tokens; a prompt needs {TOKENS_MIN}")


def at_random(vocabulary: int, targets: Sequence[int] = TINY_TARGETS) -> list[Prompt]:
    """Prompts for a model that knows no language: the same tokens every time."""
    source = random.Random(11)
    return [
        Prompt(f"request-{number}", "random tokens", "", tuple(source.randrange(vocabulary) for _ in range(target)))
        for number, target in enumerate(targets)
    ]
