"""Ratios to the reference as a forest plot: the noise floor behind them, published ones beside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from vringlab.analysis.pairing import Floats
from vringlab.analysis.units import METRICS
from vringlab.report.canvas import (
    GRID,
    INK,
    MUTED,
    PAPER,
    SMALL,
    TEXT,
    Look,
    RunFigure,
    Width,
    line_inches,
    looks,
    panel_title,
    sheet,
    text_inches,
    tidy_axes,
    usable,
    wrapped,
)
from vringlab.report.marks import Mark, mark_handles
from vringlab.report.summary import ArmRow, Summary, ratio_text

_ROW = 0.235
_AXIS = 0.26
_GAP = 0.2

#: Room for the axis itself, in inches, below which texts are shortened.
_LEAST = 1.6

#: How far beyond the estimates and floors an interval may stretch an axis (log scale).
_WIDEN = 1.2

#: Changes in percent at which an axis may have a tick, on either side of none.
_TICKS = (
    -99.9, -99, -95, -90, -80, -70, -60, -50, -40, -30, -20, -15, -10, -5, -2, -1, 0,
    1, 2, 5, 10, 15, 20, 30, 50, 75, 100, 150, 200, 300, 500, 900, 1900, 4900, 9900,
)  # fmt: skip


@dataclass(frozen=True)
class _Group:
    """The arms at one workload and point."""

    title: str
    rows: tuple[ArmRow, ...]


def effects(
    summary: Summary,
    metrics: Sequence[str],
    width: Width = "wide",
    notes: bool = True,
    marks: Sequence[Mark] = (),
) -> RunFigure | None:
    """Every arm's ratio to the reference, one panel per metric; None without any.

    Args:
        summary: The run.
        metrics: Metrics in order; those that it lacks are left out.
        width: Wide or narrow.
        notes: Whether the caption is drawn.
        marks: Published ratios to draw beside.
    """
    panels = {metric: _groups(summary, metric) for metric in metrics}
    panels = {metric: groups for metric, groups in panels.items() if groups}
    if not panels:
        return None
    room = usable(width)
    rows = [row for groups in panels.values() for group in groups for row in group.rows]
    left = max(text_inches(row.arm, SMALL) for row in rows) + 0.12
    texts = {id(row): effect_text(row) for row in rows}
    right = max(text_inches(text, SMALL, "bold") for text in texts.values()) + 0.15
    if room - left - right < _LEAST:
        # The dashes of its line say of an interval that it is one boot's.
        texts = {key: text.removesuffix(" (1 boot)") for key, text in texts.items()}
        right = max(text_inches(text, SMALL, "bold") for text in texts.values()) + 0.15
    inner = room - left - right
    marked = {id(row): [mark for mark in marks if mark.fits(row)] for row in rows}
    titles = {
        (metric, group.title): wrapped(group.title, room, SMALL)
        for metric, groups in panels.items()
        for group in groups
    }
    heights = {
        metric: sum(
            len(group.rows) * _ROW + line_inches(SMALL, len(titles[metric, group.title]))
            for group in groups
        )
        for metric, groups in panels.items()
    }
    head = line_inches(TEXT) + 0.06
    total = sum(heights.values()) + len(panels) * (head + _AXIS + _GAP)
    shown = looks(summary.run)
    made = sheet(
        summary,
        f"change against {summary.run.plan.reference}",
        total,
        width,
        handles=legend(rows, [mark for some in marked.values() for mark in some]),
        caption=_caption(summary, rows),
        notes=notes,
    )
    margin = (made.width - room) / 2
    top = 0.0
    for metric, groups in panels.items():
        axes = made.axes(margin + left, top + head, inner, heights[metric])
        panel_title(axes, metric_title(metric), left)
        lines = {group.title: titles[metric, group.title] for group in groups}
        _draw(axes, groups, lines, shown, left, inner, marked, texts)
        top += head + heights[metric] + _AXIS + _GAP
    return made.figure


def _groups(summary: Summary, metric: str) -> list[_Group]:
    groups = []
    for workload in summary.workloads:
        for params in summary.points(workload):
            rows = [r for r in summary.of(workload, params, metric) if not r.is_reference]
            if rows:
                label = summary.label(workload, params)
                groups.append(_Group(": ".join(p for p in (workload, label) if p), tuple(rows)))
    return groups


def metric_title(metric: str) -> str:
    """A metric with the direction that is better."""
    spec = METRICS.get(metric)
    return metric if spec is None else f"{metric} ({spec.direction} is better)"


def effect_text(row: ArmRow) -> str:
    """The change of a row with its interval, or why there is none."""
    if row.effect is not None:
        return ratio_text(row)
    if row.invalid and not row.valid:
        return "all invalid"
    return "not measured" if row.problem == "not measured" else "no pair"


def axis_limits(rows: Sequence[ArmRow], marks: Sequence[Mark] = ()) -> tuple[float, float]:
    """Ends of an axis on the log scale; it always holds 0, estimates, floors and marks."""
    core = [0.0, *(float(np.log(mark.ratio)) for mark in marks)]
    wide = [0.0]
    for row in rows:
        core += [np.log(row.floor), -np.log(row.floor)] if row.floor else []
        if row.effect is not None:
            core.append(row.effect.log_mean)
            if row.effect.interval.known:
                ends = (row.effect.interval.low, row.effect.interval.high)
                wide += [float(np.log(max(end, 1e-300))) for end in ends]
    low, high = min(core), max(core)
    pad = max(high - low, 0.02)
    low, high = (
        max(min(core + wide), low - _WIDEN * pad),
        min(max(core + wide), high + _WIDEN * pad),
    )
    edge = 0.04 * max(high - low, 0.02)
    return low - edge, high + edge


def _draw(
    axes: Axes,
    groups: Sequence[_Group],
    titles: Mapping[str, list[str]],
    shown: Mapping[str, Look],
    left: float,
    inner: float,
    marked: Mapping[int, Sequence[Mark]],
    texts: Mapping[int, str],
) -> None:
    rows = [row for group in groups for row in group.rows]
    low, high = axis_limits(rows, [mark for row in rows for mark in marked[id(row)]])
    axes.set_xlim(low, high)
    # The axis counts inches downwards, so that titles between the rows take their own room.
    total = sum(len(g.rows) * _ROW + line_inches(SMALL, len(titles[g.title])) for g in groups)
    axes.set_ylim(total, 0)
    tidy_axes(axes)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    _ticks(axes, low, high, inner)
    axes.axvline(0, color=INK, lw=0.9, zorder=2)
    y, places, names = 0.0, [], []
    for group in groups:
        for line in titles[group.title]:
            y += line_inches(SMALL)
            axes.annotate(
                line,
                (0, y),
                xytext=(-72 * left, 3),
                bbox={"fc": PAPER, "ec": "none", "pad": 0.8},
                size=SMALL,
                color=MUTED,
                gid="group-title",
                xycoords=("axes fraction", "data"),
                textcoords="offset points",
            )
        floor = group.rows[0].floor
        if floor is not None and floor > 1:
            band = Rectangle(
                (-np.log(floor), y),
                2 * np.log(floor),
                len(group.rows) * _ROW,
                fc=GRID,
                alpha=0.9,
                lw=0,
                zorder=1,
            )
            band.set_gid("floor")
            axes.add_patch(band)
        for row in group.rows:
            draw_row(axes, row, y + _ROW / 2, shown[row.arm], (low, high), texts[id(row)])
            _marks(axes, y + _ROW / 2, marked[id(row)])
            places.append(y + _ROW / 2)
            names.append(row.arm)
            y += _ROW
    axes.set_yticks(places, names)


def draw_row(
    axes: Axes, row: ArmRow, y: float, look: Look, limits: tuple[float, float], text: str
) -> None:
    """Draw a row's ratio at `y` of an axis of log ratios, and `text` right of the axis.

    Args:
        axes: The panel.
        row: The row.
        y: Its place.
        look: Of its arm.
        limits: Ends of the axis; an interval that reaches further ends in an arrow.
        text: What stands beside; see `effect_text`.
    """
    axes.annotate(
        text,
        (1, y),
        xytext=(8, 0),
        textcoords="offset points",
        size=SMALL,
        va="center",
        xycoords=("axes fraction", "data"),
        gid="value",
        color=INK if row.effect is not None else MUTED,
        weight="bold" if row.beyond_noise else "normal",
    )
    found = row.effect
    if found is None:
        return
    if found.interval.known:
        ends = np.log(np.maximum([found.interval.low, found.interval.high], 1e-300))
        seen: Floats = np.clip(ends, *limits)
        axes.plot(
            seen,
            [y, y],
            color=look.colour,
            lw=1.8,
            ls="-" if found.unit != "block" else (0, (2, 1)),
            zorder=3,
            gid=f"interval:{row.arm}",
            solid_capstyle="butt",
        )
        for beyond, place, marker in (
            (ends[0] < limits[0], 0.008, "<"),
            (ends[1] > limits[1], 0.992, ">"),
        ):
            if beyond:
                axes.plot(
                    [place],
                    [y],
                    marker=marker,
                    ms=5,
                    color=look.colour,
                    zorder=4,
                    gid="beyond",
                    transform=axes.get_yaxis_transform(),
                )
    axes.plot(
        [found.log_mean],
        [y],
        marker=look.marker,
        ms=6,
        mfc=look.colour,
        mec=PAPER,
        mew=0.6,
        ls="",
        zorder=5,
        gid=f"effect:{row.arm}",
    )


def _marks(axes: Axes, y: float, marks: Sequence[Mark]) -> None:
    for mark in marks:
        axes.plot([np.log(mark.ratio)], [y], **mark.look)


def _ticks(axes: Axes, low: float, high: float, width: float) -> None:
    """Ticks at round changes, as many as `width` inches have room for."""
    inside = [tick for tick in _TICKS if low <= np.log1p(tick / 100) <= high]
    kept: list[float] = [0.0]
    # Ticks far from none first: they say how far the axis reaches.
    for tick in sorted(inside, key=lambda t: -abs(np.log1p(t / 100))):
        place = np.log1p(tick / 100)
        room = text_inches(_percent(tick), SMALL) + 0.12
        apart = [abs(place - np.log1p(other / 100)) for other in kept]
        if min(apart) / (high - low) * width > room:
            kept.append(tick)
    kept.sort()
    axes.xaxis.set_major_locator(FixedLocator([float(np.log1p(tick / 100)) for tick in kept]))
    axes.xaxis.set_minor_locator(NullLocator())
    names = {round(float(np.log1p(tick / 100)), 9): _percent(tick) for tick in kept}
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: names.get(round(value, 9), "")))


def _percent(tick: float) -> str:
    return "0 %" if tick == 0 else f"{tick:+g} %" if abs(tick) < 900 else f"x{1 + tick / 100:g}"


def legend(rows: Sequence[ArmRow], marks: Sequence[Mark] = ()) -> list[Line2D | Patch]:
    """What the marks of rows mean."""
    handles: list[Line2D | Patch] = []
    if any(row.effect is not None for row in rows):
        handles.append(
            Line2D([], [], ls="", marker="o", color=MUTED, ms=6, label="ratio of geometric means")
        )
    known = [row.effect for row in rows if row.effect and row.effect.interval.known]
    if any(found.unit != "block" for found in known):
        handles.append(Line2D([], [], color=MUTED, lw=1.8, label="95 % interval"))
    if any(found.unit == "block" for found in known):
        handles.append(
            Line2D([], [], color=MUTED, lw=1.8, ls=(0, (2, 1)), label="interval of one boot alone")
        )
    handles += mark_handles(marks)
    if any(row.floor and row.floor > 1 for row in rows):
        handles.append(Patch(fc=GRID, label="noise floor: two equal arms"))
    return handles


def _caption(summary: Summary, rows: Sequence[ArmRow]) -> str:
    parts = ["Logarithmic axes: a change and its inverse are equally far from none."]
    found = [row.effect for row in rows if row.effect is not None]
    methods = sorted({one.method for one in found if one.interval.known})
    if any(not one.interval.known for one in found):
        parts.append("[n=1]: one block has no interval.")
    if methods:
        parts.append(
            f"Intervals: {100 * summary.level:g} %, from block-paired log ratios, "
            f"{'; '.join(methods)}."
        )
    if any(row.beyond_noise for row in rows):
        parts.append("Bold with a star: beyond the noise floor.")
    if summary.run.plan.twin is None:
        parts.append("The run has no A/A pair, so its noise floor is not known.")
    return " ".join(parts)
