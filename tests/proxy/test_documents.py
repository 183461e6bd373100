"""docs/PROXY.md says of each report which test holds it; this holds the page to that."""

from __future__ import annotations

import re
from pathlib import Path

from kvpd.config import ProxyConfig, resolve
from kvpd.integrations.proxy import limits

PROJECT = Path(__file__).resolve().parents[2]
ROWS_OF_PROXIES = {f"P{number:02}" for number in range(14, 41)}


def page() -> str:
    """The page."""
    return (PROJECT / "docs" / "PROXY.md").read_text(encoding="utf-8")


def rows() -> dict[str, str]:
    """The table's rows: each number and what stands in its last cell."""
    found = re.findall(r"^\| (P\d\d(?:, P\d\d)*) \| .* \| (.*) \|$", page(), re.MULTILINE)
    return {number: cell for numbers, cell in found for number in numbers.split(", ")}


def all_tests() -> set[str]:
    """Every test of the proxy."""
    texts = [module.read_text(encoding="utf-8") for module in Path(__file__).parent.glob("test_*.py")]
    return set(re.findall(r"^(?:async )?def (test_\w+)\(", "\n".join(texts), re.MULTILINE))


def test_the_example_in_the_page_is_good(tmp_path: Path) -> None:
    """The first thing that somebody does is to copy it."""
    (example,) = re.findall(r"^```toml\n(.*?)^```", page(), re.MULTILINE | re.DOTALL)
    file = tmp_path / "kvpd.toml"
    file.write_text(example)
    assert resolve("proxy", file=file, environ={}).proxy.decode == ("http://10.0.0.5:8000+10.0.0.5:7300",)


def test_the_limits_in_the_page_are_the_defaults() -> None:
    """Whoever gets a 413 or a 503 looks them up there."""
    config = ProxyConfig()
    for text in (
        f"`body_bytes_max`, {config.body_bytes_max >> 20} MiB",
        f"`body_memory_max`, {config.body_memory_max >> 30} GiB",
        f"`header_count_max`, {config.header_count_max}; {limits.HEAD_BYTES_MAX >> 10} KiB",
        f"`requests_max`, {config.requests_max} ",
        f"`connections_max`, {config.connections_max} ",
        f"{limits.LATE_CONNECTIONS_MAX} more are taken for probes",
        f"{limits.PROMPTS_MAX} prompts in one request",
        f"at most {limits.REQUEST_ID_CHARS_MAX} printable",
    ):
        assert text in page(), text


def test_every_report_about_proxies_has_a_row_and_every_test_in_it_exists() -> None:
    """A table that names tests which are gone claims what nobody checks."""
    assert rows().keys() >= ROWS_OF_PROXIES
    for number, cell in rows().items():
        named = re.findall(r"`(test_\w+)`", cell)
        assert set(named) <= all_tests(), number
        assert all(number.lower() in name for name in named), number
        assert named or number not in ROWS_OF_PROXIES, number


def test_every_test_that_bears_a_number_is_in_its_row() -> None:
    """Whoever reads the row must find all of what holds it."""
    for name in all_tests():
        for number in re.findall(r"_p(\d\d)(?=_)", name):
            assert f"`{name}`" in rows()[f"P{number}"], name
