"""Effects over a whole parameter matrix, with p values adjusted for their number."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pandas as pd

from vringlab.analysis.bootstrap import SEED, Hierarchy, draw_means
from vringlab.analysis.pairing import PARAM, Pairs, check_columns, pair, param_columns
from vringlab.analysis.stats import adjust, from_draws
from vringlab.errors import VringlabError


def points(samples: pd.DataFrame, workload: str, metric: str) -> list[dict[str, object]]:
    """The parameter points at which a workload measured a metric, sorted; one `{}` for none."""
    rows = samples[(samples["workload"] == workload) & (samples["metric"] == metric)]
    columns = [c for c in param_columns(rows) if rows[c].notna().any()]
    if not columns:
        return [{}]
    found = rows[columns].drop_duplicates().sort_values(columns)
    return [
        {str(name).removeprefix(PARAM): value for name, value in row.items() if pd.notna(value)}
        for row in found.to_dict("records")
    ]


def effects(
    samples: pd.DataFrame,
    metrics: Iterable[str],
    arms: Iterable[str],
    reference: str,
    level: float = 0.95,
    draws: int = 10_000,
    seed: int = SEED,
) -> pd.DataFrame:
    """Effects over the whole parameter matrix, one row per metric, workload, point and arm.

    The family for `p_holm` and `p_bh` is all rows. A point that cannot be judged keeps its row,
    with the reason in `problem`. Bootstrap draws are shared between all columns of one design.

    Returns:
        Columns of `Effect.as_record`, `problem`, `p_holm`, `p_bh`.
    """
    check_columns(samples)
    rows: list[dict[str, object]] = []
    done: dict[tuple[bytes, bytes], list[tuple[int, Pairs]]] = {}
    invalid = ~samples["valid"].astype(bool)
    for metric in metrics:
        measured = samples[samples["metric"] == metric]
        # Invalid samples may have no row of the metric, but have the reasons.
        known = samples[(samples["metric"] == metric) | invalid]
        for workload in sorted(set(measured["workload"])):
            for point in points(samples, workload, metric):
                for arm in arms:
                    named = {PARAM + name: value for name, value in point.items()}
                    row: dict[str, object] = {
                        "metric": metric,
                        "workload": workload,
                        **named,
                        "arm": arm,
                        "reference": reference,
                        "problem": "",
                    }
                    try:
                        pairs = pair(known, metric, arm, reference, point, workload)
                        key = Hierarchy(pairs.boot, pairs.host).key
                        done.setdefault(key, []).append((len(rows), pairs))
                    except VringlabError as error:
                        row["problem"] = error.message
                    rows.append(row)
    for group in done.values():
        shown = None
        if draws:
            first = group[0][1]
            columns = np.column_stack([pairs.log_ratio for _, pairs in group])
            shown = draw_means(columns, Hierarchy(first.boot, first.host), draws, seed)
        for column, (index, pairs) in enumerate(group):
            try:
                found = from_draws(pairs, level, None if shown is None else shown[:, column])
                rows[index].update(found.as_record())
            except VringlabError as error:
                rows[index]["problem"] = error.message
    table = pd.DataFrame(rows)
    if "p" not in table.columns:
        table["p"] = np.nan
    table["p_holm"] = adjust(table["p"].to_numpy(dtype=np.float64), "holm")
    table["p_bh"] = adjust(table["p"].to_numpy(dtype=np.float64), "bh")
    return table
