"""Pairs, effects, bootstrap and matrix on data with known answers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as sps

from vringlab.analysis import matrix, power, stats
from vringlab.analysis.bootstrap import Hierarchy, draw_means, percentiles
from vringlab.analysis.pairing import BIN_ERROR, pair
from vringlab.analysis.simulate import Design, Noise, as_samples, simulate
from vringlab.errors import MeasurementInvalid, UserError

ARMS = ("queued", "queued.aa", "direct")


def simulated(
    boots: int = 3,
    blocks: int = 4,
    ratio: float = 1.25,
    seed: int = 7,
    noise: Noise | None = None,
    layout: Any = "swap",
    **more: Any,
) -> pd.DataFrame:
    design = Design(boots, blocks, layout)
    logs = simulate(design, noise or Noise(interaction=0.03), ratio, 1, seed)[:, 0]
    return as_samples(logs, design, **more)


def small(values: dict[tuple[str, int, str], list[float]], **columns: Any) -> pd.DataFrame:
    """Samples from {(boot, block, arm): values}."""
    rows = []
    for (boot, block, arm), figures in values.items():
        for position, value in enumerate(figures):
            rows.append(
                {
                    "run_id": "r",
                    "experiment": "e",
                    "cell_id": f"{boot}-{block}-{arm}-{position}",
                    "block": block,
                    "position": position,
                    "boot": boot,
                    "host": "h",
                    "host_kind": "physical",
                    "arm": arm,
                    "base_kernel": "k",
                    "workload": "w",
                    "metric": "rtt_mean",
                    "value": value,
                    "unit": "ns",
                    "valid": True,
                    "reason": "",
                    "started": f"2024-01-01T00:{block:02d}:{position:02d}Z",
                    "window_s": 4.0,
                }
            )
    frame = pd.DataFrame(rows)
    for name, value in columns.items():
        frame[name] = value
    return frame


FOUR = small(
    {
        ("a", 1, "x"): [100.0],
        ("a", 1, "y"): [110.0],
        ("a", 2, "x"): [100.0],
        ("a", 2, "y"): [130.0],
        ("b", 3, "x"): [300.0],
        ("b", 3, "y"): [345.0],
        ("b", 4, "x"): [310.0],
        ("b", 4, "y"): [400.0],
    }
)


# ------------------------------------------------------------------------------ known answers


def test_primary_interval_is_t_on_boot_means() -> None:
    logs = np.log([[1.1, 1.3], [345 / 300, 400 / 310]])
    means = logs.mean(axis=1)
    found = stats.effect(FOUR, "rtt_mean", "y", "x", draws=0)
    known = sps.ttest_1samp(means, 0.0)
    assert found.log_mean == pytest.approx(means.mean())
    assert found.unit == "boot"
    assert found.df == 1
    assert found.p == pytest.approx(known.pvalue)
    interval = known.confidence_interval(0.95)
    assert found.interval.low == pytest.approx(math.exp(interval.low))
    assert found.interval.high == pytest.approx(math.exp(interval.high))


def test_within_interval_pools_blocks_of_all_boots() -> None:
    logs = np.log([[1.1, 1.3], [345 / 300, 400 / 310]])
    variance = logs.var(axis=1, ddof=1).mean()
    half = sps.t.ppf(0.975, 2) * math.sqrt(variance / 4)
    found = stats.effect(FOUR, "rtt_mean", "y", "x", draws=0)
    assert found.sd_block == pytest.approx(math.sqrt(variance))
    assert found.within.high == pytest.approx(math.exp(logs.mean() + half))


def test_abba_is_averaged_on_the_log_scale() -> None:
    frame = small(
        {("a", 1, "x"): [100.0, 400.0], ("a", 1, "y"): [300.0], ("a", 2, "x"): [100.0]}
        | {("a", 2, "y"): [150.0, 600.0]}
    )
    pairs = pair(frame, "rtt_mean", "y", "x")
    assert np.exp(pairs.log_ratio) == pytest.approx([300 / 200, 300 / 100])
    assert pairs.samples == 6


def test_free_points_are_paired_each_for_itself() -> None:
    one = small({("a", 1, "x"): [100.0], ("a", 1, "y"): [110.0]}, param_payload=64)
    two = small({("a", 1, "x"): [1000.0], ("a", 1, "y"): [2000.0]}, param_payload=4096)
    two["cell_id"] += "-4096"
    both = pd.concat([one, two], ignore_index=True)
    free = pair(both, "rtt_mean", "y", "x")
    assert np.exp(free.log_ratio) == pytest.approx([math.sqrt(1.1 * 2.0)])
    assert "geometric mean over the points of payload" in free.notes
    held = pair(both, "rtt_mean", "y", "x", {"payload": "4096"})
    assert np.exp(held.log_ratio) == pytest.approx([2.0])


def test_unbalanced_boots_weigh_the_same() -> None:
    frame = pd.concat([FOUR, small({("b", 5, "x"): [100.0], ("b", 5, "y"): [100.0]})])
    found = stats.effect(frame, "rtt_mean", "y", "x", draws=0)
    first = np.log([1.1, 1.3]).mean()
    second = np.log([345 / 300, 400 / 310, 1.0]).mean()
    assert found.log_mean == pytest.approx((first + second) / 2)


def test_hosts_are_the_unit_when_there_are_several() -> None:
    parts = [simulated(3, 2, host=host, seed=index) for index, host in enumerate("ABC")]
    for index, part in enumerate(parts):
        part["run_id"] = f"run{index}"
    frame = pd.concat(parts)
    found = stats.effect(frame, "rtt_mean", "direct", "queued")
    means = [stats.effect(p, "rtt_mean", "direct", "queued", draws=0).log_mean for p in parts]
    assert found.unit == "host"
    assert found.hosts == 3
    assert found.boots == 9
    assert found.p == pytest.approx(sps.ttest_1samp(means, 0.0).pvalue)


def test_arms_with_boots_of_their_own_are_paired_across_boots() -> None:
    frame = simulated(4, 3, layout="reboot")
    found = stats.effect(frame, "rtt_mean", "direct", "queued", draws=0)
    assert found.pairs.across_boots
    assert found.boots == 4
    assert found.blocks == 12
    assert found.pairs.table["boot"].iloc[0] == "simulated-b01-direct+simulated-b01-queued"


def test_a_block_split_between_boots_is_not_paired_where_others_are_whole() -> None:
    # A guest died in the middle of block 9, and the rest of it ran in another boot.
    split = small({("a", 9, "x"): [100.0], ("b", 9, "y"): [900.0]})
    found = stats.effect(pd.concat([FOUR, split]), "rtt_mean", "y", "x", draws=0)
    assert found.blocks == 4
    assert found.pairs.unpaired == 2
    assert not found.pairs.across_boots


def test_boots_of_another_run_are_other_boots() -> None:
    other = FOUR.assign(run_id="s", value=FOUR["value"] * 2)
    found = stats.effect(pd.concat([FOUR, other]), "rtt_mean", "y", "x", draws=0)
    assert found.boots == 4
    assert stats.level_of(pd.concat([FOUR, other]), "rtt_mean", "x").boots == 4


def test_one_boot_is_marked_and_one_block_has_no_interval() -> None:
    one = stats.effect(simulated(1, 6), "rtt_mean", "direct", "queued", draws=0)
    assert one.unit == "block"
    assert one.df == 5
    assert any("one boot" in note for note in one.notes)
    single = stats.effect(simulated(1, 1), "rtt_mean", "direct", "queued")
    assert single.unit == "none"
    assert not single.interval.known
    assert single.p == 1
    assert power.smallest_detectable(single) == math.inf
    assert "no interval" in str(single)


def test_level_of_an_arm_is_clustered_by_boot() -> None:
    found = stats.level_of(FOUR, "rtt_mean", "x")
    assert found.value == pytest.approx(math.exp((math.log(100) + np.log([300, 310]).mean()) / 2))
    assert found.boots == 2
    assert found.mean == pytest.approx(202.5)


def test_outliers_are_named_with_their_arm_and_kept() -> None:
    frame = simulated(3, 8, ratio=1.0, noise=Noise(slow=0.0))
    mask = (frame["cell_id"] == "b001-direct").to_numpy()
    frame.loc[mask, "value"] = frame.loc[mask, "value"] * 3
    found = stats.effect(frame, "rtt_mean", "direct", "queued", draws=0)
    far = found.outliers
    assert list(far["block"]) == [1]
    assert far["off"].iloc[0] == "direct"
    assert bool(far["first"].iloc[0])
    assert found.blocks == 24
    assert abs(math.log(far["ratio_without"].iloc[0])) < abs(found.log_mean)


# ------------------------------------------------------------------------------------- counts


def count_samples(x: list[float], y: list[float], window: float = 2.0) -> pd.DataFrame:
    values = {("a", i, "x"): [v] for i, v in enumerate(x)}
    values |= {("b", 10 + i, "x"): [v + 1] for i, v in enumerate(x)}
    values |= {("a", i, "y"): [v] for i, v in enumerate(y)}
    values |= {("b", 10 + i, "y"): [v] for i, v in enumerate(y)}
    return small(values, metric="tx_interrupts", unit="1/s", window_s=window)


def test_a_count_of_zero_stands_by_half_a_count() -> None:
    found = stats.effect(count_samples([1000, 1100], [0, 2]), "tx_interrupts", "y", "x", draws=0)
    first = np.log([0.5 / 2000.5, 4.5 / 2200.5]).mean()
    second = np.log([0.5 / 2002.5, 4.5 / 2202.5]).mean()
    assert found.log_mean == pytest.approx((first + second) / 2)
    assert any("counted no event" in note for note in found.notes)


def test_zero_counts_everywhere_are_no_effect_but_an_error() -> None:
    frame = count_samples([0, 0], [0, 0])
    frame["value"] = 0.0
    with pytest.raises(MeasurementInvalid, match="no event"):
        stats.effect(frame, "tx_interrupts", "y", "x")


def test_zero_count_without_window_is_an_error() -> None:
    with pytest.raises(MeasurementInvalid, match="window is unknown"):
        stats.effect(count_samples([9, 8], [0, 1], math.nan), "tx_interrupts", "y", "x")


# ---------------------------------------------------------------------------------- properties


@settings(max_examples=25)
@given(
    seed=st.integers(0, 10_000),
    scale=st.floats(1e-3, 1e3),
    boots=st.integers(1, 5),
    blocks=st.integers(2, 4),
)
def test_scale_swap_and_order_do_not_matter(
    seed: int, scale: float, boots: int, blocks: int
) -> None:
    frame = simulated(boots, blocks, seed=seed)
    found = stats.effect(frame, "rtt_mean", "direct", "queued", draws=0)
    # Another scale for each boot: pairing cancels what all arms of a boot share.
    factor = {boot: scale * (index + 1) for index, boot in enumerate(frame["boot"].unique())}
    scaled = frame.assign(value=frame["value"] * frame["boot"].map(factor).astype(float))
    swapped = stats.effect(frame, "rtt_mean", "queued", "direct", draws=0)
    shuffled = stats.effect(
        frame.sample(frac=1, random_state=seed), "rtt_mean", "direct", "queued", draws=0
    )
    for other in (stats.effect(scaled, "rtt_mean", "direct", "queued", draws=0), shuffled):
        assert other.ratio == pytest.approx(found.ratio)
        assert other.interval.low == pytest.approx(found.interval.low)
        assert other.p == pytest.approx(found.p)
    assert swapped.ratio == pytest.approx(1 / found.ratio)
    assert swapped.interval.low == pytest.approx(1 / found.interval.high)
    assert swapped.p == pytest.approx(found.p)


def test_order_of_rows_does_not_change_the_bootstrap() -> None:
    frame = simulated()
    one = stats.effect(frame, "rtt_mean", "direct", "queued")
    two = stats.effect(frame.iloc[::-1], "rtt_mean", "direct", "queued")
    assert one.bootstrap == two.bootstrap


@settings(max_examples=50)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_adjusted_p_values(p: list[float]) -> None:
    holm, bh = stats.adjust(p, "holm"), stats.adjust(p, "bh")
    assert bh == pytest.approx(sps.false_discovery_control(p, method="bh"))
    assert (holm >= bh - 1e-12).all()
    assert (bh >= np.asarray(p) - 1e-12).all()
    assert holm[int(np.argmin(p))] == pytest.approx(min(1.0, min(p) * len(p)))


def test_holm_by_hand_and_missing_tests_do_not_count() -> None:
    found = stats.adjust([0.01, math.nan, 0.04, 0.03], "holm")
    assert found[[0, 2, 3]] == pytest.approx([0.03, 0.06, 0.06])
    assert math.isnan(found[1])


# ----------------------------------------------------------------------------------- bootstrap


def test_bootstrap_has_the_variance_that_theory_gives() -> None:
    values = np.random.default_rng(3).normal(size=(4, 5))
    boots = np.repeat(np.arange(4), 5)
    drawn = draw_means(
        values.reshape(-1, 1), Hierarchy(boots, np.zeros(4, dtype=np.int64)), 200_000
    )
    expected = (values.mean(axis=1).var() + values.var(axis=1).mean() / 5) / 4
    assert drawn.mean() == pytest.approx(values.mean(), abs=0.005)
    assert drawn.var() == pytest.approx(expected, rel=0.02)


def test_nested_bootstrap_of_unequal_hosts_and_boots() -> None:
    boot = np.repeat(np.arange(5), [3, 1, 2, 4, 2])
    host = np.array([0, 0, 1, 1, 1])
    values = np.random.default_rng(4).normal(size=12)
    hierarchy = Hierarchy(boot, host)
    drawn = draw_means(values[:, None], hierarchy, 200_000)[:, 0]
    means = [values[boot == b].mean() for b in range(5)]
    spread = [values[boot == b].var() / (boot == b).sum() for b in range(5)]
    centre = np.array([np.mean(means[:2]), np.mean(means[2:])])
    inner = [
        (np.var(means[:2]) + np.mean(spread[:2])) / 2,
        (np.var(means[2:]) + np.mean(spread[2:])) / 3,
    ]
    assert drawn.mean() == pytest.approx(centre.mean(), abs=0.005)
    assert drawn.var() == pytest.approx((centre.var() + np.mean(inner)) / 2, rel=0.02)
    assert hierarchy.block_weights @ values == pytest.approx(centre.mean())


def test_general_and_balanced_draws_agree() -> None:
    rng = np.random.default_rng(5)
    values = rng.normal(size=12)
    boots = np.repeat(np.arange(4), 3)
    flat = draw_means(values[:, None], Hierarchy(boots, np.zeros(4, dtype=np.int64)), 100_000)
    split = draw_means(
        np.concatenate([values, values])[:, None],
        Hierarchy(np.concatenate([boots, boots + 4]), np.repeat([0, 1], 4)),
        100_000,
    )
    # Two equal hosts: the same centre, and half the variance of one.
    assert split.mean() == pytest.approx(flat.mean(), abs=0.01)
    assert split.var() == pytest.approx(flat.var() / 2, rel=0.05)


def test_bootstrap_agrees_with_scipy_on_blocks_of_one_boot() -> None:
    values = np.random.default_rng(6).gumbel(size=30)
    ours = draw_means(
        values[:, None],
        Hierarchy(np.zeros(30, dtype=np.int64), np.zeros(1, dtype=np.int64)),
        60_000,
    )
    theirs = sps.bootstrap(
        (values,), np.mean, n_resamples=60_000, method="percentile", rng=np.random.default_rng(1)
    ).confidence_interval
    low, high = percentiles(ours, (0.025, 0.975))[:, 0]
    assert low == pytest.approx(theirs.low, abs=0.02 * values.std())
    assert high == pytest.approx(theirs.high, abs=0.02 * values.std())


def test_percentiles_are_numpys() -> None:
    values = np.random.default_rng(7).normal(size=(1001, 3))
    points = (0.0, 0.025, 0.5, 0.9751, 1.0)
    assert percentiles(values, points) == pytest.approx(np.quantile(values, points, axis=0))


def test_columns_share_draws_and_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(8).normal(size=(6, 2))
    hierarchy = Hierarchy(np.repeat([0, 1], 3), np.zeros(2, dtype=np.int64))
    both = draw_means(values, hierarchy, 1000)
    assert draw_means(values[:, 1:], hierarchy, 1000) == pytest.approx(both[:, 1:])
    monkeypatch.setattr("vringlab.analysis.bootstrap._BYTES", 1)
    assert draw_means(values, hierarchy, 50).shape == (50, 2)


@pytest.mark.parametrize(
    ("boot", "host"), [([0, 2], [0, 0]), ([], []), ([0, 1], [0]), ([0, 1], [1, 1])]
)
def test_hierarchy_with_gaps_is_refused(boot: list[int], host: list[int]) -> None:
    with pytest.raises(UserError, match="numbered"):
        Hierarchy(np.array(boot, dtype=np.int64), np.array(host, dtype=np.int64))


# ----------------------------------------------------------------------------------- bad input


def broken(**change: Any) -> pd.DataFrame:
    frame = FOUR.copy()
    for column, value in change.items():
        frame[column] = frame[column].astype(object)
        frame.loc[frame.index[1], column] = value
    return frame


@pytest.mark.parametrize(
    ("frame", "error", "message"),
    [
        (broken(value=math.nan), MeasurementInvalid, "finite number: cell a-1-y-0"),
        (broken(value=math.inf), MeasurementInvalid, "finite number"),
        (broken(value=-5.0), MeasurementInvalid, "negative"),
        (broken(value=0.0), MeasurementInvalid, "is 0 in a sample marked valid"),
        (broken(unit="us"), UserError, "mixed units: ns, us"),
        (FOUR.assign(unit="parsec"), UserError, "unknown unit"),
        (FOUR.assign(unit="1/s"), UserError, "does not measure the same"),
        (FOUR.assign(valid=False, reason="short reads"), MeasurementInvalid, "8 x short reads"),
        (FOUR[FOUR["arm"] == "x"], UserError, "no sample is of arm 'y'"),
        (FOUR.drop(columns="boot"), UserError, "lack the columns boot"),
        (pd.concat([FOUR, FOUR]), UserError, "more than once"),
        (FOUR.assign(workload=["w", "v"] * 4), UserError, "not to be mixed"),
        (FOUR.assign(value=100.0), MeasurementInvalid, "the same to the last digit"),
        (FOUR.iloc[[0, 3]], MeasurementInvalid, "no block has a valid sample"),
        (FOUR.iloc[:0], UserError, "no sample is of arm"),
    ],
)
def test_bad_samples_are_named(frame: pd.DataFrame, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        stats.effect(frame, "rtt_mean", "y", "x")
    assert "remedy" in str(caught.value)


def test_one_arm_all_invalid_gives_its_reason() -> None:
    frame = FOUR.copy()
    mask = (frame["arm"] == "y").to_numpy()
    frame.loc[mask, "valid"] = False
    frame.loc[mask, "metric"] = "none"
    frame.loc[mask, "reason"] = "short reads"
    frame.loc[mask, "value"] = math.nan
    with pytest.raises(MeasurementInvalid, match="for arm 'y': 4 x short reads"):
        stats.effect(frame, "rtt_mean", "y", "x")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: stats.effect(FOUR, "latency", "y", "x"), "unknown metric"),
        (lambda: stats.effect(FOUR, "rtt_mean", "x", "x"), "with itself"),
        (lambda: stats.effect(FOUR, "rtt_mean", "y", "x", {"ring": "split"}), "no parameter"),
        (lambda: stats.effect(FOUR, "rtt_mean", "y", "x", level=95), "level 95"),
        (lambda: stats.effect(FOUR, "rtt_mean", "y", "x", draws=-1), "resamples"),
        (lambda: stats.effect(FOUR, "rtt_mean", "y", "x", workload="z"), "workload 'z'"),
        (lambda: stats.adjust([0.5, 2.0]), "not between"),
        (lambda: stats.adjust([0.5], "sidak"), "unknown adjustment"),  # type: ignore[arg-type]
        (lambda: power.noise_floor(FOUR, "rtt_mean", "x"), "no A/A pair"),
        (lambda: power.required_blocks(1.0, 0.1), "ratio of 1"),
        (lambda: power.required_blocks(1.00001, 0.5), "needs over"),
        (lambda: power.required_blocks(1.1, math.nan), "spread is not known"),
    ],
)
def test_bad_requests_are_named(call: Any, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        call()
    assert caught.value.remedy


def test_invalid_samples_and_lone_ones_are_counted() -> None:
    frame = FOUR.copy()
    mask = (frame["cell_id"] == "b-4-y-0").to_numpy()
    frame.loc[mask, "valid"] = False
    frame.loc[mask, "reason"] = "pinning drifted"
    found = stats.effect(frame, "rtt_mean", "y", "x", draws=0)
    assert found.blocks == 3
    assert dict(found.pairs.invalid) == {"pinning drifted": 1}
    assert found.pairs.unpaired == 1


def test_percentiles_in_one_bin_get_the_bins_width() -> None:
    values = {("ab"[i // 2], i, arm): [1000.0] for i in range(4) for arm in "xy"}
    frame = small(values, metric="rtt_p50")
    found = stats.effect(frame, "rtt_p50", "y", "x")
    assert found.interval.high == pytest.approx(math.exp(2 * BIN_ERROR))
    assert found.p == 1
    assert any("bins" in note for note in found.notes)


# --------------------------------------------------------------------------------------- power


def test_power_of_t_is_that_of_a_simulation() -> None:
    rng = np.random.default_rng(9)
    data = rng.normal(1.2, 1.0, size=(40_000, 6))
    hit = (stats.mean_t(data).p() < 0.05).mean()
    assert power.power(1.2 * math.sqrt(6), 5) == pytest.approx(hit, abs=0.01)
    shift = power.detectable_shift(5)
    assert power.power(shift, 5) == pytest.approx(0.8, abs=1e-6)


def test_required_blocks_is_the_fewest() -> None:
    need = power.required_blocks(1.05, 0.08, 0.02, blocks_per_boot=3)
    assert need.blocks == 3 * need.boots
    assert need.power >= 0.8
    assert power.design_power(math.log(1.05), need.boots - 1, 3, 0.08, 0.02) < 0.8
    # The usual normal approximation, which is a little too small for t.
    rough = (1.96 + 0.84) ** 2 * (0.02**2 + 0.08**2 / 3) / math.log(1.05) ** 2
    assert rough < need.boots < rough + 4


def test_required_n_assumes_a_spread_only_for_one_block() -> None:
    single = stats.effect(simulated(1, 1), "rtt_mean", "direct", "queued", draws=0)
    assert power.required_n(single, 1.01).assumed
    assert "assumed" in str(power.required_n(single, 1.01))
    many = stats.effect(simulated(3, 4), "rtt_mean", "direct", "queued", draws=0)
    assert not power.required_n(many, 1.05).assumed
    lone = stats.effect(simulated(4, 1), "rtt_mean", "direct", "queued", draws=0)
    assert power.required_n(lone, 1.05).sd_block == 0


def test_noise_floor_is_the_twins_distance_or_its_far_end() -> None:
    floor = power.noise_floor(simulated(5, 4, seed=1), "rtt_mean", "queued")
    assert not floor.differ
    assert floor.floor == pytest.approx(math.exp(abs(floor.effect.log_mean)))
    assert floor.smallest_detectable > 1
    biased = simulated(5, 4, seed=1)
    mask = biased["arm"] == "queued.aa"
    biased.loc[mask, "value"] *= 1.5
    floor = power.noise_floor(biased, "rtt_mean", "queued")
    assert floor.differ
    assert floor.floor == pytest.approx(floor.effect.interval.high, rel=1e-6)
    assert "beyond chance" in str(floor)


def test_boots_that_agree_by_chance_promise_nothing() -> None:
    values = {("a", 1, "x"): [100.0], ("a", 1, "y"): [80.0], ("a", 2, "x"): [100.0]}
    values |= {("a", 2, "y"): [125.0], ("b", 3, "x"): [100.0], ("b", 3, "y"): [80.0001]}
    values |= {("b", 4, "x"): [100.0], ("b", 4, "y"): [125.0]}
    found = stats.effect(small(values), "rtt_mean", "y", "x", draws=0)
    assert found.se < 1e-5
    assert power.smallest_detectable(found) > 1.5


# -------------------------------------------------------------------------------------- matrix


def test_matrix_keeps_points_that_cannot_be_judged() -> None:
    good = simulated(3, 3, params={"payload": 64})
    bad = simulated(3, 3, params={"payload": 4096}, seed=2)
    bad["cell_id"] += "-4096"
    bad["valid"] = False
    bad["reason"] = "short reads"
    table = matrix.effects(
        pd.concat([good, bad], ignore_index=True), ["rtt_mean"], ["direct", "queued.aa"], "queued"
    )
    assert list(table["param_payload"]) == [64, 64, 4096, 4096]
    assert table["problem"].str.contains("short reads").tolist() == [False, False, True, True]
    p = table["p"].to_numpy(dtype=float)[:2]
    assert table["p_holm"].to_numpy(dtype=float)[:2] == pytest.approx(stats.adjust(p))
    alone = stats.effect(good, "rtt_mean", "direct", "queued", {"payload": 64})
    assert table["bootstrap_low"].iloc[0] == pytest.approx(alone.bootstrap.low)
    assert table["low"].iloc[0] == pytest.approx(alone.interval.low)


def test_matrix_without_any_result_is_still_a_table() -> None:
    frame = simulated(2, 2).assign(valid=False)
    table = matrix.effects(frame, ["rtt_mean"], ["direct"], "queued")
    assert table["p_holm"].isna().all()
