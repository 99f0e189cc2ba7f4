"""vsock streams: throughput against threads, CPU time beside it, and the memory of packets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from vringlab.analysis.pairing import point_text
from vringlab.campaign.experiment import Value
from vringlab.report.canvas import (
    INK,
    SMALL,
    TEXT,
    Look,
    RunFigure,
    Width,
    line_inches,
    looks,
    sheet,
    tidy_axes,
    usable,
    wrapped,
)
from vringlab.report.family import Family
from vringlab.report.marks import published
from vringlab.report.panels import Column, arm_panels, invalid_text, shared_text, span_of, unit_of
from vringlab.report.summary import ArmRow, Summary

_RATES = (
    Column("throughput", "throughput", zero=True),
    Column("throughput_per_cpu", "throughput per host CPU", zero=True),
)
_CPU = (Column("cpu", "host CPU", zero=True), Column("guest_cpu", "guest CPU", zero=True))
_SLAB = (
    Column("slab_peak", "guest's slab caches, peak", log=True),
    Column("slab_median", "guest's slab caches, median", log=True),
    Column("host_slab_peak", "host's slab caches, peak", log=True),
    Column("host_slab_median", "host's slab caches, median", log=True),
)
_BY = "threads"
_HEIGHT = 1.35


def draw(summary: Summary, workload: str, width: Width, notes: bool) -> dict[str, RunFigure]:
    """Throughput by threads where it varies; each sample; CPU; slab memory over the baseline."""
    if not any(_BY in params for params in summary.points(workload)):
        return {}
    marks = published(summary)
    figures = {
        "threads": curves(summary, workload, "throughput", width, notes),
        "throughput": arm_panels(
            summary, workload, _RATES, "throughput of each sample", width, notes, marks=marks
        ),
        "cpu": arm_panels(summary, workload, _CPU, "CPU time (100 % is one CPU)", width, notes),
        "slab": arm_panels(
            summary, workload, _SLAB, "memory of packets over the baseline", width, notes
        ),
    }
    return {name: figure for name, figure in figures.items() if figure is not None}


def curves(
    summary: Summary, workload: str, metric: str, width: Width = "wide", notes: bool = True
) -> RunFigure | None:
    """A metric by the number of threads, a panel for each combination of the other parameters.

    None where no combination was measured with two numbers of threads.
    """
    groups: dict[str, list[ArmRow]] = {}
    shared = summary.shared(workload)
    for row in summary.of(workload, None, metric):
        rest: dict[str, Value] = {
            name: value for name, value in row.params.items() if name != _BY and name not in shared
        }
        if _BY in row.params and row.level is not None:
            groups.setdefault(point_text(rest), []).append(row)
    groups = {
        text: rows for text, rows in groups.items() if len({row.params[_BY] for row in rows}) > 1
    }
    if not groups:
        return None
    shown = looks(summary.run)
    arms = [
        arm for arm in summary.arms if any(r.arm == arm for rows in groups.values() for r in rows)
    ]
    handles = [
        Line2D([], [], color=shown[a].colour, marker=shown[a].marker, ls=shown[a].dashes, label=a)
        for a in arms
    ]
    room = usable(width)
    across = min(len(groups), 2) if width == "wide" else 1
    left, gap = 0.75, 0.25
    each = (room - across * left - (across - 1) * gap) / across
    titles = {text: wrapped(text, each, TEXT) if text else [] for text in groups}
    head = line_inches(TEXT, max(map(len, titles.values()))) + 0.06
    foot = line_inches(SMALL, 2) + 0.16
    down = -(-len(groups) // across)
    caption = (
        f"Marks: geometric mean over boots; bars: its {100 * summary.level:g} % interval, t on "
        "boot means. Arms stand side by side for the eye only."
    )
    rows = [row for some in groups.values() for row in some]
    made = sheet(
        summary,
        f"{metric} by threads",
        down * (head + _HEIGHT + foot),
        width,
        subject=workload,
        detail=shared_text(summary, workload),
        handles=handles,
        caption=" ".join([caption, *invalid_text(rows)]),
        notes=notes,
    )
    for place, (text, some) in enumerate(groups.items()):
        column, line = place % across, place // across
        axes = made.axes(
            (made.width - room) / 2 + left + column * (each + left + gap),
            line * (head + _HEIGHT + foot) + head,
            each,
            _HEIGHT,
        )
        tidy_axes(axes, grid="y")
        _panel(axes, some, arms, shown, metric)
        axes.set_title("\n".join(titles[text]), size=TEXT, loc="left", color=INK, pad=4)
    return made.figure


def _panel(
    axes: Axes, rows: Sequence[ArmRow], arms: Sequence[str], shown: Mapping[str, Look], metric: str
) -> None:
    levels = [row.level for row in rows if row.level is not None]
    values = np.array([level.value for level in levels])
    scale, unit = unit_of(values, rows[0].unit, metric)
    ends = [e for v in levels if v.interval.known for e in (v.interval.low, v.interval.high)]
    low, high = span_of(values / scale, [end / scale for end in ends], log=False, zero=True)
    numbers = sorted({int(str(row.params[_BY])) for row in rows})
    for place, arm in enumerate(arms):
        look = shown[arm]
        shift = 1.05 ** (place - (len(arms) - 1) / 2)
        points = sorted(
            (int(str(row.params[_BY])) * shift, row.level)
            for row in rows
            if row.arm == arm and row.level is not None
        )
        axes.plot(
            [x for x, _ in points],
            [level.value / scale for _, level in points],
            marker=look.marker,
            color=look.colour,
            ls=look.dashes,
            ms=4.5,
            gid=f"curve:{arm}",
        )
        for x, level in points:
            if level.interval.known:
                ends = [level.interval.low / scale, min(level.interval.high / scale, high)]
                axes.plot([x, x], ends, color=look.colour, lw=1.2, alpha=0.7)
    axes.set_ylim(low, high)
    axes.set_xscale("log", base=2)
    axes.set_xlim(numbers[0] / 1.3, numbers[-1] * 1.3)
    axes.set_xticks(numbers, [str(number) for number in numbers])
    axes.minorticks_off()
    axes.set_xlabel(_BY, size=SMALL, labelpad=1)
    axes.set_ylabel(f"{metric} ({unit})", size=SMALL)


FAMILY = Family(
    name="streams",
    metrics=tuple(column.metric for column in (*_RATES, *_CPU, *_SLAB)),
    headline=("throughput", "cpu", "slab_peak", "slab_median"),
    draw=draw,
    order=4,
)
