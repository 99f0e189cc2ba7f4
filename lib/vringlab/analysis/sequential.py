"""Stop measuring when the verdict is reached, with the error rates of a fixed design kept.

After each unit (a boot, or a block where there is one boot only) the effect's t is held against
a limit that spends part of alpha (`vringlab.analysis.boundaries`). The interval of each look,
mean +- limit x standard error, is a repeated confidence interval (Jennison and Turnbull,
"Interim analyses: the repeated confidence interval approach", JRSS B 51, 1989): all looks
together cover the truth with 1 - alpha, so any rule may stop on it. Three do:

    effect     the interval excludes no effect, beyond the noise floor;
    no effect  a claimed size is given, and the interval lies within half of it on both sides;
    hopeless   past half of the budget, the chance that the rest of it would still show an effect
               of the claimed size is under 5 % (conditional power). This only ever stops without
               an effect, so it cannot add to false positives.

The spending function is the power family with exponent 2 (Kim and DeMets). In simulation
(`calibrate.calibrate_sequential`, noise as in `simulate.Noise`, 10 boots of 5 blocks) it stops an
effect of +20 % after 4.3 to 4.8 boots and one of +60 % after 3.3 to 3.5, where the
O'Brien-Fleming type takes 5.0 to 5.5 and 4.1 to 4.4; it agrees with the fixed design more often
than the Pocock type, and has more power than always-valid intervals, which know no budget.

The estimate after an early stop lies a little too far from 1; its interval is right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy import stats as sps

from vringlab.analysis.boundaries import Spending, spent, t_limits
from vringlab.analysis.pairing import BOOT, Floats, Pairs, check_columns, pair
from vringlab.analysis.stats import Interval, mean_t
from vringlab.errors import MeasurementInvalid, UserError

Outcome = Literal["effect", "no effect", "hopeless", "budget", "continue"]
OUTCOMES: tuple[Outcome, ...] = ("effect", "no effect", "hopeless", "budget", "continue")
EFFECT, NO_EFFECT, HOPELESS, BUDGET, CONTINUE = range(5)

#: Units before the first look. Two would need a t of over 300 to stop.
FIRST_LOOK = 3

#: An interval within this share of the claimed effect (log scale) shows that it is not there.
NO_EFFECT_SHARE = 0.5

#: Conditional power under which going on is hopeless, and the share of the budget before which
#: that is not asked: the spread of few units is not known well enough.
HOPELESS_POWER = 0.05
HOPELESS_AFTER = 0.5


@dataclass(frozen=True)
class SequentialPlan:
    """When to look, and how much error to spend. Fixed before the first block is measured.

    Attributes:
        max_blocks: Budget in blocks.
        looks: Numbers of units at which to look; or how many looks, evenly spaced to the end; or
            None for one after each unit from the third on.
        alpha: Error of the first kind over all looks.
        spending: Spending function.
        blocks_per_boot: Blocks in each boot.
        unit: What is counted: `boot`; or `block` where all blocks are of one boot, and the
            result holds for that boot.
        claimed: Ratio that is claimed. Without it only an effect or the budget stops.
    """

    max_blocks: int
    looks: int | tuple[int, ...] | None = None
    alpha: float = 0.05
    spending: Spending = "power"
    blocks_per_boot: int = 1
    unit: Literal["boot", "block"] = "boot"
    claimed: float | None = None

    def __post_init__(self) -> None:
        if self.blocks_per_boot < 1:
            raise UserError("a boot holds at least one block", remedy="give blocks_per_boot >= 1")
        if self.units < FIRST_LOOK:
            raise UserError(
                f"a budget of {self.max_blocks} blocks holds {self.units} {self.unit}s; "
                f"deciding early needs {FIRST_LOOK} or more",
                remedy=f"give max_blocks >= {FIRST_LOOK * self._size}",
            )
        if self.claimed is not None and not (np.isfinite(self.claimed) and self.claimed > 0):
            raise UserError(
                f"{self.claimed} is no ratio", remedy="give after/before of the claim, such as 0.8"
            )
        _ = self.limits

    @property
    def _size(self) -> int:
        return self.blocks_per_boot if self.unit == "boot" else 1

    @property
    def units(self) -> int:
        """Budget in units."""
        return self.max_blocks // self._size

    @cached_property
    def schedule(self) -> tuple[int, ...]:
        """Numbers of units at which is looked."""
        if self.looks is None:
            return tuple(range(FIRST_LOOK, self.units + 1))
        if isinstance(self.looks, int):
            if self.looks < 1:
                raise UserError("a plan has at least one look", remedy="give looks >= 1")
            steps = np.linspace(0, self.units, self.looks + 1)[1:]
            return tuple(sorted({max(FIRST_LOOK, round(float(step))) for step in steps}))
        return tuple(self.looks)

    @cached_property
    def limits(self) -> tuple[float, ...]:
        """Limit of |t| at each look."""
        return t_limits(self.units, self.schedule, self.alpha, self.spending)

    def spent(self, units: int) -> float:
        """Alpha spent by the looks up to a number of units."""
        done = [look for look in self.schedule if look <= units]
        return spent(done[-1] / self.units, self.alpha, self.spending) if done else 0.0


@dataclass(frozen=True)
class Walk:
    """Where each of many data sets stops.

    Attributes:
        units: Units used, shape (datasets,).
        outcome: Index into `OUTCOMES`, shape (datasets,).
        mean: Mean log ratio at the stop, shape (datasets,).
        half: Half width of the interval at the stop, log scale, shape (datasets,).
    """

    units: npt.NDArray[np.int64]
    outcome: npt.NDArray[np.int64]
    mean: Floats
    half: Floats


def _hopeless(plan: SequentialPlan, n: int, mean: Floats, se: Floats) -> npt.NDArray[np.bool_]:
    """Whether the chance of an effect at the end is small, were the claim true.

    With information fraction f, B = z sqrt(f) is Brownian motion with the claim's drift; the
    last look's limit is taken as a normal quantile of the same p value.
    """
    if plan.claimed is None or n < HOPELESS_AFTER * plan.units:
        return np.zeros(mean.shape, dtype=np.bool_)
    fraction = n / plan.units
    claim = float(np.log(plan.claimed))
    at_end = se * np.sqrt(fraction)
    with np.errstate(divide="ignore", invalid="ignore"):
        drift = abs(claim) / at_end
        here = np.sign(claim) * mean / se * np.sqrt(fraction)
    last = float(sps.norm.isf(sps.t.sf(plan.limits[-1], plan.units - 1)))
    rest = np.sqrt(max(1 - fraction, 1e-12))
    chance = sps.norm.sf((last - here - drift * (1 - fraction)) / rest)
    return np.asarray((chance < HOPELESS_POWER) & (n < plan.units), dtype=np.bool_)


def walk(means: Floats, plan: SequentialPlan, floor: float = 0.0) -> Walk:
    """Look after look, for many data sets at once.

    Args:
        means: Log ratios of the units in order of measuring, shape (datasets, units so far).
        plan: The plan.
        floor: Noise floor on the log scale, at least 0: an effect's interval must lie beyond it.

    Returns:
        For each data set its first stop, or its state at the last look.
    """
    count, have = means.shape
    units = np.full(count, have, dtype=np.int64)
    outcome = np.full(count, CONTINUE, dtype=np.int64)
    centre, half = np.full(count, np.nan), np.full(count, np.inf)
    margin = None
    if plan.claimed is not None and plan.claimed != 1:
        margin = NO_EFFECT_SHARE * abs(float(np.log(plan.claimed)))
    for look, limit in zip(plan.schedule, plan.limits, strict=True):
        if look > have:
            break
        going = outcome == CONTINUE
        now = mean_t(means[:, :look])
        width = limit * now.se
        centre[going], half[going], units[going] = now.mean[going], width[going], look
        found = np.full(count, CONTINUE)
        if look == plan.units:
            found[:] = BUDGET
        found[_hopeless(plan, look, now.mean, now.se)] = HOPELESS
        if margin is not None:
            found[np.abs(now.mean) + width < margin] = NO_EFFECT
        # A spread of exactly 0 is no measurement; `decide` refuses it before.
        found[(np.abs(now.mean) - width > floor) & (now.se > 0)] = EFFECT
        outcome[going] = found[going]
    return Walk(units, outcome, centre, half)


@dataclass(frozen=True)
class Decision:
    """What a look says.

    Attributes:
        stop: Whether to stop measuring.
        outcome: `effect`, `no effect`, `hopeless`, `budget` or `continue`.
        why: The reason in one sentence.
        ratio: Ratio at the look; NaN before the first.
        interval: Interval of the ratio at the look, right at any stop; unknown before the first.
        spent: Alpha spent so far.
        alpha: Alpha of the plan.
        look: Number of the look, from 1; 0 before the first.
        looks: Number of looks of the plan.
        units: Units that the look used.
        unit: `boot` or `block`.
        more_blocks: Blocks to measure until the next look; 0 at a stop.
    """

    stop: bool
    outcome: Outcome
    why: str
    ratio: float
    interval: Interval
    spent: float
    alpha: float
    look: int
    looks: int
    units: int
    unit: str
    more_blocks: int
    notes: tuple[str, ...] = field(default=())


def _counted(pairs: Pairs, plan: SequentialPlan) -> tuple[Floats, tuple[str, ...]]:
    if plan.unit == "boot":
        return pairs.boot_means, ()
    if pairs.boots > 1:
        note = f"blocks of {pairs.boots} boots were counted as if of one"
        return pairs.log_ratio, (note,)
    return pairs.log_ratio, ()


def _complete(samples: pd.DataFrame, plan: SequentialPlan) -> pd.DataFrame:
    """Samples without the boot in progress, which would stand for less than a whole unit."""
    if plan.unit == "block" or samples.empty:
        return samples
    last = samples.sort_values("started", kind="stable").iloc[-1]
    boot = (samples[BOOT] == last[BOOT]).all(axis=1).to_numpy()
    if samples["block"][boot].nunique() < plan.blocks_per_boot:
        samples = samples[~boot]
    return samples


def decide(
    samples: pd.DataFrame,
    plan: SequentialPlan,
    metric: str,
    arm: str,
    reference: str,
    params: Mapping[str, object] | None = None,
    workload: str | None = None,
    floor: float = 0.0,
) -> Decision:
    """Whether to stop, from all samples so far.

    The looks are gone through again from the first, so the answer depends on the samples alone:
    asked twice, after a resume, or on a recorded run, it is the same.

    Args:
        samples: Tidy samples so far.
        plan: The plan, the same at each call.
        metric: Name of the metric.
        arm: Arm above the line.
        reference: Arm below it.
        params: Parameters to hold fixed.
        workload: Needed when several workloads measured the metric.
        floor: Noise floor on the log scale.

    Raises:
        UserError: as for `stats.effect`.
        MeasurementInvalid: as for `stats.effect`, once there are units enough to look at.
    """
    check_columns(samples)
    whole = _complete(samples, plan)
    if whole.empty:
        return _decision(plan, np.zeros(0), floor)
    try:
        pairs = pair(whole, metric, arm, reference, params, workload)
    except MeasurementInvalid:
        # Too early to complain: a first boot may fail and the next ones work.
        if max(whole["boot"].nunique(), whole["block"].nunique()) < FIRST_LOOK:
            return _decision(plan, np.zeros(0), floor)
        raise
    means, notes = _counted(pairs, plan)
    if means.size >= FIRST_LOOK and np.ptp(means) == 0:
        raise MeasurementInvalid(
            f"{metric}, {arm} against {reference}: all ratios are the same to the last digit",
            remedy="look at the raw files: a constant, a cached or a copied figure",
        )
    return _decision(plan, means, floor, notes)


def undecided(plan: SequentialPlan, why: str) -> Decision:
    """The decision to go on because the samples so far cannot be looked at."""
    return replace(_decision(plan, np.zeros(0), 0.0), why=why)


def _decision(
    plan: SequentialPlan, means: Floats, floor: float, notes: Sequence[str] = ()
) -> Decision:
    have = min(means.size, plan.units)
    done = [look for look in plan.schedule if look <= have]
    if done:
        found = walk(means[None, :have], plan, floor)
        outcome = OUTCOMES[int(found.outcome[0])]
        used = int(found.units[0])
        centre, half = float(found.mean[0]), float(found.half[0])
        interval = Interval(float(np.exp(centre - half)), float(np.exp(min(centre + half, 700))))
        ratio = float(np.exp(centre))
    else:
        outcome, used, interval, ratio = "continue", have, Interval(), float("nan")
    stop = outcome != "continue"
    next_look = next((look for look in plan.schedule if look > have), plan.units)
    look = sum(1 for number in plan.schedule if number <= used)
    return Decision(
        stop=stop,
        outcome=outcome,
        why=_why(plan, outcome, ratio, interval, used, look),
        ratio=ratio,
        interval=interval,
        spent=plan.spent(used),
        alpha=plan.alpha,
        look=look,
        looks=len(plan.schedule),
        units=used,
        unit=plan.unit,
        more_blocks=0 if stop else (next_look - have) * plan._size,
        notes=tuple(notes),
    )


def _why(
    plan: SequentialPlan, outcome: Outcome, ratio: float, interval: Interval, used: int, look: int
) -> str:
    at = f"after {used} of {plan.units} {plan.unit}s (look {look} of {len(plan.schedule)})"
    shown = f"ratio {ratio:.3f} {interval}"
    claimed = f"{plan.claimed:.3f}" if plan.claimed is not None else ""
    return {
        "effect": f"{at}: {shown} excludes no effect",
        "no effect": f"{at}: {shown} excludes half of the claimed {claimed} and more",
        "hopeless": f"{at}: {shown}; the rest of the budget would hardly show {claimed}",
        "budget": f"{at}: the budget is used up; {shown}",
        "continue": f"{at}: {shown} does not decide"
        if look
        else f"{used} of {plan.units} {plan.unit}s, first look at {plan.schedule[0]}",
    }[outcome]
