"""Two runs side by side: their ratios, and whether they may be compared at all.

Ratios of one run are compared with those of another only where everything that changes a
measurement was the same. Where it was not, the comparison is refused and names what differs; it
can be forced, and then every rendering of it says so first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from scipy import stats as sps

from vringlab.analysis.frames import RunFrames
from vringlab.analysis.pairing import PARAM, point_text
from vringlab.analysis.provenance import Difference, differences
from vringlab.analysis.stats import Interval
from vringlab.campaign.experiment import Value
from vringlab.errors import UserError
from vringlab.report.summary import (
    ArmRow,
    amount,
    change_text,
    heading,
    ratio_text,
    summarise,
)
from vringlab.report.tables import aligned

#: How many differences an error message names.
_NAMED = 6


@dataclass(frozen=True)
class Pair:
    """One arm at one point in both runs.

    Attributes:
        workload: Name of the workload.
        params: The parameter point.
        metric: Name of the metric.
        arm: Name of the arm.
        first: Its row in the first run; None when that lacks it.
        second: Its row in the second run.
    """

    workload: str
    params: Mapping[str, Value]
    metric: str
    arm: str
    first: ArmRow | None
    second: ArmRow | None

    @property
    def shift(self) -> tuple[float, Interval] | None:
        """Ratio of the second run's ratio to the first's, with a 95 % interval.

        Two independent estimates on the log scale: Welch's t (Welch, "The generalization of
        Student's problem", Biometrika 34, 1947). The interval is unknown unless both rest on
        boots or hosts; None when one of the runs has no ratio.
        """
        one = self.first.effect if self.first else None
        other = self.second.effect if self.second else None
        if one is None or other is None:
            return None
        centre = other.log_mean - one.log_mean
        if {one.unit, other.unit} - {"boot", "host"} or min(one.df, other.df) < 1:
            return float(np.exp(centre)), Interval()
        parts = np.array([one.se**2, other.se**2])
        if not parts.sum() > 0:
            return float(np.exp(centre)), Interval()
        freedom = parts.sum() ** 2 / np.sum(parts**2 / np.array([one.df, other.df]))
        half = float(sps.t.ppf(0.975, freedom) * np.sqrt(parts.sum()))
        ends = np.exp(np.clip([centre - half, centre + half], -700, 700))
        return float(np.exp(centre)), Interval(float(ends[0]), float(ends[1]))

    @property
    def differ(self) -> bool:
        """Whether the interval of the shift excludes 1."""
        found = self.shift
        if found is None or not found[1].known:
            return False
        return found[1].low > 1 or found[1].high < 1


@dataclass(frozen=True)
class Comparison:
    """Two runs side by side. `rich.print(comparison)` prints it.

    Attributes:
        first: The first run.
        second: The second run.
        pairs: By workload, point, metric and arm.
        differences: Keys of provenance in which they differ, those that matter first.
        forced: Whether it was made against differences that matter.
        unmatched: Points that one run has alone, in words.
    """

    first: RunFrames = field(repr=False)
    second: RunFrames = field(repr=False)
    pairs: tuple[Pair, ...]
    differences: tuple[Difference, ...]
    forced: bool
    unmatched: tuple[str, ...] = ()

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a reader must know before any figure, one sentence each."""
        found = []
        against = [one for one in self.differences if one.refuses]
        if self.forced:
            found.append(
                f"FORCED: the runs differ in {len(against)} things that change a measurement, "
                "so no difference below can be put down to the patch."
            )
            found += [f"differs: {one}" for one in against]
        unknown = [one for one in self.differences if one.missing and one.check == "must match"]
        if unknown:
            found.append(
                "Recorded by one run only, so not compared: "
                f"{', '.join(one.path for one in unknown)}."
            )
        found += [
            f"SIMULATED: run {run.run_id} holds random numbers."
            for run in (self.first, self.second)
            if run.simulated
        ]
        return (*found, *self.unmatched)

    @property
    def title(self) -> str:
        """Both runs."""
        return f"A {self.first.run_id} against B {self.second.run_id}"

    @property
    def reference(self) -> str:
        """The arm that the others are compared with, in each run."""
        return self.first.plan.reference

    def sections(self) -> Iterator[tuple[str, list[Pair]]]:
        """Pairs by workload and point, with a title."""
        groups: dict[str, list[Pair]] = {}
        for pair in self.pairs:
            title = ", ".join(part for part in (pair.workload, point_text(pair.params)) if part)
            groups.setdefault(title, []).append(pair)
        yield from groups.items()

    def frame(self) -> pd.DataFrame:
        """One row per pair with plain numbers."""
        rows = []
        for pair in self.pairs:
            row: dict[str, object] = {
                "workload": pair.workload,
                **{PARAM + name: value for name, value in pair.params.items()},
                "metric": pair.metric,
                "arm": pair.arm,
            }
            for name, one in (("a", pair.first), ("b", pair.second)):
                ratio = one.effect if one else None
                known = ratio is not None and ratio.interval.known
                row |= {
                    f"figure_{name}": one.level.value if one and one.level else np.nan,
                    f"valid_{name}": one.valid if one else 0,
                    f"invalid_{name}": one.invalid if one else 0,
                    f"ratio_{name}": ratio.ratio if ratio else np.nan,
                    f"low_{name}": ratio.interval.low if ratio and known else np.nan,
                    f"high_{name}": ratio.interval.high if ratio and known else np.nan,
                }
            shift = pair.shift
            row |= {
                "shift": shift[0] if shift else np.nan,
                "shift_low": shift[1].low if shift and shift[1].known else np.nan,
                "shift_high": shift[1].high if shift and shift[1].known else np.nan,
                "differ": pair.differ,
                "forced": self.forced,
            }
            rows.append(row)
        return pd.DataFrame(rows)

    def text(self) -> str:
        """Plain text."""
        lines = [self.title, f"A: {heading(self.first)}", f"B: {heading(self.second)}"]
        lines += [""] if self.warnings else []
        lines += self.warnings
        for title, pairs in self.sections():
            lines += ["", title, *aligned(self._cells(pairs))]
        lines += ["", self.legend] if self.pairs else ["", "The runs have nothing in common."]
        return "\n".join(lines) + "\n"

    def markdown(self) -> str:
        """Markdown."""
        lines = [f"### {self.title}", "", f"A: {heading(self.first)}  ", ""]
        lines[2] += f"\nB: {heading(self.second)}"
        lines += [f"> **{warning}**\n>" for warning in self.warnings]
        for title, pairs in self.sections():
            heads, *rows = self._cells(pairs)
            lines += ["", f"**{title}**", "", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
            lines += [f"| {' | '.join(row)} |" for row in rows]
        lines += ["", self.legend if self.pairs else "The runs have nothing in common."]
        return "\n".join(lines) + "\n"

    @property
    def legend(self) -> str:
        """How to read the columns."""
        return (
            f"A, B: change against {self.reference} in that run with its interval; for "
            f"{self.reference} itself its figure. B/A: how the changes differ, 95 % by Welch's t; "
            "*: they do (not adjusted for the number of lines)."
        )

    def _cells(self, pairs: Sequence[Pair]) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = [("metric", "arm", "A", "B", "B/A")]
        before = ""
        for pair in pairs:
            name = pair.metric if pair.metric != before else ""
            before = pair.metric
            cells = (_side(pair.first), _side(pair.second), _shift_text(pair))
            rows.append((name, pair.arm, *cells))
        return rows

    def __rich_console__(self, console: Console, options: object) -> Iterator[RenderableType]:
        yield Text(self.title, style="bold")
        yield Text(f"A: {heading(self.first)}\nB: {heading(self.second)}")
        for warning in self.warnings:
            style = "bold red" if warning.startswith(("FORCED", "SIMULATED")) else "yellow"
            yield Text(warning, style=style)
        for title, pairs in self.sections():
            yield Text(f"\n{title}", style="bold")
            table = Table.grid(padding=(0, 2, 0, 0))
            for place, row in enumerate(self._cells(pairs)):
                style = "dim" if not place else "bold" if pairs[place - 1].differ else ""
                table.add_row(*(Text(cell, style=style) for cell in row))
            yield Padding(table, (0, 0, 0, 2))
        text = self.legend if self.pairs else "The runs have nothing in common."
        yield Text(f"\n{text}", style="dim")


def _side(row: ArmRow | None) -> str:
    if row is None:
        return "not measured"
    if row.effect is not None:
        return ratio_text(row)
    if row.level is not None and row.is_reference:
        return amount(row.level.value, row.unit, row.metric)
    return "all invalid" if row.invalid and not row.valid else "no pair"


def _shift_text(pair: Pair) -> str:
    found = pair.shift
    if found is None:
        return ""
    ratio, interval = found
    if not interval.known:
        return f"{change_text(ratio)} [unknown]"
    low, high = (change_text(end).removesuffix(" %") for end in (interval.low, interval.high))
    return f"{change_text(ratio)} [{low}, {high}]{' *' if pair.differ else ''}"


def compare(
    first: RunFrames,
    second: RunFrames,
    force: bool = False,
    metrics: Sequence[str] | None = None,
) -> Comparison:
    """Two runs side by side.

    Args:
        first: One run.
        second: The other.
        force: Compare them although something that changes a measurement differs.
        metrics: Metrics to compare; the headline ones when None.

    Raises:
        UserError: the runs are of two experiments or have different reference arms, or they
            differ in a key that must match and `force` is not given; the message names it.
    """
    for what, one, other in (
        ("experiments", first.plan.experiment, second.plan.experiment),
        ("reference arms", first.plan.reference, second.plan.reference),
        ("base kernels", first.plan.base_kernel, second.plan.base_kernel),
    ):
        if one != other and (what != "base kernels" or not force):
            raise UserError(
                f"the runs have different {what}: {one} and {other}",
                remedy="compare two runs of one experiment on one base kernel"
                + (" (--force compares them anyway)" if what == "base kernels" else ""),
            )
    found = tuple(differences(first.provenance, second.provenance))
    against = [one for one in found if one.refuses]
    if against and not force:
        named = "\n".join(f"  {one}" for one in against[:_NAMED])
        more = f"\n  and {len(against) - _NAMED} more" if len(against) > _NAMED else ""
        raise UserError(
            f"the runs {first.run_id} and {second.run_id} differ in what changes a "
            f"measurement:\n{named}{more}",
            remedy="measure both in one place, or force it (--force); the comparison then says so",
        )
    kernels = first.plan.base_kernel != second.plan.base_kernel
    if kernels:
        base = Difference(
            "plan.base_kernel",
            first.plan.base_kernel,
            second.plan.base_kernel,
            "must match",
            "base kernel",
        )
        found = (base, *found)
    pairs, unmatched = _pairs(first, second, metrics)
    return Comparison(first, second, pairs, found, bool(against) or kernels, unmatched)


def _pairs(
    first: RunFrames, second: RunFrames, metrics: Sequence[str] | None
) -> tuple[tuple[Pair, ...], tuple[str, ...]]:
    rows = [_by_place(run, metrics) for run in (first, second)]
    shared = {key[:3] for key in rows[0]} & {key[:3] for key in rows[1]}
    pairs = []
    for key in [*rows[0], *(key for key in rows[1] if key not in rows[0])]:
        one, other = rows[0].get(key), rows[1].get(key)
        known = one or other
        assert known is not None
        if key[:3] in shared:
            pairs.append(Pair(known.workload, known.params, known.metric, known.arm, one, other))
    alone = []
    for name, mine in (("A", rows[0]), ("B", rows[1])):
        points = dict.fromkeys((key[0], key[1]) for key in mine if key[:3] not in shared)
        if points:
            words = "; ".join(" ".join(part for part in point if part) for point in points)
            alone.append(f"Only {name} measured: {words}.")
    return tuple(pairs), tuple(alone)


def _by_place(
    run: RunFrames, metrics: Sequence[str] | None
) -> dict[tuple[str, str, str, str], ArmRow]:
    return {
        (row.workload, point_text(dict(sorted(row.params.items()))), row.metric, row.arm): row
        for row in summarise(run, metrics).rows
    }
