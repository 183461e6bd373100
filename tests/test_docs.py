"""The documents say what the code does: every name, default, event and diagram in them is compared with the code."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import get_args

import msgspec
import orjson
import pytest
import trio

from kvpd import link
from kvpd.config import Config, resolve, settings
from kvpd.core import messages
from kvpd.core.events import ReportName
from kvpd.errors import ErrorCode
from kvpd.metrics import ProxyMetrics, ReceiverMetrics, SenderMetrics

PROJECT = Path(__file__).resolve().parent.parent
DOCUMENTS = [PROJECT / "README.md", PROJECT / "CHANGELOG.md", *sorted((PROJECT / "docs").glob("*.md"))]
KVPD = Path(sys.executable).with_name("kvpd")
DEADLINE_S = 60.0
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
MADE_ON_THE_SPOT = frozenset({"name", "engine_socket"})  # their defaults depend on the host

# What calls a logger, and what names an event of the writer's own.
_LOGGING = frozenset({"debug", "info", "warning", "error"})
_OWN_LINES = frozenset({"_own_line"})


def page(name: str) -> str:
    return (PROJECT / name).read_text(encoding="utf-8")


def section(text: str, title: str) -> str:
    """What stands under a heading, up to the next one of the same or a higher level."""
    headings = FENCED.sub(lambda block: "." * len(block[0]), text)  # a comment in a block looks like one
    match = re.search(rf"^(#+) {re.escape(title)}$", headings, re.MULTILINE)
    assert match is not None, f"no heading {title!r}"
    end = re.compile(rf"^#{{1,{len(match[1])}}} ", re.MULTILINE).search(headings, match.end())
    return text[match.end() : end.start() if end else None]


def rows(text: str) -> dict[str, list[str]]:
    """The tables' rows by their first cell's word, for rows that begin with one in backquotes."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        match = re.fullmatch(r"\| `([^`]+)` \| (.*) \|", line)
        if match is not None:
            assert match[1] not in found, f"two rows for {match[1]}"
            found[match[1]] = [cell.strip() for cell in match[2].split(" | ")]
    return found


def prose(text: str) -> str:
    """A document without its fenced blocks."""
    return FENCED.sub("", text)


def fenced(text: str, language: str) -> list[str]:
    """The fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def anchors(text: str) -> set[str]:
    """The names by which a page's headings are linked to."""
    titles = re.findall(r"^#+ (.+)$", prose(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_between_documents_leads_somewhere(document: Path) -> None:
    """A reader who is sent to a page that is not there stops reading."""
    text = prose(document.read_text(encoding="utf-8"))
    targets = re.findall(r"\]\(([^)]+)\)", text) + re.findall(r"^\[[^\]]+\]: (\S+)$", text, re.MULTILINE)
    for target in targets:
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        path = (document.parent / name).resolve() if name else document
        assert path.exists(), f"{document.name} links to {target}"
        if anchor:
            assert anchor in anchors(path.read_text(encoding="utf-8")), f"{document.name} links to {target}"


def test_every_path_that_a_document_names_exists() -> None:
    """The table that says where a thing is decided is worth nothing once the thing has moved."""
    for document in DOCUMENTS:
        text = prose(document.read_text(encoding="utf-8"))
        for name in re.findall(r"`((?:kvpd|scripts|docs|tests)/[\w./-]+)`", text):
            assert (PROJECT / name).exists(), f"{document.name} names {name}"


def test_every_function_in_the_table_of_decisions_exists() -> None:
    """A reader new to the code finds admission, a put and a cancel within a minute each."""
    for line in section(page("docs/ARCHITECTURE.md"), "Where is X decided?").splitlines():
        modules = [PROJECT / name for name in re.findall(r"`(kvpd/[\w/]+\.py)`", line)]
        for name in re.findall(r"`(_?[a-z_]+)`", line):
            assert any(f"def {name}(" in module.read_text(encoding="utf-8") for module in modules), f"{name} in {line}"


def test_every_setting_is_documented_with_its_default_and_meaning() -> None:
    """Operators configure from the page, and claims and defaults must agree."""
    text = section(page("docs/OPERATIONS.md"), "Configure")
    names = {"receiver", "sender", "proxy", "log", "metrics"}
    for name in names:
        documented = rows(section(text, f"[{name}]"))
        known = {line.name: line for line in settings(resolve(environ={})) if line.section == name}
        assert documented.keys() == known.keys()
        for key, (default, meaning) in documented.items():
            assert meaning == known[key].meaning, f"{name}.{key}"
            assert key in MADE_ON_THE_SPOT or default == f"`{known[key].text}`", f"{name}.{key}"
    assert {line.section for line in settings(Config())} == names, "a section has got keys and no table"


def test_the_example_configurations_are_good(tmp_path: Path) -> None:
    """The first thing that somebody does is to copy one."""
    examples = fenced(page("docs/OPERATIONS.md"), "toml")
    assert len(examples) == 2
    for example in examples:
        file = tmp_path / "kvpd.toml"
        file.write_text(example)
        result = run([KVPD, "config", "check", "--config", file])
        assert (result.returncode, result.stderr) == (0, "")


def logged_events() -> set[str]:
    """Every event that some module of kvpd logs: the cores' reports, and the literals given to loggers."""
    events = {str(name) for name in ReportName}
    for module in (PROJECT / "kvpd").rglob("*.py"):
        if "vllm" in module.parts:
            continue  # it speaks in vLLM's own log, and in its form
        for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
                first = node.args[0]
                is_logging = node.func.attr in _OWN_LINES or (
                    node.func.attr in _LOGGING and ast.unparse(node.func.value) in {"log", "logger", "self._log"}
                )
                if is_logging and isinstance(first, ast.Constant):
                    events.add(str(first.value))
    return events


def test_every_log_event_is_documented_and_no_other() -> None:
    """Somebody who is paged greps the page for the line that they see."""
    documented = rows(section(page("docs/OPERATIONS.md"), "Logs"))
    events = logged_events()
    assert {"ready", "log_lines_dropped", "transfer_queued"} <= events
    assert documented.keys() == events


def metric_names() -> Iterator[str]:
    for metrics in (ReceiverMetrics(), SenderMetrics(), ProxyMetrics()):
        for metric in metrics.registry.collect():
            if metric.name.startswith("kvpd_"):
                yield f"{metric.name}_total" if metric.type == "counter" else metric.name


def test_every_metric_is_documented_and_no_other() -> None:
    """A dashboard is made from the page."""
    documented = rows(section(page("docs/OPERATIONS.md"), "Probes and metrics"))
    assert documented.keys() == set(metric_names())


def test_the_metrics_that_the_table_of_symptoms_names_exist() -> None:
    """A wrong name in an alert is an alert that never fires."""
    names = set(re.findall(r"`(kvpd_\w+)", section(page("docs/OPERATIONS.md"), "When paged")))
    assert names
    assert names <= set(metric_names())


