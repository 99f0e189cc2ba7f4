"""Percentiles from histograms, against numpy on the expanded latencies."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vringlab.analysis import quantiles
from vringlab.analysis.simulate import Design, Noise, as_samples, simulate
from vringlab.analysis.stats import effect
from vringlab.errors import MeasurementInvalid, UserError

BINS = st.lists(st.tuples(st.floats(0, 1e9), st.integers(0, 20)), min_size=1, max_size=20).filter(
    lambda bins: any(count for _, count in bins)
)


@given(BINS, st.lists(st.floats(0, 1), min_size=1, max_size=5))
def test_quantile_is_numpys_on_the_expanded_list(
    bins: list[tuple[float, int]], q: list[float]
) -> None:
    values, counts = zip(*bins, strict=True)
    known = np.quantile(np.repeat(values, counts), q)
    assert quantiles.quantile(values, counts, q) == pytest.approx(known, rel=1e-9, abs=1e-6)


def test_huge_counts_are_not_expanded() -> None:
    found = quantiles.quantile([1.0, 2.0], [10**12, 10**12], [0.25, 0.75])
    assert found.tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("values", "counts", "error"),
    [
        ([], [], MeasurementInvalid),
        ([1.0], [0], MeasurementInvalid),
        ([-1.0], [1], MeasurementInvalid),
        ([math.nan], [1], MeasurementInvalid),
        ([1.0], [-1], MeasurementInvalid),
        ([1.0], [math.nan], MeasurementInvalid),
        ([1.0, 2.0], [1], UserError),
    ],
)
def test_bad_histograms_are_named(
    values: list[float], counts: list[float], error: type[Exception]
) -> None:
    with pytest.raises(error):
        quantiles.quantile(values, counts, 0.5)


def test_percent_for_a_probability_is_refused() -> None:
    with pytest.raises(UserError, match="probability"):
        quantiles.quantile([1.0], [1], 99)


def run() -> tuple[pd.DataFrame, pd.DataFrame]:
    design = Design(3, 2)
    samples = as_samples(simulate(design, Noise(), 0.5, 1, 1)[:, 0], design, params={"payload": 64})
    bins = [
        {"cell_id": row["cell_id"], "metric": "rtt", "value": row["value"] * k, "count": 10 * k}
        for _, row in samples.iterrows()
        for k in (1, 2, 4)
    ]
    return samples, pd.DataFrame(bins).assign(unit="ns")


def test_percentiles_are_added_once_and_give_effects() -> None:
    samples, histograms = run()
    more = quantiles.add_percentiles(samples, histograms, [50, 99.9])
    assert len(more) == 3 * len(samples)
    assert set(more["metric"]) == {"rtt_mean", "rtt_p50", "rtt_p99.9"}
    assert more["param_payload"].dtype == samples["param_payload"].dtype
    assert quantiles.add_percentiles(more, histograms, [50, 99.9]) is more
    by_mean = effect(more, "rtt_mean", "direct", "queued", draws=0)
    by_median = effect(more, "rtt_p50", "direct", "queued", draws=0)
    assert by_median.ratio == pytest.approx(by_mean.ratio)


def test_invalid_cells_get_no_percentiles() -> None:
    samples, histograms = run()
    samples.loc[0, "valid"] = False
    more = quantiles.add_percentiles(samples, histograms, [50])
    assert len(more) == 2 * len(samples) - 1


def test_a_bad_histogram_is_named_with_its_cell() -> None:
    samples, histograms = run()
    histograms.loc[0, "value"] = -1.0
    with pytest.raises(MeasurementInvalid, match=f"cell {samples['cell_id'].iloc[0]}"):
        quantiles.add_percentiles(samples, histograms)


def test_merged_bins_add_up_without_invalid_cells() -> None:
    samples, histograms = run()
    merged = quantiles.merge(samples, histograms, ["arm", "param_payload"])
    assert merged["count"].sum() == histograms["count"].sum()
    samples.loc[samples["cell_id"] == histograms["cell_id"].iloc[0], "valid"] = False
    fewer = quantiles.merge(samples, histograms, ["arm"])
    assert fewer["count"].sum() == histograms["count"].sum() - 70


def test_frames_that_do_not_fit_are_refused() -> None:
    samples, histograms = run()
    with pytest.raises(UserError, match="mixed units"):
        quantiles.merge(samples, histograms.assign(unit=["ns", "us"] * (len(histograms) // 2)))
    with pytest.raises(UserError, match="lack the columns count"):
        quantiles.add_percentiles(samples, histograms.drop(columns="count"))
    with pytest.raises(UserError, match="no column ring"):
        quantiles.merge(samples, histograms, ["ring"])
