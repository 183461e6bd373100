"""docs/VLLM.md says of each report which test holds it; this holds the page to that."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

PROJECT: Final = Path(__file__).resolve().parents[2]
REPORTS: Final = {f"P{number}" for number in range(37, 53)}


def rows() -> dict[str, list[str]]:
    """The table's rows: the number in the first cell, and the other cells."""
    page = (PROJECT / "docs" / "VLLM.md").read_text(encoding="utf-8")
    table = page.split("\n## Reports from elsewhere\n")[1].split("\n## ")[0]
    found = re.findall(r"^\| (P\d\d) \| (.*) \|$", table, re.MULTILINE)
    assert len(dict(found)) == len(found), "two rows for one report"
    return {number: cells.split(" | ") for number, cells in found}


def all_tests() -> set[str]:
    """The names of all tests, those that need vLLM too."""
    texts = [module.read_text(encoding="utf-8") for module in (PROJECT / "tests").rglob("test_*.py")]
    return set(re.findall(r"^(?:async )?def (test_\w+)\(", "\n".join(texts), re.MULTILINE))


def test_every_report_has_a_row_and_every_test_in_it_exists() -> None:
    """A table that names tests which are gone claims what nobody checks."""
    assert rows().keys() == REPORTS
    for number, cells in rows().items():
        assert re.search(r"[\w.-]+/[\w.-]+#\d+", cells[0]), f"{number}: no report"
        named = set(re.findall(r"`(test_\w+)`", cells[-1]))
        assert named, number
        assert named <= all_tests(), number


def test_every_test_that_bears_a_report_s_number_is_in_its_row() -> None:
    """Whoever reads the row must find all of what holds it."""
    for name in all_tests():
        for number in re.findall(r"_p(\d\d)(?=_)", name):
            if f"P{number}" in REPORTS:
                assert f"`{name}`" in rows()[f"P{number}"][-1], name
