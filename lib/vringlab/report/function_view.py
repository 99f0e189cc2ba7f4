"""Where the instructions went: by side, kind of code and function, and how two arms differ."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from vringlab.analysis import instructions
from vringlab.analysis.frames import RunFrames
from vringlab.campaign.experiment import Value
from vringlab.campaign.work import TOOLS, WAITING, WORKING
from vringlab.report.canvas import (
    INK,
    MUTED,
    PAPER,
    SMALL,
    TEXT,
    RunFigure,
    Width,
    line_inches,
    panel_title,
    sheet,
    statement,
    style,
    text_inches,
    tidy_axes,
    usable,
    wrapped,
)
from vringlab.report.opinions import chosen_rows
from vringlab.report.summary import Summary, amount, change_text, count

#: Guest dark, host pale; one hue for each kind of code. Modules under test stand out.
COLOURS: Mapping[tuple[str, str], str] = {
    ("guest", "module"): "#d55e00",
    ("guest", "kernel"): "#0072b2",
    ("guest", "user"): "#009e73",
    ("host", "module"): "#e69f00",
    ("host", "kernel"): "#56b4e9",
    ("host", "user"): "#8fd6bf",
}

#: Functions too small to be kept by name; see `campaign.instructions`.
REST = "(the rest)"
_ROW = 0.235
_BAR = 0.3
_AXIS = 0.42
_HEAD = line_inches(TEXT) + 0.06
#: How far beyond the bars an interval may stretch the axis, in parts of the longest bar.
_WIDEN = 0.8
#: Share of all instructions below which what was executed to wait is not worth a sentence.
_LITTLE = 0.005


def name_of(side: str, area: str, module: str, function: str) -> str:
    """What a row of a profile is called: `guest virtio_transport_send_pkt [vsock module]`."""
    if not function and not module:
        return f"{side}, user space" if area == "user" else f"{side}, {area} as a whole"
    return f"{side} {function or '(no symbol)'}{f' [{module}]' if module else ''}"


def working(table: pd.DataFrame) -> pd.DataFrame:
    """Rows of a difference that are a cost of the work: not what waits, nor the tools' own.

    What stands together as the rest is no function, and comes last.
    """
    kept = table[table["area"].isin(WORKING)]
    if "function" in kept:
        kept = kept.sort_values("function", key=lambda names: names == REST, kind="stable")
    return kept.reset_index(drop=True)


def difference_table(
    profile: pd.DataFrame, arm: str, reference: str, most: int = 15, level: float = 0.95
) -> pd.DataFrame:
    """The largest differences by function, for reading.

    Args:
        profile: Rows of one workload at one point; see `analysis.instructions.at`.
        arm: The arm.
        reference: What it is compared with.
        most: Rows to show; the rest and the total are told in two more.
        level: Level of the intervals.

    Returns:
        side, code (kind), module, function, the two arms' instructions for one unit, the change
        and its interval, as text.
    """
    table = working(instructions.difference(profile, arm, reference, level))
    shown, left = table.head(most), table.iloc[most:]
    rows = [
        (
            *(row[name] for name in ("side", "area", "module")),
            row["function"] or ("(no symbol)" if row["module"] else "(as a whole)"),
            *_numbers(row["reference"], row["arm"], row["change"]),
            _interval(row["low"], row["high"]),
        )
        for _, row in shown.iterrows()
    ]
    for name, some in ((f"{len(left)} others", left), ("all", table)):
        if len(some):
            sums = (float(some[column].sum()) for column in ("reference", "arm", "change"))
            rows.append(("", "", "", name, *_numbers(*sums), ""))
    columns = ["side", "code", "module", "function", reference, arm, "change", "95 % interval"]
    columns[-1] = f"{100 * level:g} % interval"
    return pd.DataFrame(rows, columns=columns)


def _numbers(reference: float, arm: float, change: float) -> tuple[str, str, str]:
    return f"{reference:,.0f}", f"{arm:,.0f}", f"{change:+,.0f}"


def _interval(low: float, high: float) -> str:
    return f"[{low:+,.0f}, {high:+,.0f}]" if np.isfinite(low) and np.isfinite(high) else "one boot"


def area_table(
    profile: pd.DataFrame, arm: str, reference: str, level: float = 0.95
) -> pd.DataFrame:
    """Both arms by side and kind of code, for reading, with what is left out and why."""
    table = instructions.difference(profile, arm, reference, level, by=("side", "area"))
    table = table.sort_values(["side", "area"], ignore_index=True)
    rows = [
        (
            *(row[name] for name in ("side", "area")),
            *_numbers(row["reference"], row["arm"], row["change"]),
            _interval(row["low"], row["high"]),
            _why_left_out(row["area"]),
        )
        for _, row in table.iterrows()
    ]
    columns = ["side", "code", reference, arm, "change", f"{100 * level:g} % interval", ""]
    return pd.DataFrame(rows, columns=columns)


def _why_left_out(area: str) -> str:
    if area in WAITING:
        return "left out: waiting"
    return "left out: the benchmark's own programs" if area == TOOLS else ""


def table_of(run: RunFrames, workload: str | None = None, most: int = 15) -> pd.DataFrame:
    """`difference_table` for the arm and point that stand for a run; empty without both opinions.

    Args:
        run: The run.
        workload: Only this one.
        most: Rows to show.

    Raises:
        UserError: as for `analysis.instructions.profiles`.
    """
    found = chosen_rows(run, instructions.profiles, workload)
    if found is None:
        return pd.DataFrame()
    item, here = found
    return difference_table(here, item.arm, run.plan.reference, most)


def areas_of(run: RunFrames, workload: str | None = None) -> pd.DataFrame:
    """`area_table` for the arm and point that stand for a run; empty without both opinions.

    Raises:
        UserError: as for `analysis.instructions.profiles`.
    """
    found = chosen_rows(run, instructions.profiles, workload)
    if found is None:
        return pd.DataFrame()
    item, here = found
    return area_table(here, item.arm, run.plan.reference)


def by_area(table: pd.DataFrame) -> pd.DataFrame:
    """A difference summed by side and kind of code, in the order of `COLOURS`."""
    sums = table.groupby(["side", "area"])[["reference", "arm", "change"]].sum()
    return sums.reindex([key for key in COLOURS if key in sums.index])


def waiting_sentence(profile: pd.DataFrame, arm: str, reference: str) -> str:
    """What was executed to wait and is left out, in both arms; empty when it is next to nothing."""
    table = instructions.difference(profile, arm, reference)
    waits = table[table["area"].isin(WAITING)]
    sums = {name: float(waits[name].sum()) for name in ("reference", "arm")}
    if all(abs(value) < _LITTLE * table[name].sum() for name, value in sums.items()):
        return ""
    unit = profile["unit"].iloc[0]
    return (
        f"Executed to wait, and left out: {amount(sums['reference'], 'instruction')} for one "
        f"{unit} in {reference}, {amount(sums['arm'], 'instruction')} in {arm}."
    )


def functions_figure(
    summary: Summary,
    profile: pd.DataFrame,
    arm: str,
    workload: str,
    params: Mapping[str, Value],
    *,
    most: int = 12,
    width: Width = "wide",
    notes: bool = True,
) -> RunFigure:
    """The largest differences by function as bars with intervals, below them both arms by area.

    Args:
        summary: The run; its reference is what the arm is compared with.
        profile: The run's profiles; see `analysis.instructions.profiles`.
        arm: The arm.
        workload: The workload.
        params: The parameter point.
        most: Functions to show.
        width: Wide or narrow.
        notes: Whether the caption is drawn.
    """
    reference = summary.run.plan.reference
    here = instructions.at(profile, workload, params)
    table = working(instructions.difference(here, arm, reference, summary.level))
    title = f"where the instructions went, {arm} against {reference}"
    with style():
        if table.empty:
            text = f"No block has the instructions of both {arm} and {reference} by function."
            return statement(summary, title, text, width)
        return _figure(summary, here, table, arm, workload, params, title, most, width, notes)


def _figure(
    summary: Summary,
    profile: pd.DataFrame,
    table: pd.DataFrame,
    arm: str,
    workload: str,
    params: Mapping[str, Value],
    title: str,
    most: int,
    width: Width,
    notes: bool,
) -> RunFigure:
    reference = summary.run.plan.reference
    shown = table.head(most)
    unit = str(profile["unit"].iloc[0])
    room = usable(width)
    areas = by_area(table)
    # Colours say which are the modules under test; a narrow figure has no room for their names.
    names = [
        name_of(side, area, module, function)
        for side, area, module, function in shown[instructions.FUNCTION].itertuples(index=False)
    ]
    if width == "narrow":
        names = [name.partition(" [")[0] for name in names]
    lines = [wrapped(name, 0.45 * room, SMALL) for name in names]
    texts = [*chain.from_iterable(lines), arm, reference]
    left = max(text_inches(text, SMALL) for text in texts) + 0.15
    row = max(_ROW, line_inches(SMALL, max(map(len, lines))) + 0.04)
    height = len(shown) * row
    heads = [
        wrapped(text, room, TEXT, "bold")
        for text in (
            f"largest differences, instructions for one {unit}",
            f"both arms, instructions for one {unit}",
        )
    ]
    head = max(map(len, heads)) * line_inches(TEXT) + 0.06
    made = sheet(
        summary,
        title,
        2 * head + height + 2 * _AXIS + 2 * _BAR + 0.1,
        width,
        subject=workload,
        detail=summary.label(workload, params),
        handles=_legend(areas, shown),
        caption=_caption(summary, profile, table, shown, arm),
        notes=notes,
    )
    start = (made.width - room) / 2 + left
    upper = made.axes(start, head, room - left - 0.25, height)
    panel_title(upper, "\n".join(heads[0]), left)
    _bars(upper, shown, ["\n".join(some) for some in lines], room - left - 0.25)
    lower = made.axes(start, 2 * head + height + _AXIS, room - left - 0.25, 2 * _BAR)
    panel_title(lower, "\n".join(heads[1]), left)
    _stacks(lower, areas, [(reference, "reference"), (arm, "arm")], room - left - 0.25)
    return made.figure


def _legend(areas: pd.DataFrame, shown: pd.DataFrame) -> list[Line2D | Patch]:
    names = {"module": "module under test"}
    handles: list[Line2D | Patch] = [
        Patch(fc=COLOURS[side, area], label=f"{side}, {names.get(area, area)}")
        for side, area in areas.index
    ]
    if np.isfinite(shown["low"]).any():
        handles.append(Line2D([], [], color=INK, lw=1.2, label="95 % interval"))
    return handles


def _caption(
    summary: Summary, profile: pd.DataFrame, table: pd.DataFrame, shown: pd.DataFrame, arm: str
) -> str:
    reference = summary.run.plan.reference
    total, before = float(table["change"].sum()), float(table["reference"].sum())
    told = float(shown["change"].sum())
    parts = [
        f"Means over boots. In all {total:+,.0f} instructions"
        + (f" ({change_text(1 + total / before)})" if before > 0 else "")
        + f"; the {count(len(shown), 'row')} above sum up to {told:+,.0f}.",
        "A function's own instructions, without those of what it calls.",
        f"Intervals: {100 * summary.level:g} %, t on boot means."
        if np.isfinite(shown["low"]).any()
        else "One boot: no intervals.",
        waiting_sentence(profile, arm, reference),
    ]
    return " ".join(part for part in parts if part)


def _bars(axes: Axes, shown: pd.DataFrame, names: list[str], inches_wide: float) -> None:
    places = np.arange(len(shown))
    changes = shown["change"].to_numpy(dtype=np.float64)
    keys = list(zip(shown["side"], shown["area"], strict=True))
    bars = axes.barh(places, changes, height=0.66, color=[COLOURS[key] for key in keys], zorder=2)
    for bar, key, function in zip(bars, keys, shown["function"], strict=True):
        bar.set_gid(f"change:{key[0]}:{key[1]}:{function}")
    ends = shown[["low", "high"]].to_numpy(dtype=np.float64)
    reach = float(np.abs(changes).max()) or 1.0
    known = ends[np.isfinite(ends)]
    low = max(min(0.0, *changes, *known), min(0.0, *changes) - _WIDEN * reach)
    high = min(max(0.0, *changes, *known), max(0.0, *changes) + _WIDEN * reach)
    pad = 0.03 * (high - low)
    axes.set_xlim(low - pad, high + pad)
    for place, (first, last) in zip(places, ends, strict=True):
        if not (np.isfinite(first) and np.isfinite(last)):
            continue
        axes.plot(
            np.clip([first, last], low, high), [place] * 2, color=INK, lw=1.2, zorder=3, gid="span"
        )
        for beyond, end, marker in ((first < low, low, "<"), (last > high, high, ">")):
            if beyond:
                axes.plot([end], [place], marker=marker, ms=4, color=INK, zorder=3, gid="beyond")
    axes.set_ylim(len(shown) - 0.5, -0.5)
    axes.set_yticks(places, names, size=SMALL)
    axes.axvline(0, color=INK, lw=0.9, zorder=3)
    _number_axis(axes, inches_wide)


def _stacks(
    axes: Axes, areas: pd.DataFrame, arms: list[tuple[str, str]], inches_wide: float
) -> None:
    ends = [0.0]
    for place, (_, column) in enumerate(arms):
        # Of noise alone a small sum may be below nothing; it stands left of none.
        above, below = 0.0, 0.0
        for (side, area), value in zip(areas.index, areas[column], strict=True):
            start = above if value >= 0 else below
            (bar,) = axes.barh(
                place,
                value,
                left=start,
                height=0.7,
                color=COLOURS[side, area],
                ec=PAPER,
                lw=0.6,
                zorder=2,
            )
            bar.set_gid(f"stack:{column}:{side}:{area}")
            above, below = (above + value, below) if value >= 0 else (above, below + value)
        ends += [above, below]
    low, high = min(ends), max(ends)
    texts = [amount(float(areas[column].sum()), "instruction") for _, column in arms]
    # Room for the total behind each bar.
    wide = max(text_inches(text, SMALL) for text in texts) + 0.15
    axes.set_xlim(low, low + (high - low or 1.0) * inches_wide / max(inches_wide - wide, 0.3))
    for place, (text, (_, column)) in enumerate(zip(texts, arms, strict=True)):
        end = float(areas[column].clip(lower=0).sum())
        axes.annotate(
            text,
            (end, place),
            xytext=(4, 0),
            textcoords="offset points",
            size=SMALL,
            va="center",
            color=MUTED,
            gid="total",
        )
    axes.set_ylim(len(arms) - 0.5, -0.5)
    axes.set_yticks(range(len(arms)), [name for name, _ in arms], size=SMALL)
    _number_axis(axes, inches_wide)


def _number_axis(axes: Axes, inches_wide: float) -> None:
    tidy_axes(axes)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    widest = max(abs(end) for end in axes.get_xlim())
    each = text_inches(f"{-widest:,.0f}", SMALL) + 0.15
    axes.xaxis.set_major_locator(MaxNLocator(max(1, min(6, int(inches_wide / each) - 1))))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
