"""Noise floor, smallest detectable effect, and how many blocks an effect needs.

Power is that of the two-sided t test on boot means that `stats.effect` makes, from the
noncentral t distribution; the variance of a boot mean is sd_boot^2 + sd_block^2 / blocks per
boot. All effects are on the log scale inside and ratios outside.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pandas as pd
from scipy import optimize
from scipy import stats as sps

from vringlab.analysis.pairing import Floats, pair
from vringlab.analysis.stats import Effect, from_pairs
from vringlab.analysis.units import percent_text
from vringlab.campaign.experiment import TWIN_SUFFIX
from vringlab.errors import UserError

#: Power at which an effect counts as detectable.
POWER = 0.8

#: Spread of the log ratio from block to block that is assumed, and said to be assumed, where a
#: run has too few blocks to show its own. A choice: the hand-measured nested pktgen runs, three
#: per arm, spread by 9 and 14 % between runs; pinned physical hosts do far better.
ASSUMED_SD = 0.05

_MAX_BOOTS = 100_000


@lru_cache(maxsize=4096)
def power(shift: float, df: int, level: float = 0.95) -> float:
    """Power of the two-sided t test.

    Args:
        shift: True mean divided by its standard error.
        df: Degrees of freedom, at least 1.
        level: 1 minus the error of the first kind.
    """
    limit = float(sps.t.ppf(0.5 + level / 2, df))
    upper = float(sps.nct.sf(limit, df, shift))
    lower = float(sps.nct.cdf(-limit, df, shift))
    # scipy's noncentral t underflows to NaN where the answer is 1 or 0 for all purposes.
    if not np.isfinite(upper):
        upper = 1.0 if shift > limit else 0.0
    return min(1.0, upper + (lower if np.isfinite(lower) else 0.0))


@lru_cache(maxsize=1024)
def detectable_shift(df: int, level: float = 0.95, wanted: float = POWER) -> float:
    """True mean in standard errors that the t test finds with the power wanted."""
    limit = float(sps.t.ppf(0.5 + level / 2, df))
    return float(
        optimize.brentq(lambda d: power(float(d), df, level) - wanted, 0.0, 4 * limit + 10)
    )


def smallest_detectable(effect: Effect, wanted: float = POWER) -> float:
    """Smallest ratio above 1 that a run like this one finds with the power wanted.

    The standard error is the larger of the one between boots and the one that the spread within
    boots implies: two boots can agree by chance, and must not promise what blocks deny.

    Returns:
        A ratio above 1 (its inverse is as detectable); infinite without degrees of freedom.
    """
    if effect.df < 1:
        return float("inf")
    within = 0.0
    if np.isfinite(effect.sd_block) and effect.hosts == 1:
        sizes = np.bincount(effect.pairs.boot)
        within = effect.sd_block * float(np.sqrt(np.sum(1 / sizes))) / effect.boots
    shift = detectable_shift(effect.df, effect.level, wanted)
    return float(np.exp(min(700.0, shift * max(effect.se, within))))


@dataclass(frozen=True)
class NoiseFloor:
    """What two equal arms look like in this run.

    Attributes:
        effect: The twin against the reference.
        floor: Ratio above 1: how far apart the equal arms came out. When their interval excludes
            1, something other than the arm differs (order, warm-up, what the arm before left
            behind), and the floor is the far end of the interval.
        differ: Whether their interval excludes 1.
        smallest_detectable: Smallest ratio above 1 that the run would have found, 80 % power.
    """

    effect: Effect
    floor: float
    differ: bool
    smallest_detectable: float

    def __str__(self) -> str:
        """The floor in one line."""
        text = f"two equal arms {percent_text(self.effect.change)} apart"
        return text + (" beyond chance" if self.differ else "")


def floor_of(mean: Floats, half: Floats) -> Floats:
    """Noise floor on the log scale of A/A pairs, from their mean log ratios and half widths.

    The distance of the equal arms; where their interval excludes 0, its far end.
    """
    distance = np.abs(mean)
    return np.where(distance > half, distance + half, distance)


def noise_floor(
    samples: pd.DataFrame,
    metric: str,
    reference: str,
    params: Mapping[str, object] | None = None,
    level: float = 0.95,
    workload: str | None = None,
    twin: str | None = None,
) -> NoiseFloor:
    """The noise floor from the A/A pair.

    Args:
        samples: Tidy samples.
        metric: Name of the metric.
        reference: The arm that has a twin.
        params: Parameters to hold fixed.
        level: Level of the interval.
        workload: Needed when several workloads measured the metric.
        twin: Name of the twin; the reference with `.aa` when not given.

    Raises:
        UserError: the samples have no twin of the reference, or as for `stats.effect`.
        MeasurementInvalid: as for `stats.effect`.
    """
    name = twin or reference + TWIN_SUFFIX
    if name not in set(samples["arm"]):
        raise UserError(
            f"the run has no A/A pair: no sample of {name!r}",
            remedy="keep the twin in the plan; every profile has it",
        )
    found = from_pairs(pair(samples, metric, name, reference, params, workload), level, draws=0)
    mean = np.asarray(found.log_mean)
    half = np.inf
    if found.interval.known:
        half = float(np.log(found.interval.high)) - found.log_mean
    floor = float(np.exp(floor_of(mean, np.asarray(half))))
    differ = bool(np.abs(mean) > half)
    return NoiseFloor(found, floor, differ, smallest_detectable(found))


@dataclass(frozen=True)
class RequiredN:
    """A design that finds an effect.

    Attributes:
        blocks: Blocks in all, `boots` x `blocks_per_boot`.
        boots: Boots.
        blocks_per_boot: Blocks in each.
        power: Power of that design.
        ratio: Ratio to be found.
        sd_block: Spread from block to block that was reckoned with (log scale).
        sd_boot: Spread of the effect from boot to boot that was reckoned with; NaN when it is
            not known and was left out.
        assumed: Whether the spread is an assumption and not this run's.
    """

    blocks: int
    boots: int
    blocks_per_boot: int
    power: float
    ratio: float
    sd_block: float
    sd_boot: float
    assumed: bool

    def __str__(self) -> str:
        """`24 blocks (8 boots of 3) for a change of +5.0 % at ...`."""
        spread = f"{100 * self.sd_block:.1f} % per block"
        spread = f"an assumed spread of {spread}" if self.assumed else f"a spread of {spread}"
        if not np.isfinite(self.sd_boot):
            spread += " (that between boots is not known)"
        elif self.sd_boot:
            spread += f" and {100 * self.sd_boot:.1f} % per boot"
        return (
            f"{self.blocks} blocks ({self.boots} boots of {self.blocks_per_boot}) for a change of "
            f"{percent_text(self.ratio - 1)} at {100 * self.power:.0f} % power and {spread}"
        )


def design_se(boots: int, blocks_per_boot: int, sd_block: float, sd_boot: float = 0.0) -> float:
    """Standard error of a design's log ratio."""
    return float(np.sqrt((sd_boot**2 + sd_block**2 / blocks_per_boot) / boots))


