"""What was executed for one unit of work, by function: read from a run whose instructions count.

The profile of a cell is a slope between two sizes of work (`vringlab.campaign.instructions`), so
single values of small functions may be below nothing; their mean over blocks is what counts.
Instructions executed to wait (areas `idle` and `spin`) and those of the benchmark's own programs
(`tools`) are in the profiles and in no metric.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from vringlab.analysis.frames import RunFrames
from vringlab.analysis.stats import mean_t
from vringlab.campaign import tables
from vringlab.campaign.work import FORMAT
from vringlab.errors import UserError

#: What tells one function from another.
FUNCTION = ["side", "area", "module", "function"]
_CELL = ["cell_id", "host", "boot", "block", "arm", "workload"]
_DIFFERENCE = ["reference", "arm", "change", "low", "high"]


def profiles(run: RunFrames) -> pd.DataFrame:
    """Instructions for one unit of work of each valid cell, by function.

    Returns:
        One row per cell and function: cell_id, host, boot, block, arm, workload, the `param_`
        columns, unit, side, area, module and function (text; empty where it is not known), value
        (instructions). Empty when none were counted.

    Raises:
        UserError: a file is damaged, or of a format that this version does not know.
    """

    def rows(record: Mapping[str, Any]) -> list[tuple[Any, ...]]:
        return [
            (side, area, module or "", function or "", float(value))
            for side, area, module, function, value in record["rows"]
        ]

    return run.once("profiles", lambda: _by_cell(run, rows, [*FUNCTION, "value"])).copy()


def events(run: RunFrames) -> pd.DataFrame:
    """What else one unit of work of each valid cell took: exits by reason, context switches.

    Returns:
        One row per cell and kind: the first columns of `profiles` as far as unit, `what`
        (`exits`, `exits: hlt`, `context switches of the guest`) and value. Empty when nothing was
        counted.

    Raises:
        UserError: as for `profiles`.
    """

    def rows(record: Mapping[str, Any]) -> list[tuple[Any, ...]]:
        return [(what, float(value)) for what, value in record["others"].items()]

    return run.once("events", lambda: _by_cell(run, rows, ["what", "value"])).copy()


def _by_cell(
    run: RunFrames, take: Callable[[Mapping[str, Any]], list[tuple[Any, ...]]], columns: list[str]
) -> pd.DataFrame:
    """What was kept of each valid cell whose instructions were counted, with what the cell is."""
    rows: list[tuple[Any, ...]] = []
    for cell_id, path in tables.instruction_profiles(run.path).items():
        try:
            record = json.loads(path.read_text())
            if record["format"] != FORMAT:
                raise UserError(
                    f"{path} has format {record['format']}; this version reads {FORMAT}",
                    remedy="use the version of vringlab that wrote the run",
                )
            rows += [(cell_id, record["unit"], *row) for row in take(record)]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"{path} is damaged: {error}", remedy="restore it from a copy, or remove it"
            ) from None
    samples = run.samples[run.samples["valid"].astype(bool)]
    cells = samples.drop_duplicates("cell_id")[[*_CELL, *run.params]]
    found = pd.DataFrame(rows, columns=["cell_id", "unit", *columns])
    return cells.merge(found, on="cell_id", how="inner")


def difference(
    profile: pd.DataFrame,
    arm: str,
    reference: str,
    level: float = 0.95,
    by: Sequence[str] = FUNCTION,
) -> pd.DataFrame:
    """Where one arm executes more or less than another, by function.

    Args:
        profile: Rows of one workload at one point, from `profiles` or `events`.
        arm: The arm.
        reference: What it is compared with.
        level: Level of the intervals.
        by: Columns by which rows are told apart.

    Returns:
        One row per function, the largest difference first: the columns `by`, `reference` and
        `arm` (means over boots), `change` (arm less reference), `low` and `high` (Student's t on
        the boots' mean differences, on the hosts' with several, as for all intervals here; NaN
        with one). Blocks that lack one of the arms are left out. Empty when
        none has both.
    """
    mine = profile[profile["arm"].isin([arm, reference])]
    counts, keys = _paired(mine, arm, reference)
    if counts.empty:
        return pd.DataFrame(columns=[*by, *_DIFFERENCE])
    mine = mine[pd.MultiIndex.from_frame(mine[keys]).isin(counts.index)]
    # A function that did not run in a block ran no instruction there.
    sums = mine.astype({"value": float}).pivot_table(
        index=keys, columns=["arm", *by], values="value", aggfunc="sum", fill_value=0.0
    )
    sides = {
        name: pd.DataFrame(sums.xs(name, axis=1, level="arm")).div(counts[name], axis=0)
        for name in (arm, reference)
    }
    both = sides[arm].columns.union(sides[reference].columns)
    ours, theirs = (
        _clusters(sides[name].reindex(columns=both, fill_value=0.0), keys)
        for name in (arm, reference)
    )
    found = mean_t((ours - theirs).to_numpy(dtype=np.float64).T)
    half = found.half_width(level) if found.df else np.full(len(both), np.nan)
    table = pd.DataFrame(
        {
            "reference": theirs.mean(),
            "arm": ours.mean(),
            "change": found.mean,
            "low": found.mean - half,
            "high": found.mean + half,
        }
    ).reset_index()
    return table.sort_values("change", key=lambda values: -values.abs(), ignore_index=True)


def _paired(mine: pd.DataFrame, arm: str, reference: str) -> tuple[pd.DataFrame, list[str]]:
    """Cells of each arm by block, of blocks that have both, and what names a block.

    Where each arm has boots of its own, a block reaches across boots, as in `pairing.pair`.
    """
    for keys in (["host", "boot", "block"], ["host", "block"]):
        counts = mine.groupby([*keys, "arm"])["cell_id"].nunique().unstack("arm")
        counts = counts.reindex(columns=[arm, reference]).dropna()
        if not counts.empty:
            break
    return counts, keys


def _clusters(blocks: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """Means over what counts as independent: boots (blocks, across boots), or several hosts."""
    means = blocks.groupby(level=keys[:2]).mean()
    several = means.index.get_level_values("host").nunique() > 1
    return means.groupby(level="host").mean() if several else means


def at(profile: pd.DataFrame, workload: str, params: Mapping[str, object]) -> pd.DataFrame:
    """Rows of one workload at one parameter point."""
    rows = profile[profile["workload"] == workload]
    for name, value in params.items():
        rows = rows[rows[f"param_{name}"].astype(str) == str(value)]
    return rows
