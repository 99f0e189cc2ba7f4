"""Panels with one row per arm: every sample, lines between samples of a block, an interval.

Valid samples are filled; invalid ones are hollow crosses and in no interval. An interval that
reaches beyond the panel ends in an arrow: with two boots it can be a hundred times as wide as
the samples, and the samples shall stay readable.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullFormatter

from vringlab.analysis.pairing import Floats, point_text
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
from vringlab.report.marks import PLACED, Mark, mark_handles
from vringlab.report.summary import ArmRow, Summary, amount, at, count, reason_kinds

_ROW = 0.27
_AXIS = 0.23
_GAP = 0.12

#: Share of the range of the samples by which an interval may widen a panel on either side.
_WIDEN = 0.6


@dataclass(frozen=True)
class Column:
    """One metric as a column of panels.

    Attributes:
        metric: Its name.
        title: What it is, in the words of an axis.
        log: Whether its axis is logarithmic.
        zero: Whether its axis begins at 0.
        shared: Whether all points have the same limits, so that they can be compared by eye.
    """

    metric: str
    title: str
    log: bool = False
    zero: bool = False
    shared: bool = False


@dataclass(frozen=True)
class _Panel:
    column: Column
    params: Mapping[str, Value]
    rows: list[ArmRow]
    samples: pd.DataFrame
    scale: float
    unit: str
    claimed: list[tuple[Mark, float]]

    @property
    def valid(self) -> pd.DataFrame:
        return self._finite(valid=True)

    @property
    def invalid(self) -> pd.DataFrame:
        return self._finite(valid=False)

    def _finite(self, valid: bool) -> pd.DataFrame:
        rows = self.samples
        kept: pd.DataFrame = rows[(rows["valid"] == valid) & np.isfinite(rows["value"])]
        return kept


def arm_panels(
    summary: Summary,
    workload: str,
    columns: Sequence[Column],
    title: str,
    width: Width = "wide",
    notes: bool = True,
    points: Sequence[Mapping[str, Value]] | None = None,
    marks: Sequence[Mark] = (),
    remark: str = "",
) -> RunFigure | None:
    """A figure with a panel for each parameter point and metric; None without any sample.

    Args:
        summary: The run; only metrics that it has are drawn.
        workload: The workload.
        columns: Metrics; four stand in two rows.
        title: Title of the figure.
        width: Wide or narrow.
        notes: Whether the caption is drawn.
        points: Points to draw; all of the workload's when None.
        marks: Published ratios to draw beside; where they would be from the reference's mean.
        remark: What else the caption says.
    """
    there = summary.metrics(workload)
    points = summary.points(workload) if points is None else points
    panels = [
        _panel(summary, workload, params, column, marks)
        for params in points
        for column in columns
        if column.metric in there
    ]
    panels = [panel for panel in panels if len(panel.samples) or panel.rows]
    if not panels:
        return None
    used = len({panel.column.metric for panel in panels})
    across = 1 if width == "narrow" else used if used > 1 else min(2, len(panels))
    across = 2 if across == 4 else across
    places, down = _grid(panels, across)
    shown = looks(summary.run)
    values = [_value_text(row) for panel in panels for row in panel.rows]
    left = max(text_inches(row.arm, SMALL) for panel in panels for row in panel.rows) + 0.12
    right = max(text_inches(text, SMALL) for text in values) + 0.15
    room = usable(width)
    inner = (room - left - across * right - (across - 1) * _GAP) / across
    own_left = across > 1 and used == 1
    if own_left:
        inner -= left * (across - 1) / across
    shared = _shared(points)
    titles = [wrapped(_panel_title(panel, shared), inner + right, TEXT) for panel in panels]
    head = line_inches(TEXT, max(len(lines) for lines in titles)) + 0.04
    body = _ROW * len(summary.arms)
    each = head + body + _AXIS + _GAP
    caption = " ".join(part for part in (_caption(summary, panels), remark) if part)
    made = sheet(
        summary,
        title,
        each * down,
        width,
        subject=workload,
        detail=point_text(shared),
        handles=_legend(panels),
        caption=caption,
        notes=notes,
    )
    limits = _limits(panels)
    margin = (made.width - room) / 2
    for place, panel in enumerate(panels):
        row, column = places[place]
        step = inner + right + _GAP + (left if own_left else 0)
        x = margin + left + column * step
        axes = made.axes(x, row * each + head, inner, body)
        labels = own_left or column == 0
        _draw(axes, panel, shown, limits[place], inner, labels)
        for number, line in enumerate(reversed(titles[place])):
            axes.annotate(
                line,
                (0, 1),
                xytext=(0, 3 + 72 * line_inches(TEXT, number)),
                size=TEXT,
                xycoords="axes fraction",
                textcoords="offset points",
                gid="panel-title",
            )
    return made.figure


def _grid(panels: Sequence[_Panel], across: int) -> tuple[list[tuple[int, int]], int]:
    """Row and column of each panel, and the number of rows; a metric has one column throughout.

    A point that lacks a metric leaves its place empty, or else all that follow would move.
    """
    metrics = list(dict.fromkeys(panel.column.metric for panel in panels))
    if len(metrics) == 1 or across == 1:
        return [divmod(n, across) for n in range(len(panels))], -(-len(panels) // across)
    found: list[tuple[int, int]] = []
    top = 0
    for _, some in itertools.groupby(panels, key=lambda panel: point_text(panel.params)):
        own = [divmod(metrics.index(panel.column.metric), across) for panel in some]
        found += [(top + row, column) for row, column in own]
        top = found[-1][0] + 1
    return found, top


def _shared(points: Sequence[Mapping[str, Value]]) -> dict[str, Value]:
    """Parameters that have one value at all of several points."""
    if len(points) < 2:
        return {}
    first, *others = points
    return {
        name: value
        for name, value in first.items()
        if all(name in point and point[name] == value for point in others)
    }


def _panel(
    summary: Summary,
    workload: str,
    params: Mapping[str, Value],
    column: Column,
    marks: Sequence[Mark],
) -> _Panel:
    rows = summary.of(workload, params, column.metric)
    here = at(summary.run.samples, workload, params)
    samples = here[here["metric"] == column.metric]
    unit = rows[0].unit if rows else ""
    values = samples.loc[np.isfinite(samples["value"]), "value"]
    if column.shared:
        every = summary.run.samples
        same = (every["workload"] == workload) & (every["metric"] == column.metric)
        values = every.loc[same & np.isfinite(every["value"]), "value"]
    scale, name = unit_of(values.to_numpy(dtype=np.float64), unit, column.metric)
    return _Panel(column, params, rows, samples, scale, name, placed(marks, rows))


def unit_of(values: Floats, unit: str, metric: str) -> tuple[float, str]:
    """The unit in which the largest value has one to three digits before the point.

    Returns:
        How many of `unit` one of it is, and its name.
    """
    typical = float(values.max()) if values.size else 1.0
    number, _, name = amount(typical, unit, metric).partition(" ")
    return (10.0 ** round(np.log10(typical / float(number))) if float(number) > 0 else 1.0), name


def placed(marks: Sequence[Mark], rows: Sequence[ArmRow]) -> list[tuple[Mark, float]]:
    """Marks of the arms of one point, with the value that each ratio makes of the reference's."""
    base = next((row.level.value for row in rows if row.is_reference and row.level), None)
    if base is None:
        return []
    return [(mark, mark.ratio * base) for mark in marks for row in rows if mark.fits(row)]


