"""The matrix of netperf's changes: the mail's own form, and what a heat map's cells say."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.text import Text
from tests.fakes.fake_runs import MERGE, RX_POLL, THROUGHPUT, make_form
from tests.pure.test_figures import WIDTHS, check_text, marked

from vringlab.analysis.frames import RunFrames, load_run
from vringlab.report import netperf_figures, stream_figures
from vringlab.report.canvas import RunFigure, Width, style
from vringlab.report.figures import drawn_metrics, figures_for
from vringlab.report.heat_maps import colour_of
from vringlab.report.mail import mail_text
from vringlab.report.marks import published
from vringlab.report.netperf_matrix import (
    COLUMNS,
    DIRECTIONS,
    FULL_COLOUR,
    beside,
    measured_blocks,
    published_blocks,
    run_lines,
    seed_lines,
)
from vringlab.report.path_view import path_figure
from vringlab.report.summary import Summary, summarise
from vringlab.settings import settings

EXPERIMENT = "vhost-net-rx-poll"
ROW = re.compile(r"(\d+)/(\d+)/([+-]\d+\.\d{4})% ([+-]\d+\.\d{4})% ([+-]\d+\.\d{4})%")
MAIL = re.compile(r"(\d+)/(\d+)/([+-][\d.]+)% ([+-][\d.]+)% ([+-][\d.]+)%")


@pytest.fixture(scope="module")
def run() -> RunFrames:
    return load_run(settings().data / "recorded" / EXPERIMENT)


def test_published_rows_are_written_as_in_the_mail() -> None:
    lines = seed_lines(published_blocks(EXPERIMENT))
    rows = [match.groups() for line in lines if (match := ROW.match(line))]
    assert len(rows) == 54
    # The first and the last of each table in the mail.
    for row in (
        "64/1/+0.7773% -8.6224% +10.2866%",
        "65535/8/-0.4108% -14.4304% +16.3838%",
        "64/1/-0.6228% -2.1936% +1.6060%",
        "65535/8/+0.1137% -2.7922% +2.9894%",
        "256/1/+1.9004% -4.7985% +7.0366%",
        "4096/50/-11.1990% -15.4763% +5.0605%",
    ):
        assert any(line.startswith(row) for line in lines), row
    flagged = [line.partition("   ")[0] for line in lines if "digit for digit" in line]
    assert [line.split("/")[:2] for line in flagged] == [["65535", "4"], ["65535", "8"]]
    assert sum(line in DIRECTIONS.values() for line in lines) == 0
    assert Counter(line.partition(",")[0] for line in lines if "published" in line) == Counter(
        DIRECTIONS.values()
    )


def test_published_rows_are_the_mail_s_character_by_character() -> None:
    mail = (Path(__file__).parent / "data" / "seed-001-matrix.txt").read_text().splitlines()
    rows = [line for line in mail if MAIL.fullmatch(line)]
    assert len(rows) == 54
    lines = seed_lines(published_blocks(EXPERIMENT))
    assert [line.partition("   ")[0] for line in lines if MAIL.match(line)] == rows
    heads = [line for line in mail if line.startswith("size(B)")]
    assert [line for line in lines if line.startswith("size(B)")] == heads


def test_measured_cells_are_the_run_s_effects(run: RunFrames) -> None:
    summary = summarise(run, ["throughput", "cpu", "throughput_per_cpu", "transactions"])
    blocks = measured_blocks(summary, "netperf")
    assert {block.arm for block in blocks} == {"shipped", "2014", "always-polling.aa"}
    block = next(b for b in blocks if (b.direction, b.arm) == ("guest-tx", "2014"))
    (change, cpu, _) = block.cells[16384, 1]
    row = next(
        row
        for row in summary.of("netperf", None, "throughput")
        if row.arm == "2014" and row.params["direction"] == "guest-tx"
    )
    assert row.effect is not None
    assert change.change == pytest.approx(row.effect.ratio - 1)
    assert change.printed == f"{100 * (row.effect.ratio - 1):+.4f}%"
    assert cpu.change is not None
    # The twin is the noise, and comes last.
    assert blocks[-1].arm == "always-polling.aa"
    assert "noise" in blocks[-1].title


def test_only_rows_that_were_measured_are_shown_in_a_terminal(run: RunFrames) -> None:
    lines = run_lines(run, whole=False)
    blocks = "\n".join(lines).split("\n\n")
    stated = [line for block in blocks if "published" in block for line in block.split("\n")]
    places = [match.group(1, 2) for line in stated if (match := MAIL.match(line))]
    assert places == [("1024", "1"), ("1024", "4"), ("16384", "1"), ("16384", "1"), ("256", "1")]
    assert len(run_lines(run)) > len(lines)


def test_a_run_of_another_workload_has_no_matrix() -> None:
    other = load_run(settings().data / "recorded" / "vsock-direct-enqueue")
    assert run_lines(other) == []


def test_a_cell_without_a_valid_sample_says_so(run: RunFrames) -> None:
    samples = run.samples.copy()
    place = (samples["param_size"] == 16384) & (samples["param_direction"] == "guest-tx")
    samples.loc[place, "valid"] = False
    samples.loc[place, "reason"] = "session 0 died"
    broken = replace(run, samples=samples)
    summary = summarise(broken, ["throughput", "cpu", "throughput_per_cpu"])
    block = next(
        b
        for b in measured_blocks(summary, "netperf")
        if (b.direction, b.arm) == ("guest-tx", "2014")
    )
    assert [change.change for change in block.cells[16384, 1]] == [None] * 3
    assert {change.problem for change in block.cells[16384, 1]} == {"invalid"}
    assert any("16384/1/invalid invalid invalid" in line for line in run_lines(broken))
    assert "matrix-guest-tx" in figures_for(broken)


def test_an_infinite_or_missing_figure_does_not_break_the_figures(run: RunFrames) -> None:
    samples = run.samples.copy()
    rr = samples["param_direction"] == "rr"
    samples.loc[rr & (samples["metric"] == "cpu"), "value"] = np.nan
    figures = figures_for(replace(run, samples=samples))
    assert {"matrix-guest-rx", "matrix-guest-tx", "matrix-rr", "path"} <= set(figures)


def test_one_direction_alone_has_its_figures_only(run: RunFrames) -> None:
    samples = run.samples[run.samples["param_direction"] == "rr"].reset_index(drop=True)
    cells = tuple(cell for cell in run.plan.cells if cell.params["direction"] == "rr")
    alone = replace(run, samples=samples, plan=replace(run.plan, cells=cells))
    figures = [name for name in figures_for(alone) if name.startswith("matrix")]
    assert figures == ["matrix-rr"]


@pytest.mark.parametrize("name", [EXPERIMENT, "vsock-skb-merge", "vsock-fast-path"])
def test_long_points_fit_beside_the_shares_of_a_path(name: str) -> None:
    recorded = load_run(settings().data / "recorded" / name)
    for width in WIDTHS:
        with style():
            figure = path_figure(summarise(recorded, ["throughput"]), width)
            assert figure is not None
            check_text(figure)


def test_streams_have_curves_and_memory() -> None:
    stream = load_run(settings().data / "recorded" / "vsock-fast-path")
    figures = figures_for(stream)
    assert {"threads", "throughput", "cpu", "slab", "path"} <= set(figures)
    axes = figures["threads"].axes[0]
    lines = [line for line in axes.get_lines() if str(line.get_gid()).startswith("curve:")]
    assert {line.get_gid() for line in lines} == {"curve:queued", "curve:queued.aa", "curve:direct"}
    assert all(len(line.get_xdata()) == 4 for line in lines)  # type: ignore[arg-type]  # of numpy


# Figures of simulated runs: what is drawn, and that it can be read


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Summary]:
    """Summaries of runs of each kind, as small as tell their arms apart."""
    folder = tmp_path_factory.mktemp("forms")
    found = {}
    for name, form in ((RX_POLL, "corner"), (THROUGHPUT, "threads"), (MERGE, "sizes")):
        made = load_run(make_form(folder, name, form, boots=2, blocks=1))
        found[form] = summarise(made, drawn_metrics(made))
    return found


def bent(summary: Summary, samples: pd.DataFrame) -> Summary:
    made = replace(summary.run, samples=samples)
    return summarise(made, drawn_metrics(made))


def drawn(summary: Summary, width: Width = "wide") -> dict[str, RunFigure]:
    """The family's own figures, each checked: nothing cut, nothing on something else."""
    (workload,) = summary.workloads
    draw = netperf_figures.draw if workload == "netperf" else stream_figures.draw
    with style():
        figures = draw(summary, workload, width, notes=True)
        for figure in figures.values():
            check_text(figure)
    return figures


