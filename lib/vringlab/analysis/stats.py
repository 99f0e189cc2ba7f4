"""Effects with intervals: the ratio of two arms, from block-paired log values clustered by boot.

Which interval is primary, and why
    A boot is one draw of page placement, KASLR and timer phases; an arm may do better in one boot
    than in another (an arm-by-boot interaction), and blocks of one boot cannot show that. So the
    unit of inference is the boot, and with several hosts the host: Student's t on boot means (or
    host means), m - 1 degrees of freedom for m of them. Under normal boot means it is exact for
    any m >= 2, whether or not there is an interaction, and bimodal noise within boots does not
    break it (`vringlab.analysis.calibrate`). What was tried and rejected, all on simulated A/A
    data with few boots:
    - percentiles of the hierarchical bootstrap: far too narrow at 2 or 3 boots, too wide at 10;
    - t on blocks: false positives grow with the number of blocks when there is an interaction;
    - pooling blocks and boots unless a test finds an interaction: the test has no power at 2
      boots, and errors exceed 5 % just where the interaction is moderate.
    The price is honest: with 2 boots t is 12.7, and only large effects separate.

    One boot gives an interval from its blocks that holds for that boot alone; it is marked so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import pandas as pd
from scipy import stats as sps

from vringlab.analysis.bootstrap import SEED, Hierarchy, draw_means, percentiles
from vringlab.analysis.pairing import (
    BIN_ERROR,
    BOOT,
    COUNTS,
    PARAM,
    Floats,
    Pairs,
    pair,
    select,
    values_log,
)
from vringlab.analysis.units import metric as metric_spec
from vringlab.analysis.units import percent_text
from vringlab.errors import MeasurementInvalid, UserError

Unit = Literal["host", "boot", "block", "none"]

#: A block is called an outlier beyond this robust z (Iglewicz and Hoaglin, "How to Detect and
#: Handle Outliers", 1993).
OUTLIER_Z = 3.5

# Relative size below which two log ratios are the same figure and differ by rounding only.
_SAME = 1e-12


@dataclass(frozen=True)
class Interval:
    """An interval of a ratio, 0 to infinity when nothing is known."""

    low: float = 0.0
    high: float = np.inf

    @property
    def known(self) -> bool:
        """Whether it excludes anything."""
        return self.low > 0 or self.high < np.inf

    def __str__(self) -> str:
        return f"[{self.low:.3f}, {self.high:.3f}]" if self.known else "[unknown]"


@dataclass(frozen=True)
class MeanT:
    """Student's t on the last axis of an array of means; shapes are those of the other axes.

    Attributes:
        mean: Mean of the means.
        se: Its standard error.
        df: Degrees of freedom, number of means minus 1.
    """

    mean: Floats
    se: Floats
    df: int

    def p(self) -> Floats:
        """Two-sided p value against a mean of 0; 1 without degrees of freedom."""
        if self.df < 1:
            return np.ones_like(self.mean)
        with np.errstate(divide="ignore", invalid="ignore"):
            t = np.where(self.se > 0, np.abs(self.mean) / self.se, np.inf)
        # No spread and no difference is no evidence of one.
        t = np.where((self.se == 0) & (self.mean == 0), 0.0, t)
        return np.asarray(2 * sps.t.sf(t, self.df), dtype=np.float64)

    def half_width(self, level: float) -> Floats:
        """Half the width of the interval at a level; infinite without degrees of freedom."""
        if self.df < 1:
            return np.full_like(self.mean, np.inf)
        return np.asarray(sps.t.ppf(0.5 + level / 2, self.df) * self.se, dtype=np.float64)


def mean_t(means: Floats) -> MeanT:
    """Student's t of cluster means along the last axis.

    The one place where the primary interval is computed: effects, sequential looks and the
    calibration all call it.
    """
    count = means.shape[-1]
    centre = np.asarray(means.mean(axis=-1))
    if count < 2:
        return MeanT(centre, np.full_like(centre, np.inf), 0)
    se = np.asarray(means.std(axis=-1, ddof=1) / np.sqrt(count))
    return MeanT(centre, se, count - 1)


@dataclass(frozen=True)
class Effect:
    """Ratio arm / reference of one metric at one parameter point.

    Attributes:
        pairs: The paired log ratios behind it.
        log_mean: Natural log of the ratio: mean of boot means (of host means of boot means).
        se: Standard error of `log_mean`.
        df: Degrees of freedom of the primary interval; 0 when there is none.
        unit: What the primary interval counts as independent: `host`, `boot`, `block` (one boot
            only: the interval holds for that boot), or `none` (one block).
        level: Level of all intervals.
        interval: Primary interval of the ratio: t on the means of `unit`.
        p: Two-sided p value against a ratio of 1.
        within: Interval from blocks within boots: holds for these boots only.
        bootstrap: Percentiles of the hierarchical bootstrap, beside the primary interval.
        draws: Resamples behind `bootstrap`; 0 when it was not asked for.
        sd_block: Standard deviation of the log ratio from block to block within a boot; NaN when
            no boot has two blocks.
        sd_boot: Standard deviation of the effect from boot to boot beyond what blocks explain
            (method of moments, 0 when the estimate is negative); NaN with one boot.
        notes: What a reader should know, one sentence each.
    """

    pairs: Pairs = field(repr=False)
    log_mean: float
    se: float
    df: int
    unit: Unit
    level: float
    interval: Interval
    p: float
    within: Interval
    bootstrap: Interval
    draws: int
    sd_block: float
    sd_boot: float
    notes: tuple[str, ...] = ()

    @property
    def ratio(self) -> float:
        """The ratio arm / reference, of geometric means."""
        return float(np.exp(self.log_mean))

    @property
    def change(self) -> float:
        """The ratio as a change, ratio - 1."""
        return float(np.expm1(self.log_mean))

    @property
    def blocks(self) -> int:
        """Paired blocks."""
        return self.pairs.blocks

    @property
    def boots(self) -> int:
        """Boots (clusters)."""
        return self.pairs.boots

    @property
    def hosts(self) -> int:
        """Hosts."""
        return self.pairs.hosts

    @property
    def method(self) -> str:
        """The primary interval's method in words."""
        if self.unit == "none":
            return "one block: no interval"
        if self.unit == "block":
            return f"t on {self.blocks} blocks of one boot"
        count = self.hosts if self.unit == "host" else self.boots
        return f"t on {count} {self.unit} means"

    @property
    def improvement(self) -> float:
        """Log ratio with the sign turned so that more is better."""
        return self.log_mean * metric_spec(self.pairs.metric).better

    @property
    def outliers(self) -> pd.DataFrame:
        """Blocks far from the others; see `outliers`."""
        return outliers(self.pairs)

    def __str__(self) -> str:
        """`1.628 [1.551, 1.709]`, with change, level, method and blocks."""
        low, high = np.expm1(np.log([max(self.interval.low, 1e-300), self.interval.high]))
        change = percent_text(self.change)
        if not self.interval.known:
            return f"{self.ratio:.3f} ({change}), {self.method}"
        return (
            f"{self.ratio:.3f} {self.interval} ({change} [{percent_text(low)}, "
            f"{percent_text(high)}]), {100 * self.level:g} %, {self.method}, {self.blocks} blocks"
        )

    def as_record(self) -> dict[str, object]:
        """Flat, plain values for a table or JSON."""
        return {
            "metric": self.pairs.metric,
            "workload": self.pairs.workload,
            **{PARAM + name: value for name, value in self.pairs.params.items()},
            "arm": self.pairs.arm,
            "reference": self.pairs.reference,
            "ratio": self.ratio,
            "low": self.interval.low,
            "high": self.interval.high,
            "level": self.level,
            "p": self.p,
            "df": self.df,
            "method": self.method,
            "within_low": self.within.low,
            "within_high": self.within.high,
            "bootstrap_low": self.bootstrap.low,
            "bootstrap_high": self.bootstrap.high,
            "sd_block": self.sd_block,
            "sd_boot": self.sd_boot,
            "blocks": self.blocks,
            "boots": self.boots,
            "hosts": self.hosts,
            "samples": self.pairs.samples,
            "invalid": sum(self.pairs.invalid.values()),
            "unpaired": self.pairs.unpaired,
            "outliers": len(self.outliers),
            "notes": "; ".join(self.notes),
        }