def _panel_title(panel: _Panel, shared: Mapping[str, Value]) -> str:
    label = point_text({name: v for name, v in panel.params.items() if name not in shared})
    unit = f" ({panel.unit}{', log axis' if panel.column.log else ''})"
    return f"{label}: {panel.column.title}{unit}" if label else f"{panel.column.title}{unit}"


def shared_text(summary: Summary, workload: str) -> str:
    """The parameters of a workload that do not vary; empty when all do."""
    return point_text(summary.shared(workload))


def _value_text(row: ArmRow) -> str:
    if row.level is not None:
        return f"{amount(row.level.value, row.unit, row.metric)}  n={row.valid}"
    return "all invalid" if row.invalid else "no sample"


def _limits(panels: Sequence[_Panel]) -> list[tuple[float, float]]:
    """Ends of each panel's axis in its scaled unit."""
    own = [_span(panel) for panel in panels]
    found = []
    for panel, (low, high) in zip(panels, own, strict=True):
        if panel.column.shared:
            same = [
                (span[0] * other.scale / panel.scale, span[1] * other.scale / panel.scale)
                for other, span in zip(panels, own, strict=True)
                if other.column == panel.column
            ]
            low, high = min(s[0] for s in same), max(s[1] for s in same)
        found.append((low, high))
    return found


def _span(panel: _Panel) -> tuple[float, float]:
    values = panel.samples["value"].to_numpy(dtype=np.float64)
    values = np.append(values, [value for _, value in panel.claimed]) / panel.scale
    ends = [
        end / panel.scale
        for row in panel.rows
        if row.level is not None and row.level.interval.known
        for end in (row.level.interval.low, row.level.interval.high)
    ]
    return span_of(values, ends, log=panel.column.log, zero=panel.column.zero)


