"""Is it noise? One comparison of a run beside its A/A pair, as tables and a figure.

A question is one metric at one parameter point, one arm against the reference.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from vringlab.analysis.calibrate import METHODS, Scenario, calibrate
from vringlab.analysis.frames import RunFrames
from vringlab.analysis.pairing import point_text
from vringlab.analysis.power import (
    ASSUMED_SD,
    POWER,
    NoiseFloor,
    noise_floor,
)
from vringlab.analysis.simulate import Design, Noise
from vringlab.analysis.stats import Effect, effect
from vringlab.analysis.wording import change, interval_text
from vringlab.campaign.experiment import TWIN_SUFFIX, Value
from vringlab.errors import UserError, VringlabError
from vringlab.report.canvas import (
    GRID,
    INK,
    MUTED,
    RunFigure,
    Width,
    looks,
    sheet,
    style,
    tidy_axes,
)
from vringlab.report.change_axis import set_change_axis
from vringlab.report.summary import (
    Summary,
    count,
    heading,
    headline,
    sorted_points,
    summarise,
)

_PANEL = 2.6
_LAYOUTS: dict[Scenario, str] = {"arm x boot": "in turns", "own boots": "own boots"}

#: What each method takes for independent.
_COUNTS = dict(
    zip(METHODS, ("boots", "boots", "both", "blocks", "runs", "runs", "messages"), strict=True)
)


@dataclass(frozen=True)
class Question:
    """One comparison of a run.

    Attributes:
        run: The run.
        workload: The workload.
        params: The parameter point.
        metric: The metric.
        arm: The arm that is compared with the reference.
        effect: Arm against reference.
        noise: The A/A pair.
    """

    run: RunFrames
    workload: str
    params: dict[str, Value]
    metric: str
    arm: str
    effect: Effect
    noise: NoiseFloor

    @property
    def reference(self) -> str:
        """The arm below the line."""
        return self.run.plan.reference

    @property
    def spreads(self) -> tuple[float, float]:
        """Spread of the log ratio per block and per boot, those of the noisier of the two pairs.

        With one block in each boot all spread is the boots', and that of blocks is 0. Where the run
        shows neither, `power.ASSUMED_SD` is taken per block.
        """
        pairs = (self.effect, self.noise.effect)
        blocks = [found.sd_block for found in pairs if np.isfinite(found.sd_block)]
        boots = [found.sd_boot for found in pairs if np.isfinite(found.sd_boot)]
        assumed = 0.0 if boots else ASSUMED_SD
        return max(blocks, default=assumed), max(boots, default=0.0)

    @property
    def blocks_per_boot(self) -> int:
        """Blocks in each boot of the run."""
        return max(1, round(self.effect.blocks / self.effect.boots))

    def __str__(self) -> str:
        """The question, and the run that is to answer it, in two lines."""
        size = f"{count(self.effect.blocks, 'block')} in {count(self.effect.boots, 'boot')}"
        return (
            f"{self.metric} of {self.workload} at {point_text(self.params)}: "
            f"{self.arm} against {self.reference}, {size}\n{heading(self.run)}"
        )


def question(
    run: RunFrames, metric: str | None = None, arm: str | None = None, level: float = 0.95
) -> Question:
    """The first comparison of a run that has an effect and an A/A pair.

    Args:
        run: The run.
        metric: Only this metric.
        arm: Only this arm; else the last of the plan, which is the form that was merged.
        level: Level of the intervals.

    Raises:
        UserError: the run has no such comparison; says why each was passed over.
    """
    plan = run.plan
    arms = [name for name in reversed(plan.arms) if not name.endswith(TWIN_SUFFIX)]
    arms = [name for name in arms if name != plan.reference and arm in (None, name)]
    problems: dict[str, None] = {}
    for workload in plan.workloads:
        metrics = [metric] if metric is not None else headline(run.samples, workload)
        for name in metrics:
            for params in sorted_points(run, workload):
                for chosen in arms:
                    try:
                        return Question(
                            run,
                            workload,
                            dict(params),
                            name,
                            chosen,
                            _effect(run, name, chosen, dict(params), workload, level),
                            noise_floor(run.samples, name, plan.reference, params, level, workload),
                        )
                    except VringlabError as error:
                        problems[error.message] = None
    why = "; ".join(list(problems)[:3]) or f"no arm {arm!r}"
    raise UserError(
        f"run {run.run_id} has no comparison to look at: {why}",
        remedy=f"arms: {', '.join(plan.arms)}; its metrics: "
        f"{', '.join(dict.fromkeys(run.samples['metric']))}",
    )


def _effect(
    run: RunFrames, metric: str, arm: str, params: dict[str, Value], workload: str, level: float
) -> Effect:
    plan = run.plan
    return effect(
        run.samples, metric, arm, plan.reference, params, level, draws=0, workload=workload
    )


def pair_table(asked: Question) -> pd.DataFrame:
    """The A/A pair and the arm side by side: ratio, interval, and the spreads behind them."""
    rows = [("equal arms", asked.noise.effect), (asked.arm, asked.effect)]
    return pd.DataFrame(
        {
            "pair": [
                f"{asked.reference}{TWIN_SUFFIX if name == 'equal arms' else ''}"
                if name == "equal arms"
                else name
                for name, _ in rows
            ],
            "against": asked.reference,
            "change": [change(found.ratio) for _, found in rows],
            "95 % interval": [
                interval_text(found.interval) if found.interval.known else "none: one boot"
                for _, found in rows
            ],
            "spread per block": [_percent(found.sd_block) for _, found in rows],
            "spread per boot": [_percent(found.sd_boot) for _, found in rows],
        }
    )


def _percent(spread: float) -> str:
    return f"{100 * spread:.1f} %" if np.isfinite(spread) else "not known"


def floor_sentence(asked: Question) -> str:
    """The noise floor, and what the run could have seen, as a sentence."""
    least = asked.noise.smallest_detectable
    seen = (
        f"a change of {change(least)} or {change(1 / least)} is the smallest that a run like this "
        f"one finds in {100 * POWER:.0f} % of the cases"
        if np.isfinite(least)
        else "with one boot no smallest detectable change can be given"
    )
    beyond = asked.effect.interval
    log_floor = float(np.log(asked.noise.floor))
    clear = beyond.known and (
        np.log(max(beyond.low, 1e-300)) > log_floor or np.log(beyond.high) < -log_floor
    )
    found = str(asked.noise)
    return (
        f"{found[0].upper()}{found[1:]}; {seen}. The interval of {asked.arm} lies "
        f"{'beyond' if clear else 'not beyond'} the noise floor."
    )


def block_figure(asked: Question, width: Width = "wide") -> RunFigure:
    """The log ratio of every block, by boot: the equal arms on the left, the arm on the right."""
    run = asked.run
    summary = _summary(asked)
    pairs = [
        (run.plan.reference + TWIN_SUFFIX, asked.noise.effect, "two equal arms"),
        (asked.arm, asked.effect, f"{asked.arm} against {asked.reference}"),
    ]
    handles: list[Line2D | Patch] = [
        Line2D([], [], ls="", marker="o", color=MUTED, ms=5, label="a block"),
        Line2D([], [], color=MUTED, lw=2.2, label="mean of a boot"),
        Patch(fc=GRID, label="95 % interval of the equal arms"),
    ]
    with style():
        made = sheet(
            summary,
            f"{asked.metric}: every block's ratio",
            _PANEL + 0.8,
            width,
            detail=f"{asked.workload}, {point_text(asked.params)}",
            handles=handles,
            caption="Blocks of one boot share page placement, KASLR and timer phases, so they "
            "lie together; the interval counts boots. Same scale on both sides.",
        )
        gap, left = 0.25, 0.95
        each = (made.width - left - 0.15 - gap) / 2
        values = np.concatenate([found.pairs.log_ratio for _, found, _ in pairs])
        low, high = min(0.0, float(values.min())), max(0.0, float(values.max()))
        pad = 0.12 * max(high - low, 0.02)
        for place, (arm, found, title) in enumerate(pairs):
            axes = made.axes(left + place * (each + gap), 0.25, each, _PANEL)
            axes.set_title(title, loc="left", size=9.5, weight="bold")
            _boots(axes, found, looks(run)[arm].colour)
            _band(axes, asked.noise.effect)
            axes.set_ylim(low - pad, high + pad)
            set_change_axis(axes, "y")
            if place:
                axes.tick_params(labelleft=False)
    return made.figure


def _boots(axes: Axes, found: Effect, colour: str) -> None:
    pairs = found.pairs
    boots = pairs.boots
    for boot in range(boots):
        values = pairs.log_ratio[pairs.boot == boot]
        spots = boot + np.linspace(-0.18, 0.18, len(values)) if len(values) > 1 else [boot]
        axes.plot(spots, values, "o", color=colour, ms=5, alpha=0.75, mew=0, zorder=3)
        axes.plot([boot - 0.3, boot + 0.3], [values.mean()] * 2, color=colour, lw=2.2, zorder=4)
    axes.axhline(0, color=INK, lw=0.9, zorder=2)
    axes.set_xlim(-0.6, boots - 0.4)
    axes.set_xticks(range(boots), [str(boot + 1) for boot in range(boots)])
    axes.set_xlabel("boot")
    tidy_axes(axes, grid="y")


def _band(axes: Axes, equal: Effect) -> None:
    if equal.interval.known:
        low, high = np.log(max(equal.interval.low, 1e-300)), np.log(equal.interval.high)
        axes.axhspan(low, high, color=GRID, lw=0, zorder=1)


def _summary(asked: Question) -> Summary:
    return summarise(asked.run, [])


def false_positives(asked: Question, datasets: int = 300, seed: int = 1) -> pd.DataFrame:
    """How often common tests see a difference between equal arms, by layout and length.

    SIMULATED, with the default spreads of `simulate.Noise`: no arm is better on average. The
    layouts are all arms in each boot in turns, where an arm does a little better in one boot than
    in another; and a boot of its own for each arm. Each is shown with the boots and blocks of
    this run (two boots at least), and with five times the blocks.

    Returns:
        One row per method: what it counts as independent, and the share of data sets in which
        equal arms came out different.
    """
    boots, blocks = max(2, asked.effect.boots), asked.blocks_per_boot
    designs = [Design(boots, blocks), Design(boots, 5 * blocks)]
    found = calibrate(
        datasets, seed, designs, list(_LAYOUTS), (), Noise(), more=1, sequential=False
    ).false_positives
    table = pd.DataFrame({"method": list(METHODS), "counts": [_COUNTS[m] for m in METHODS]})
    for scenario, layout in _LAYOUTS.items():
        for design in designs:
            rows = found[(found["scenario"] == scenario) & (found["design"] == str(design))]
            shares = rows.set_index("method").loc[list(METHODS), "rejected"]
            table[f"{layout}, {design}"] = [f"{100 * share:.1f} %" for share in shares]
    return table
