"""Raw latencies, one a line as `vringlab-pingpong --dump` and others write them, in bulk.

Ten million of them are read by Arrow and binned by arithmetic on whole arrays; what is drawn and
merged afterwards is the histogram, whose size does not depend on their number.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
from pyarrow import csv

from vringlab.analysis.pairing import Floats
from vringlab.errors import MeasurementInvalid, UserError

#: Bins in each octave. A latency lies within half a bin of its midpoint: a share of 1/256 at most.
BINS_PER_OCTAVE = 128

#: Percentiles of a summary, those of the documented vsock runs and the extremes.
PERCENTILES = (1.0, 50.0, 90.0, 99.0, 99.9, 99.99)


def load(path: Path | str) -> Floats:
    """Latencies of a text file with one number a line, or of a .npy file, shape (n,).

    Raises:
        UserError: there is no such file, or it holds something else than numbers.
        MeasurementInvalid: it is empty, or a latency is negative or no number.
    """
    source = Path(path)
    try:
        if source.suffix == ".npy":
            values = np.asarray(np.load(source, allow_pickle=False), dtype=np.float64).ravel()
        else:
            table = csv.read_csv(
                source,
                read_options=csv.ReadOptions(column_names=["ns"]),
                convert_options=csv.ConvertOptions(column_types={"ns": pa.float64()}),
            )
            values = table["ns"].to_numpy()
    except (OSError, ValueError, pa.ArrowInvalid) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        if isinstance(error, pa.ArrowInvalid) and "Empty CSV" in first:
            raise _empty(source) from None
        raise UserError(
            f"{source} cannot be read as latencies: {first}",
            remedy="give a text file with one number of nanoseconds a line, or a .npy file",
        ) from error
    if values.size == 0:
        raise _empty(source)
    if not np.isfinite(values).all() or (values < 0).any():
        bad = int((~np.isfinite(values) | (values < 0)).sum())
        raise MeasurementInvalid(
            f"{bad} of {values.size} latencies in {source} are negative or no number",
            remedy="the clock went back or the file is damaged; do not use it",
        )
    return values


def _empty(source: Path) -> MeasurementInvalid:
    return MeasurementInvalid(
        f"{source} holds no latency", remedy="the tool measured nothing: look at its output"
    )


def histogram(values: Floats) -> pd.DataFrame:
    """A log-linear histogram: columns `value` (bin midpoint) and `count`, ascending.

    Bins are linear within an octave, as in HdrHistogram; zero has a bin of its own.

    Args:
        values: Latencies, not negative, shape (n,).
    """
    mantissa, exponent = np.frexp(values)
    step = np.floor((mantissa - 0.5) * (2 * BINS_PER_OCTAVE)).astype(np.int64)
    index = np.where(values > 0, exponent.astype(np.int64) * BINS_PER_OCTAVE + step, _ZERO)
    found, counts = _unique(index)
    octave, place = np.divmod(found, BINS_PER_OCTAVE)
    middle = np.ldexp(0.5 + (place + 0.5) / (2 * BINS_PER_OCTAVE), octave.astype(np.int32))
    return pd.DataFrame({"value": np.where(found == _ZERO, 0.0, middle), "count": counts})


#: Below every index that a latency above zero can have (frexp's exponent is over -1100).
_ZERO = -(2**20)


def _unique(
    index: npt.NDArray[np.int64],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Distinct values and their counts; by counting where the range allows it, for its speed."""
    low, high = int(index.min()), int(index.max())
    if high - low > 2**20:
        values, counts = np.unique(index, return_counts=True)
        return values, counts.astype(np.int64)
    counts = np.bincount(index - low)
    values = np.flatnonzero(counts)
    return values + low, counts[values].astype(np.int64)


def summary(values: Floats) -> pd.Series:
    """n, min, mean, standard deviation, percentiles and max, in the unit of the values."""
    levels = np.percentile(values, PERCENTILES)
    return pd.Series(
        {
            "n": float(values.size),
            "min": float(values.min()),
            "mean": float(values.mean()),
            "stddev": float(values.std(ddof=1)) if values.size > 1 else float("nan"),
            **{f"p{p:g}": float(level) for p, level in zip(PERCENTILES, levels, strict=True)},
            "max": float(values.max()),
        }
    )