def design_half_width(
    boots: int,
    blocks_per_boot: int,
    sd_block: float,
    sd_boot: float = 0.0,
    level: float = 0.95,
) -> float:
    """Half the width of a design's interval on the log scale; infinite with fewer than two boots.

    It is that of the t interval on boot means (`stats.mean_t`) at its expected standard error.
    """
    if boots < 2:
        return float("inf")
    limit = float(sps.t.ppf(0.5 + level / 2, boots - 1))
    return limit * design_se(boots, blocks_per_boot, sd_block, sd_boot)


def design_power(
    log_ratio: float,
    boots: int,
    blocks_per_boot: int,
    sd_block: float,
    sd_boot: float = 0.0,
    level: float = 0.95,
) -> float:
    """Power of a design for a log ratio; 0 with fewer than two boots."""
    if boots < 2:
        return 0.0
    se = design_se(boots, blocks_per_boot, sd_block, sd_boot)
    if se == 0:
        return float(log_ratio != 0)
    return power(abs(log_ratio) / se, boots - 1, level)


def required_blocks(
    ratio: float,
    sd_block: float,
    sd_boot: float = 0.0,
    blocks_per_boot: int = 1,
    level: float = 0.95,
    wanted: float = POWER,
    assumed: bool = False,
) -> RequiredN:
    """Fewest boots that find a ratio, from known spreads.

    Raises:
        UserError: the ratio is 1 or not positive, a spread is negative or no number, or the
            answer is beyond any machine's patience.
    """
    if not np.isfinite(ratio) or ratio <= 0 or ratio == 1:
        raise UserError(
            f"no number of blocks finds a ratio of {ratio:g}",
            remedy="give the ratio after/before of the effect to be found, such as 1.05",
        )
    between = sd_boot if np.isfinite(sd_boot) else 0.0
    if not np.isfinite(sd_block) or min(sd_block, between) < 0:
        raise UserError("the spread is not known", remedy="measure two or more blocks first")
    if blocks_per_boot < 1:
        raise UserError("a boot holds at least one block", remedy="give blocks_per_boot >= 1")
    target = abs(float(np.log(ratio)))

    def enough(boots: int) -> bool:
        return design_power(target, boots, blocks_per_boot, sd_block, between, level) >= wanted

    high = 2
    while not enough(high):
        high *= 2
        if high > _MAX_BOOTS:
            raise UserError(
                f"a change of {100 * (ratio - 1):+.2f} % needs over {_MAX_BOOTS} boots here",
                remedy="lower the noise (pinning, longer windows) or look for a larger effect",
            )
    low = max(2, high // 2)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle + 1, high)
    return RequiredN(
        blocks=high * blocks_per_boot,
        boots=high,
        blocks_per_boot=blocks_per_boot,
        power=design_power(target, high, blocks_per_boot, sd_block, between, level),
        ratio=ratio,
        sd_block=sd_block,
        sd_boot=sd_boot,
        assumed=assumed,
    )


def required_n(
    effect: Effect,
    ratio: float | None = None,
    blocks_per_boot: int | None = None,
    wanted: float = POWER,
) -> RequiredN:
    """How many blocks an effect needs, at the noise that a run showed.

    Args:
        effect: Effect whose spreads are used.
        ratio: Ratio to be found; the effect's own estimate when not given.
        blocks_per_boot: Blocks in each boot; as in the run when not given.
        wanted: Power.

    Raises:
        UserError: as for `required_blocks`.
    """
    per_boot = blocks_per_boot or max(1, round(effect.blocks / effect.boots))
    sd_block, sd_boot = effect.sd_block, effect.sd_boot
    assumed = False
    if not np.isfinite(sd_block):
        # One block per boot: the spread between boots is all there is to see.
        sd_block = 0.0 if np.isfinite(sd_boot) else ASSUMED_SD
        assumed = not np.isfinite(sd_boot)
    return required_blocks(
        effect.ratio if ratio is None else ratio,
        sd_block,
        0.0 if assumed else sd_boot,
        per_boot,
        effect.level,
        wanted,
        assumed,
    )
