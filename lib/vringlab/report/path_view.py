"""Which path packets took: a table by arm and point, and a figure of the shares.

The counts come from passes of their own that nobody timed (`campaign.paths`); a share stands
beside the effect of the same point so that a reader sees both: whether the changed code ran, and
what it brought.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from vringlab.analysis.frames import RunFrames
from vringlab.analysis.pairing import point_text
from vringlab.campaign import experiment as experiments
from vringlab.campaign.experiment import Probes
from vringlab.campaign.paths import PathPass
from vringlab.errors import UserError
from vringlab.report.canvas import (
    INK,
    MUTED,
    SMALL,
    TEXT,
    Look,
    RunFigure,
    Width,
    line_inches,
    looks,
    sheet,
    text_inches,
    tidy_axes,
    usable,
    wrapped,
)
from vringlab.report.summary import ArmRow, Summary, sorted_points

_WORDS = {True: "ran", False: "NOT exercised", None: "not known"}
_ROW = 0.24
_AXIS = 0.42


def probes_of(run: RunFrames) -> Probes | None:
    """What the run's experiment counts; None where its file is not here or counts nothing."""
    with suppress(UserError):
        return experiments.of_run(run.path, run.plan.experiment).counted
    return None


def ordered(run: RunFrames) -> list[PathPass]:
    """The passes by workload, point and arm in the order of the experiment's file."""
    arms = list(run.plan.arms)
    found = []
    for workload in run.plan.workloads:
        for params in sorted_points(run, workload):
            here = [
                item
                for item in run.paths
                if item.workload == workload and dict(item.params) == dict(params)
            ]
            found += sorted(here, key=lambda item: arms.index(item.arm))
    return found


def path_frame(run: RunFrames) -> pd.DataFrame:
    """One row per workload, point and arm: whether the arm's path ran, shares, counts.

    Columns: `workload`, `point`, `arm`, `path` (`ran`, `NOT exercised`, `not known`), one per
    share in percent, one per counter in calls (missing where it could not be counted), `counted
    by`, `notes`. Empty when the run has no passes.
    """
    rows = [
        {
            "workload": item.workload,
            "point": point_text(item.params),
            "arm": item.arm,
            "path": _WORDS[item.exercised],
            **{name: round(value, 1) for name, value in item.shares.items()},
            **item.counts,
            "counted by": item.tool,
            "notes": "; ".join([*item.notes, *dict.fromkeys(item.missing.values())]),
        }
        for item in ordered(run)
    ]
    frame = pd.DataFrame(rows)
    for name in {name for item in run.paths for name in item.counts}:
        frame[name] = frame[name].astype("Int64")
    return frame


def path_rows(run: RunFrames) -> list[dict[str, object]]:
    """The passes in words for a page: point, arm, whether its path ran, shares, counts, notes."""
    rows: list[dict[str, object]] = []
    group = ""
    for item in ordered(run):
        here = _place(item)
        rows.append(
            {
                "point": here,
                "first": here != group,
                "arm": item.arm,
                "path": _WORDS[item.exercised],
                "shares": ", ".join(f"{name} {value:.1f} %" for name, value in item.shares.items()),
                "counts": ", ".join(f"{name} {value}" for name, value in item.counts.items()),
                "notes": "; ".join([*item.notes, *dict.fromkeys(item.missing.values())]),
            }
        )
        group = here
    return rows


def _place(item: PathPass) -> str:
    return ", ".join(part for part in (item.workload, point_text(item.params)) if part)


def path_lines(run: RunFrames) -> list[str]:
    """The passes in words, one line each; the first says how they were made. Empty without any."""
    passes = ordered(run)
    problem = run.provenance.get("path_problem")
    if not passes:
        return [f"Which path the packets took could not be seen: {problem}."] if problem else []
    tools = ", ".join(dict.fromkeys(item.tool for item in passes))
    lines = [f"Which path the packets took, counted by {tools} in passes that were not timed:"]
    group = ""
    for item in passes:
        here = _place(item)
        if here != group:
            lines.append(f"  {here}")
            group = here
        shares = [f"{name} {value:.1f} %" for name, value in item.shares.items()]
        counts = [f"{name} {value}" for name, value in item.counts.items() if value]
        lines.append(f"    {item.arm}: {_WORDS[item.exercised]}; {', '.join([*shares, *counts])}")
    reasons = dict.fromkeys(text for item in passes for text in item.missing.values())
    return [*lines, *(f"  {text}" for text in reasons)]


