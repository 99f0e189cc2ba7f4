"""Published ratios beside what was measured: what they are, and how every figure draws them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from matplotlib.lines import Line2D

from vringlab.analysis.claims import load_claims
from vringlab.errors import UserError
from vringlab.report.canvas import INK, MUTED
from vringlab.report.summary import ArmRow, Summary

#: What a caption says of marks among figures in a unit.
PLACED = (
    "Claimed: where the arm would be if the published ratio held, from the reference's mean here."
)


@dataclass(frozen=True)
class Mark:
    """A published ratio, drawn beside what was measured.

    Attributes:
        metric: Its metric.
        params: The parameters that it names; a row that has others too is meant as well.
        arm: The arm above the line; below it is the run's reference.
        ratio: The published ratio.
        standing: Whether it was neither withdrawn nor superseded.
    """

    metric: str
    params: Mapping[str, object]
    arm: str
    ratio: float
    standing: bool

    def fits(self, row: ArmRow) -> bool:
        """Whether a row is about the same arm, metric and point."""
        return (row.metric, row.arm) == (self.metric, self.arm) and all(
            str(row.params.get(name)) == str(v) for name, v in self.params.items()
        )

    @property
    def look(self) -> dict[str, Any]:
        """Properties of the line that stands for it."""
        return {
            "ls": "",
            "marker": "D" if self.standing else "x",
            "ms": 6.5 if self.standing else 5.5,
            "mfc": "none",
            "mec": INK if self.standing else MUTED,
            "mew": 1.2,
            "zorder": 7,
            "gid": f"claimed:{self.arm}",
        }


def published(summary: Summary) -> list[Mark]:
    """The published ratios of the run's experiment against its reference arm."""
    plan = summary.run.plan
    found = []
    with suppress(UserError):
        for claim in load_claims(plan.experiment):
            ratio = claim.ratio
            if claim.arms[0] == plan.reference and ratio is not None and ratio > 0:
                standing = claim.status == "standing"
                found.append(Mark(claim.metric, claim.params, claim.arms[1], ratio, standing))
    return found


def mark_handles(marks: Iterable[Mark]) -> list[Line2D]:
    """Entries of a legend for the marks of a figure."""
    handles = []
    standing = {mark.standing: mark for mark in marks}
    for which, label in ((True, "claimed"), (False, "claimed, since withdrawn or superseded")):
        if which in standing:
            look = {**standing[which].look, "ms": 6, "gid": None}
            handles.append(Line2D([], [], label=label, **look))
    return handles
