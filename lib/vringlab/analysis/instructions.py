"""What was executed for one unit of work, by function: read from a run whose instructions count.

The profile of a cell is a slope between two sizes of work (`vringlab.campaign.instructions`), so
single values of small functions may be below nothing; their mean over blocks is what counts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np
import pandas as pd
from scipy import stats as sps

from vringlab.analysis.frames import RunFrames
from vringlab.campaign import tables
from vringlab.campaign.instructions import FORMAT
from vringlab.errors import UserError

#: What tells one function from another.
FUNCTION = ["side", "area", "module", "function"]
_COLUMNS = ["cell_id", "boot", "block", "arm", "workload", "unit", *FUNCTION, "value"]


def profiles(run: RunFrames) -> pd.DataFrame:
    """Instructions for one unit of work of each valid cell, by function.

    Returns:
        One row per cell and function: cell_id, boot, block, arm, workload, unit, the `param_`
        columns, side, area, module and function (text; empty where it is not known), value
        (instructions). Empty when none were counted.

    Raises:
        UserError: a file is damaged, or of a format that this version does not know.
    """
    samples = run.samples[run.samples["valid"].astype(bool)]
    columns = ["cell_id", "boot", "block", "arm", "workload", *run.params]
    cells = samples.drop_duplicates("cell_id")[columns]
    rows = []
    for cell_id, path in tables.instruction_profiles(run.path).items():
        try:
            record = json.loads(path.read_text())
            if record["format"] != FORMAT:
                raise UserError(
                    f"{path} has format {record['format']}; this version reads {FORMAT}",
                    remedy="use the version of vringlab that wrote the run",
                )
            rows += [
                (cell_id, record["unit"], *(name or "" for name in names), float(value))
                for *names, value in record["rows"]
            ]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{path} is damaged: {error}", remedy="restore it from a copy, or remove it"
            ) from None
    found = pd.DataFrame(rows, columns=["cell_id", "unit", *FUNCTION, "value"])
    merged = cells.merge(found, on="cell_id", how="inner")
    return merged[[*_COLUMNS[:5], *run.params, *_COLUMNS[5:]]]


def difference(
    profile: pd.DataFrame, arm: str, reference: str, level: float = 0.95
) -> pd.DataFrame:
    """Where one arm executes more or less than another, by function.

    Args:
        profile: Rows of one workload at one point, from `profiles`.
        arm: The arm.
        reference: What it is compared with.
        level: Level of the intervals.

    Returns:
        One row per function, the largest difference first: side, area, module, function,
        `reference` and `arm` (means over boots), `change` (arm less reference), `low` and `high`
        (Student's t on the boots' mean differences, as for all intervals here; NaN with one boot).
    """
    mine = profile[profile["arm"].isin([arm, reference])]
    # A function that did not run in a block ran no instruction there.
    wide = mine.pivot_table(
        index=["boot", "block"],
        columns=["arm", *FUNCTION],
        values="value",
        aggfunc="sum",
        fill_value=0.0,
    )
    if wide.empty or not {arm, reference} <= set(wide.columns.get_level_values("arm")):
        return pd.DataFrame(columns=[*FUNCTION, "reference", "arm", "change", "low", "high"])
    stacked = {
        name: pd.DataFrame(wide.xs(name, axis=1, level="arm")).groupby(level="boot").mean()
        for name in (arm, reference)
    }
    both = stacked[arm].columns.union(stacked[reference].columns)
    ours, theirs = (
        stacked[name].reindex(columns=both, fill_value=0.0) for name in (arm, reference)
    )
    change = ours - theirs
    boots = len(change)
    half = (
        float(sps.t.ppf(0.5 + level / 2, boots - 1)) * change.std(ddof=1) / np.sqrt(boots)
        if boots > 1
        else change.mean() * np.nan
    )
    table = pd.DataFrame(
        {
            "reference": theirs.mean(),
            "arm": ours.mean(),
            "change": change.mean(),
            "low": change.mean() - half,
            "high": change.mean() + half,
        }
    ).reset_index()
    return table.sort_values("change", key=lambda values: -values.abs(), ignore_index=True)


def at(profile: pd.DataFrame, workload: str, params: Mapping[str, object]) -> pd.DataFrame:
    """Rows of one workload at one parameter point."""
    rows = profile[profile["workload"] == workload]
    for name, value in params.items():
        rows = rows[rows[f"param_{name}"].astype(str) == str(value)]
    return rows
