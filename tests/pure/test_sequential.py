"""Limits against published and simulated ones; stopping against the fixed design."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as sps

from vringlab.analysis.boundaries import Spending, always_valid_limit, spent, t_limits
from vringlab.analysis.sequential import (
    EFFECT,
    HOPELESS,
    NO_EFFECT,
    SequentialPlan,
    decide,
    walk,
)
from vringlab.analysis.simulate import ARM, REFERENCE, Design, Noise, as_samples, simulate
from vringlab.analysis.stats import effect, mean_t
from vringlab.errors import MeasurementInvalid, UserError

SPENDINGS: tuple[Spending, ...] = ("power", "obrien-fleming", "pocock")


def t_paths(datasets: int, units: int, seed: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """|t| at 2, 3, ... units of normal data with mean 0."""
    x = np.random.default_rng(seed).standard_normal((datasets, units))
    n = np.arange(2, units + 1)
    mean = np.cumsum(x, axis=1)[:, 1:] / n
    variance = (np.cumsum(x * x, axis=1)[:, 1:] - n * mean**2) / (n - 1)
    return np.abs(mean) / np.sqrt(variance / n)


# -------------------------------------------------------------------------------------- limits


@pytest.mark.parametrize("spending", SPENDINGS)
def test_limits_spend_alpha_as_the_function_says(spending: Spending) -> None:
    looks = (3, 4, 6, 7, 8)
    limits = np.array(t_limits(8, looks, 0.05, spending))
    crossed = t_paths(200_000, 8, 1)[:, np.array(looks) - 2] > limits
    for index, look in enumerate(looks):
        share = crossed[:, : index + 1].any(axis=1).mean()
        # Four standard errors of 200,000 draws at 5 % are 0.2 %.
        assert share == pytest.approx(spent(look / 8, 0.05, spending), abs=0.002)


def test_limits_of_many_units_are_the_published_normal_ones() -> None:
    # O'Brien-Fleming type, alpha 0.05 two-sided, five equal looks: 4.877 3.357 2.680 2.290 2.031
    # (Reboussin, DeMets, Kim and Lan, Controlled Clinical Trials 21, 2000).
    looks = (20, 40, 60, 80, 100)
    limits = t_limits(100, looks, 0.05, "obrien-fleming")
    normal = sps.norm.isf(sps.t.sf(limits, np.array(looks) - 1))
    assert normal == pytest.approx([4.877, 3.357, 2.680, 2.290, 2.031], rel=0.015)


def test_one_look_at_the_end_is_the_usual_t_test() -> None:
    assert t_limits(6, (6,))[0] == pytest.approx(sps.t.ppf(0.975, 5))


@given(st.floats(0, 1), st.floats(0, 1), st.sampled_from(SPENDINGS))
def test_spending_grows_to_alpha(one: float, two: float, spending: Spending) -> None:
    low, high = sorted((one, two))
    assert 0 <= spent(low, 0.05, spending) <= spent(high, 0.05, spending) <= 0.05 + 1e-12
    assert spent(1, 0.05, spending) == pytest.approx(0.05)


def test_always_valid_limit_is_kept_and_costs_power() -> None:
    paths = t_paths(100_000, 10, 2)
    limits = np.array([always_valid_limit(n) for n in range(2, 11)])
    assert (paths > limits).any(axis=1).mean() < 0.05
    assert limits[-1] > t_limits(10, tuple(range(3, 11)))[-1]
    assert always_valid_limit(1) == math.inf


@pytest.mark.parametrize(
    ("units", "looks", "alpha"),
    [(10, (), 0.05), (10, (3, 3), 0.05), (10, (1, 5), 0.05), (10, (3, 11), 0.05), (10, (5,), 5)],
)
def test_bad_looks_are_refused(units: int, looks: tuple[int, ...], alpha: float) -> None:
    with pytest.raises(UserError) as caught:
        t_limits(units, looks, alpha)
    assert caught.value.remedy


# ------------------------------------------------------------------- against the fixed design


def stopped(ratio: float, claimed: float, interaction: float = 0.03, datasets: int = 3000) -> Any:
    design = Design(10, 5)
    logs = simulate(design, Noise(interaction=interaction), ratio, datasets, 11)
    units = (logs[ARM] - logs[REFERENCE]).mean(axis=-1)
    found = walk(units, SequentialPlan(50, blocks_per_boot=5, claimed=claimed))
    full = mean_t(units)
    fixed = np.sign(full.mean) * (full.p() < 0.05)
    early = np.sign(found.mean) * (found.outcome == EFFECT)
    return found, fixed, early


@pytest.mark.parametrize("interaction", [0.0, 0.03])
def test_false_positives_are_kept(interaction: float) -> None:
    design = Design(10, 5)
    logs = simulate(design, Noise(interaction=interaction), 1.0, 4000, 12)
    units = (logs[ARM] - logs[REFERENCE]).mean(axis=-1)
    found = walk(units, SequentialPlan(50, blocks_per_boot=5))
    share = (found.outcome == EFFECT).mean()
    # 5 % and four standard errors; and it must not be 0 either, or nothing is tested.
    assert 0.02 < share < 0.064
    assert (np.abs(found.mean) <= found.half).mean() > 0.936


@pytest.mark.parametrize(
    ("ratio", "claimed", "most_units", "least_agreement"),
    [(1.0, 1.2, 8.0, 0.93), (1.2, 1.2, 5.5, 0.99), (1.6, 1.6, 4.0, 0.99)],
)
def test_same_verdict_with_far_fewer_boots(
    ratio: float, claimed: float, most_units: float, least_agreement: float
) -> None:
    found, fixed, early = stopped(ratio, claimed)
    assert (fixed == early).mean() > least_agreement
    assert found.units.mean() < most_units


def test_intervals_at_the_stop_cover_the_truth() -> None:
    for ratio in (1.0, 1.05, 1.2):
        found, _, _ = stopped(ratio, 1.2, datasets=2000)
        assert (np.abs(found.mean - math.log(ratio)) <= found.half).mean() > 0.93


def test_hopeless_and_no_effect_are_found() -> None:
    found, _, _ = stopped(1.0, 1.2)
    shares = np.bincount(found.outcome, minlength=5) / found.outcome.size
    assert shares[NO_EFFECT] > 0.5
    assert shares[HOPELESS] > 0.05


# -------------------------------------------------------------------------------------- decide


def samples(boots: int = 6, blocks: int = 2, ratio: float = 1.3, seed: int = 3) -> pd.DataFrame:
    design = Design(boots, blocks)
    return as_samples(simulate(design, Noise(), ratio, 1, seed)[:, 0], design)


PLAN = SequentialPlan(12, blocks_per_boot=2, claimed=1.3)


def at(frame: pd.DataFrame, plan: SequentialPlan = PLAN, **more: Any) -> Any:
    return decide(frame, plan, "rtt_mean", "direct", "queued", **more)


def test_decision_after_each_block_of_a_run() -> None:
    frame = samples()
    seen = [at(frame[frame["block"] <= block]) for block in range(1, 13)]
    first = next(index for index, decision in enumerate(seen) if decision.stop)
    assert [d.stop for d in seen] == [index >= first for index in range(12)]
    # Once stopped, more samples change nothing.
    assert {d.units for d in seen[first:]} == {seen[first].units}
    assert {d.interval for d in seen[first:]} == {seen[first].interval}
    assert seen[first].outcome == "effect"
    assert seen[first].interval.low > 1
    assert 0 < seen[first].spent < 0.05
    assert seen[0].more_blocks == 6
    assert seen[1].more_blocks == 4
    assert "first look at 3" in seen[1].why


def test_a_boot_in_progress_is_not_counted() -> None:
    frame = samples()
    assert at(frame[frame["block"] <= 7]).units == 3
    assert at(frame[frame["block"] <= 7]).interval == at(frame[frame["block"] <= 6]).interval


def test_interval_at_a_look_is_wider_than_the_fixed_one() -> None:
    frame = samples(4, 2, ratio=1.0)
    decision = at(frame)
    fixed = effect(frame, "rtt_mean", "direct", "queued", draws=0)
    assert decision.ratio == pytest.approx(fixed.ratio)
    assert decision.interval.high > fixed.interval.high


def test_budget_ends_it() -> None:
    plan = SequentialPlan(6, blocks_per_boot=2)
    frame = samples(3, 2, ratio=1.0)
    decision = at(frame, plan)
    assert decision.stop
    assert decision.outcome == "budget"
    assert decision.more_blocks == 0
    assert decision.spent == pytest.approx(0.05)


def test_noise_floor_must_be_passed() -> None:
    frame = samples()
    assert at(frame).outcome == "effect"
    assert at(frame, floor=2.0).outcome != "effect"


def test_blocks_of_one_boot_can_be_the_unit() -> None:
    plan = SequentialPlan(12, unit="block", claimed=1.3)
    decision = at(samples(1, 12), plan)
    assert decision.outcome == "effect"
    assert decision.unit == "block"
    assert at(samples(2, 6), plan).notes


def test_looks_can_be_a_number_or_a_list() -> None:
    assert SequentialPlan(10, looks=2).schedule == (5, 10)
    assert SequentialPlan(10, looks=(4, 10)).schedule == (4, 10)
    assert SequentialPlan(5).schedule == (3, 4, 5)


def test_a_first_boot_without_valid_samples_does_not_stop_it() -> None:
    frame = samples()
    frame.loc[frame["block"] <= 2, "valid"] = False
    assert not at(frame[frame["block"] <= 2]).stop
    assert at(frame[frame["block"] <= 8]).units == 3
    frame["valid"] = False
    with pytest.raises(MeasurementInvalid, match="no valid sample"):
        at(frame)


def test_no_samples_yet() -> None:
    assert not at(samples().iloc[:0]).stop


def test_zero_variance_is_refused() -> None:
    frame = samples()
    frame["value"] = 100.0
    with pytest.raises(MeasurementInvalid, match="last digit"):
        at(frame)


@pytest.mark.parametrize(
    "plan",
    [
        {"max_blocks": 2},
        {"max_blocks": 8, "blocks_per_boot": 4},
        {"max_blocks": 9, "blocks_per_boot": 0},
        {"max_blocks": 9, "claimed": -1.0},
        {"max_blocks": 9, "claimed": math.nan},
        {"max_blocks": 9, "looks": 0},
        {"max_blocks": 9, "looks": (9, 3)},
        {"max_blocks": 9, "alpha": 2.0},
        {"max_blocks": 9, "spending": "all"},
    ],
)
def test_bad_plans_are_refused(plan: Any) -> None:
    with pytest.raises(UserError) as caught:
        SequentialPlan(**plan)
    assert caught.value.remedy


@settings(max_examples=20)
@given(st.integers(0, 1000))
def test_swapping_the_arms_inverts_the_decision(seed: int) -> None:
    frame = samples(seed=seed)
    one = at(frame, SequentialPlan(12, blocks_per_boot=2))
    two = decide(frame, SequentialPlan(12, blocks_per_boot=2), "rtt_mean", "queued", "direct")
    assert one.outcome == two.outcome
    assert one.interval.low == pytest.approx(1 / two.interval.high)