def span_of(
    values: Floats, ends: Sequence[float], *, log: bool, zero: bool = False
) -> tuple[float, float]:
    """Ends of an axis that holds all values, and of intervals as much as leaves them readable.

    Args:
        values: Values, those that are not finite are left out.
        ends: Ends of intervals.
        log: Whether the axis is logarithmic; it then has no place for a value of 0.
        zero: Whether the axis begins at 0.
    """
    values = values[np.isfinite(values)]
    if log:
        values = values[values > 0]
    if not values.size:
        return (0.1, 10.0) if log else (0.0, 1.0)
    turn: Callable[[Floats], Floats] = np.log if log else np.asarray
    low, high = float(turn(values.min())), float(turn(values.max()))
    # One value, or many equal ones, still need an axis around them.
    pad = (high - low) or (0.5 if log else 0.2 * abs(high) or 1.0)
    reach = [low, high]
    if ends:
        reach += [float(end) for end in turn(np.maximum(np.array(ends), 1e-300))]
    low = max(min(reach), low - _WIDEN * pad) - 0.08 * pad
    high = min(max(reach), high + _WIDEN * pad) + 0.08 * pad
    if log:
        return float(np.exp(low)), float(np.exp(high))
    return (0.0 if zero else max(low, 0.0) if values.min() >= 0 else low), high


def _draw(
    axes: Axes,
    panel: _Panel,
    shown: Mapping[str, Look],
    limits: tuple[float, float],
    width: float,
    labels: bool,
) -> None:
    arms = [row.arm for row in panel.rows]
    if panel.column.log:
        axes.set_xscale("log")
    axes.set_xlim(*limits)
    axes.set_ylim(len(arms) - 0.5, -0.5)
    tidy_axes(axes)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.set_yticks(range(len(arms)), arms if labels else [""] * len(arms))
    _ticks(axes, panel, limits, width)
    places = _places(panel, arms)
    _pair_lines(axes, panel, places)
    for index, row in enumerate(panel.rows):
        look = shown[row.arm]
        _interval(axes, index, row, panel, look, limits)
        mine = panel.valid[panel.valid["arm"] == row.arm]
        axes.plot(
            _inside(mine["value"] / panel.scale, limits),
            places.loc[mine.index],
            ls="",
            marker=look.marker,
            # Many samples must not hide the interval, nor each other.
            ms=4.2 if len(mine) <= 10 else 3.0 if len(mine) <= 25 else 2.2,
            mfc=look.colour,
            mec=PAPER,
            mew=0.4 if len(mine) <= 25 else 0.2,
            gid=f"samples:{row.arm}",
            zorder=_above(len(mine)),
            clip_on=False,
        )
        bad = panel.invalid[panel.invalid["arm"] == row.arm]
        axes.plot(
            _inside(bad["value"] / panel.scale, limits),
            places.loc[bad.index],
            ls="",
            marker="X",
            ms=6,
            mfc="none",
            mec=look.colour,
            mew=0.9,
            gid=f"invalid:{row.arm}",
            zorder=4,
            clip_on=False,
        )
        axes.annotate(
            _value_text(row),
            (1, index),
            xytext=(8, 0),
            textcoords="offset points",
            xycoords=("axes fraction", "data"),
            size=SMALL,
            va="center",
            gid="value",
            color=INK if row.level is not None else MUTED,
        )
        for mark, value in panel.claimed:
            if mark.arm == row.arm:
                axes.plot([value / panel.scale], [index], **mark.look)


def _above(samples: int) -> float:
    return 6.0 if samples <= 10 else 4.0


def _inside(values: pd.Series, limits: tuple[float, float]) -> Floats:
    # A count of 0 has no place on a logarithmic axis: it stands at its left end.
    return np.asarray(np.maximum(values.to_numpy(dtype=np.float64), limits[0]))


def _places(panel: _Panel, arms: Sequence[str]) -> pd.Series:
    """Where each sample stands across its row: by block, so that drift shows as a slope."""
    blocks = sorted(set(panel.samples["block"]))
    step = 0.62 / max(1, len(blocks) - 1)
    rank = {block: place * step - 0.31 for place, block in enumerate(blocks)}
    if len(blocks) == 1:
        rank = {blocks[0]: 0.0}
    index = {arm: place for place, arm in enumerate(arms)}
    found = [
        index[arm] + rank[block]
        for arm, block in zip(panel.samples["arm"], panel.samples["block"], strict=True)
    ]
    return pd.Series(found, index=panel.samples.index, dtype=np.float64)


