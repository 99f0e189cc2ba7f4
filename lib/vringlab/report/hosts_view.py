"""A run on several hosts: what each of them did, and what it means to count hosts.

Ratios nest: blocks in boots, boots in hosts. The widest level is what an interval may count as
independent when it is to hold for a host that was not measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D

from vringlab.analysis.frames import RunFrames
from vringlab.analysis.pairing import Floats, Pairs, pair, point_text
from vringlab.analysis.stats import mean_t
from vringlab.report.canvas import (
    INK,
    MUTED,
    SMALL,
    RunFigure,
    Width,
    looks,
    sheet,
    text_inches,
    tidy_axes,
    usable,
)
from vringlab.report.change_axis import set_change_axis
from vringlab.report.summary import change_text, summarise

_ROW = 0.34
_GAP = 0.28
_AXIS = 0.42
#: An interval of two hosts can be wider than any axis: it is cut this far beyond the blocks, in
#: spreads of the blocks.
_CUT = 1.2
#: Room for the name of a tick in inches.
_TICK = 0.62


@dataclass(frozen=True)
class Level:
    """One way to count: what is taken as independent, and what follows.

    Attributes:
        name: `blocks`, `boots` or `hosts`.
        number: How many there are.
        log_mean: Mean log ratio.
        half: Half the width of its interval; infinite for one of a kind.
    """

    name: str
    number: int
    log_mean: float
    half: float

    @property
    def text(self) -> str:
        """`+5.1 % [-2.0, +12.7]`."""
        if not np.isfinite(self.half):
            return f"{change_text(float(np.exp(self.log_mean)))} [n=1]"
        ends = (self.log_mean - self.half, self.log_mean + self.half)
        low, high = (change_text(float(np.exp(end))).removesuffix(" %") for end in ends)
        return f"{change_text(float(np.exp(self.log_mean)))} [{low}, {high}]"


def levels(pairs: Pairs, level: float = 0.95) -> tuple[Level, ...]:
    """The interval of a ratio when blocks, boots or hosts are counted.

    The last that there are several of is the one that verdicts use (`analysis.stats`).
    """
    boots = pairs.boot_means
    hosts = np.bincount(pairs.host, boots, pairs.hosts) / np.bincount(
        pairs.host, minlength=pairs.hosts
    )
    found = []
    for name, means in (("blocks", pairs.log_ratio), ("boots", boots), ("hosts", hosts)):
        of: Floats = np.asarray(means, dtype=np.float64)
        result = mean_t(of)
        found.append(Level(name, of.size, float(result.mean), float(result.half_width(level))))
    return tuple(found)


def hosts_of(run: RunFrames) -> pd.DataFrame:
    """What each host is and did: one row per host."""
    cells = run.samples.drop_duplicates("cell_id")
    boots = run.provenance.get("boots", {})
    spent = _time_by_host(run)
    rows = []
    for name, own in cells.groupby("host", sort=True):
        times = spent.get(str(name), {})
        total = sum(times.values())
        begun = [boot for boot in boots.values() if boot.get("host") == name]
        rows.append(
            {
                "host": name,
                "kind": ", ".join(sorted(set(own["host_kind"]))),
                "arms": ", ".join(sorted(set(own["arm"]))),
                "boots": own["boot"].nunique(),
                "begun": len(begun) or own["boot"].nunique(),
                "blocks": own["block"].nunique(),
                "samples": len(own),
                "invalid": int((~own["valid"].astype(bool)).sum()),
                "in timed windows": f"{times.get('measure', 0.0) / total:.0%}" if total else "",
            }
        )
    return pd.DataFrame(rows)


def _time_by_host(run: RunFrames) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    attempts: Any = run.time.get("attempts")
    for attempt in attempts if isinstance(attempts, list) else []:
        hosts = attempt.get("hosts")
        for name, phases in hosts.items() if isinstance(hosts, Mapping) else ():
            own = found.setdefault(str(name), {})
            for phase, seconds in phases.items():
                own[phase] = own.get(phase, 0.0) + float(seconds)
    return found


def level_table(
    run: RunFrames, metric: str, arm: str, workload: str, params: Mapping[str, object] | None = None
) -> pd.DataFrame:
    """The change against the reference with its interval, by what is counted as independent.

    Raises:
        UserError, MeasurementInvalid: as for `analysis.pairing.pair`.
    """
    pairs = pair(run.samples, metric, arm, run.plan.reference, params, workload)
    return pd.DataFrame(
        {"counted": each.name, "number": each.number, f"{metric}, {arm}": each.text}
        for each in levels(pairs)
    )


def cluster_figure(
    run: RunFrames,
    metric: str,
    arm: str,
    workload: str,
    params: Mapping[str, object] | None = None,
    width: Width = "wide",
) -> RunFigure:
    """Blocks, boots and hosts of one ratio, and the interval that each of them gives.

    Args:
        run: The run.
        metric: A metric.
        arm: The arm; it is held against the plan's reference.
        workload: The workload.
        params: Parameters to hold fixed.
        width: Wide or narrow.

    Raises:
        UserError, MeasurementInvalid: as for `analysis.pairing.pair`.
    """
    summary = summarise(run, [metric])
    pairs = pair(run.samples, metric, arm, run.plan.reference, params, workload)
    names = [str(name) for name in np.unique(pairs.table["host"].to_numpy(dtype=str))]
    ways = levels(pairs)
    look = looks(run)[arm]
    labels = [*names, *(f"counting {each.name} ({each.number})" for each in ways)]
    room = usable(width)
    left = max(text_inches(label, SMALL) for label in labels) + 0.12
    right = max(text_inches(each.text, SMALL, "bold") for each in ways) + 0.15
    panel = len(labels) * _ROW + _GAP
    point = point_text(params or {})
    made = sheet(
        summary,
        f"{metric} of {arm} against {run.plan.reference}, by host",
        panel + _AXIS,
        width,
        subject=", ".join(part for part in (workload, point) if part),
        handles=[
            Line2D([], [], marker=".", ls="none", color=look.colour, ms=6, label="a block"),
            Line2D([], [], marker="|", ls="none", color=look.colour, ms=12, mew=2, label="a boot"),
            Line2D([], [], marker="D", ls="none", color=look.colour, ms=6, label="a host"),
        ],
        caption=_caption(ways),
    )
    axes = made.axes((made.width - room) / 2 + left, 0.0, room - left - right, panel)
    low, high = _limits(pairs, ways)
    axes.set_xlim(low, high)
    axes.set_ylim(panel, 0)
    tidy_axes(axes)
    axes.spines["left"].set_visible(False)
    axes.axvline(0, color=MUTED, lw=0.9)
    places = [(n + 0.5) * _ROW for n in range(len(names))]
    below = [(len(names) + n + 0.5) * _ROW + _GAP for n in range(len(ways))]
    axes.set_yticks([*places, *below], labels)
    axes.tick_params(axis="y", length=0)
    boot_means = pairs.boot_means
    for place, name in zip(places, names, strict=True):
        of_host = pairs.table["host"].to_numpy(dtype=str) == name
        blocks = pairs.log_ratio[of_host]
        boots = boot_means[np.unique(pairs.boot[of_host])]
        axes.plot(
            blocks, np.full(blocks.size, place + 0.07), ".", color=look.colour, ms=6, alpha=0.6
        )
        axes.plot(boots, np.full(boots.size, place), "|", color=look.colour, ms=12, mew=2)
        axes.plot([boots.mean()], [place - 0.07], "D", color=look.colour, ms=6)
    for place, each in zip(below, ways, strict=True):
        used = each is _used(ways)
        if np.isfinite(each.half):
            axes.plot(
                [each.log_mean - each.half, each.log_mean + each.half],
                [place, place],
                color=look.colour if used else MUTED,
                lw=2.4 if used else 1.4,
                solid_capstyle="butt",
            )
        axes.plot([each.log_mean], [place], "D", color=look.colour if used else MUTED, ms=5)
        axes.annotate(
            each.text,
            (1, place),
            xytext=(8, 0),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            va="center",
            size=SMALL,
            weight="bold" if used else "normal",
            color=INK if used else MUTED,
            annotation_clip=False,
            gid="change",
        )
    set_change_axis(axes, "x", most=max(2, int((room - left - right) / _TICK)))
    return made.figure


def _limits(pairs: Pairs, ways: tuple[Level, ...]) -> tuple[float, float]:
    """Ends of the axis: all blocks, no change, and of intervals as much as leaves those visible."""
    core = np.append(pairs.log_ratio, 0.0)
    low, high = float(core.min()), float(core.max())
    most = _CUT * max(high - low, 0.02)
    ends = [each.log_mean + sign * each.half for each in ways for sign in (-1, 1)]
    known = [end for end in ends if np.isfinite(end)]
    low, high = max(min([low, *known]), low - most), min(max([high, *known]), high + most)
    edge = 0.04 * (high - low)
    return low - edge, high + edge


def _used(ways: tuple[Level, ...]) -> Level:
    """The widest level of which there are several: what verdicts count."""
    several = [each for each in ways if each.number > 1]
    return several[-1] if several else ways[-1]


def _caption(ways: tuple[Level, ...]) -> str:
    used = _used(ways)
    text = (
        f"Intervals of 95 %, by what is counted as independent; verdicts count {used.name}. "
        "An interval that leaves the axis is cut."
    )
    if used.name == "hosts" and used.number < 4:
        text += (
            f" {used.number} hosts leave {used.number - 1} degree"
            f"{'s' if used.number > 2 else ''} of freedom: they say little of a further one."
        )
    return text
