"""Round-trip times: distributions by arm and payload, and what each run of a tool gave.

Two pictures of one distribution: the share of messages below a time, where the bulk is seen, and
the percentile plot with a logarithmic axis towards 100 %, where the tail is (as HdrHistogram's
own plots have it). The line is the merged histogram of all valid samples of an arm; the band
spans the samples, so that a reader sees whether one arm's runs differ more than two arms do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

from vringlab.analysis.pairing import Floats
from vringlab.analysis.quantiles import quantile
from vringlab.campaign.experiment import Value
from vringlab.errors import MeasurementInvalid
from vringlab.report.canvas import (
    MUTED,
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
from vringlab.report.panels import Column, arm_panels, invalid_text, shared_text
from vringlab.report.summary import Summary, amount, at

_ROUND_TRIPS = (
    Column("rtt_p1", "1st percentile"),
    Column("rtt_mean", "mean"),
    Column("rtt_p99", "99th percentile"),
)

_HEIGHT = 2.1
_AXIS = 0.42
_GAP = 0.3

#: Chances at which a distribution is drawn: even in the bulk, and even per decade of the tail.
_CHANCES: Floats = np.unique(
    np.concatenate([np.linspace(0, 0.99, 120), 1 - np.logspace(-2, -6, 60)])
)


@dataclass(frozen=True)
class Curve:
    """The distribution of an arm at one point.

    Attributes:
        chances: Probabilities, ascending, shape (n,).
        times: Quantiles of the merged histogram in ns, shape (n,).
        low: Smallest quantile of the samples, shape (n,); NaN beyond what a sample can say.
        high: Largest quantile of the samples.
        samples: Number of samples.
        messages: Number of round trips.
        valid: Whether the samples are valid.
    """

    chances: Floats
    times: Floats
    low: Floats
    high: Floats
    samples: int
    messages: int
    valid: bool


def curve(histograms: pd.DataFrame, valid: bool = True) -> Curve | None:
    """The distribution behind the histograms of an arm; None when there is none.

    Args:
        histograms: Rows of `RunFrames.histograms` of the arm's cells.
        valid: Whether the cells are valid.
    """
    if histograms.empty:
        return None
    merged = histograms.groupby("value", sort=True)["count"].sum()
    messages = int(merged.sum())
    try:
        # Beyond 1 - 1/n there is no message to see.
        last = int(np.searchsorted(_CHANCES, max(0.5, 1 - 1 / messages), side="right"))
        chances = _CHANCES[:last]
        times = quantile(merged.index.to_numpy(), merged.to_numpy(), list(chances))
        rows = []
        for _, cell in histograms.groupby("cell_id", sort=True):
            own = quantile(cell["value"], cell["count"], list(chances))
            own[chances > 1 - 1 / cell["count"].sum()] = np.nan
            rows.append(own)
    except (MeasurementInvalid, ZeroDivisionError):
        return None
    table = np.array(rows)
    # A column may hold no sample that reaches so far.
    low = np.where(np.isnan(table).all(axis=0), np.nan, np.fmin.reduce(table))
    high = np.where(np.isnan(table).all(axis=0), np.nan, np.fmax.reduce(table))
    return Curve(chances, times, low, high, len(rows), messages, valid)


def curves(summary: Summary, workload: str, params: Mapping[str, Value]) -> dict[str, Curve]:
    """Distributions at one point by arm; invalid samples only for an arm without valid ones."""
    here = at(summary.run.samples, workload, params).drop_duplicates("cell_id")
    bins = summary.run.histograms
    bins = bins[(bins["metric"] == "rtt") & bins["cell_id"].isin(here["cell_id"])]
    found: dict[str, Curve] = {}
    for arm in summary.arms:
        mine = here[here["arm"] == arm]
        good = mine.loc[mine["valid"].astype(bool), "cell_id"]
        for cells, valid in ((good, True), (mine["cell_id"], False)):
            made = curve(bins[bins["cell_id"].isin(cells)], valid)
            if made is not None:
                found[arm] = made
                break
    return found


def distributions(
    summary: Summary, workload: str, width: Width = "wide", notes: bool = True
) -> RunFigure | None:
    """Distributions of the round-trip time, two panels for each parameter point.

    None when no sample has a histogram.
    """
    points = [(params, curves(summary, workload, params)) for params in summary.points(workload)]
    points = [(params, found) for params, found in points if found]
    if not points:
        return None
    across = 2 if width == "wide" else 1
    left = text_inches("100 ms", SMALL) + 0.3
    # Half of the last percentile's name stands beyond its panel.
    right = text_inches("99.9999", SMALL) / 2
    inner = (usable(width) - across * left - (across - 1) * 0.15 - right) / across
    titles = [
        wrapped(_point_title(summary, workload, params, found), usable(width), TEXT, "bold")
        for params, found in points
    ]
    head = line_inches(TEXT, max(map(len, titles))) + 0.16
    panel = _HEIGHT + _AXIS
    each = head + panel * (2 // across) + _GAP
    shown = looks(summary.run)
    made = sheet(
        summary,
        "round-trip time, distribution",
        each * len(points) - _GAP + 0.1,
        width,
        subject=workload,
        detail=shared_text(summary, workload),
        handles=_legend(summary, shown, points),
        caption=_caption(summary, workload, points),
        notes=notes,
    )
    margin = (made.width - usable(width)) / 2
    for row, (_, found) in enumerate(points):
        top = row * each + head
        step = 0.0 if across == 1 else inner + left + 0.15
        below = panel if across == 1 else 0.0
        first = made.axes(margin + left, top, inner, _HEIGHT)
        second = made.axes(margin + left + step, top + below, inner, _HEIGHT)
        cumulative(first, found, shown, inner)
        percentiles(second, found, shown)
        for number, line in enumerate(reversed(titles[row])):
            first.annotate(
                line,
                (0, 1),
                xytext=(-72 * left, 10 + 72 * line_inches(TEXT, number)),
                size=TEXT,
                xycoords="axes fraction",
                textcoords="offset points",
                gid="panel-title",
                weight="bold",
            )
    return made.figure


def _point_title(
    summary: Summary, workload: str, params: Mapping[str, Value], found: Mapping[str, Curve]
) -> str:
    label = summary.label(workload, params) or workload
    messages = sum(one.messages for one in found.values() if one.valid)
    samples = sum(one.samples for one in found.values() if one.valid)
    if not messages:
        return f"{label}: every sample is invalid; what the tool printed is drawn faint"
    return f"{label}: {messages:,} round trips in {samples} valid samples".replace(",", " ")


def _strokes(axes: Axes, arm: str, one: Curve, look: Look, x: Floats, y: Floats) -> None:
    style: dict[str, Any] = {"color": look.colour, "lw": 1.6, "ls": look.dashes}
    if not one.valid:
        style = {"color": look.colour, "lw": 1.0, "ls": (0, (1, 2)), "alpha": 0.6}
    axes.plot(x, y, gid=f"{'curve' if one.valid else 'invalid'}:{arm}", zorder=3, **style)


def cumulative(
    axes: Axes, found: Mapping[str, Curve], shown: Mapping[str, Look], inches: float
) -> None:
    """Draw the share of messages over round-trip time; `inches` is the axes' width."""
    axes.set_xscale("log")
    for arm, one in found.items():
        if one.valid and one.samples > 1:
            axes.fill_betweenx(
                one.chances, one.low, one.high, color=shown[arm].colour, alpha=0.13, lw=0, zorder=2
            )
        _strokes(axes, arm, one, shown[arm], one.times, one.chances)
    axes.set_ylim(0, 1)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "25", "50", "75", "100"])
    axes.set_ylabel("% of messages", fontsize=SMALL, labelpad=1)
    low = min(float(one.times[one.times > 0].min(initial=np.inf)) for one in found.values())
    high = max(float(one.times[one.chances <= 0.999].max()) for one in found.values())
    if np.isfinite(low) and high > low:
        axes.set_xlim(low / 1.05, high * 1.05)
    _time_axis(axes, "x", inches)
    axes.set_xlabel("round-trip time, log axis", fontsize=SMALL, labelpad=1)
    tidy_axes(axes, grid="both")