def _check_level(level: float) -> None:
    if not 0.5 <= level < 1:
        raise UserError(f"level {level} is not usable", remedy="use a level such as 0.95 or 0.99")


def _ratio(centre: float, half: float) -> Interval:
    if not np.isfinite(half):
        return Interval()
    # Beyond this the exponential overflows, and no bound is meant.
    return Interval(float(np.exp(max(centre - half, -700))), float(np.exp(min(centre + half, 700))))


def _spread(pairs: Pairs) -> tuple[float, int, float]:
    """Standard deviation within boots, its degrees of freedom, sum of 1/blocks over boots."""
    sizes = np.bincount(pairs.boot, minlength=pairs.boots)
    rest = pairs.log_ratio - pairs.boot_means[pairs.boot]
    df = pairs.blocks - pairs.boots
    sd = float(np.sqrt(np.sum(rest**2) / df)) if df else np.nan
    return sd, df, float(np.sum(1 / sizes))


def _host_means(pairs: Pairs) -> Floats:
    sums = np.bincount(pairs.host, pairs.boot_means, pairs.hosts)
    means: Floats = sums / np.bincount(pairs.host, minlength=pairs.hosts)
    return means


def _too_coarse(pairs: Pairs) -> bool:
    """Whether the values are too few different ones for their rounding to average out."""
    if metric_spec(pairs.metric).percentile is None:
        return False
    distinct = min(pairs.table["log_arm"].nunique(), pairs.table["log_reference"].nunique())
    return pairs.blocks >= 3 and distinct < 3


