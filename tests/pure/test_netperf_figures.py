"""The matrix of netperf's changes: the mail's own form, and what a heat map's cells say."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from vringlab.analysis.frames import RunFrames, load_run
from vringlab.report.figures import figures_for
from vringlab.report.netperf_matrix import (
    DIRECTIONS,
    measured_blocks,
    published_blocks,
    run_lines,
    seed_lines,
)
from vringlab.report.summary import summarise
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
    published = lines[next(i for i, line in enumerate(lines) if "published" in line) :]
    places = [match.group(1, 2) for line in published if (match := MAIL.match(line))]
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


def test_streams_have_curves_and_memory() -> None:
    stream = load_run(settings().data / "recorded" / "vsock-fast-path")
    figures = figures_for(stream)
    assert {"threads", "throughput", "cpu", "slab", "path"} <= set(figures)
    (axes,) = figures["threads"].axes
    lines = [line for line in axes.get_lines() if str(line.get_gid()).startswith("curve:")]
    assert {line.get_gid() for line in lines} == {"curve:queued", "curve:queued.aa", "curve:direct"}
    assert all(len(line.get_xdata()) == 4 for line in lines)  # type: ignore[arg-type]  # of numpy
