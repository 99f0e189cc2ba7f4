"""Exits by reason and context switches for one unit of work, of two arms beside each other."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from vringlab.analysis import instructions
from vringlab.analysis.frames import RunFrames
from vringlab.campaign.experiment import Value
from vringlab.lab.events import BY_REASON, EXITS, GUEST_SWITCHES, HOST_SWITCHES
from vringlab.report.canvas import (
    INK,
    MUTED,
    SMALL,
    Look,
    RunFigure,
    Width,
    line_inches,
    looks,
    sheet,
    statement,
    style,
    text_inches,
    tidy_axes,
    usable,
    wrapped,
)
from vringlab.report.opinions import chosen_rows
from vringlab.report.summary import Summary

_ROW = 0.26
_AXIS = 0.42
#: Share of all exits below which a reason is left out of the figure in both arms.
_LITTLE = 0.01
_TITLE = "exits and context switches"
_LAST = 4


def event_table(profile: pd.DataFrame, arm: str, reference: str, level: float) -> pd.DataFrame:
    """What two arms differ in, in the order of reading: exits, reasons, context switches, cycles.

    Args:
        profile: Rows of one workload at one point; see `analysis.instructions.events`.
        arm: The arm.
        reference: What it is compared with.
        level: Level of the intervals.

    Returns:
        One row per kind: what, reference, arm, change, low, high, as `instructions.difference`.
    """
    table = instructions.difference(profile, arm, reference, level, by=["what"])
    most = table[["reference", "arm"]].max(axis=1).astype(float)
    keys = pd.DataFrame({"rank": table["what"].map(_rank), "most": -most})
    return table.loc[keys.sort_values(["rank", "most"]).index].reset_index(drop=True)


def _rank(what: str) -> int:
    if what.startswith(BY_REASON):
        return 1
    # What comes last is no event: cycles, where perf has them.
    return {EXITS: 0, GUEST_SWITCHES: 2, HOST_SWITCHES: 3}.get(what, _LAST)


def table_of(run: RunFrames, workload: str | None = None) -> pd.DataFrame:
    """The same as text, for the arm and point that stand for a run; empty where none were counted.

    Args:
        run: The run.
        workload: Only this one.

    Raises:
        UserError: as for `analysis.instructions.profiles`.
    """
    found = chosen_rows(run, instructions.events, workload)
    if found is None:
        return pd.DataFrame()
    item, here = found
    reference = run.plan.reference
    table = event_table(here, item.arm, reference, 0.95)
    rows = [
        (
            row["what"],
            _number(row["reference"]),
            _number(row["arm"]),
            _number(row["change"], "+"),
            _interval(row["low"], row["high"]),
        )
        for _, row in table.iterrows()
    ]
    unit = item.unit or "unit"
    columns = [f"for one {unit}", reference, item.arm, "change", "95 % interval"]
    return pd.DataFrame(rows, columns=columns)


def _interval(low: float, high: float) -> str:
    if not (np.isfinite(low) and np.isfinite(high)):
        return "one boot"
    return f"[{_number(low, '+')}, {_number(high, '+')}]"


def _number(value: float, sign: str = "") -> str:
    """Events for one unit are few, unless that is a byte; cycles are many."""
    if abs(value) >= 1000:
        return f"{value:{sign},.0f}"
    return f"{value:{sign}.2f}" if abs(value) >= 0.1 or value == 0 else f"{value:{sign}.2g}"


def events_figure(
    summary: Summary,
    profile: pd.DataFrame,
    arm: str,
    workload: str,
    params: Mapping[str, Value],
    *,
    width: Width = "wide",
    notes: bool = True,
) -> RunFigure:
    """Both arms on one line for each kind of event, and in words by how much they differ.

    Args:
        summary: The run; its reference is what the arm is compared with.
        profile: What was counted; see `analysis.instructions.events`.
        arm: The arm.
        workload: The workload.
        params: The parameter point.
        width: Wide or narrow.
        notes: Whether the caption is drawn.
    """
    reference = summary.run.plan.reference
    here = instructions.at(profile, workload, params)
    table = event_table(here, arm, reference, summary.level)
    title = f"{_TITLE}, {arm} against {reference}"
    with style():
        shown = table[_large(table)]
        if shown.empty:
            text = f"No block has the events of both {arm} and {reference}."
            return statement(summary, title, text, width)
        unit = str(here["unit"].iloc[0])
        shown_looks = looks(summary.run)
        both = {reference: shown_looks[reference], arm: shown_looks[arm]}
        room = usable(width)
        # A narrow figure has room for the changes alone; the table has their intervals.
        wide = width == "wide" and bool(np.isfinite(shown["low"]).any())
        texts = [
            _number(row["change"], "+") + (f" {_interval(row['low'], row['high'])}" if wide else "")
            for _, row in shown.iterrows()
        ]
        lines = [wrapped(_name(what), 0.4 * room, SMALL) for what in shown["what"]]
        names = ["\n".join(some) for some in lines]
        left = max(text_inches(text, SMALL) for some in lines for text in some) + 0.12
        right = max(text_inches(text, SMALL) for text in texts) + 0.12
        row = max(_ROW, line_inches(SMALL, max(map(len, lines))) + 0.05)
        height = len(shown) * row
        made = sheet(
            summary,
            title,
            height + _AXIS,
            width,
            subject=workload,
            detail=summary.label(workload, params),
            handles=[_mark(look, name) for name, look in both.items()],
            caption=_caption(summary, _small(table, shown), unit, wide),
            notes=notes,
        )
        start = (made.width - room) / 2 + left
        axes = made.axes(start, 0, room - left - right, height)
        _draw(axes, shown, names, texts, list(both.values()), room - left - right)
        axes.set_xlabel(f"for one {unit}", size=SMALL)
        return made.figure


def _large(table: pd.DataFrame) -> pd.Series[bool]:
    """Events worth drawing: a reason of next to no exits is in the table only."""
    most = table[["reference", "arm"]].max(axis=1).astype(float)
    whole = most[table["what"] == EXITS]
    least = _LITTLE * float(whole.iloc[0]) if len(whole) else 0.0
    rank = table["what"].map(_rank)
    return (rank < _LAST) & ((rank != 1) | (most >= least))


def _small(table: pd.DataFrame, shown: pd.DataFrame) -> int:
    """How many reasons are not drawn."""
    return sum(table["what"].str.startswith(BY_REASON)) - sum(
        shown["what"].str.startswith(BY_REASON)
    )


def _name(what: str) -> str:
    return f"exit: {what.removeprefix(BY_REASON)}" if what.startswith(BY_REASON) else what


def _mark(look: Look, name: str) -> Line2D:
    return Line2D([], [], color=look.colour, marker=look.marker, ls="", ms=6, label=name)


def _caption(summary: Summary, left_out: int, unit: str, intervals: bool) -> str:
    how = f" with its {100 * summary.level:g} % interval (t on boot means)" if intervals else ""
    return " ".join(
        [
            f"Means over boots for one {unit}, by the slope of two untimed runs; to the right the "
            f"change{how}.",
            "Reasons as the KVM host's kernel names them.",
            f"{left_out} of under {100 * _LITTLE:g} % of the exits are not drawn."
            if left_out
            else "",
        ]
    ).strip()


def _draw(
    axes: Axes,
    shown: pd.DataFrame,
    names: list[str],
    texts: list[str],
    both: list[Look],
    inches_wide: float,
) -> None:
    places = np.arange(len(shown))
    ends = shown[["reference", "arm"]].to_numpy(dtype=np.float64)
    for place, pair in zip(places, ends, strict=True):
        axes.plot(pair, [place] * 2, color=MUTED, lw=1.4, zorder=2, gid="span")
    for column, look in enumerate(both):
        axes.plot(
            ends[:, column],
            places,
            ls="",
            marker=look.marker,
            ms=6,
            color=look.colour,
            zorder=3,
            gid=f"events:{('reference', 'arm')[column]}",
        )
    axes.set_ylim(len(shown) - 0.5, -0.5)
    axes.set_yticks(places, names, size=SMALL)
    axes.set_xlim(min(0.0, float(ends.min())), 1.06 * float(ends.max()))
    tidy_axes(axes, grid="both")
    axes.xaxis.set_major_locator(MaxNLocator(max(1, min(5, int(inches_wide / 0.5)))))
    for place, text in zip(places, texts, strict=True):
        axes.annotate(
            text,
            (1, place),
            xytext=(6, 0),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            size=SMALL,
            va="center",
            color=INK,
            gid="change",
        )
