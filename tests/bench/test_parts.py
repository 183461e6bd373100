"""The parts of `kvpd bench`: what a figure is made of, without a daemon."""

from __future__ import annotations

import sys
from pathlib import Path

import click
import pytest

from kvpd.bench.arguments import size_text, sizes
from kvpd.bench.loopwatch import LoopWatch
from kvpd.bench.memcpy import Memcpy
from kvpd.bench.payload import Load, Payload, has_stamps, put_stamps, stamp
from kvpd.bench.plots import Plot, Series, check_plot_file, draw
from kvpd.bench.rounds import Measured, alternate, percentile
from kvpd.bench.tables import text
from kvpd.bench.transfer import Case, TransferResult
from kvpd.bench.wires import Binding

CHUNK_BYTES = 4096
_LINES = ["memcpy", "bare UCX puts", "kvpd, in place", "kvpd, engines copy"]


def test_what_is_compared_takes_turns() -> None:
    """A machine that slows down within a run must slow down both sides of a ratio."""
    order: list[str] = []

    def record(name: str) -> int:
        order.append(name)
        return len(order)

    results = alternate(3, {"a": lambda: record("a"), "b": lambda: record("b")})
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert results == {"a": [1, 4, 5], "b": [2, 3, 6]}


def test_a_ratio_is_taken_round_by_round() -> None:
    """The ratio of two medians would compare moments that were never side by side."""
    kvpd, memcpy = Measured.of([1.0, 4.0, 9.0]), Measured.of([1.0, 2.0, 3.0])
    assert kvpd.ratio_to(memcpy) == Measured(2.0, 1.0, 3.0, (1.0, 2.0, 3.0))


@pytest.mark.parametrize(("percent", "expected"), [(0, 1.0), (50, 2.0), (75, 3.0), (99, 4.0), (100, 4.0)])
def test_a_percentile_is_a_value_that_was_seen(percent: float, expected: float) -> None:
    """Nearest rank: an interpolated p99 is a latency that nobody had."""
    assert percentile([4.0, 1.0, 3.0, 2.0], percent) == expected


def test_turns_are_counted_by_length_in_a_file_that_both_sides_map(tmp_path: Path) -> None:
    """The benchmark reads what the daemon counts, and may take the difference of two moments."""
    seen = LoopWatch.create(tmp_path / "turns")
    daemon = LoopWatch(seen.file)
    daemon.count(5.0)
    before = seen.turns()
    for milliseconds in (0.0, 1.0, 1.0, 40.0):
        daemon.count(milliseconds / 1e3)
    daemon.count(1e9)
    since = seen.turns() - before
    assert since.total == 5
    assert 1e-3 <= since.percentile_s(50) <= 1.02e-3
    assert 40e-3 <= since.percentile_s(80) <= 40.8e-3
    assert since.percentile_s(100) > 3600
    assert (before - before).percentile_s(99) == 0


