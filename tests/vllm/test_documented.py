"""The commands of docs/VLLM.md, as they are written there: a newcomer pastes them, and gets an answer."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import PROJECT

DEADLINE_S = 280.0
SECTION = "## One machine, by hand"


def commands() -> str:
    """The section's blocks, one after the other."""
    text = (PROJECT / "docs" / "VLLM.md").read_text()
    section = text[text.index(SECTION) + len(SECTION) :].partition("\n## ")[0]
    return "\n".join(re.findall(r"^```\n(.*?)^```$", section, flags=re.MULTILINE | re.DOTALL))


@pytest.fixture
def prepared() -> None:
    """What the section says is there: the model."""
    prepare = "from demo_app import model; print(model.prepare(print))"
    environment = {**os.environ, "PYTHONPATH": str(PROJECT / "scripts")}
    subprocess.run([PROJECT / ".venv/bin/python", "-c", prepare], env=environment, check=True, timeout=DEADLINE_S)


@pytest.fixture
def shell(prepared: None) -> Iterator[subprocess.Popen[str]]:
    """A shell that runs them; what it started ends with this, at the latest."""
    script = f"set -eu\ncd '{PROJECT}'\n{commands()}"
    with subprocess.Popen(
        ["bash", "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0
    ) as process:
        yield process
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def answers(text: str) -> list[dict[str, Any]]:
    """The completions in what curl wrote, one after the other."""
    reader = json.JSONDecoder()
    return [reader.raw_decode(text, found.start())[0] for found in re.finditer(r'\{"id":', text)]


@pytest.mark.timeout(DEADLINE_S + 20)
def test_what_a_newcomer_pastes_answers(shell: subprocess.Popen[str]) -> None:
    """Each command works where it stands, and the last one ends what the others have started."""
    out, err = shell.communicate(timeout=DEADLINE_S)
    sys.stdout.write(out[-3000:] + err[-20_000:])  # shown if this fails
    assert shell.returncode == 0
    chat, prefilled, completed = (answer for answer in answers(out) if "choices" in answer)
    assert "Paris" in chat["choices"][0]["message"]["content"]
    (outside,) = re.findall(r"^vllm:external_prefix_cache_hits_total\{.*\} (.*)$", out, flags=re.MULTILINE)
    assert float(outside) == chat["usage"]["prompt_tokens"] - 1
    assert prefilled["kv_transfer_params"]["transfer_id"] == "request-1"
    assert "Paris" in completed["choices"][0]["text"]
