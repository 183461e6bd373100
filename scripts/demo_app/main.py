"""The demo's conductor: `python -m demo_app.main`, normally by way of `scripts/demo`.

It starts the processes, tells the engines what to do, and judges the outcome; it never touches a KV cache itself. It
waits for events only, each wait has a deadline, and whatever ends it ends every process that it started.
"""

from __future__ import annotations

import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import attrs
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from demo_app import model, prompts, report
from demo_app.arguments import parse
from demo_app.children import ChildFailed, Family
from demo_app.chunks import KvShape
from demo_app.conductor import Conductor
from demo_app.prompts import Prompt
from demo_app.requests import Request

_ROOT = Path(__file__).resolve().parents[2]


@attrs.frozen
class Task:
    """What is to be computed, and how its tokens are to be read."""

    model_name: str
    folder: Path
    shape: KvShape
    prompts: list[Prompt]
    decode: Callable[[tuple[int, ...]], str]


def prepared_smollm2(console: Console) -> Path:
    """The trained model's folder; it is made on the first run, which is shown.

    Raises:
        ModelUnavailable: it cannot be made.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task(f"{model.SMOLLM2_NAME}: looking into {model.cache_folder()}", total=len(model.STEPS))
        steps_begun = 0

        def on_step(step: str) -> None:
            nonlocal steps_begun
            progress.update(bar, description=f"{model.SMOLLM2_NAME}: {step}", completed=steps_begun)
            progress.console.print(f"  {model.SMOLLM2_NAME}, once only: {step}")
            steps_begun += 1

        folder = model.prepare(on_step)
    console.print(f"{model.SMOLLM2_NAME} is ready in {folder}")
    return folder


def prepare_smollm2(console: Console) -> Task:
    """The trained model, and prompts from the project's documents."""
    folder = prepared_smollm2(console)
    chat = prompts.Chat(folder)
    return Task("smollm2", folder, model.read_shape(folder), prompts.from_documents(_ROOT, chat.encode), chat.decode)


def prepare_tiny(console: Console) -> Task:
    """The random model needs no preparation, and its tokens are no words."""
    console.print("a tiny Llama with random weights and random prompts")
    made_up = prompts.at_random(model.TINY_VOCABULARY)
    return Task("tiny", Path(), model.TINY_SHAPE, made_up, lambda tokens: " ".join(map(str, tokens)))


def run(console: Console, task: Task, logs: Path | None) -> list[str]:
    """Do it all, print it all, and say what was not as it should be.

    Raises:
        ChildFailed: a process ended or fell silent before its time.
    """
    requests = [Request(prompt, f"prefill-{n}", f"sender-{n}") for n, prompt in enumerate(task.prompts)]
    # The folder's name is short because a Unix socket's path may have no more than 107 bytes.
    with tempfile.TemporaryDirectory(prefix="kvpd-demo-", dir="/tmp") as scratch, Family(logs) as family:
        conductor = Conductor(family, console, requests, task.shape, Path(scratch))
        conductor.start(task.model_name, task.folder)
        conductor.transfer()
        verdict = conductor.stop_daemons()
        conductor.compare()
    report.show(console, requests, task.shape, task.decode, verdict)
    if logs is not None:
        console.print(f"logs: {logs}", soft_wrap=True)
    report.print_last_line(requests)
    return report.faults(requests, verdict)


def main() -> int:
    """Exit status 0, 1 or (by argparse) 2; 130 after Ctrl-C."""
    options = parse()
    console = Console(highlight=False)
    complaints = Console(stderr=True, highlight=False, markup=False)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds, and so ends every process
    try:
        if options.keep_logs is not None:
            options.keep_logs.mkdir(parents=True, exist_ok=True)
        task = prepare_tiny(console) if options.model == "tiny" else prepare_smollm2(console)
        faults = run(console, task, options.keep_logs)
    except (model.ModelUnavailable, prompts.DocumentsTooShort, ChildFailed, OSError) as error:
        faults = [str(error)]
    except KeyboardInterrupt:
        complaints.print("scripts/demo: interrupted; every process that it started is gone")
        return 130
    for fault in faults:
        complaints.print(f"scripts/demo: {fault}", soft_wrap=True)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