def test_a_chunk_is_known_by_its_stamps_and_by_every_byte() -> None:
    """A benchmark that moves the wrong bytes fast is worth nothing."""
    payload = Payload(CHUNK_BYTES)
    load = Load(run=3, requests=8, chunks=2, depth=1, mode="check")
    chunk = bytearray(payload.chunk(7, 1))
    put_stamps(memoryview(chunk), load.stamp(7, 1))
    assert payload.is_whole(memoryview(chunk), 7, 1, load.stamp(7, 1))
    assert not payload.is_whole(memoryview(chunk), 7, 0, load.stamp(7, 0))
    assert has_stamps(memoryview(chunk), load.stamp(7, 1))
    assert not has_stamps(memoryview(chunk), load.stamp(6, 1))
    chunk[CHUNK_BYTES // 2] ^= 1
    assert not payload.is_whole(memoryview(chunk), 7, 1, load.stamp(7, 1))
    chunk[-1] ^= 1
    assert not has_stamps(memoryview(chunk), load.stamp(7, 1))


def test_chunks_differ_from_each_other_and_from_run_to_run() -> None:
    """What a slot held before must never pass for what should be there."""
    payload = Payload(CHUNK_BYTES)
    places = [(number, chunk) for number in range(64) for chunk in range(8)]
    assert len({bytes(payload.chunk(*place)) for place in places}) == len(places)
    loads = [Load(run=run, requests=64, chunks=8, depth=1, mode="copy") for run in (1, 2)]
    assert len({load.stamp(*place) for load in loads for place in places}) == 2 * len(places)
    assert len({key for load in loads for number in range(64) for key in load.keys(number)}) == 2 * len(places)
    assert len(stamp(0, 0)) * 2 <= 64, "the smallest chunk that may be asked for"


def transfer_case(binding: Binding, *values: float) -> Case:
    """A case whose every goodput is `values`, round by round; memcpy was 8 GB/s."""
    goodput = Measured.of(values)
    return Case(
        transport="cma",
        binding=binding,
        carried_by=("cma", "tcp"),
        versions=binding,
        chunk_bytes=1 << 20,
        batch=4,
        in_flight=2,
        memcpy=Measured.of([8.0] * len(values)),
        bare=goodput,
        in_place=goodput,
        copying=goodput,
    )


def test_one_binding_has_a_row_and_nothing_to_be_compared_with() -> None:
    """Who did not ask for ucx-py does not read of it."""
    result = TransferResult(cases=(transfer_case("ucx", 4.0, 2.0),))
    (table,) = result.tables()
    assert [row[0] for row in table.rows] == ["cma 1MiB 4 2"]
    assert [series.name for series in result.plots()[0].series] == _LINES


def test_two_bindings_are_compared_round_by_round() -> None:
    """A row for each, lines of their own, and the ratio of what was measured in the same round."""
    result = TransferResult(cases=(transfer_case("ucx", 4.0, 2.0), transfer_case("ucx-py", 2.0, 4.0)))
    goodputs, ratios = result.tables()
    assert [row[0] for row in goodputs.rows] == ["cma 1MiB 4 2", "cma by ucx-py 1MiB 4 2"]
    assert ratios.rows == [("cma by ucx-py 1MiB 4 2", *[Measured.of([0.5, 2.0])] * 3)]
    (plot,) = result.plots()
    assert [series.name for series in plot.series] == [*_LINES, *(f"{name}, by ucx-py" for name in _LINES[1:])]


def test_ucx_py_alone_has_nothing_to_be_divided_by() -> None:
    """A comparison with figures of another run would be none."""
    (table,) = TransferResult(cases=(transfer_case("ucx-py", 4.0),)).tables()
    assert [row[0] for row in table.rows] == ["cma by ucx-py 1MiB 4 2"]


def test_memcpy_copies() -> None:
    """The bound that everything is compared with must have been done."""
    assert Memcpy(1 << 20).gb_s(CHUNK_BYTES, 1 << 20) > 0


@pytest.mark.parametrize(
    ("cell", "expected"),
    [
        (None, "-"),
        ("cma", "cma"),
        (12345, "12,345"),
        (0.0, "0"),
        (12345.6, "12,346"),
        (0.12345, "0.123"),
        (0.0000321, "3.2e-05"),
        (Measured(1.5, 1.5, 1.5, (1.5,)), "1.5"),
        (Measured(1.5, 1.25, 2.0, (1.5, 1.25, 2.0)), "1.5 (1.2–2)"),  # noqa: RUF001
    ],
)
def test_cells_are_short_and_show_the_spread(cell: str | int | float | Measured | None, expected: str) -> None:
    """More digits than the spread allows would be a claim."""
    assert text(cell) == expected


def test_lists_are_read_as_settings_are_written() -> None:
    """And what cannot be read is refused with its reason."""
    option = sizes("--sizes", "4KiB,1MiB,300", "Sizes.")
    context = click.Context(click.Command("x"))
    assert option.process_value(context, "4KiB,1MiB,300") == (4096, 1 << 20, 300)
    assert [size_text(nbytes) for nbytes in (4096, 1 << 20, 300)] == ["4KiB", "1MiB", "300"]
    for wrong in ("4KiB,", "1", "many"):
        with pytest.raises(click.BadParameter):
            option.process_value(context, wrong)


def test_a_plot_can_be_written_in_both_formats(tmp_path: Path) -> None:
    """With every kind of line."""
    series = Series(name="a", x=[1, 2], y=[1, 2], low=[0.5, 1], high=[2, 3])
    plain = Series(name="b", x=[1, 2], y=[2, 1])
    plots = [
        Plot(title="bars", x_label="x", y_label="y", series=[series, plain], x_log=True, x_ticks=[(1, "one")]),
        Plot(title="steps", x_label="x", y_label="y", series=[plain], y_log=True, steps=True, markers=False),
    ]
    for suffix, head in ((".svg", b"<?xml"), (".png", b"\x89PNG")):
        file = tmp_path / f"plot{suffix}"
        check_plot_file(file)
        draw(plots, file)
        assert file.read_bytes().startswith(head)


def test_a_plot_that_cannot_be_drawn_is_refused_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before minutes of measuring, not after them."""
    with pytest.raises(click.UsageError, match=r"\.svg or \.png"):
        check_plot_file(Path("plot.jpeg"))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "matplotlib.figure", raising=False)
    with pytest.raises(click.UsageError, match=r"install kvpd\[bench\]"):
        check_plot_file(Path("plot.svg"))