def from_pairs(pairs: Pairs, level: float = 0.95, draws: int = 10_000, seed: int = SEED) -> Effect:
    """The effect behind paired log ratios; see `effect`."""
    _check_level(level)
    shown = None
    if draws:
        hierarchy = Hierarchy(pairs.boot, pairs.host)
        shown = draw_means(pairs.log_ratio[:, None], hierarchy, draws, seed)[:, 0]
    return from_draws(pairs, level, shown)


def from_draws(pairs: Pairs, level: float, shown: Floats | None) -> Effect:
    """The effect behind paired log ratios, with bootstrap draws made already; see `effect`."""
    values = pairs.log_ratio
    same = pairs.blocks > 1 and np.ptp(values) <= _SAME * max(1.0, float(np.abs(values).max()))
    coarse = _too_coarse(pairs)
    if same and not coarse:
        what = (
            "no event was counted in any block"
            if pairs.metric in COUNTS and np.all(values == 0)
            else f"all {pairs.blocks} ratios are the same to the last digit"
        )
        raise MeasurementInvalid(
            f"{pairs.metric}, {pairs.arm} against {pairs.reference}: {what}; "
            "measurements vary, so this is none",
            remedy="look at the raw files: a constant, a cached or a copied figure",
        )
    sd_block, df_block, inverse = _spread(pairs)
    boots = mean_t(pairs.boot_means)
    centre = boots if pairs.hosts == 1 else mean_t(_host_means(pairs))
    mean = float(centre.mean)
    within_se = sd_block * np.sqrt(inverse) / pairs.boots if df_block else np.inf
    within = MeanT(np.asarray(mean), np.asarray(within_se), df_block)
    unit: Unit = "host" if pairs.hosts > 1 else "boot"
    primary = centre
    if pairs.boots == 1:
        unit, primary = ("block", within) if df_block else ("none", centre)
    notes = list(pairs.notes)
    half = float(primary.half_width(level))
    if coarse and half < 2 * BIN_ERROR:
        half = 2 * BIN_ERROR
        notes.append("interval widened to what the histogram's bins resolve")
    if unit == "block":
        notes.append("one boot: the interval says nothing of other boots")
    bootstrap = Interval()
    if shown is not None and pairs.blocks > 1:
        low, high = percentiles(shown[:, None], (0.5 - level / 2, 0.5 + level / 2))[:, 0]
        bootstrap = Interval(float(np.exp(low)), float(np.exp(high)))
    extra = np.nan
    if pairs.boots > 1:
        explained = sd_block**2 * inverse / pairs.boots if df_block else 0.0
        extra = float(np.sqrt(max(0.0, float(boots.se) ** 2 * pairs.boots - explained)))
    p = float(primary.p())
    if half == 2 * BIN_ERROR and abs(mean) <= half:
        p = 1.0
    return Effect(
        pairs=pairs,
        log_mean=mean,
        se=float(primary.se),
        df=primary.df,
        unit=unit,
        level=level,
        interval=_ratio(mean, half),
        p=p,
        within=_ratio(mean, float(within.half_width(level))),
        bootstrap=bootstrap,
        draws=0 if shown is None else shown.size,
        sd_block=sd_block,
        sd_boot=extra,
        notes=tuple(notes),
    )


def effect(
    samples: pd.DataFrame,
    metric: str,
    arm: str,
    reference: str,
    params: Mapping[str, object] | None = None,
    level: float = 0.95,
    draws: int = 10_000,
    seed: int = SEED,
    workload: str | None = None,
) -> Effect:
    """Ratio of an arm to the reference with its intervals.

    Works alike for means, percentiles, rates and counts. A count may be 0: half a count is then
    in every value (`pairing.HALF_COUNT`). Invalid samples are left out and counted; outliers are
    named and never left out.

    Args:
        samples: Tidy samples (`RunFrames.samples`).
        metric: Name in `units.METRICS`.
        arm: Arm above the line.
        reference: Arm below it.
        params: Parameters to hold fixed; points left free are averaged within blocks.
        level: Level of the intervals.
        draws: Resamples of the hierarchical bootstrap; 0 leaves it out.
        seed: Seed of the bootstrap.
        workload: Needed when several workloads measured the metric.

    Raises:
        UserError: unknown metric, unit, arm, parameter, workload or level; mixed units; rows
            that stand twice.
        MeasurementInvalid: no block with both arms valid, a value that cannot be, or ratios
            without any variance.
    """
    pairs = pair(samples, metric, arm, reference, params, workload)
    return from_pairs(pairs, level, draws, seed)


