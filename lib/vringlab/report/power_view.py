"""How much to measure, and when to stop, at the spreads that a run showed: tables and figures.

Power is reckoned; campaigns are simulated with the run's spreads, and say so.
"""

from __future__ import annotations

from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, PercentFormatter

from vringlab.analysis.power import POWER, RequiredN, design_power, required_blocks
from vringlab.analysis.sequential import EFFECT, OUTCOMES, SequentialPlan, walk
from vringlab.analysis.stats import mean_t
from vringlab.analysis.units import metric as metric_spec
from vringlab.analysis.wording import change
from vringlab.errors import UserError
from vringlab.report.canvas import INK, MUTED, RunFigure, Width, sheet, style, tidy_axes
from vringlab.report.change_axis import set_change_axis
from vringlab.report.noise_view import Question
from vringlab.report.summary import count, summarise

_PANEL = 2.6
_SIMULATED = "SIMULATED with this run's spreads; no measurement."
_BLUES = mpl.colormaps["Blues"]

#: Improvements, in percent, that tables and curves show.
_PERCENT = (2, 5, 10, 20, 50)


def better(asked: Question, percent: float) -> float:
    """The ratio of an improvement of so many percent: above 1 where more is better, else below."""
    up = metric_spec(asked.metric).direction == "higher"
    return 1 + percent / 100 if up else 1 - percent / 100


def needed(asked: Question) -> pd.DataFrame:
    """Boots and blocks that effects of several sizes need at this run's spreads."""
    block, boot = asked.spreads
    rows = []
    for ratio in (better(asked, percent) for percent in _PERCENT):
        found = required(ratio, block, boot, asked.blocks_per_boot)
        rows.append(
            {
                "change to be found": change(ratio),
                "boots": found.boots if found else "over 100000",
                "blocks in each": asked.blocks_per_boot,
                "blocks": found.blocks if found else "",
                "power": f"{100 * found.power:.0f} %" if found else "",
            }
        )
    return pd.DataFrame(rows)


def required(ratio: float, block: float, boot: float, per_boot: int) -> RequiredN | None:
    """Fewest boots that find a ratio; None when no number that anybody measures does."""
    try:
        return required_blocks(ratio, block, boot, per_boot)
    except UserError:
        return None


def power_figure(
    asked: Question,
    *,
    sd_block: float | None = None,
    sd_boot: float | None = None,
    blocks_per_boot: int | None = None,
    ratios: tuple[float, ...] = (),
    max_boots: int = 20,
    width: Width = "wide",
) -> RunFigure:
    """Power against the number of boots, one curve per size of the effect.

    Args:
        asked: The question, whose spreads hold where none are given.
        sd_block: Spread of the log ratio per block.
        sd_boot: Spread per boot.
        blocks_per_boot: Blocks in each boot.
        ratios: Effects; improvements of several sizes when empty.
        max_boots: End of the axis.
        width: Wide or narrow.
    """
    own_block, own_boot = asked.spreads
    block = own_block if sd_block is None else sd_block
    boot = own_boot if sd_boot is None else sd_boot
    per_boot = blocks_per_boot or asked.blocks_per_boot
    ratios = ratios or tuple(better(asked, percent) for percent in _PERCENT)
    boots = np.arange(2, max_boots + 1)
    # Pale for the smallest effect, dark for the largest.
    colours = [_BLUES(0.35 + 0.65 * (place + 1) / len(ratios)) for place in range(len(ratios))]
    with style():
        made = sheet(
            summarise(asked.run, []),
            f"{asked.metric}: chance to find an effect",
            _PANEL + 0.65,
            width,
            handles=[
                Line2D([], [], color=colour, lw=2, label=change(ratio))
                for ratio, colour in zip(ratios, colours, strict=True)
            ],
            detail=f"{count(per_boot, 'block')} per boot, spread {100 * block:.1f} % per block and "
            f"{100 * boot:.1f} % per boot",
            caption="Two-sided t test on boot means at 5 %, from the noncentral t distribution: "
            f"reckoned, not measured. Dashed: {100 * POWER:.0f} %.",
        )
        axes = made.axes(0.75, 0.1, made.width - 0.95, _PANEL)
        for ratio, colour in zip(ratios, colours, strict=True):
            log_ratio = float(np.log(ratio))
            curve = [design_power(log_ratio, int(n), per_boot, block, boot) for n in boots]
            axes.plot(boots, curve, color=colour, lw=2, clip_on=False)
        axes.axhline(POWER, color=MUTED, lw=0.9, ls=(0, (4, 3)))
        axes.set_ylim(0, 1)
        axes.set_xlim(2, max_boots)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("boots")
        tidy_axes(axes, grid="both")
    return made.figure


