"""The figures as tables, for a terminal and as Markdown, and as JSON and a plot for whoever wants to look closer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import attrs
from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from kvpd.bench.plots import Plot, Series
from kvpd.bench.record import Record
from ttft_app.figures import Figures, Spread
from ttft_app.measuring import ANSWER_TOKENS, Sample
from ttft_app.systems import CONCURRENT, KVPD, NIXL, SEQUENTIAL, SINGLE, SYSTEMS, System

# A stage of kvpd's requests, one after the other: they add up to the time to first token.
_STAGES: Final = {
    "log.way_in": "to the prefill engine: client, proxy, vLLM's front end, its scheduler; the transfer opens",
    "prefill.computed": "prefill: the prompt and one token; admission, and all chunks but the last ones, beside it",
    "log.landed": "the rest of the chunks: copied into staging, put, acknowledged",
    "log.to_claim": "to the decode engine: the proxy's second hop, vLLM's front end, its scheduler; claimed",
    "log.copied": "copied into the decode engine's blocks, released",
    "log.answered": "decode: the prompt's last token, and the way back",
}
_BESIDE: Final = {
    "beside.admission": "admission, from the transfer's opening",
    "beside.done": "the sender knows that all has landed, after the receiver does",
    "decode.loaded": "the connector's own count of claim and copy",
}
# A stage of what a proxy that asks one engine after the other waits for.
_ALONE: Final = {"decode.queued": "in vLLM's queue", "decode.computed": "vLLM computed"}
_SEEN: Final = {
    "proxy.prefill_request": "the prefill engine's answer",
    "prefill.computed": "of which vLLM computed",
    "proxy.word": "waiting for word that the KV cache is complete",
    "decode_request": "the decode engine's first bytes",
    "decode.queued": "of which in vLLM's queue, KV cache and all",
    "decode.computed": "of which vLLM computed",
}


@attrs.frozen
class Table:
    """Rows of text; the first column is what a row is about."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    def markdown(self) -> str:
        """As Markdown."""
        lines = [f"### {self.title}", "", _row(self.columns), _row(["---", *["---:"] * (len(self.columns) - 1)])]
        lines += [_row(row) for row in self.rows]
        return "\n".join([*lines, "", *([self.note, ""] if self.note else [])])

    def show(self, console: Console) -> None:
        """In a terminal."""
        drawn = RichTable(title=self.title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
        for number, column in enumerate(self.columns):
            drawn.add_column(column, justify="right" if number else "left", overflow="fold")
        for row in self.rows:
            drawn.add_row(*row)
        console.print(drawn)
        if self.note:
            console.print(self.note, highlight=False, markup=False)
            console.print()


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def tables(figures: Figures) -> list[Table]:
    """All of them."""
    columns = ["", *(f"{length} tokens" for length in figures.lengths)]
    return [
        _firsts(figures, columns),
        _comparison(figures, columns),
        *_seen(figures, columns),
        *_stages(figures, columns),
    ]


def _firsts(figures: Figures, columns: Sequence[str]) -> Table:
    rows = [[system.name, *(figures.first(system, length).text() for length in figures.lengths)] for system in SYSTEMS]
    note = f"Medians of {len(figures.rounds)} rounds, quartiles in parentheses."
    return Table("Time to first token (ms)", columns, rows, note)


def _comparison(figures: Figures, columns: Sequence[str]) -> Table:
    rows = [
        [system.name, *(figures.added(system, length).text() for length in figures.lengths)] for system in SYSTEMS[1:]
    ]
    for system in KVPD:
        ratios = (f"{figures.added_ratio(system, NIXL, length):.2f}" for length in figures.lengths)
        rows.append([f"{system.name} / {NIXL.name}", *ratios])
        wins = (f"{figures.wins(system, NIXL, length)} of {len(figures.rounds)}" for length in figures.lengths)
        rows.append([f"rounds in which {system.name} added less", *wins])
    return Table("Added to the time of the system's own prefill server, asked alone (ms)", columns, rows)


def _over_single(figures: Figures, columns: Sequence[str]) -> Table:
    rows = []
    for system in SYSTEMS[1:]:
        rows.append([system.name, *(figures.over_single(system, length).text() for length in figures.lengths)])
        alone = (figures.alone(system, length).text() for length in figures.lengths)
        rows.append([f"{system.name}: its prefill server alone takes", *alone])
    note = "Two processes of one program need not be equally fast, so this has their differences in it."
    return Table("Added to the time of the single server (ms)", columns, rows, note)


def _seen(figures: Figures, columns: Sequence[str]) -> list[Table]:
    """What the same proxy code sees of both systems that it asks one engine after the other."""

    def cell(system: System, length: int, name: str) -> str:
        return figures.stage(system, length, name).text()

    found = []
    for system in (SEQUENTIAL, NIXL):
        rows = [[text, *(cell(system, length, name) for length in figures.lengths)] for name, text in _SEEN.items()]
        found.append(Table(f"{system.name}: what its proxy waits for (ms)", columns, rows))
    alone = [[text, *(cell(SINGLE, length, name) for length in figures.lengths)] for name, text in _ALONE.items()]
    return [Table(f"{SINGLE.name} (ms)", columns, alone), *found]


def _stages(figures: Figures, columns: Sequence[str]) -> list[Table]:
    found = []
    for system in (SEQUENTIAL, CONCURRENT):
        rows = [
            [text, *(figures.stage(system, length, name).text() for length in figures.lengths)]
            for name, text in {**_STAGES, **{key: f"beside: {text}" for key, text in _BESIDE.items()}}.items()
        ]
        found.append(Table(f"{system.name}: a request's stages, by kvpd's log (ms)", columns, rows))
    return found


def write_json(file: Path, about: Record, samples: Sequence[Sample]) -> None:
    """Everything that was measured."""
    whole = {"about": attrs.asdict(about), "samples": [attrs.asdict(one) for one in samples]}
    file.write_text(json.dumps(whole, indent=1) + "\n")


def write_markdown(file: Path, about: Record, found: Sequence[Table]) -> None:
    """The tables, and where they are from."""
    head = [
        f"SmolLM2-135M-Instruct, float32, streams of {ANSWER_TOKENS} tokens.",
        "",
        *(f"- {one}" for one in about.lines()),
    ]
    file.write_text("\n".join([*head, "", *(table.markdown() for table in found)]))


def plots(figures: Figures) -> list[Plot]:
    """What each system takes, and what it adds."""

    def series(name: str, spreads: Sequence[Spread]) -> Series:
        return Series(
            name=name,
            x=figures.lengths,
            y=[one.median for one in spreads],
            low=[one.low for one in spreads],
            high=[one.high for one in spreads],
        )

    first = [series(one.name, [figures.first(one, length) for length in figures.lengths]) for one in SYSTEMS]
    added = [series(one.name, [figures.added(one, length) for length in figures.lengths]) for one in SYSTEMS[1:]]
    return [_plot("Time to first token", first), _plot("Added to the system's own prefill server, asked alone", added)]


def _plot(title: str, series: Sequence[Series]) -> Plot:
    return Plot(title=f"{title}: medians and quartiles", x_label="tokens of the prompt", y_label="ms", series=series)