def test_every_error_code_is_documented_and_no_other() -> None:
    """An engine decides by the code what to do, and the page says what."""
    assert rows(section(page("docs/PROTOCOL.md"), "Error codes")).keys() == {str(code) for code in ErrorCode}


def test_every_message_is_documented_with_its_fields() -> None:
    """Whoever writes a proxy or a second implementation has this table and no other."""
    documented = rows(section(page("docs/PROTOCOL.md"), "Messages"))
    kinds = {kind.__name__: kind for kind in get_args(messages.AnyMessage)}
    assert documented.keys() == kinds.keys()
    common = set(messages.PeerMessage.__struct_fields__)
    for name, kind in kinds.items():
        fields = kind.__struct_fields__
        own = [field for field in fields if field not in common or not issubclass(kind, messages.PeerMessage)]
        shown = re.sub(r" \([^)]*\)", "", documented[name][1]).split(", ")
        assert shown == own, name


def test_the_structures_inside_messages_are_documented_too() -> None:
    """An rkey in the wrong place is a write to the wrong place."""
    documented = rows(section(page("docs/PROTOCOL.md"), "Messages"))
    for message, field, kind in (
        ("Hello", "host", messages.HostIdentity),
        ("Welcome", "regions", messages.Region),
        ("Ack", "error", messages.ErrorInfo),
    ):
        assert f"{field} ({', '.join(kind.__struct_fields__)})" in documented[message][1]


def test_every_frame_of_the_engine_link_is_documented_with_its_direction() -> None:
    """An engine in another language speaks these frames."""
    documented = rows(section(page("docs/PROTOCOL.md"), "The engine link"))
    from_engine = {kind.__name__ for kind in get_args(link.EngineFrame)}
    from_daemon = {kind.__name__ for kind in get_args(link.DaemonFrame)}
    assert {name for name, cells in documented.items() if cells[0] == "engine"} == from_engine
    assert {name for name, cells in documented.items() if cells[0] == "daemon"} == from_daemon


def test_the_versions_in_the_text_are_the_code_s() -> None:
    """A version that is wrong in the text sends a reader after a difference that is none."""
    text = page("docs/PROTOCOL.md")
    assert f"`protocol_version` is {messages.PROTOCOL_VERSION}." in text
    assert f"The link's version is {link.LINK_VERSION}." in re.sub(r"\s+", " ", text)


