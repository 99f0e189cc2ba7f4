"""How many pairs either opinion needs: interval width against pairs, for time and instructions."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from vringlab.analysis.frames import RunFrames
from vringlab.analysis.pairing import point_text
from vringlab.analysis.power import POWER, RequiredN, design_half_width, noise_floor
from vringlab.analysis.stats import Effect, from_pairs
from vringlab.analysis.units import metric as metric_spec
from vringlab.campaign.work import SIZES_S
from vringlab.errors import MeasurementInvalid, UserError, VringlabError
from vringlab.report.canvas import (
    INK,
    MUTED,
    RunFigure,
    Width,
    log_ticks,
    sheet,
    statement,
    style,
    tidy_axes,
    usable,
)
from vringlab.report.noise_view import Question
from vringlab.report.opinions import INSTRUCTIONS, SIDES, Opinion, chosen, refusal, summary_of
from vringlab.report.power_view import required
from vringlab.report.summary import at, change_text, count
from vringlab.report.time_budget import duration

_PANEL = 2.9
_COUNTED = (INSTRUCTIONS, *SIDES.values())
_COLOURS = ("#0072b2", "#d55e00")
_CAPTION = (
    "Points: this run's interval after so many pairs. Lines: expected at this run's spreads, "
    "reckoned and not measured. Half widths are shown as an increase: a change of -20 % is as far "
    "from none as one of +25 %. Times are those of the timed windows, and of the runs that were "
    "counted."
)
#: End of the axis of pairs: what needs more is said in words.
_MOST = 10_000


@dataclass(frozen=True)
class Pairing:
    """What pairs of samples tell of an arm in one metric, and what more of them would.

    Attributes:
        asked: The comparison, with its A/A pair.
        ratio: Ratio to be found.
        pair_s: Length of one pair's runs, s: the timed windows, or the runs that were counted.
    """

    asked: Question
    ratio: float
    pair_s: float

    @property
    def effect(self) -> Effect:
        """The effect of the run."""
        return self.asked.effect

    @cached_property
    def needed(self) -> RequiredN | None:
        """Fewest pairs that find the ratio with 80 % power, at this run's spreads; None beyond."""
        return required(self.ratio, *self.asked.spreads, self.asked.blocks_per_boot)

    @property
    def needed_s(self) -> float:
        """Length of their runs, s; infinite beyond."""
        return self.needed.blocks * self.pair_s if self.needed is not None else float("inf")

    @property
    def assumed(self) -> bool:
        """Whether the run is too small to show its spread, so that one is assumed."""
        effects = (self.effect, self.asked.noise.effect)
        return not any(np.isfinite([one.sd_block, one.sd_boot]).any() for one in effects)

    @property
    def apart(self) -> float:
        """How far equal arms came out, as a ratio above 1: the median over their pairs."""
        return float(np.exp(np.median(np.abs(self.asked.noise.effect.pairs.log_ratio))))

    def measured(self) -> pd.DataFrame:
        """Half width of the interval after each pair from the second on, as the run went.

        Columns: pairs, boots, half (on the log scale), one_boot (holds for one boot alone).
        """
        rows = []
        for pairs in range(2, self.effect.blocks + 1):
            with suppress(MeasurementInvalid):
                found = from_pairs(self.effect.pairs.first(pairs), self.effect.level, draws=0)
                if found.interval.known and found.interval.high < np.inf:
                    half = float(np.log(found.interval.high)) - found.log_mean
                    rows.append((pairs, found.boots, half, found.unit == "block"))
        return pd.DataFrame(rows, columns=["pairs", "boots", "half", "one_boot"])

    def reckoned(self, most: int) -> pd.DataFrame:
        """Half width that whole boots are expected to give at this run's spreads, up to `most`.

        Columns: pairs, half (on the log scale).
        """
        size = self.asked.blocks_per_boot
        last = max(2, most // size)
        boots = np.unique(np.geomspace(2, last, 60).round().astype(int)) if last > 2 else [2]
        halves = [
            design_half_width(int(n), size, *self.asked.spreads, self.effect.level) for n in boots
        ]
        return pd.DataFrame({"pairs": [int(n) * size for n in boots], "half": halves})


def pairings(
    run: RunFrames,
    item: Opinion,
    side: str | None = None,
    level: float = 0.95,
) -> tuple[Pairing, Pairing]:
    """An arm's time and instructions at a point, asked for a change of the instructions' size.

    Of a rate the change of that size is the inverse ratio.

    Args:
        run: The run.
        item: Arm, workload and point.
        side: Only the instructions of that side, `guest` or `host`.
        level: Level of the intervals.

    Raises:
        UserError: the run does not have both with an A/A pair there, or the instructions came out
            exactly alike, so that there is no size.
        MeasurementInvalid: as for `power.noise_floor`.
    """
    row = item.counted if side is None else item.sides.get(side)
    time = item.time.effect if item.time is not None else None
    counted = row.effect if row is not None else None
    if time is None or counted is None:
        raise UserError(
            f"run {run.run_id} does not have both time and instructions of {item.arm} by "
            f"{item.workload} at {point_text(item.params)}",
            remedy="measure with --count-instructions; vringlab show says what is missing",
        )
    workload, params, arm = item.workload, item.params, item.arm
    size = counted.improvement
    if size == 0:
        raise UserError(
            f"the instructions of {arm} and {run.plan.reference} do not differ",
            remedy="there is no size that pairs could decide",
        )
    made = []
    for effect in (time, counted):
        metric = effect.pairs.metric
        noise = noise_floor(
            run.samples, metric, run.plan.reference, params, level, workload=workload
        )
        asked = Question(run, workload, dict(params), metric, arm, effect, noise)
        ratio = float(np.exp(metric_spec(metric).better * size))
        made.append(Pairing(asked, ratio, _pair_s(run, asked)))
    return made[0], made[1]


def pairings_of(
    run: RunFrames, workload: str | None = None, side: str | None = None
) -> tuple[Pairing, Pairing]:
    """`pairings` of the arm and point that stand for a run, or for one of its workloads.

    Raises:
        UserError, MeasurementInvalid: as for `pairings`; the run has no point with both.
    """
    item = chosen(run, workload)
    if item is None:
        raise UserError(
            f"run {run.run_id} has no point with both time and instructions",
            remedy=refusal(run) or "vringlab show says what is missing",
        )
    return pairings(run, item, side)


@dataclass(frozen=True)
class Answer:
    """How many pairs either opinion needs, as a figure and in sentences."""

    figure: RunFigure
    lines: tuple[str, ...]


def answer(
    run: RunFrames,
    workload: str | None = None,
    side: str | None = None,
    *,
    width: Width = "wide",
) -> Answer:
    """The answer for the arm and point that stand for a run, or for one of its workloads.

    Where there is nothing to ask, figure and sentence say why.

    Args:
        run: The run.
        workload: Only this one.
        side: Only the instructions of that side, `guest` or `host`.
        width: Wide or narrow.
    """
    try:
        asked = pairings_of(run, workload, side)
    except VringlabError as error:
        why = f"{error.message[0].upper()}{error.message[1:]}: {error.remedy}."
        with style():
            figure = statement(summary_of(run), "pairs that are needed", why, width)
        return Answer(figure, (why,))
    return Answer(pairs_figure(asked, width), tuple(pairs_lines(asked)))


def _pair_s(run: RunFrames, asked: Question) -> float:
    if asked.metric in _COUNTED:
        return 2 * sum(SIZES_S)
    rows = at(run.samples, asked.workload, asked.params)
    rows = rows[rows["valid"].astype(bool) & (rows["metric"] == asked.metric)]
    windows = rows.groupby("arm")["window_s"].mean()
    return float(windows.reindex([asked.arm, asked.reference]).sum())


def pairs_lines(asked: Sequence[Pairing]) -> list[str]:
    """What each needs to decide a change of the instructions' size, in sentences."""
    told = []
    for one in asked:
        need = one.needed
        what = (
            f"{count(need.blocks, 'pair')} ({count(need.boots, 'boot')} of "
            f"{need.blocks_per_boot}), {duration(one.needed_s)} of {_runs(one)}"
            if need is not None
            else "over 100,000 boots"
        )
        if one.assumed:
            what += f", at an assumed spread of {100 * one.asked.spreads[0]:.0f} %"
        told.append(
            f"By {_called(one)}, a change of {change_text(one.ratio)} is found with "
            f"{100 * POWER:.0f} % power by {what}; equal arms came out {_apart(one)} apart "
            f"(median of {count(one.asked.noise.effect.blocks, 'pair')})."
        )
    time, counted = asked
    if np.isfinite(time.needed_s) and np.isfinite(counted.needed_s):
        told.append(
            f"So {_called(counted)} need {100 * counted.needed_s / time.needed_s:.3g} % of the "
            f"measuring time that {time.asked.metric} needs for the same verdict."
        )
    return told


def _runs(one: Pairing) -> str:
    return "counted runs" if one.asked.metric in _COUNTED else "timed windows"


def _called(one: Pairing) -> str:
    sides = {name: f"{side}'s instructions" for side, name in SIDES.items()}
    return sides.get(one.asked.metric, one.asked.metric)


def _apart(one: Pairing) -> str:
    return f"{100 * (one.apart - 1):.1f} %"


def pairs_table(asked: Sequence[Pairing]) -> pd.DataFrame:
    """The same as a table: spreads, pairs and their length, by metric."""
    rows = []
    for one in asked:
        block, boot = one.asked.spreads
        need = one.needed
        rows.append(
            {
                "metric": one.asked.metric,
                "measured": change_text(one.effect.ratio),
                "to be found": change_text(one.ratio),
                "spread per pair": f"{100 * block:.1f} %" if block else "in that per boot",
                "spread per boot": f"{100 * boot:.1f} %",
                "equal arms, median": _apart(one),
                "pairs needed": f"{need.blocks} in {count(need.boots, 'boot')}" if need else "-",
                "runs of": duration(one.needed_s) if need else "-",
            }
        )
    return pd.DataFrame(rows)


def pairs_figure(asked: Sequence[Pairing], width: Width = "wide", notes: bool = True) -> RunFigure:
    """Half width of the ratio's interval against the number of pairs; both axes logarithmic.

    Points are the run's own intervals after so many pairs, lines what its spreads let expect.

    Args:
        asked: Time and instructions; see `pairings`.
        width: Wide or narrow.
        notes: Whether the caption is drawn.
    """
    first = asked[0].asked
    summary = summary_of(first.run, asked[0].effect.level)
    most = max([one.effect.blocks for one in asked] + [_needed(one) for one in asked])
    most = min(_MOST, max(4, round(1.3 * most)))
    handles = [
        Line2D([], [], color=colour, marker="o", ms=5, lw=1.6, label=_label(one))
        for one, colour in zip(asked, _COLOURS, strict=True)
    ]
    size = abs(asked[-1].effect.log_mean)
    line = f"size of the change in {_called(asked[-1])}, {change_text(asked[-1].effect.ratio)}"
    handles += [
        Line2D([], [], color=INK, lw=1, ls=(0, (4, 3)), label=line),
        Line2D([], [], color=MUTED, ls="", marker="D", ms=6, label="needed for 80 % power"),
    ]
    if any(one.measured()["one_boot"].any() for one in asked):
        handles.append(
            Line2D([], [], color=MUTED, ls="", marker="o", mfc="none", ms=5, label="one boot alone")
        )
    with style():
        made = sheet(
            summary,
            "pairs, and how wide they leave the interval",
            _PANEL + 0.65,
            width,
            subject=first.workload,
            detail=f"{first.arm} against {first.reference}, {point_text(first.params)}",
            handles=handles,
            caption=_CAPTION,
            notes=notes,
        )
        room = usable(width)
        left = 0.75
        axes = made.axes((made.width - room) / 2 + left, 0.1, room - left - 0.1, _PANEL)
        axes.set_xscale("log")
        axes.set_yscale("log")
        seen = [_percent(size)]
        for one, colour in zip(asked, _COLOURS, strict=True):
            seen += _curves(axes, one, colour, most)
        axes.axhline(_percent(size), color=INK, lw=1, ls=(0, (4, 3)), gid="size")
        axes.set_xlim(1.8, 1.15 * most)
        low, high = 0.8 * min(seen), 1.25 * max(seen)
        axes.set_ylim(low, high)
        tidy_axes(axes, grid="both")
        xticks = log_ticks(2, most, room - left)
        axes.set_xticks(xticks, [f"{tick:g}" for tick in xticks])
        yticks = log_ticks(low, high, _PANEL, 0.35)
        axes.set_yticks(yticks, [f"{tick:g} %" for tick in yticks])
        axes.minorticks_off()
        axes.set_xlabel("pairs of samples (blocks)")
        axes.set_ylabel("half width of the interval")
    return made.figure


def _needed(one: Pairing) -> int:
    return one.needed.blocks if one.needed is not None else one.effect.blocks


def _label(one: Pairing) -> str:
    need = one.needed
    if need is None:
        return f"{_called(one)}: over 100,000 boots needed"
    return f"{_called(one)}: {count(need.blocks, 'pair')} needed, {duration(one.needed_s)}"


def _percent(log: float) -> float:
    return 100 * float(np.expm1(min(log, 20.0)))


def _curves(axes: Axes, one: Pairing, colour: str, most: int) -> list[float]:
    """Draw what was measured and what is expected; their heights."""
    expected = one.reckoned(most)
    heights = [_percent(half) for half in expected["half"]]
    axes.plot(expected["pairs"], heights, color=colour, lw=1.6, gid=f"reckoned:{one.asked.metric}")
    measured = one.measured()
    for alone in (False, True):
        some = measured[measured["one_boot"] == alone]
        values = [_percent(half) for half in some["half"]]
        axes.plot(
            some["pairs"],
            values,
            ls="",
            marker="o",
            ms=5,
            color=colour,
            mfc="none" if alone else colour,
            gid=f"{'alone' if alone else 'measured'}:{one.asked.metric}",
        )
        heights += values
    if one.needed is not None and one.needed.blocks <= most:
        at_need = design_half_width(
            one.needed.boots, one.needed.blocks_per_boot, *one.asked.spreads, one.effect.level
        )
        axes.plot(
            [one.needed.blocks],
            [_percent(at_need)],
            ls="",
            marker="D",
            ms=7,
            color=colour,
            mec=INK,
            mew=0.8,
            zorder=5,
            gid=f"needed:{one.asked.metric}",
        )
    # A spread of none has no place on a logarithmic axis.
    return [value for value in heights if value > 0]
