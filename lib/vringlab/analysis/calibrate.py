"""How often the statistics are wrong, on simulated data where the truth is known.

Each data set holds a reference, its twin and an arm. Four scenarios:

    same boots          all arms in each boot; the boot's offset is shared and cancels
    arm x boot          as before, and each arm does better or worse from boot to boot
    arm x boot, bimodal as before, the difference from boot to boot being one of two modes
    own boots           a boot of its own for each arm, as most comparisons are published

On the same data: the primary interval and the verdict's rule; the other intervals that are shown
beside it; and tests that take pings or runs for independent. Those are Mann-Whitney over the
messages of all runs, Welch's t over runs, and a permutation test of the difference of means over
pooled runs, as Firecracker's A/B test makes it (tests/framework/ab_test.py, which asks for a p
value below 1 % and a minimum strength on top; here all are held at 5 %).

Everything is reckoned for many data sets at once, by the functions that `stats.effect`,
`power.noise_floor` and `sequential.decide` call themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import pandas as pd
from scipy import stats as sps

from vringlab.analysis.bootstrap import Hierarchy, draw_means, percentiles
from vringlab.analysis.boundaries import Spending, always_valid_limit
from vringlab.analysis.pairing import Floats
from vringlab.analysis.power import floor_of
from vringlab.analysis.sequential import CONTINUE, EFFECT, FIRST_LOOK, SequentialPlan, walk
from vringlab.analysis.simulate import (
    ARM,
    REFERENCE,
    TWIN,
    Design,
    Noise,
    messages,
    simulate,
)
from vringlab.analysis.stats import mean_t
from vringlab.errors import UserError

Scenario = Literal["same boots", "arm x boot", "arm x boot, bimodal", "own boots"]
SCENARIOS: tuple[Scenario, ...] = ("same boots", "arm x boot", "arm x boot, bimodal", "own boots")

#: Boots x blocks in each: two small designs, one of the usual size, and the mail's 50 runs.
DESIGNS = (Design(2, 3), Design(3, 4), Design(5, 5), Design(10, 5))

#: True ratios for power.
RATIOS = (1.05, 1.10, 1.20, 1.60)

LEVEL = 0.95

#: Standard deviation of an arm's offset within a boot in the scenario `arm x boot`.
INTERACTION = 0.03

PRIMARY = "t on boot means"
VERDICT = "verdict (beyond the A/A pair)"
BOOTSTRAP = "hierarchical bootstrap"
BLOCKS = "t on blocks"
WELCH = "Welch over runs"
PERMUTATION = "permutation over runs"
PINGS = "Mann-Whitney over pings"

#: Methods that know of boots; the others take blocks, runs or pings for independent.
OURS = (PRIMARY, VERDICT)
METHODS = (*OURS, BOOTSTRAP, BLOCKS, WELCH, PERMUTATION, PINGS)

_PERMUTATIONS = 999
_DRAWS = 2_000
_CHUNK = 250


@dataclass(frozen=True)
class CalibrationResult:
    """What a calibration found.

    Attributes:
        table: One row per scenario, design, true ratio and method: scenario, design, boots,
            blocks, ratio, method, rejected (share of data sets), low, high (Monte-Carlo interval
            of that share, 95 %), coverage (of the method's interval; NaN where it has none),
            datasets.
        sequential: One row per interaction, true ratio and rule of stopping; see
            `calibrate_sequential`. Empty when not asked for.
        datasets: Data sets per scenario and design that all methods shared.
        seed: Seed.
        noise: Spreads of the scenario `same boots`.
    """

    table: pd.DataFrame
    sequential: pd.DataFrame
    datasets: int
    seed: int
    noise: Noise

    @property
    def false_positives(self) -> pd.DataFrame:
        """Rows of equal arms."""
        return self.table[self.table["ratio"] == 1.0]

    @property
    def power(self) -> pd.DataFrame:
        """Rows of true effects."""
        return self.table[self.table["ratio"] != 1.0]

    @property
    def problems(self) -> tuple[str, ...]:
        """Where the primary interval or the verdict misses its promise beyond chance.

        The promise: at most 5 % false positives, coverage of 93 to 97 %. A share counts as off
        when its Monte-Carlo interval lies wholly outside; the interval's level allows for the
        number of shares that are looked at.
        """
        ours = self.table[self.table["method"].isin(OURS)]
        level = 1 - 0.05 / max(1, 2 * len(ours))
        found = []
        for row in ours.to_dict("records"):
            where = f"{row['method']}, {row['scenario']}, {row['design']}, ratio {row['ratio']:g}"
            count = int(row["datasets"])
            low, _ = share_interval(float(row["rejected"]), count, level)
            if row["ratio"] == 1.0 and low > 1 - LEVEL:
                found.append(f"{where}: {100 * row['rejected']:.1f} % false positives")
            if np.isfinite(row["coverage"]):
                low, high = share_interval(float(row["coverage"]), count, level)
                if high < 0.93 or low > 0.97:
                    found.append(f"{where}: coverage {100 * row['coverage']:.1f} %")
        return tuple(found)


def share_interval(share: float, count: int, level: float = 0.95) -> tuple[float, float]:
    """Wilson's interval of a simulated share."""
    found = sps.binomtest(round(share * count), count).proportion_ci(level, "wilson")
    return float(found.low), float(found.high)


# ------------------------------------------------------------------------------------- methods


@dataclass(frozen=True)
class _Found:
    rejected: Floats
    covered: Floats | None = None


def _interval(mean: Floats, half: Floats, p: Floats, truth: float) -> _Found:
    return _Found(
        (p < 1 - LEVEL).astype(np.float64), (np.abs(mean - truth) <= half).astype(np.float64)
    )


def _primary(logs: Floats, truth: float) -> dict[str, _Found]:
    """Primary interval and verdict, from logs of shape (arms, datasets, boots, blocks)."""
    means = (logs[ARM] - logs[REFERENCE]).mean(axis=-1)
    found = mean_t(means)
    half = found.half_width(LEVEL)
    equal = mean_t((logs[TWIN] - logs[REFERENCE]).mean(axis=-1))
    floor = floor_of(equal.mean, equal.half_width(LEVEL))
    beyond = np.abs(found.mean) - half > floor
    return {
        PRIMARY: _interval(found.mean, half, found.p(), truth),
        VERDICT: _Found(beyond.astype(np.float64)),
    }


def _bootstrap(logs: Floats, truth: float, seed: np.random.SeedSequence) -> _Found:
    ratios = logs[ARM] - logs[REFERENCE]
    datasets, boots, blocks = ratios.shape
    hierarchy = Hierarchy(np.repeat(np.arange(boots), blocks), np.zeros(boots, dtype=np.int64))
    drawn = draw_means(ratios.reshape(datasets, -1).T, hierarchy, _DRAWS, seed)
    low, high = percentiles(drawn, (0.5 - LEVEL / 2, 0.5 + LEVEL / 2))
    out = (low > 0) | (high < 0)
    covers = (low <= truth) & (truth <= high)
    return _Found(out.astype(np.float64), covers.astype(np.float64))


def _blocks(logs: Floats, truth: float) -> _Found:
    ratios = logs[ARM] - logs[REFERENCE]
    found = mean_t(ratios.reshape(ratios.shape[0], -1))
    return _interval(found.mean, found.half_width(LEVEL), found.p(), truth)


def _welch(logs: Floats) -> _Found:
    one, two = (np.exp(logs[arm]).reshape(logs.shape[1], -1) for arm in (ARM, REFERENCE))
    p = np.asarray(sps.ttest_ind(one, two, axis=1, equal_var=False).pvalue)
    return _Found((p < 1 - LEVEL).astype(np.float64))


def _permutation(logs: Floats, rng: np.random.Generator) -> _Found:
    """Two-sided permutation test of the difference of means, one set of permutations for all."""
    one, two = (np.exp(logs[arm]).reshape(logs.shape[1], -1) for arm in (ARM, REFERENCE))
    pooled = np.concatenate([one, two], axis=1)
    count = one.shape[1]
    labels = np.repeat([1.0, -1.0], count) / count
    shuffled = rng.permuted(np.tile(labels, (_PERMUTATIONS, 1)), axis=1)
    seen = np.abs(pooled @ labels)
    # Rounding must not make a permutation that equals the data look smaller than it.
    as_large = np.abs(pooled @ shuffled.T) >= seen[:, None] * (1 - 1e-12)
    p = (1 + as_large.sum(axis=1)) / (1 + _PERMUTATIONS)
    return _Found((p <= 1 - LEVEL).astype(np.float64))


def _pings(logs: Floats, noise: Noise, count: int, rng: np.random.Generator) -> _Found:
    shares = []
    for start in range(0, logs.shape[1], _CHUNK):
        part = messages(logs[[ARM, REFERENCE], start : start + _CHUNK], noise, count, rng)
        flat = part.reshape(2, part.shape[1], -1)
        p = sps.mannwhitneyu(flat[0], flat[1], axis=1, method="asymptotic").pvalue
        shares.append(np.asarray(p) < 1 - LEVEL)
    return _Found(np.concatenate(shares).astype(np.float64))


# ---------------------------------------------------------------------------------- simulation


def scenario_logs(
    scenario: Scenario,
    design: Design,
    noise: Noise,
    ratio: float,
    datasets: int,
    seed: np.random.SeedSequence,
) -> Floats:
    """Simulated logs of one scenario, shape (arms, datasets, boots, blocks)."""
    rng = np.random.default_rng(seed)
    if scenario == "own boots":
        return simulate(replace(design, layout="reboot"), noise, ratio, datasets, rng)
    if scenario == "arm x boot":
        noise = replace(noise, interaction=INTERACTION)
    logs = simulate(design, noise, ratio, datasets, rng)
    if scenario == "arm x boot, bimodal":
        slow = rng.random((*logs.shape[:3], 1)) < noise.slow_share
        logs = logs + noise.slow * slow
    return logs


def _rows(
    scenario: Scenario, design: Design, ratio: float, found: dict[str, _Found]
) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for method, result in found.items():
        datasets = result.rejected.size
        share = float(result.rejected.mean())
        low, high = share_interval(share, datasets)
        covered = np.nan if result.covered is None else float(result.covered.mean())
        rows.append(
            {
                "scenario": scenario,
                "design": str(design),
                "boots": design.boots,
                "blocks": design.blocks,
                "ratio": ratio,
                "method": method,
                "rejected": share,
                "low": low,
                "high": high,
                "coverage": covered,
                "datasets": datasets,
            }
        )
    return rows


def calibrate(
    datasets: int = 2_000,
    seed: int = 1,
    designs: Sequence[Design] = DESIGNS,
    scenarios: Sequence[Scenario] = SCENARIOS,
    ratios: Sequence[float] = RATIOS,
    noise: Noise | None = None,
    pings: int = 50,
    more: int = 5,
    sequential: bool = True,
    progress: Callable[[str], None] = lambda _: None,
) -> CalibrationResult:
    """False positives, coverage and power by simulation.

    Args:
        datasets: Data sets per design and scenario.
        seed: Seed; equal seeds give equal tables.
        designs: Designs of two or more boots.
        scenarios: Scenarios.
        ratios: True ratios for power, of the primary interval, the verdict and Welch's t.
        noise: Spreads; those of `Noise()` when not given.
        pings: Messages per run for Mann-Whitney. A real run has a thousand times as many, which
            makes that test worse.
        more: The primary interval and the verdict cost next to nothing, and are held against
            `more` times as many data sets, of which the first `datasets` are those of the others.
        sequential: Whether to calibrate stopping too.
        progress: Called with each scenario and design as it begins.

    Raises:
        UserError: fewer than 100 data sets, or a design of one boot.
    """
    if datasets < 100 or more < 1:
        raise UserError(
            f"{datasets} data sets say nothing of 5 %", remedy="use 100 or more; 2,000 is usual"
        )
    if any(design.boots < 2 for design in designs):
        raise UserError(
            "a design of one boot has no interval on boot means", remedy="use two boots or more"
        )
    spreads = noise or Noise()
    rows: list[dict[str, object]] = []
    for scenario in scenarios:
        for design in designs:
            progress(f"{scenario}, {design}")
            # A seed for each part, so that leaving one out does not change the others.
            name = (SCENARIOS.index(scenario), design.boots, design.blocks)
            data, drawn, other = np.random.SeedSequence((seed, *name)).spawn(3)
            rng = np.random.default_rng(other)
            logs = scenario_logs(scenario, design, spreads, 1.0, more * datasets, data)
            found = _primary(logs, 0.0)
            shared = logs[:, :datasets]
            found[BOOTSTRAP] = _bootstrap(shared, 0.0, drawn)
            found[BLOCKS] = _blocks(shared, 0.0)
            found[WELCH] = _welch(shared)
            found[PERMUTATION] = _permutation(shared, rng)
            found[PINGS] = _pings(shared, spreads, pings, rng)
            rows += _rows(scenario, design, 1.0, found)
            for ratio in ratios:
                logs = scenario_logs(scenario, design, spreads, ratio, more * datasets, data)
                found = _primary(logs, float(np.log(ratio)))
                found[WELCH] = _welch(logs[:, :datasets])
                rows += _rows(scenario, design, ratio, found)
    steps = pd.DataFrame()
    if sequential:
        progress("sequential stopping")
        steps = calibrate_sequential(datasets, seed, noise=spreads)
    return CalibrationResult(pd.DataFrame(rows), steps, datasets, seed, spreads)


# ---------------------------------------------------------------------------------- sequential

_ALWAYS_VALID = "always valid"
_SPENDINGS: tuple[Spending, ...] = ("power", "obrien-fleming", "pocock")


def _always_valid(units: Floats) -> tuple[Floats, Floats, Floats, Floats]:
    """Units used, whether an effect was found, mean and half width, of the mixture t test."""
    count, have = units.shape
    used = np.full(count, float(have))
    hit = np.zeros(count, dtype=np.bool_)
    centre, half = np.zeros(count), np.zeros(count)
    for n in range(FIRST_LOOK, have + 1):
        now = mean_t(units[:, :n])
        width = always_valid_limit(n, 1 - LEVEL) * now.se
        centre[~hit], half[~hit] = now.mean[~hit], width[~hit]
        new = (np.abs(now.mean) > width) & ~hit
        used[new] = n
        hit |= new
    return used, hit.astype(np.float64), centre, half


def calibrate_sequential(
    datasets: int = 2_000,
    seed: int = 1,
    design: Design = DESIGNS[-1],
    ratios: Sequence[float] = (1.0, *RATIOS),
    noise: Noise | None = None,
) -> pd.DataFrame:
    """Rules of stopping against the fixed full design, on the same data.

    For equal arms the claimed ratio is 1.2; else it is the true one.

    Returns:
        One row per interaction, ratio and rule: interaction, ratio, rule, effect (share that
        found one), fixed (share of the full design), agree (share with the same finding and
        sign), units (mean number of boots used), saved (share of the full design not measured),
        coverage of the interval at the stop.
    """
    spreads = noise or Noise()
    rows = []
    for interaction in (0.0, INTERACTION):
        for ratio in ratios:
            name = (seed, round(1000 * interaction), round(1000 * ratio))
            logs = simulate(
                design,
                replace(spreads, interaction=interaction),
                ratio,
                datasets,
                np.random.SeedSequence(name),
            )
            units = (logs[ARM] - logs[REFERENCE]).mean(axis=-1)
            full = mean_t(units)
            fixed = np.sign(full.mean) * (full.p() < 1 - LEVEL)
            rules: dict[str, tuple[Floats, Floats, Floats, Floats]] = {}
            for spending in _SPENDINGS:
                plan = SequentialPlan(
                    design.boots * design.blocks,
                    spending=spending,
                    blocks_per_boot=design.blocks,
                    claimed=1.2 if ratio == 1.0 else ratio,
                )
                end = walk(units, plan)
                assert not (end.outcome == CONTINUE).any()
                hit = (end.outcome == EFFECT).astype(np.float64)
                rules[spending] = (end.units.astype(np.float64), hit, end.mean, end.half)
            rules[_ALWAYS_VALID] = _always_valid(units)
            for rule, (used, hit, mean, half) in rules.items():
                rows.append(
                    {
                        "interaction": interaction,
                        "ratio": ratio,
                        "rule": rule,
                        "effect": float(hit.mean()),
                        "fixed": float(np.abs(fixed).mean()),
                        "agree": float((np.sign(mean) * hit == fixed).mean()),
                        "units": float(used.mean()),
                        "saved": 1 - float(used.mean()) / design.boots,
                        "coverage": float((np.abs(mean - np.log(ratio)) <= half).mean()),
                    }
                )
    return pd.DataFrame(rows)