def path_figure(summary: Summary, width: Width = "wide", notes: bool = True) -> RunFigure | None:
    """The shares by workload, point and arm, a row each; None where there are none."""
    run = summary.run
    passes = [item for item in ordered(run) if item.shares]
    names = list(dict.fromkeys(name for item in passes for name in item.shares))
    if not names:
        return None
    groups: dict[tuple[str, str], list[PathPass]] = {}
    for item in passes:
        label = summary.label(item.workload, item.params) or point_text(item.params)
        groups.setdefault((item.workload, label), []).append(item)
    shown = looks(run)
    several = len({workload for workload, _ in groups}) > 1
    labels = [f"{w}, {p}" if several and p else p or w for w, p in groups]
    room = usable(width)
    left = min(max(text_inches(label, SMALL) for label in labels) + 0.15, 0.5 * room)
    across = len(names) if width == "wide" else 1
    each = (room - left - 0.2 * (across - 1)) / across
    lines = [wrapped(label, left - 0.1, SMALL) for label in labels]
    row_inches = max(_ROW, line_inches(SMALL, max(map(len, lines))) + 0.08)
    height = len(groups) * row_inches
    arms = [arm for arm in run.plan.arms if any(item.arm == arm for item in passes)]
    handles = [
        Line2D([], [], ls="", marker=shown[arm].marker, color=shown[arm].colour, label=arm)
        for arm in arms
    ]
    probes = probes_of(run)
    meaning = {share.name: share.shows for share in probes.shares} if probes else {}
    caption = " ".join(f"{name}: {meaning[name]}" for name in names if name in meaning)
    tools = ", ".join(dict.fromkeys(item.tool for item in passes))
    caption += f" Counted by {tools} in passes that were not timed, one for each arm and point."
    down = len(names) // across
    made = sheet(
        summary,
        "which path the packets took",
        down * (height + _AXIS) + 0.05,
        width,
        handles=handles,
        caption=caption.strip(),
        notes=notes,
    )
    for place, name in enumerate(names):
        column, row = place % across, place // across
        axes = made.axes(
            (made.width - room) / 2 + left + column * (each + 0.2),
            row * (height + _AXIS),
            each,
            height,
        )
        names_of = ["\n".join(some) for some in lines] if column == 0 else []
        _share_panel(axes, name, list(groups.values()), names_of, shown, arms)
    return made.figure


def _share_panel(
    axes: Axes,
    name: str,
    groups: Sequence[Sequence[PathPass]],
    labels: Sequence[str],
    shown: Mapping[str, Look],
    arms: Sequence[str],
) -> None:
    tidy_axes(axes)
    # Arms with one value would hide each other.
    step = 0.5 / max(len(arms), 1)
    for place, group in enumerate(groups):
        for item in group:
            if name not in item.shares:
                continue
            look = shown[item.arm]
            offset = (arms.index(item.arm) - (len(arms) - 1) / 2) * step
            axes.plot(
                item.shares[name],
                place + offset,
                ls="",
                marker=look.marker,
                color=look.colour,
                ms=4.5,
                clip_on=False,
                gid=f"share:{item.arm}",
            )
    axes.set_ylim(len(groups) - 0.5, -0.5)
    axes.set_yticks(range(len(groups)), labels or [""] * len(groups), size=SMALL)
    axes.set_xlim(0, 100)
    axes.set_xlabel(f"{name}, %", size=TEXT, color=INK)


