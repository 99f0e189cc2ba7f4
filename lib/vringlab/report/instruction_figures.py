"""Instructions beside the time: both opinions, every sample, where they went; and other events."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from matplotlib.axes import Axes

from vringlab.analysis.instructions import events, profiles
from vringlab.analysis.pairing import point_text
from vringlab.errors import UserError
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
    style,
    text_inches,
    tidy_axes,
    usable,
    wrapped,
)
from vringlab.report.change_axis import set_change_axis
from vringlab.report.events_view import events_figure
from vringlab.report.family import Family
from vringlab.report.forest import axis_limits, draw_row, effect_text, legend, metric_title
from vringlab.report.function_view import functions_figure
from vringlab.report.opinions import (
    CYCLES,
    EVENTS,
    INSTRUCTIONS,
    SIDES,
    Opinion,
    chosen,
    opinions,
)
from vringlab.report.panels import Column, arm_panels
from vringlab.report.summary import ArmRow, Summary

_COLUMNS = (
    Column(INSTRUCTIONS, "host and guest"),
    Column("instructions_guest", "guest"),
    Column("instructions_host", "host"),
    Column("instructions_module", "modules under test"),
)
_ROW = 0.24
_AXIS = 0.3
_GAP = 0.25
_ARROW = "\N{RIGHTWARDS ARROW}"


@dataclass(frozen=True)
class _Line:
    """A row of the figure: an arm at a point."""

    y: float
    opinion: Opinion


@dataclass(frozen=True)
class _Layout:
    """Places in inches from the top: rows, titles of points, words; and the height of all."""

    lines: list[_Line]
    titles: list[tuple[float, str]]
    words: list[tuple[float, str]]
    height: float


def opinions_figure(
    summary: Summary, workload: str, width: Width = "wide", notes: bool = True
) -> RunFigure | None:
    """The changes of time and of instructions beside each other, on one scale, by point and arm.

    The A/A pair is among them. None when the run was not asked to count, or has no instructions.

    Args:
        summary: The run.
        workload: The workload.
        width: Wide (panels beside each other) or narrow (below each other).
        notes: Whether the caption is drawn.
    """
    found = [item for item in opinions(summary.run, summary.level) if item.workload == workload]
    rows = [row for item in found for row in (item.time, item.counted) if row is not None]
    if not any(item.counted is not None and item.counted.effect is not None for item in found):
        return None
    room = usable(width)
    left = max(text_inches(item.arm, SMALL) for item in found) + 0.12
    right = max(text_inches(effect_text(row), SMALL, "bold") for row in rows) + 0.15
    across = 2 if width == "wide" else 1
    # Names of the arms stand before the first panel only, but panels are of one size.
    inner = (room - left - across * right - _GAP * (across - 1)) / across
    layouts = {
        "time": _layout(found, room, words=across == 2),
        "counted": _layout(found, room, words=True),
    }
    limits = axis_limits(rows)
    reach = max(map(abs, limits))
    shown = looks(summary.run)
    times = dict.fromkeys(item.time.metric for item in found if item.time is not None)
    heads = [" or ".join(map(metric_title, times)) or "time", _counted_title(found)]
    wrap = inner + right + left if across == 1 else inner + right
    head = max(len(wrapped(text, wrap, TEXT, "bold")) for text in heads)
    top = line_inches(TEXT, head) + 0.06
    with style():
        made = sheet(
            summary,
            "two opinions, time and instructions",
            max(_bottom(layouts.values(), top, across)),
            width,
            subject=workload,
            detail=point_text(summary.shared(workload)),
            handles=legend(rows),
            caption=_caption(summary),
            notes=notes,
        )
        margin = (made.width - room) / 2
        bottoms = _bottom(layouts.values(), top, across)
        for place, (kind, layout) in enumerate(layouts.items()):
            column = place % across
            start = margin + left + column * (inner + right + _GAP)
            upper = bottoms[place] - layout.height - _AXIS
            axes = made.axes(start, upper, inner, layout.height)
            axes.set_gid(f"opinion:{kind}")
            title = "\n".join(wrapped(heads[place], wrap, TEXT, "bold"))
            panel_title(axes, title, left if across == 1 else 0.0)
            axes.set_xlim(-reach, reach)
            axes.set_ylim(layout.height, 0)
            _panel(axes, layout.lines, kind, shown, (-reach, reach), named=column == 0)
            set_change_axis(axes, "x", max(3, int(inner / 0.6)))
            if column == 0:
                _texts(axes, layout.titles, MUTED, left, "group-title")
                _texts(axes, layout.words, INK, left, "word")
    return made.figure


def _counted_title(found: Sequence[Opinion]) -> str:
    units = dict.fromkeys(item.unit for item in found if item.unit)
    one = f" for one {' or '.join(units)}" if units else ""
    return f"instructions{one} (lower is better)"


def _bottom(layouts: Iterable[_Layout], top: float, across: int) -> list[float]:
    """Lower edge of each panel in inches, beside each other or below each other."""
    heights = [top + layout.height + _AXIS for layout in layouts]
    return [max(heights)] * len(heights) if across > 1 else list(accumulate(heights))


def _layout(found: Sequence[Opinion], room: float, *, words: bool) -> _Layout:
    lines: list[_Line] = []
    titles: list[tuple[float, str]] = []
    said: list[tuple[float, str]] = []
    y, group = 0.0, None
    for item in found:
        if item.point != group:
            y += 0.05 if group is not None else 0.0
            for text in wrapped(item.point, room, SMALL):
                y += line_inches(SMALL)
                titles.append((y, text))
        group = item.point
        lines.append(_Line(y + _ROW / 2, item))
        y += _ROW
        if words and not item.is_twin:
            for text in wrapped(f"{_ARROW} {item.word}", room - 0.2, SMALL):
                y += line_inches(SMALL)
                said.append((y, text))
            y += 0.07
    return _Layout(lines, titles, said, y)


def _panel(
    axes: Axes,
    lines: Sequence[_Line],
    kind: str,
    shown: Mapping[str, Look],
    limits: tuple[float, float],
    *,
    named: bool,
) -> None:
    tidy_axes(axes)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.axvline(0, color=INK, lw=0.9, zorder=2)
    for line in lines:
        row: ArmRow | None = line.opinion.time if kind == "time" else line.opinion.counted
        if row is None:
            continue
        draw_row(axes, row, line.y, shown[row.arm], limits, effect_text(row))
        if row.floor is not None and row.floor > 1:
            _band(axes, row.floor, line.y)
    axes.set_yticks([line.y for line in lines], [line.opinion.arm for line in lines], size=SMALL)
    if not named:
        axes.tick_params(labelleft=False)


def _band(axes: Axes, floor: float, y: float) -> None:
    half = float(np.log(floor))
    (band,) = axes.barh(y, 2 * half, left=-half, height=_ROW, color=GRID, lw=0, zorder=1)
    band.set_gid("floor")


def _texts(
    axes: Axes, texts: Sequence[tuple[float, str]], colour: str, left: float, gid: str
) -> None:
    for y, text in texts:
        axes.annotate(
            text,
            (0, y),
            xytext=(-72 * left + (10 if gid == "word" else 0), 3),
            bbox={"fc": PAPER, "ec": "none", "pad": 0.8},
            size=SMALL,
            color=colour,
            style="italic" if gid == "word" else "normal",
            gid=gid,
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
        )


def _caption(summary: Summary) -> str:
    twin = summary.run.plan.twin
    parts = [
        "Both panels have one logarithmic scale, so that the widths of the intervals can be "
        "compared by eye.",
        f"Intervals: {100 * summary.level:g} %, from block-paired log ratios.",
        f"{twin} is {summary.run.plan.reference} again: the A/A pair." if twin else "",
        "Bold with a star: beyond the noise floor. Words: adjusted for their number, too.",
    ]
    return " ".join(part for part in parts if part)


def functions(
    summary: Summary, workload: str, width: Width = "wide", notes: bool = True
) -> RunFigure | None:
    """Where they went, for the arm and point that stand for a workload; None without any.

    Raises:
        UserError: as for `analysis.instructions.profiles`.
    """
    item = chosen(summary.run, workload, summary.level)
    profile = profiles(summary.run) if item is not None else None
    if item is None or profile is None or profile.empty:
        return None
    return functions_figure(
        summary, profile, item.arm, workload, item.params, width=width, notes=notes
    )


def other_events(
    summary: Summary, workload: str, width: Width = "wide", notes: bool = True
) -> RunFigure | None:
    """Exits and context switches, as for `functions`; None without any.

    Raises:
        UserError: as for `analysis.instructions.profiles`.
    """
    item = chosen(summary.run, workload, summary.level)
    found = events(summary.run) if item is not None else None
    if item is None or found is None or found.empty:
        return None
    return events_figure(summary, found, item.arm, workload, item.params, width=width, notes=notes)


def draw(summary: Summary, workload: str, width: Width, notes: bool) -> dict[str, RunFigure]:
    """Both opinions, the samples of each count, the largest differences by function, and events."""
    remark = (
        "Instructions for one unit of work, those executed to wait and the tools' own left out."
    )
    title = "instructions of each sample"
    figures = {
        "opinions": opinions_figure(summary, workload, width, notes),
        "instructions": arm_panels(summary, workload, _COLUMNS, title, width, notes, remark=remark),
    }
    # What is damaged is told where it is asked for; a report goes on.
    with suppress(UserError):
        figures["functions"] = functions(summary, workload, width, notes)
        figures["events"] = other_events(summary, workload, width, notes)
    return {name: figure for name, figure in figures.items() if figure is not None}


FAMILY = Family(
    name="instructions",
    metrics=(*(column.metric for column in _COLUMNS), *EVENTS),
    headline=(INSTRUCTIONS, *SIDES.values()),
    draw=draw,
    covers=CYCLES,
    order=8,
)
