"""vsock streams: throughput against threads, CPU time beside it, and the memory of packets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from vringlab.analysis.pairing import PARAM, point_text
from vringlab.campaign.experiment import Value
from vringlab.report.canvas import (
    INK,
    MUTED,
    PAPER,
    SMALL,
    TEXT,
    Look,
    RunFigure,
    Width,
    line_inches,
    log_ticks,
    looks,
    sheet,
    text_inches,
    tidy_axes,
    usable,
    wrapped,
)
from vringlab.report.family import Family
from vringlab.report.marks import PLACED, Mark, mark_handles, published
from vringlab.report.panels import (
    Column,
    arm_panels,
    invalid_text,
    placed,
    shared_text,
    span_of,
    unit_of,
)
from vringlab.report.summary import ArmRow, Summary, at

_RATES = (
    Column("throughput", "throughput", zero=True),
    Column("throughput_per_cpu", "throughput per host CPU", zero=True),
)
_CPU = (Column("cpu", "host CPU", zero=True), Column("guest_cpu", "guest CPU", zero=True))
_SLAB = (
    Column("slab_peak", "guest slab, peak", log=True),
    Column("slab_median", "guest slab, median", log=True),
    Column("host_slab_peak", "host slab, peak", log=True),
    Column("host_slab_median", "host slab, median", log=True),
)
#: What stands side by side over the number of threads.
_CURVES = (_RATES[0], _CPU[0])
_BY = "threads"

_HEIGHT = 1.35
_LEFT = 0.62
_GAP = 0.25
#: Span of the means from which on an axis is logarithmic.
_DECADES = 30.0


def draw(summary: Summary, workload: str, width: Width, notes: bool) -> dict[str, RunFigure]:
    """Throughput by threads where it varies; each sample; CPU; slab memory over the baseline."""
    if not any(_BY in params for params in summary.points(workload)):
        return {}
    marks = published(summary)
    figures = {
        "threads": curves(summary, workload, _CURVES, width, notes, marks),
        "throughput": arm_panels(
            summary, workload, _RATES, "throughput of each sample", width, notes, marks=marks
        ),
        "cpu": arm_panels(summary, workload, _CPU, "CPU time (100 % is one CPU)", width, notes),
        "slab": arm_panels(
            summary,
            workload,
            _SLAB,
            "memory of packets over the baseline",
            width,
            notes,
            marks=marks,
            remark="A sample whose caches did not rise above the baseline has no figure here.",
        ),
    }
    return {name: figure for name, figure in figures.items() if figure is not None}


@dataclass(frozen=True)
class _Panel:
    """One metric over threads, at one combination of the other parameters."""

    title: str
    column: Column
    rows: list[ArmRow]
    samples: pd.DataFrame
    claimed: list[tuple[int, Mark, float]]
    scale: float
    unit: str
    log: bool

    @property
    def threads(self) -> list[int]:
        return sorted({_threads(row) for row in self.rows})


def _threads(row: ArmRow) -> int:
    return int(str(row.params[_BY]))


def curves(
    summary: Summary,
    workload: str,
    columns: Sequence[Column] = _CURVES,
    width: Width = "wide",
    notes: bool = True,
    marks: Sequence[Mark] = (),
) -> RunFigure | None:
    """Metrics by the number of threads, a row for each combination of the other parameters.

    None where no combination was measured with two numbers of threads.

    Args:
        summary: The run; metrics that it lacks are left out.
        workload: The workload.
        columns: Metrics, side by side where the figure is wide.
        width: Wide or narrow.
        notes: Whether the caption is drawn.
        marks: Published ratios to draw beside; where they would be from the reference's mean.
    """
    panels = _panels(summary, workload, columns, marks)
    if not panels:
        return None
    shown = looks(summary.run)
    across = len({panel.column for panel in panels}) if width == "wide" else 1
    room = usable(width)
    each = (room - across * _LEFT - (across - 1) * _GAP) / across
    titles = [wrapped(panel.title, each + 0.1, TEXT) for panel in panels]
    head = line_inches(TEXT, max(map(len, titles))) + 0.06
    pitch = head + _HEIGHT + line_inches(SMALL, 2) + 0.14
    made = sheet(
        summary,
        f"{' and '.join(dict.fromkeys(panel.column.title for panel in panels))} by threads",
        pitch * -(-len(panels) // across),
        width,
        subject=workload,
        detail=shared_text(summary, workload),
        handles=_legend(summary, panels, shown),
        caption=_caption(summary, panels),
        notes=notes,
    )
    for place, panel in enumerate(panels):
        line, column = divmod(place, across)
        left = (made.width - room) / 2 + _LEFT + column * (each + _LEFT + _GAP)
        axes = made.axes(left, line * pitch + head, each, _HEIGHT)
        _draw(axes, panel, summary.arms, shown, each)
        for number, text in enumerate(reversed(titles[place])):
            axes.annotate(
                text,
                (0, 1),
                xytext=(0, 4 + 72 * line_inches(TEXT, number)),
                size=TEXT,
                color=INK,
                xycoords="axes fraction",
                textcoords="offset points",
                gid="panel-title",
            )
    return made.figure


def _panels(
    summary: Summary, workload: str, columns: Sequence[Column], marks: Sequence[Mark]
) -> list[_Panel]:
    shared = summary.shared(workload)
    groups: dict[str, list[Mapping[str, Value]]] = {}
    for params in summary.points(workload):
        rest = {name: value for name, value in params.items() if name not in (_BY, *shared)}
        if _BY in params:
            groups.setdefault(point_text(rest), []).append(params)
    panels = []
    for text, points in groups.items():
        if len({str(params[_BY]) for params in points}) < 2:
            continue
        for column in columns:
            rows = [row for params in points for row in summary.of(workload, params, column.metric)]
            levels = np.array([row.level.value for row in rows if row.level is not None])
            if not levels.size:
                continue
            here = pd.concat([at(summary.run.samples, workload, params) for params in points])
            samples = here[(here["metric"] == column.metric) & np.isfinite(here["value"])]
            scale, unit = unit_of(levels, rows[0].unit, column.metric)
            claimed = [
                (int(str(params[_BY])), mark, value)
                for params in points
                for mark, value in placed(marks, [r for r in rows if r.params == params])
            ]
            log = bool(levels.max() > _DECADES * levels.min())
            title = ": ".join(part for part in (text, column.title) if part)
            title += f" ({unit}{', log axis' if log else ''})"
            panels.append(_Panel(title, column, rows, samples, claimed, scale, unit, log))
    return panels


def _draw(
    axes: Axes, panel: _Panel, every: Sequence[str], shown: Mapping[str, Look], inches: float
) -> None:
    tidy_axes(axes, grid="y")
    threads = panel.threads
    ends = [
        end / panel.scale
        for row in panel.rows
        if row.level is not None and row.level.interval.known
        for end in (row.level.interval.low, row.level.interval.high)
    ]
    values = np.array(
        [
            *panel.samples["value"],
            *(value for _, _, value in panel.claimed),
            *(row.level.value for row in panel.rows if row.level is not None),
        ]
    )
    low, high = span_of(values / panel.scale, ends, log=panel.log, zero=True)
    if panel.log:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(FixedLocator(log_ticks(low, high, _HEIGHT, 0.28)))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_ylim(low, high)
    axes.set_xscale("log", base=2)
    pad = 1.2 * (threads[-1] / threads[0]) ** 0.06
    axes.set_xlim(threads[0] / pad, threads[-1] * pad)
    axes.xaxis.set_major_locator(FixedLocator(_apart(threads, inches)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(_BY, size=SMALL, labelpad=1)
    arms = [arm for arm in every if any(row.arm == arm for row in panel.rows)]
    # Side by side, a twelfth of an inch apart, or they would hide each other.
    step = (threads[-1] / threads[0] * pad**2) ** (0.09 / inches)
    for place, arm in enumerate(arms):
        shift = step ** (place - (len(arms) - 1) / 2)
        _arm(axes, panel, arm, shown[arm], shift, (low, high))


def _arm(
    axes: Axes, panel: _Panel, arm: str, look: Look, shift: float, limits: tuple[float, float]
) -> None:
    points = [
        (_threads(row) * shift, row.level)
        for row in panel.rows
        if row.arm == arm and row.level is not None
    ]
    points.sort(key=lambda point: point[0])
    axes.plot(
        [x for x, _ in points],
        [level.value / panel.scale for _, level in points],
        marker=look.marker,
        ms=5,
        mec=PAPER,
        mew=0.5,
        color=look.colour,
        ls=look.dashes,
        lw=1.4,
        gid=f"curve:{arm}",
        zorder=4,
    )
    for x, level in points:
        if not level.interval.known:
            continue
        ends = (level.interval.low / panel.scale, level.interval.high / panel.scale)
        bottom, top = max(ends[0], limits[0]), min(ends[1], limits[1])
        axes.plot(
            [x, x], [bottom, top], color=look.colour, lw=1.4, alpha=0.6, gid=f"interval:{arm}"
        )
        for beyond, end, marker in ((ends[0] < bottom, 0.02, "v"), (ends[1] > top, 0.98, "^")):
            if beyond:
                axes.plot(
                    [x],
                    [end],
                    marker=marker,
                    ms=4.5,
                    color=look.colour,
                    gid="beyond",
                    transform=axes.get_xaxis_transform(),
                )
    mine = panel.samples[panel.samples["arm"] == arm]
    good: dict[str, Any] = {"marker": "o", "ms": 2.2, "mec": "none", "mfc": look.colour}
    bad: dict[str, Any] = {"marker": "X", "ms": 6, "mec": look.colour, "mew": 0.9, "mfc": "none"}
    for kind, valid, style in (("samples", True, good), ("invalid", False, bad)):
        some = mine[mine["valid"].astype(bool) == valid]
        axes.plot(
            some[PARAM + _BY].astype(float) * shift,
            np.maximum(some["value"] / panel.scale, limits[0]),
            ls="",
            alpha=0.7,
            gid=f"{kind}:{arm}",
            **style,
        )
    for threads, mark, value in panel.claimed:
        if mark.arm == arm:
            axes.plot([threads * shift], [value / panel.scale], **mark.look)


def _apart(threads: Sequence[int], inches: float) -> list[int]:
    """Those numbers of threads that have room for a label, the ends first."""
    span = np.log(threads[-1] / threads[0]) or 1.0
    kept: list[int] = []
    for number in [threads[-1], *threads]:
        near = min((abs(np.log(number / other)) for other in kept), default=np.inf)
        if near * inches / span > text_inches(str(number), SMALL) + 0.12:
            kept.append(number)
    return sorted(kept)


def _legend(
    summary: Summary, panels: Sequence[_Panel], shown: Mapping[str, Look]
) -> list[Line2D | Patch]:
    rows = [row for panel in panels for row in panel.rows if row.level is not None]
    handles: list[Line2D | Patch] = [
        Line2D(
            [],
            [],
            color=shown[arm].colour,
            marker=shown[arm].marker,
            ls=shown[arm].dashes,
            label=arm,
        )
        for arm in summary.arms
        if any(row.arm == arm for row in rows)
    ]
    if any(row.level is not None and row.level.interval.known for row in rows):
        handles.append(Line2D([], [], color=MUTED, lw=1.4, label="95 % interval"))
    handles.append(Line2D([], [], ls="", marker="o", ms=2.5, color=MUTED, label="sample"))
    if any((~panel.samples["valid"].astype(bool)).any() for panel in panels):
        handles.append(
            Line2D([], [], ls="", marker="X", ms=6, mfc="none", mec=MUTED, label="invalid sample")
        )
    return [*handles, *mark_handles(mark for panel in panels for _, mark, _ in panel.claimed)]


def _caption(summary: Summary, panels: Sequence[_Panel]) -> str:
    rows = [row for panel in panels for row in panel.rows]
    boots = max((row.level.boots for row in rows if row.level is not None), default=0)
    parts = ["Lines join geometric means over boots; arms stand side by side for the eye only."]
    if boots > 1:
        parts.append(
            f"Bars: {100 * summary.level:g} % interval of the mean, t on {boots} boot means; "
            "an arrow: it reaches further."
        )
    elif boots == 1:
        parts.append("One boot: no interval that would hold for another.")
    if any(panel.claimed for panel in panels):
        parts.append(PLACED)
    return " ".join([*parts, *invalid_text(rows)])


FAMILY = Family(
    name="streams",
    metrics=tuple(column.metric for column in (*_RATES, *_CPU, *_SLAB)),
    headline=("throughput", "cpu", "slab_peak", "slab_median"),
    draw=draw,
    order=4,
)