def outliers(pairs: Pairs, threshold: float = OUTLIER_Z) -> pd.DataFrame:
    """Blocks whose log ratio is far from its boot's median, with what is known of them.

    The robust z is (x - median of the boot) / (1.4826 MAD), the MAD taken over all boots; mean
    absolute deviation times 1.2533 where the MAD is 0. Nothing is dropped: the columns say which
    arm was off, whether the block was the first of its boot, and what the ratio would be without.

    Returns:
        The blocks' table with z, off (arm), first (of its boot), ratio_without; empty when no
        block is beyond the threshold.
    """
    table = pairs.table.copy()
    boot = pd.Series(pairs.boot)
    z = {}
    for column in ("log_ratio", "log_arm", "log_reference"):
        values = pd.Series(table[column].to_numpy(dtype=np.float64))
        rest = (values - values.groupby(boot).transform("median")).to_numpy(dtype=np.float64)
        scale = 1.4826 * float(np.median(np.abs(rest)))
        scale = scale or 1.2533 * float(np.mean(np.abs(rest)))
        z[column] = rest / scale if scale else np.zeros_like(rest)
    table["z"] = z["log_ratio"]
    arm_off = np.abs(z["log_arm"]) >= np.abs(z["log_reference"])
    table["off"] = np.where(arm_off, pairs.arm, pairs.reference)
    table["first"] = ~boot.duplicated().to_numpy()
    far = np.abs(z["log_ratio"]) > threshold
    keep = pd.Series(np.where(far, np.nan, pairs.log_ratio)).groupby(boot).mean()
    table["ratio_without"] = float(np.exp(keep.mean()))
    return table[far].reset_index(drop=True)


def adjust(p: Sequence[float] | Floats, method: Literal["holm", "bh"] = "holm") -> Floats:
    """P values adjusted for their number.

    Args:
        p: P values; NaN stands for a test that could not be made and is not counted.
        method: `holm` bounds the chance of any false positive (Holm, 1979); `bh` bounds the
            expected share of false ones among the positives (Benjamini and Hochberg, 1995).

    Raises:
        UserError: the method is not known, or a p value is not between 0 and 1.
    """
    values = np.asarray(p, dtype=np.float64)
    out = np.full(values.shape, np.nan)
    known = np.flatnonzero(np.isfinite(values))
    found = values[known]
    if ((found < 0) | (found > 1)).any():
        raise UserError("a p value is not between 0 and 1", remedy="give p values as fractions")
    order = np.argsort(found, kind="stable")
    count = found.size
    rank = np.arange(1, count + 1)
    if method == "holm":
        stepped = np.maximum.accumulate(found[order] * (count - rank + 1))
    elif method == "bh":
        stepped = np.minimum.accumulate((found[order] * count / rank)[::-1])[::-1]
    else:
        raise UserError(f"unknown adjustment {method!r}", remedy="use holm or bh")
    out[known[order]] = np.minimum(stepped, 1.0)
    return out


@dataclass(frozen=True)
class Level:
    """An arm's own figure with an interval, clustered by boot.

    Attributes:
        value: Geometric mean over boots of geometric means over blocks, in `unit`.
        interval: t on the logs of boot means; unknown with one boot.
        mean: Arithmetic mean over samples.
        samples: Number of samples.
        boots: Number of boots.
        unit: Unit of value, interval and mean.
    """

    value: float
    interval: Interval
    mean: float
    samples: int
    boots: int
    unit: str


def level_of(
    samples: pd.DataFrame,
    metric: str,
    arm: str,
    params: Mapping[str, object] | None = None,
    level: float = 0.95,
    workload: str | None = None,
) -> Level:
    """The figure of one arm.

    Raises:
        UserError: as for `effect`.
        MeasurementInvalid: no valid sample, or a value that cannot be.
    """
    _check_level(level)
    rows, _, _ = select(samples, metric, (arm,), params, workload)
    logs, _ = values_log(rows, metric)
    means = pd.Series(logs).groupby([rows[name].to_numpy() for name in BOOT]).mean()
    found = mean_t(np.asarray(means, dtype=np.float64))
    values = rows["value"].to_numpy(dtype=np.float64)
    return Level(
        value=float(np.exp(found.mean)),
        interval=_ratio(float(found.mean), float(found.half_width(level))),
        mean=float(values.mean()),
        samples=len(rows),
        boots=len(means),
        unit=str(rows["unit"].iloc[0]),
    )


__all__ = [
    "OUTLIER_Z",
    "SEED",
    "Effect",
    "Interval",
    "Level",
    "MeanT",
    "adjust",
    "effect",
    "from_draws",
    "from_pairs",
    "level_of",
    "mean_t",
    "outliers",
]