def _pair_lines(axes: Axes, panel: _Panel, places: pd.Series) -> None:
    lines = []
    floor = axes.get_xlim()[0]
    for _, block in panel.valid.groupby("block"):
        if len(block) > 1:
            y = places.loc[block.index].to_numpy()
            x = np.maximum(block["value"].to_numpy() / panel.scale, floor)
            order = np.argsort(y)
            lines.append(np.column_stack([x[order], y[order]]))
    width = 0.7 if len(lines) < 12 else 0.4
    drawn = LineCollection(lines, colors=MUTED, linewidths=width, alpha=0.35, zorder=2)
    drawn.set_gid("pairs")
    axes.add_collection(drawn, autolim=False)


def _interval(
    axes: Axes,
    index: int,
    row: ArmRow,
    panel: _Panel,
    look: Look,
    limits: tuple[float, float],
) -> None:
    if row.level is None:
        return
    value = row.level.value / panel.scale
    # Above many samples, which would hide it, and below few, which it would hide.
    for colour, width, name in ((PAPER, 3.4, "halo"), (INK, 1.8, f"level:{row.arm}")):
        axes.plot(
            [value, value],
            [index - 0.4, index + 0.4],
            color=colour,
            lw=width,
            zorder=5,
            solid_capstyle="butt",
            gid=name,
        )
    if not row.level.interval.known:
        return
    low, high = row.level.interval.low / panel.scale, row.level.interval.high / panel.scale
    left, right = max(low, limits[0]), min(high, limits[1])
    for face, alpha, edge, zorder in ((look.colour, 0.22, 0.0, 1.0), ("none", 1.0, 0.9, 4.5)):
        bar = Rectangle((left, index - 0.4), right - left, 0.8, zorder=zorder)
        bar.set(facecolor=face, alpha=alpha, edgecolor=look.colour, linewidth=edge)
        bar.set_gid(f"interval:{row.arm}")
        axes.add_patch(bar)
    for beyond, end, marker in ((low < left, 0.013, "<"), (high > right, 0.987, ">")):
        if beyond:
            axes.plot(
                [end],
                [index],
                marker=marker,
                ms=5,
                color=look.colour,
                zorder=5,
                gid="beyond",
                transform=axes.get_yaxis_transform(),
            )


def _ticks(axes: Axes, panel: _Panel, limits: tuple[float, float], width: float) -> None:
    low, high = limits
    if panel.column.log:
        axes.xaxis.set_major_locator(FixedLocator(log_ticks(low, high, width)))
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _legend(panels: Sequence[_Panel]) -> list[Line2D | Patch]:
    def dot(label: str, marker: str, face: str, size: float = 5.0) -> Line2D:
        return Line2D([], [], ls="", marker=marker, ms=size, mfc=face, mec=MUTED, label=label)

    handles: list[Line2D | Patch] = [dot("sample", "o", MUTED)]
    rows = [row for panel in panels for row in panel.rows]
    if any(row.level is not None for row in rows):
        handles.append(
            Line2D([], [], ls="", marker="|", ms=9, mew=2, color=INK, label="geometric mean")
        )
    if any(row.level is not None and row.level.interval.known for row in rows):
        handles.append(Patch(fc=f"{MUTED}40", ec=MUTED, label="95 % interval"))
    if any(len(panel.valid["block"]) > panel.valid["block"].nunique() for panel in panels):
        handles.append(Line2D([], [], color=MUTED, lw=0.8, alpha=0.5, label="one block"))
    if any(len(panel.invalid) for panel in panels):
        handles.append(dot("invalid sample", "X", "none", 6))
    return [*handles, *mark_handles(mark for panel in panels for mark, _ in panel.claimed)]


def _caption(summary: Summary, panels: Sequence[_Panel]) -> str:
    boots = max((row.level.boots for p in panels for row in p.rows if row.level), default=0)
    parts = []
    if boots > 1:
        parts.append(
            f"Bar: {100 * summary.level:g} % interval of the arm's geometric mean, "
            f"t on {boots} boot means; an arrow: it reaches further."
        )
    elif boots == 1:
        parts.append("One boot: no interval that would hold for another.")
    if any(panel.column.log and (panel.valid["value"] == 0).any() for panel in panels):
        parts.append("A count of 0 stands at the left end.")
    if any(panel.claimed for panel in panels):
        parts.append(PLACED)
    parts += invalid_text([row for panel in panels for row in panel.rows])
    return " ".join(parts)


def invalid_text(rows: Sequence[ArmRow]) -> list[str]:
    """Why samples are invalid, one sentence per kind of reason, over all points of a workload."""
    reasons: dict[str, int] = {}
    seen = set()
    for row in rows:
        key = (row.workload, str(dict(row.params)), row.arm)
        if key not in seen:
            seen.add(key)
            for reason, number in row.reasons.items():
                reasons[reason] = reasons.get(reason, 0) + number
    return [
        f"Invalid, in no interval: {count(number, 'sample')}, {reason}."
        for reason, number in reason_kinds(reasons).items()
    ]