def cells_of(figure: Figure) -> dict[str, list[tuple[str, Rectangle]]]:
    """Patches of the cells by their kind: what they are of, and the patch."""
    found: dict[str, list[tuple[str, Rectangle]]] = {"cell": [], "missing": [], "repeated": []}
    for patch in figure.findobj(Rectangle):
        kind, _, name = str(patch.get_gid()).partition(":")
        if kind in found:
            found[kind].append((name, patch))
    return found


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("form", ["corner", "threads", "sizes"])
def test_no_text_is_cut_or_covered(forms: dict[str, Summary], form: str, width: Width) -> None:
    assert drawn(forms[form], width)


def test_cells_have_the_measured_change_and_its_colour(forms: dict[str, Summary]) -> None:
    summary = forms["corner"]
    figure = drawn(summary)["matrix-guest-tx"]
    words: dict[str, list[str]] = {}
    for text in figure.findobj(Text):
        kind, _, name = str(text.get_gid()).partition(":")
        if kind == "change":
            words.setdefault(name, []).append(text.get_text())
    patches: dict[str, list[Rectangle]] = {}
    for name, patch in cells_of(figure)["cell"]:
        patches.setdefault(name, []).append(patch)
    seen = 0
    for block in measured_blocks(summary, "netperf"):
        if block.direction != "guest-tx":
            continue
        for (size, sessions), changes in block.cells.items():
            name = f"{block.arm}:measured:{size}/{sessions}"
            for column, change, word, patch in zip(
                COLUMNS, changes, words[name], patches[name], strict=True
            ):
                assert change.change is not None
                shown = float(word.strip("()*?\u00b9"))
                assert shown == pytest.approx(100 * change.change, abs=0.0501)
                assert word.startswith("(") == (change.sure == "not seen")
                colour, opaque = colour_of(change.change, column.better)
                assert patch.get_facecolor() == pytest.approx(to_rgba(colour, opaque))
                seen += 1
    # Two arms and the twin, two points, three columns.
    assert seen == 3 * 2 * 3