def percentiles(axes: Axes, found: Mapping[str, Curve], shown: Mapping[str, Look]) -> None:
    """Draw round-trip time over percentile, in nines as HdrHistogram's plots do."""
    axes.set_xscale("log")
    axes.set_yscale("log")
    for arm, one in found.items():
        x = 1 / (1 - one.chances)
        if one.valid and one.samples > 1:
            axes.fill_between(
                x, one.low, one.high, color=shown[arm].colour, alpha=0.13, lw=0, zorder=2
            )
        _strokes(axes, arm, one, shown[arm], x, one.times)
    nines = int(np.ceil(max(np.log10(1 / (1 - one.chances[-1])) for one in found.values()) - 0.05))
    axes.set_xlim(1, 10.0 ** max(1, nines))
    places = [1.0, 2.0, *(10.0**n for n in range(1, max(1, nines) + 1))]
    names = ["0", "50", *(_percent(n) for n in range(1, max(1, nines) + 1))]
    axes.set_xticks(places, names)
    axes.xaxis.set_minor_locator(NullLocator())
    _time_axis(axes, "y", _HEIGHT)
    axes.set_xlabel("percentile", fontsize=SMALL, labelpad=1)
    axes.set_ylabel("")
    tidy_axes(axes, grid="both")


def _percent(nines: int) -> str:
    return f"{100 * (1 - 10.0**-nines):.{max(0, nines - 2)}f}"


