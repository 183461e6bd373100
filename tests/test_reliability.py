"""docs/RELIABILITY.md says which test holds what; this holds the page to that."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

PROJECT: Final = Path(__file__).resolve().parent.parent
REPORTS: Final = {f"P{number:02}" for number in (*range(1, 14), *range(53, 92))}


def page() -> str:
    """The page."""
    return (PROJECT / "docs" / "RELIABILITY.md").read_text(encoding="utf-8")


def sources(folder: str, pattern: str) -> str:
    """The text of all modules there."""
    return "\n".join(path.read_text(encoding="utf-8") for path in sorted((PROJECT / folder).rglob(pattern)))


def all_tests() -> set[str]:
    """The names of all tests."""
    return set(re.findall(r"^ *(?:async )?def (test_\w+)\(", sources("tests", "test_*.py"), re.MULTILINE))


def section(title: str) -> str:
    """What stands under a heading of the second level."""
    return page().split(f"\n## {title}\n")[1].split("\n## ")[0]


def rows(text: str) -> dict[str, list[str]]:
    """A table's rows: the number in the first cell, and the other cells."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if (match := re.fullmatch(r"\| (P?\d+) \| (.*) \|", line)) is not None:
            assert match[1] not in found, f"two rows for {match[1]}"
            found[match[1]] = match[2].split(" | ")
    return found


def test_every_test_that_the_page_names_exists() -> None:
    """A table that names tests which are gone claims what nobody checks."""
    named = set(re.findall(r"`(test_\w+)`", page()))
    assert len(named) > 100
    assert named - all_tests() == set()


def test_every_invariant_and_every_fault_has_a_test_and_a_planted_fault_that_exists() -> None:
    """A check that nothing can trip is worth nothing, and neither is one that is only said to exist."""
    planted = set(re.findall(r'"((?:invariant|fault)-\d\d-[\w-]+)"', sources("tests/simulation", "planted_*.py")))
    shown = set()
    for title, count in (("Ten invariants", 10), ("Twenty-two faults", 22)):
        table = rows(section(title))
        assert list(table) == [str(number) for number in range(1, count + 1)]
        for number, cells in table.items():
            assert "`test_" in cells[-2], f"{title}, {number}: no test"
            plants = re.findall(r"`([\w-]+)`", cells[-1])
            assert plants or cells[-1].startswith("none: "), f"{title}, {number}: no planted fault and no reason"
            assert set(plants) <= planted, f"{title}, {number}"
            shown |= set(plants)
    assert shown == planted


def test_every_fault_of_the_core_is_in_its_row() -> None:
    """The tests of the faults bear their numbers; whoever reads a row must find all of them."""
    table = rows(section("Twenty-two faults"))
    for name in all_tests():
        if (match := re.match(r"test_fault_(\d\d)_", name)) is not None:
            assert f"`{name}`" in table[str(int(match[1]))][-2], name


def test_every_report_has_a_row_with_a_test_or_a_reason() -> None:
    """Other people's outages are cheap lessons only if none is forgotten."""
    table = rows(section("Public reports"))
    assert set(table) == REPORTS
    for number, cells in table.items():
        assert re.search(r"[\w.-]+/[\w.-]+#\d+", cells[0]), f"{number}: no report"
        assert "`test_" in cells[-1] or len(cells[-1]) > 20, f"{number}: neither a test nor a reason"


def test_every_test_that_bears_a_report_s_number_is_in_its_row() -> None:
    """A number in a name is a promise to whoever looks for it."""
    table = rows(section("Public reports"))
    for name in all_tests():
        prefix = re.match(r"test_((?:p\d\d_)+)", name)
        for number in re.findall(r"p(\d\d)_", prefix[1]) if prefix else ():
            if f"P{number}" in REPORTS:
                assert f"`{name}`" in table[f"P{number}"][-1], name
