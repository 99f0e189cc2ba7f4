"""Percentiles of latencies from histograms, for one cell or merged over many.

A histogram is a list of (value, count) with each count at its bin's midpoint. A percentile is
the one that the expanded list of latencies would have under numpy's default definition (linear
interpolation between order statistics, type 7 of Hyndman and Fan, "Sample Quantiles in
Statistical Packages", 1996), computed without expanding it: ten million latencies in a thousand
bins cost a thousand steps. Its error is that of the bins, for fio at most 1/128.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd

from vringlab.analysis.pairing import PARAM, Floats
from vringlab.errors import MeasurementInvalid, UserError

_COLUMNS = ("cell_id", "metric", "value", "count", "unit")


def _checked(values: npt.ArrayLike, counts: npt.ArrayLike) -> tuple[Floats, npt.NDArray[np.int64]]:
    found = np.asarray(values, dtype=np.float64)
    number = np.asarray(counts)
    if found.shape != number.shape or found.ndim != 1:
        raise UserError("a histogram needs one count per value", remedy="give two equal columns")
    if not np.isfinite(found).all() or (found < 0).any():
        raise MeasurementInvalid(
            "a histogram has a latency that is negative or no number",
            remedy="mend the parser of the tool's output; the sample is invalid",
        )
    if not np.isfinite(number).all() or (number < 0).any():
        raise MeasurementInvalid(
            "a histogram has a negative count",
            remedy="mend the parser of the tool's output; the sample is invalid",
        )
    kept = number > 0
    if not kept.any():
        raise MeasurementInvalid(
            "a histogram is empty", remedy="the tool measured nothing: look at its raw output"
        )
    return found[kept], number[kept].astype(np.int64)


def quantile(values: npt.ArrayLike, counts: npt.ArrayLike, q: float | Sequence[float]) -> Floats:
    """Quantiles of a histogram, equal to `numpy.quantile(numpy.repeat(values, counts), q)`.

    Args:
        values: Bin midpoints in any order, shape (bins,).
        counts: Counts, shape (bins,).
        q: Probabilities between 0 and 1.

    Returns:
        Shape of `q`, in the unit of the values.

    Raises:
        UserError: shapes differ, or a probability is not between 0 and 1.
        MeasurementInvalid: no count at all, or a value or count that cannot be.
    """
    found, number = _checked(values, counts)
    share = np.asarray(q, dtype=np.float64)
    if not ((share >= 0) & (share <= 1)).all():
        raise UserError(
            f"{q} is no probability between 0 and 1", remedy="the 99th percentile is 0.99"
        )
    order = np.argsort(found, kind="stable")
    found = found[order]
    ends = np.cumsum(number[order])
    place = share * (ends[-1] - 1)
    below = np.floor(place).astype(np.int64)
    above = np.minimum(below + 1, ends[-1] - 1)
    low = found[np.searchsorted(ends, below, side="right")]
    high = found[np.searchsorted(ends, above, side="right")]
    return np.asarray(low + (high - low) * (place - below))


def _check_frame(histograms: pd.DataFrame) -> None:
    lacking = [column for column in _COLUMNS if column not in histograms.columns]
    if lacking:
        raise UserError(
            f"histograms lack the columns {', '.join(lacking)}",
            remedy="give a frame as vringlab.analysis.frames loads it",
        )
    mixed = histograms.groupby("metric")["unit"].nunique()
    if (mixed > 1).any():
        raise UserError(
            f"histograms of {', '.join(mixed.index[mixed > 1])} have mixed units",
            remedy="bring all bins of a metric to one unit before they are merged",
        )


def merge(
    samples: pd.DataFrame,
    histograms: pd.DataFrame,
    by: Sequence[str] = ("arm",),
    metric: str = "rtt",
) -> pd.DataFrame:
    """Histograms of valid cells, merged bin by bin, for distributions over a whole run.

    Messages of one run are not independent, so a merged histogram is for showing and for point
    figures; intervals come from per-cell percentiles (`add_percentiles`).

    Args:
        samples: Tidy samples, for the labels and validity of cells.
        histograms: One row per bin.
        by: Columns of samples to keep apart, such as arm and param_payload.
        metric: Metric of the histograms.

    Returns:
        Columns `by`, value, count, unit, sorted.

    Raises:
        UserError: columns are missing, or units are mixed.
    """
    _check_frame(histograms)
    lacking = [name for name in by if name not in samples.columns]
    if lacking:
        raise UserError(
            f"samples have no column {', '.join(lacking)}",
            remedy="columns here: " + ", ".join(map(str, samples.columns)),
        )
    valid = samples[samples["valid"].astype(bool)]
    cells = valid[["cell_id", *by]].drop_duplicates()
    joined = histograms[histograms["metric"] == metric].merge(cells, on="cell_id")
    keys = [*by, "value", "unit"]
    merged = joined.groupby(keys, sort=True, dropna=False)["count"].sum().reset_index()
    return merged[[*by, "value", "count", "unit"]]


def _name(metric: str, percent: float) -> str:
    return f"{metric}_p{percent:g}"


def add_percentiles(
    samples: pd.DataFrame,
    histograms: pd.DataFrame,
    percents: Sequence[float] = (1, 50, 90, 99, 99.9),
    metric: str = "rtt",
) -> pd.DataFrame:
    """Samples with percentiles of each cell's histogram where the tool gave none itself.

    Args:
        samples: Tidy samples.
        histograms: One row per bin.
        percents: Percentiles wanted, in percent.
        metric: Metric of the histograms; a new row's metric is `<metric>_p<percent>`.

    Returns:
        The samples, then one row per cell and percentile that was not there.

    Raises:
        UserError: columns are missing, or units are mixed.
        MeasurementInvalid: a valid cell's histogram has a value or count that cannot be.
    """
    _check_frame(histograms)
    wanted = histograms[histograms["metric"] == metric]
    have = set(zip(samples["cell_id"], samples["metric"], strict=True))
    cells = samples.drop_duplicates("cell_id").set_index("cell_id", drop=False)
    rows = []
    for cell_id, bins in wanted.groupby("cell_id", sort=True):
        if cell_id not in cells.index:
            continue
        missing = [p for p in percents if (cell_id, _name(metric, p)) not in have]
        cell = cells.loc[str(cell_id)]
        if not missing or not bool(cell["valid"]):
            continue
        try:
            found = quantile(bins["value"], bins["count"], [p / 100 for p in missing])
        except MeasurementInvalid as error:
            raise MeasurementInvalid(f"cell {cell_id}: {error.message}", error.remedy) from None
        unit = str(bins["unit"].iloc[0])
        for percent, value in zip(missing, found, strict=True):
            row: dict[object, object] = dict(cell.items())
            rows.append(row | {"metric": _name(metric, percent), "value": value, "unit": unit})
    if not rows:
        return samples
    fresh = pd.DataFrame(rows, columns=samples.columns)
    params = [column for column in samples.columns if str(column).startswith(PARAM)]
    for column in params:
        fresh[column] = fresh[column].astype(samples[column].dtype)
    return pd.concat([samples, fresh], ignore_index=True)