def _time_axis(axes: Axes, which: Literal["x", "y"], inches: float) -> None:
    axis = axes.xaxis if which == "x" else axes.yaxis
    low, high = axes.get_xlim() if which == "x" else axes.get_ylim()
    axis.set_major_locator(FixedLocator(log_ticks(low, high, inches, 0.7 if which == "x" else 0.3)))
    axis.set_minor_formatter(NullFormatter())
    axis.set_major_formatter(FuncFormatter(lambda value, _: _time(value)))


def _time(nanoseconds: float) -> str:
    number, _, name = amount(nanoseconds, "ns").partition(" ")
    return f"{float(number):g} {name}"


_Points = list[tuple[Mapping[str, Value], dict[str, Curve]]]


def _legend(summary: Summary, shown: Mapping[str, Look], points: _Points) -> list[Line2D | Patch]:
    present = [arm for arm in summary.arms if any(arm in found for _, found in points)]
    handles: list[Line2D | Patch] = [
        Line2D([], [], color=shown[arm].colour, ls=shown[arm].dashes, lw=1.6, label=arm)
        for arm in present
    ]
    if any(one.valid and one.samples > 1 for _, found in points for one in found.values()):
        handles.append(Patch(fc=MUTED, alpha=0.25, label="span of samples"))
    if any(not one.valid for _, found in points for one in found.values()):
        handles.append(Line2D([], [], color=MUTED, ls=(0, (1, 2)), lw=1.0, label="invalid samples"))
    return handles


def _caption(summary: Summary, workload: str, points: _Points) -> str:
    text = (
        "Line: all valid samples of an arm merged; percentiles end where one message is left. "
        "Messages of one run are not independent: intervals are on the figure of round trips."
    )
    rows = [row for params, _ in points for row in summary.of(workload, params)]
    return " ".join([text, *invalid_text(rows)])


def draw(summary: Summary, workload: str, width: Width, notes: bool) -> dict[str, RunFigure]:
    """Distributions, and percentiles and means of each sample."""
    figures = {
        "latency": distributions(summary, workload, width, notes),
        "round-trips": arm_panels(
            summary, workload, _ROUND_TRIPS, "round-trip time of each sample", width, notes
        ),
    }
    return {name: figure for name, figure in figures.items() if figure is not None}


FAMILY = Family(
    name="latency",
    metrics=("rtt_p1", "rtt_mean", "rtt_p99"),
    headline=("rtt_mean", "rtt_p99"),
    draw=draw,
    # Other percentiles are read off the distribution; the rate is the inverse of the mean.
    covers=("rtt_p50", "rtt_p90", "rtt_p99.9", "round_trips"),
    order=1,
)