def test_published_and_measured_cells_share_axes_and_colours(forms: dict[str, Summary]) -> None:
    figure = drawn(forms["corner"])["matrix-guest-rx"]
    cells = cells_of(figure)
    assert len({axes.get_xlim() for axes in figure.axes}) == 1
    kinds = Counter(name.split(":")[1] for name, _ in cells["cell"])
    assert kinds == {"v1": 24 * 3, "measured": 3 * 2 * 3}
    # Of each arm 22 of 24 points were not measured, and the caption says so.
    assert len(cells["missing"]) == 3 * 22 * 3
    assert "22 of 24 points not measured of 2014" in figure.caption
    repeated = {name.split(":")[2] for name, _ in cells["repeated"]}
    assert repeated == {"65535/1", "65535/2", "65535/4", "65535/8"}
    assert colour_of(0.5, 1) == colour_of(FULL_COLOUR, 1)
    assert colour_of(-0.1, -1)[0] == colour_of(0.1, 1)[0] != colour_of(-0.1, 1)[0]
    assert colour_of(0.0, 1)[1] == 0


def test_what_is_claimed_stands_first_and_noise_last(forms: dict[str, Summary]) -> None:
    measured = measured_blocks(forms["corner"], "netperf")
    found = beside("rr", measured, published_blocks(EXPERIMENT))
    assert [(block.arm, block.version) for block in found] == [
        ("2014", ""),
        ("2014", "v1"),
        ("shipped", ""),
        ("always-polling.aa", ""),
    ]


