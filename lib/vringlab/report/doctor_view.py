"""What `vringlab doctor` found, as a table: in the terminal and in a notebook."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from pandas.io.formats.style import Styler
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from vringlab.report.claim_figures import shown

#: The rows come as records, from the lab or from a file: this layer looks at no machine.
Record = Mapping[str, Any]

_MARKS = {"ok": ("ok", "green"), "warn": ("look", "yellow"), "missing": ("missing", "bold red")}


def terminal(diagnosis: Record) -> RenderableType:
    """The rows with their state, weight and remedy, and one line on what comes of them.

    Args:
        diagnosis: `lab.doctor.Diagnosis.as_record()`.
    """
    table = Table("what", "state", "weight", "found", "remedy", box=None, pad_edge=False)
    table.columns[3].ratio = 2
    table.columns[4].ratio = 3
    for row in diagnosis["checks"]:
        words, style = _MARKS.get(row["state"], (row["state"], "dim"))
        table.add_row(
            row["name"],
            Text(words, style=style),
            row["weight"],
            Text(row["found"]),
            Text(row["remedy"]),
        )
    head = Text(f"{diagnosis['host']} ({diagnosis['kind']})", style="bold")
    return Group(head, table, Text(verdict(diagnosis), style="bold"))


def verdict(diagnosis: Record) -> str:
    """What the rows come to, in a sentence."""
    missing = [row["name"] for row in _rows(diagnosis, "must", ("missing",))]
    if missing:
        return f"Not usable as a KVM host: {', '.join(missing)}."
    noisy = [row["name"] for row in _rows(diagnosis, "changes figures", ("warn",))]
    untried = [row["name"] for row in _rows(diagnosis, "must", ("unknown",))]
    parts = ["Usable."]
    if untried:
        parts = [f"Nothing is missing, but not tried: {', '.join(untried)}."]
    if noisy:
        parts.append(f"Figures depend on: {', '.join(noisy)}.")
    return " ".join(parts)


def _rows(diagnosis: Record, weight: str, states: Sequence[str]) -> list[dict[str, str]]:
    return [
        row for row in diagnosis["checks"] if row["weight"] == weight and row["state"] in states
    ]


def frame(diagnosis: Record, weight: str | None = None) -> pd.DataFrame:
    """The rows as a data frame: what, state, weight, found, remedy.

    Args:
        diagnosis: See `terminal`.
        weight: Only rows of this weight.
    """
    rows = [row for row in diagnosis["checks"] if weight in (None, row["weight"])]
    columns = ["name", "state", "weight", "found", "remedy"]
    return pd.DataFrame(rows, columns=columns).rename(columns={"name": "what"})


def table(diagnosis: Record, weight: str | None = None) -> Styler:
    """The same for a notebook, with sentences that wrap."""
    styled = shown(frame(diagnosis, weight))
    return styled.set_properties(subset=["found", "remedy"], **{"white-space": "normal"})