def path_curve(
    summary: Summary,
    share: str,
    *,
    workload: str,
    by: str,
    metric: str,
    width: Width = "wide",
    notes: bool = True,
) -> RunFigure:
    """A share against one parameter, with the effect on a metric below it, same parameter.

    One line per arm and combination of the other parameters above; below, the ratio of each arm
    to the reference with its interval. A workload that does not have the parameter stands left of
    the axis as a single point.

    Args:
        summary: The run, summarised over `metric` and the metrics of the other workloads.
        share: Name of the share.
        workload: The workload that has the parameter.
        by: The parameter, numbers above 0.
        metric: The metric whose effect is shown.
        width: Wide or narrow.
        notes: Whether the caption is drawn.

    Raises:
        UserError: the run has no such share, or no such parameter.
    """
    run = summary.run
    passes = [p for p in ordered(run) if share in p.shares]
    curve = [p for p in passes if p.workload == workload and by in p.params]
    if not curve:
        raise UserError(
            f"run {run.run_id} has no share {share!r} of {workload} by {by}",
            remedy="see path_frame(run); a run that was recorded before paths were counted, or "
            "whose profile leaves them out, has none",
        )
    rest = [p for p in passes if p.workload != workload]
    values = sorted({float(str(p.params[by])) for p in curve})
    shown = looks(run)
    room = usable(width)
    left, height, gap = 0.75, 1.55, 0.55
    arms = [arm for arm in run.plan.arms if any(p.arm == arm for p in passes)]
    others = _others(curve, by)
    dashes = dict(zip(others, ("-", "--", ":", "-."), strict=False))
    handles = [Line2D([], [], marker=shown[a].marker, color=shown[a].colour, label=a) for a in arms]
    if len(others) > 1:
        handles += [Line2D([], [], color=MUTED, ls=dashes.get(o, "-"), label=o) for o in others]
    rows = _effects(summary, workload, metric)
    single = [row for w in dict.fromkeys(p.workload for p in rest) for row in _effects(summary, w)]
    probes = probes_of(run)
    meaning = next((s.shows for s in probes.shares if s.name == share), "") if probes else ""
    caption = (
        f"Above: {share}. {meaning} Counted in passes that were not timed. Below: the ratio of "
        f"{metric} to {run.plan.reference} with its {100 * summary.level:g} % interval (t on boot "
        "means)."
    )
    if rest:
        what = ", ".join(dict.fromkeys(p.workload for p in rest))
        figure = ", ".join(dict.fromkeys(row.metric for row in single))
        caption += f" At the left: {what}, where the queue is idle (its ratio is of {figure})."
    made = sheet(
        summary,
        f"{share} and effect by {by}",
        2 * height + gap + _AXIS,
        width,
        subject=workload,
        handles=handles,
        caption=caption,
        notes=notes,
    )
    start = (made.width - room) / 2 + left
    idle = min(values) / 2.2
    upper = made.axes(start, 0, room - left, height)
    lower = made.axes(start, height + gap, room - left, height)
    for axes in (upper, lower):
        tidy_axes(axes, grid="y")
        axes.set_xscale("log", base=2)
        axes.set_xlim((idle / 1.4) if rest else values[0] / 1.3, values[-1] * 1.3)
        ticks, texts = list(values), [f"{value:g}" for value in values]
        if rest:
            ticks, texts = [idle, *ticks], ["ping-pong", *texts]
        axes.set_xticks(ticks, texts)
        axes.minorticks_off()
    spread = {arm: 1.03 ** (i - (len(arms) - 1) / 2) for i, arm in enumerate(arms)}
    for arm in arms:
        look = shown[arm]
        for other in others:
            line = sorted(
                (float(str(p.params[by])), p.shares[share])
                for p in curve
                if p.arm == arm and _other(p, by, others) == other
            )
            upper.plot(
                [x * spread[arm] for x, _ in line],
                [y for _, y in line],
                marker=look.marker,
                color=look.colour,
                ls=dashes.get(other, "-"),
                ms=5,
                clip_on=False,
                gid=f"share:{arm}",
            )
        for item in rest:
            if item.arm == arm:
                upper.plot(
                    idle * spread[arm],
                    item.shares[share],
                    ls="",
                    marker=look.marker,
                    color=look.colour,
                    ms=5,
                    clip_on=False,
                )
    upper.set_ylim(0, 103)
    upper.set_ylabel(f"{share}, %", size=TEXT)
    _effect_panel(lower, rows, single, by, idle, shown, spread)
    lower.set_ylabel("ratio", size=TEXT)
    lower.set_xlabel(by, size=TEXT)
    return made.figure


def _others(curve: Sequence[PathPass], by: str) -> list[str]:
    varying = [
        name
        for name in curve[0].params
        if name != by and len({str(item.params.get(name)) for item in curve}) > 1
    ]
    return list(
        dict.fromkeys(point_text({name: p.params[name] for name in varying}) for p in curve)
    )


def _other(item: PathPass, by: str, others: Sequence[str]) -> str:
    for text in others:
        wanted = dict(part.split("=", 1) for part in text.split(", ") if part)
        if all(str(item.params.get(name)) == value for name, value in wanted.items() if name != by):
            return text
    return ""


def _effects(summary: Summary, workload: str, metric: str = "") -> list[ArmRow]:
    """Rows with an effect: of the metric, or of the workload's first when none is named."""
    there = summary.metrics(workload)
    name = metric or (there[0] if there else "")
    return [row for row in summary.of(workload, None, name) if row.effect and not row.is_twin]


def _effect_panel(
    axes: Axes,
    rows: Sequence[ArmRow],
    single: Sequence[ArmRow],
    by: str,
    idle: float,
    shown: Mapping[str, Look],
    spread: Mapping[str, float],
) -> None:
    axes.axhline(1, color=MUTED, lw=1, zorder=1)
    places = [(float(str(row.params[by])), row) for row in rows if by in row.params]
    places += [(idle, row) for row in single]
    seen = [1.0]
    for x, row in places:
        assert row.effect is not None
        look = shown[row.arm]
        where = x * spread.get(row.arm, 1.0)
        low, high = row.effect.interval.low, row.effect.interval.high
        seen.append(row.effect.ratio)
        if np.isfinite(low) and np.isfinite(high):
            axes.plot([where, where], [low, high], color=look.colour, lw=1.4)
            seen += [low, high]
        axes.plot(where, row.effect.ratio, ls="", marker=look.marker, color=look.colour, ms=5)
    # An interval of few boots may reach very far; the points shall stay readable.
    top = min(
        max(seen), 3 * max(s for s in [1.0, *(r.effect.ratio for _, r in places if r.effect)])
    )
    bottom = max(min(seen), min([1.0, *(r.effect.ratio for _, r in places if r.effect)]) / 3, 0.0)
    pad = 0.08 * (top - bottom or 1)
    axes.set_ylim(bottom - pad, top + pad)