@pytest.mark.parametrize("form", ["corner", "threads"])
def test_a_run_that_is_all_invalid_has_readable_figures(
    forms: dict[str, Summary], form: str
) -> None:
    samples = forms[form].run.samples.assign(valid=False, reason="session 0 died")
    summary = bent(forms[form], samples)
    figures = drawn(summary)
    assert figures
    assert all("session 0 died" in figure.caption for figure in figures.values())
    assert not any(cells_of(f)["cell"] and name.startswith("host") for name, f in figures.items())


@pytest.mark.parametrize("form", ["corner", "threads"])
def test_a_figure_that_is_no_number_breaks_nothing(forms: dict[str, Summary], form: str) -> None:
    samples = forms[form].run.samples.copy()
    odd = samples["metric"].isin(["throughput", "slab_peak", "vhost_wakeups"])
    for arm, value in zip(forms[form].arms, (float("inf"), float("nan"), 0.0), strict=False):
        samples.loc[odd & (samples["arm"] == arm), "value"] = value
    assert drawn(bent(forms[form], samples))


def test_one_block_has_no_interval_and_says_so(forms: dict[str, Summary]) -> None:
    summary = forms["corner"]
    samples = summary.run.samples
    one = bent(summary, samples[samples["block"] == samples["block"].min()])
    lines = seed_lines(measured_blocks(one, "netperf"))
    assert any(line.endswith("(? ? ?)") for line in lines)
    assert lines[-1] == "(?: one block, no interval)"
    assert "with a question mark" in drawn(one)["matrix-rr"].caption


def test_lines_by_threads_are_the_means_with_what_was_claimed(forms: dict[str, Summary]) -> None:
    summary = forms["threads"]
    figure = drawn(summary)["threads"]
    # Two payloads, throughput and CPU of each.
    assert len(figure.axes) == 4
    rows = [row for row in summary.of("vsock-stream", None, "throughput") if row.arm == "direct"]
    seen = sorted(
        float(value)
        for axes in figure.axes[::2]
        for line in axes.get_lines()
        if line.get_gid() == "curve:direct"
        for value in np.asarray(line.get_ydata())
    )
    wanted = sorted(row.level.value / 1e9 for row in rows if row.level is not None)
    assert seen == pytest.approx(wanted)
    claimed = [line for _, line in marked(figure, "claimed")]
    assert len(claimed) == sum(mark.fits(row) for mark in published(summary) for row in rows) > 0
    assert "from the reference's mean here" in figure.caption


def test_slab_memory_and_streams_of_one_thread_count_have_panels(
    forms: dict[str, Summary],
) -> None:
    figures = drawn(forms["sizes"])
    assert set(figures) == {"throughput", "cpu", "slab"}
    assert list(marked(figures["slab"], "claimed"))
    assert "did not rise above the baseline" in figures["slab"].caption


def test_the_mail_has_the_matrix_in_72_columns(forms: dict[str, Summary]) -> None:
    text = mail_text(forms["corner"])
    assert max(map(len, text.splitlines())) <= 72
    assert "size(B)/sessions/throughput/cpu/normalized thru/" in text
    assert "256/1/-7.0963% -12.6880% +6.4043%" in text
    assert "size(B)" not in mail_text(forms["sizes"])


def test_a_point_without_a_metric_leaves_its_place_empty(forms: dict[str, Summary]) -> None:
    summary = forms["corner"]
    samples = summary.run.samples
    lacking = (samples["metric"] == "vhost_cpu") & (samples["param_size"] == 256)
    figure = drawn(bent(summary, samples[~lacking]))["host-guest-rx"]
    columns: dict[str, set[float]] = {}
    for axes in figure.axes:
        title = " ".join(t.get_text() for t in axes.texts if t.get_gid() == "panel-title")
        for metric in ("vhost CPU", "wakeups", "interrupts"):
            if metric in title:
                columns.setdefault(metric, set()).add(round(axes.get_position().x0, 6))
    assert {metric: len(some) for metric, some in columns.items()} == dict.fromkeys(columns, 1)
    assert len(columns) == 3