def stopping_plan(asked: Question, claimed: float, max_boots: int = 10) -> SequentialPlan:
    """A plan that looks after each boot from the third on, for a claimed ratio."""
    size = asked.blocks_per_boot
    return SequentialPlan(max_boots * size, blocks_per_boot=size, claimed=claimed)


def simulated_units(
    asked: Question, ratio: float, boots: int, datasets: int = 1, seed: int = 1
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Boot means of log ratios with a true ratio and this run's spreads: (datasets, boots)."""
    block, boot = asked.spreads
    spread = float(np.sqrt(boot**2 + block**2 / asked.blocks_per_boot))
    rng = np.random.default_rng(seed)
    drawn = np.log(ratio) + spread * rng.standard_normal((datasets, boots))
    return np.asarray(drawn, dtype=np.float64)


def stopping_table(
    asked: Question, claimed: float, max_boots: int = 10, datasets: int = 2_000, seed: int = 1
) -> pd.DataFrame:
    """Early stopping against measuring the whole budget, on the same simulated data.

    SIMULATED with this run's spreads: equal arms, half of the claimed effect, all of it.
    """
    plan = stopping_plan(asked, claimed, max_boots)
    rows = []
    for name, ratio in (
        ("none", 1.0),
        ("half of the claim", float(np.sqrt(claimed))),
        ("the claim", claimed),
    ):
        units = simulated_units(asked, ratio, max_boots, datasets, seed)
        early, full = walk(units, plan), mean_t(units)
        seen = early.outcome == EFFECT
        rows.append(
            {
                "true effect": f"{name}: {change(ratio)}",
                "found, stopping early": f"{100 * seen.mean():.1f} %",
                "found, whole budget": f"{100 * (full.p() < plan.alpha).mean():.1f} %",
                "boots used, mean": f"{early.units.mean():.1f} of {max_boots}",
                "measuring saved": f"{100 * (1 - early.units.mean() / max_boots):.0f} %",
            }
        )
    return pd.DataFrame(rows)


def stopping_figure(
    asked: Question,
    claimed: float,
    ratio: float | None = None,
    max_boots: int = 10,
    seed: int = 1,
    width: Width = "wide",
) -> RunFigure:
    """One simulated campaign, look by look: the interval narrows until it decides.

    Args:
        asked: The question whose spreads are used.
        claimed: Claimed ratio.
        ratio: True ratio of the simulation; the claimed one when not given.
        max_boots: Budget.
        seed: What the campaign is drawn from.
        width: Wide or narrow.
    """
    plan = stopping_plan(asked, claimed, max_boots)
    true = claimed if ratio is None else ratio
    units = simulated_units(asked, true, max_boots, 1, seed)
    end = walk(units, plan)
    stop, outcome = int(end.units[0]), OUTCOMES[int(end.outcome[0])]
    with style():
        made = sheet(
            summarise(asked.run, []),
            f"SIMULATED campaign: stops after {stop} of {max_boots} boots ({outcome})",
            _PANEL + 0.65,
            width,
            detail=f"true change {change(true)}, claimed {change(claimed)}",
            handles=[
                Line2D([], [], color="#d55e00", lw=2.2, marker="o", label="looks until the stop"),
                Line2D([], [], color=MUTED, lw=1.2, marker="o", label="what was not measured"),
                Line2D([], [], color=INK, lw=0.9, ls=(0, (4, 3)), label="claimed"),
            ],
            caption=f"{_SIMULATED} Intervals hold together over all looks (95 %), which is why "
            "they are wider than those of a single look.",
        )
        axes = made.axes(0.95, 0.1, made.width - 1.1, _PANEL)
        reach = 2.5 * max(abs(np.log(claimed)), abs(np.log(true)), 0.05)
        for look, limit in zip(plan.schedule, plan.limits, strict=True):
            found = mean_t(units[:, :look])
            mean, half = float(found.mean[0]), limit * float(found.se[0])
            live = look <= stop
            axes.errorbar(
                [look],
                [mean],
                yerr=[[half], [half]],
                fmt="o",
                color="#d55e00" if live else MUTED,
                lw=2.2 if live else 1.2,
                ms=6 if live else 4,
                zorder=4 if live else 3,
            )
        axes.axhline(0, color=INK, lw=0.9)
        axes.axhline(np.log(claimed), color=INK, lw=0.9, ls=(0, (4, 3)))
        axes.set_ylim(-reach, reach)
        axes.set_xlim(plan.schedule[0] - 0.5, max_boots + 0.5)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("boots measured")
        set_change_axis(axes, "y")
        tidy_axes(axes, grid="y")
    return made.figure