def test_no_message_is_longer_than_the_text_allows() -> None:
    """The limits of frames are part of the protocol."""
    assert messages.MESSAGE_BYTES_MAX == link.FRAME_BYTES_MAX == 1 << 20
    assert re.sub(r"\s+", " ", page("docs/PROTOCOL.md")).count("at most 1 MiB") == 2


def run(command: list[str | Path]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, cwd=PROJECT, check=False)


def test_the_diagrams_show_the_states_of_the_code() -> None:
    """A diagram is what a reader believes first."""
    result = run([sys.executable, PROJECT / "scripts" / "draw-states", "--check"])
    assert (result.returncode, result.stderr) == (0, "")


def test_a_page_that_shows_other_states_is_refused(tmp_path: Path) -> None:
    """A check that cannot fail checks nothing; what it finds, drawing mends."""
    for name in ("scripts/draw-states", "kvpd/core/states.py", "docs/PROTOCOL.md"):
        copy = tmp_path / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(page(name), encoding="utf-8")
    script, drawn = tmp_path / "scripts" / "draw-states", tmp_path / "docs" / "PROTOCOL.md"
    before = drawn.read_text(encoding="utf-8")
    changed = before.replace("QUEUED --> ADMITTED", "QUEUED --> COMPLETE", 1)
    assert changed != before
    drawn.write_text(changed, encoding="utf-8")
    assert run([sys.executable, script, "--check"]).returncode == 1
    assert drawn.read_text(encoding="utf-8") == changed
    assert run([sys.executable, script]).returncode == 0
    assert drawn.read_text(encoding="utf-8") == before


@pytest.mark.parametrize("arguments", [["--help"], ["config", "show", "--explain"]], ids=" ".join)
def test_the_commands_that_only_look_run(arguments: list[str]) -> None:
    """The readme tells to type them."""
    assert f"`kvpd {' '.join(arguments)}`" in page("README.md")
    assert run([KVPD, *arguments]).returncode == 0


def test_the_embedding_example_runs() -> None:
    """It is the first program that a reader copies."""
    result = run([sys.executable, PROJECT / "docs" / "examples" / "embed.py"])
    assert (result.returncode, result.stderr) == (0, "")
    assert f"{result.stdout}```" in page("docs/EMBEDDING.md"), "the page shows another output"


async def start_daemon(
    nursery: trio.Nursery, command: list[str], environment: dict[str, str]
) -> dict[str, str | int | float]:
    """Start a daemon that ends with the nursery: its line `ready`."""
    ready, lines = trio.open_memory_channel[dict[str, str | int | float]](1)

    async def watch(process: trio.Process) -> None:
        assert process.stderr is not None
        pending = b""
        async for data in process.stderr:
            *complete, pending = (pending + data).split(b"\n")
            for line in map(orjson.loads, complete):
                if line["message"] == "ready":
                    ready.send_nowait(line)

    process = await nursery.start(
        partial(trio.run_process, [KVPD, *command], stderr=subprocess.PIPE, check=False, env=environment)
    )
    nursery.start_soon(watch, process)
    return await lines.receive()


async def test_the_tour_of_the_readme_runs_and_prints_what_it_shows(tmp_path: Path) -> None:
    """Five minutes that do not work cost a reader for good."""
    text = section(page("README.md"), "A tour in five minutes")
    environment = os.environ | {"XDG_RUNTIME_DIR": str(tmp_path)}
    commands = re.findall(r"\.venv/bin/kvpd (serve (?:.|\\\n)+?) &\n", text)
    assert len(commands) == 2
    daemons = [
        command.replace("\\\n", " ").replace("--log-format console", "").replace("$XDG_RUNTIME_DIR", str(tmp_path))
        for command in commands
    ]
    (script,) = fenced(text, "python")
    with trio.fail_after(DEADLINE_S):
        async with trio.open_nursery() as nursery:
            # A port of its own, for another test may use the readme's.
            at_any_port = ["--set", "receiver.control_address=127.0.0.1:0"]
            receiver = await start_daemon(nursery, [*daemons[0].split(), *at_any_port], environment)
            await start_daemon(nursery, daemons[1].split(), environment)
            script = script.replace("127.0.0.1:7300", str(receiver["control_address"]))
            result = await trio.run_process([sys.executable, "-c", script], capture_stdout=True, env=environment)
            nursery.cancel_scope.cancel()
    assert f"$ .venv/bin/python tour.py\n{result.stdout.decode()}```" in text


def test_a_struct_of_the_wire_is_an_array() -> None:
    """The page says that messages and frames are arrays; a map would be another protocol."""
    frame = messages.encode(messages.ProxyAck(1, 2))
    assert msgspec.msgpack.decode(frame) == ["ProxyAck", 1, 2]
