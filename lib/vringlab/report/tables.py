"""The figures of a run as a table: for a terminal, plain text, Markdown and data frames.

One row per workload, parameter point, metric and arm: the arm's figure with its interval, valid
and invalid samples, and the ratio to the reference with its interval. Invalid samples are in no
figure; they are listed with their reasons below.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from vringlab.analysis.frames import RunFrames
from vringlab.analysis.pairing import PARAM, point_text
from vringlab.report.summary import (
    ArmRow,
    Summary,
    amount,
    count,
    heading,
    ratio_text,
    reason_kind,
    reason_kinds,
    run_notes,
    span,
    summarise,
)

#: What a table says of a run without samples.
EMPTY = "no sample was measured"

_LEGEND = (
    "figure: geometric mean over boots; [ ]: {level:g} % interval, t on boot means; "
    "n: valid samples, +k invalid; *: beyond the noise floor"
)


@dataclass(frozen=True)
class Line:
    """One row in words, as every rendering shows it."""

    metric: str
    arm: str
    figure: str
    interval: str
    n: str
    change: str
    row: ArmRow = field(repr=False)


@dataclass(frozen=True)
class Section:
    """The rows of one workload at one parameter point."""

    workload: str
    point: str
    lines: tuple[Line, ...]
    notes: tuple[str, ...]

    @property
    def title(self) -> str:
        """`pktgen-testpmd, ring=split, irq=same`."""
        return ", ".join(part for part in (self.workload, self.point) if part)


@dataclass(frozen=True)
class ArmTable:
    """The figures of a run in words, ready to be printed. `rich.print(table)` prints it.

    Attributes:
        summary: The numbers behind it.
        sections: By workload and point.
    """

    summary: Summary = field(repr=False)
    sections: tuple[Section, ...]

    @property
    def title(self) -> str:
        """Experiment and profile."""
        plan = self.summary.run.plan
        return f"{plan.experiment}, profile {plan.profile}"

    @property
    def subtitle(self) -> str:
        """Base kernel, host kind and number of samples."""
        return heading(self.summary.run)

    @property
    def legend(self) -> str:
        """How to read the columns, and against which arm the ratio is."""
        text = _LEGEND.format(level=100 * self.summary.level)
        if any(row.effect and row.effect.unit == "block" for row in self.summary.rows):
            text += "; (1 boot): the interval holds for that boot alone"
        twin = self.summary.run.plan.twin
        if twin:
            text += f"; {twin} is {self.summary.run.plan.reference} again: the noise"
        return text

    @property
    def statement(self) -> str:
        """What is to be said when there is nothing to show; empty when there is."""
        if not self.sections:
            return EMPTY
        if not any(row.valid for row in self.summary.rows):
            return "every sample is invalid: there is no figure to compare"
        return ""

    @property
    def notes(self) -> tuple[str, ...]:
        """Invalid samples of all sections, and what else a reader should know of the run."""
        return (*(note for part in self.sections for note in part.notes), *run_notes(self.summary))

    def frame(self) -> pd.DataFrame:
        """One row per line with plain numbers, for export."""
        return pd.DataFrame([_record(row) for row in self.summary.rows])

    def __rich_console__(self, console: Console, options: object) -> Iterator[RenderableType]:
        yield Text(self.title, style="bold")
        yield Text(self.subtitle, style="bold red" if self.summary.run.simulated else "")
        for part in self.sections:
            yield Text(f"\n{part.title}", style="bold")
            yield self._rich(part, console.width)
            for note in part.notes:
                yield Padding(Text(note, style="yellow"), (0, 0, 0, 2))
        if self.statement:
            yield Text(self.statement, style="bold yellow")
        if self.sections:
            yield Text(f"\n{self.legend}", style="dim")
        for note in run_notes(self.summary):
            yield Text(note, style="yellow")

    def _rich(self, part: Section, width: int) -> Table:
        rows = self._cells(part)
        # Where the terminal is narrow, the metric stands on a line of its own.
        narrow = max(map(len, aligned([row for row, _ in rows], gap=2))) > width
        table = Table.grid(padding=(0, 1 if narrow else 2, 0, 0))
        sides = ("left", "left", "right", "left", "right", "left")[narrow:]
        for side in sides:
            table.add_column(justify=side, no_wrap=True)  # type: ignore[arg-type]  # a literal
        for place, ((metric, *cells), line) in enumerate(rows):
            style = "dim" if line is None else ""
            if line is not None and not line.row.valid:
                style = "yellow"
            elif line is not None and line.row.beyond_noise:
                style = "bold"
            if narrow and metric and place:
                table.add_row(Text(f"  {metric}"), *[""] * 4)
            first = f"    {cells[0]}" if narrow else f"  {metric}"
            rest = cells[1:] if narrow else cells
            table.add_row(Text(first), *(Text(cell, style=style) for cell in rest))
        return table

    def _cells(self, part: Section) -> list[tuple[tuple[str, ...], Line | None]]:
        """The heads and each line in words; a metric is named in its first line only."""
        heads = ("metric", "arm", "figure", "interval", "n", f"against {self._reference}")
        rows: list[tuple[tuple[str, ...], Line | None]] = [(heads, None)]
        for line, first in _first_of_metric(part.lines):
            name = line.metric if first else ""
            rows.append(((name, line.arm, line.figure, line.interval, line.n, line.change), line))
        return rows

    @property
    def _reference(self) -> str:
        return self.summary.run.plan.reference

    def text(self) -> str:
        """Plain text; columns are as wide as they need to be."""
        lines = [self.title, self.subtitle]
        for part in self.sections:
            rows = [row for row, _ in self._cells(part)]
            lines += ["", part.title, *aligned(rows, right=(2, 4))]
            lines += [f"  {note}" for note in part.notes]
        if self.statement:
            lines += ["", self.statement]
        if self.sections:
            lines += ["", self.legend]
        return "\n".join([*lines, *run_notes(self.summary)]) + "\n"

    def markdown(self) -> str:
        """A Markdown table per section."""
        lines = [f"### {self.title}", "", self.subtitle, ""]
        for part in self.sections:
            lines += [f"**{part.title}**", ""]
            lines += [
                f"| metric | arm | figure | interval | n | against {self._reference} |",
                "|---|---|--:|---|--:|---|",
            ]
            for line in part.lines:
                cells = (line.metric, line.arm, line.figure, line.interval, line.n, line.change)
                lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
            lines.append("")
            lines += [f"- {note}" for note in part.notes]
            lines += [""] if part.notes else []
        if self.statement:
            lines += [f"**{self.statement}**", ""]
        if self.sections:
            lines += [self.legend, ""]
        lines += [f"- {note}" for note in run_notes(self.summary)]
        return "\n".join(lines).rstrip() + "\n"


def arm_table(
    run: RunFrames | Summary, metrics: Sequence[str] | None = None, level: float = 0.95
) -> ArmTable:
    """The figures of a run in words. Never raises for a fault of the data.

    Args:
        run: The run, or its summary where there is one already.
        metrics: Metrics to show; the headline ones when None.
        level: Level of the intervals.
    """
    summary = run if isinstance(run, Summary) else summarise(run, metrics, level)
    sections = []
    for workload in summary.workloads:
        for params in summary.points(workload):
            rows = summary.of(workload, params)
            point = point_text(params)
            if not any(row.valid for row in rows):
                # Nothing to tell apart: the first metric's lines say it for all.
                rows = [row for row in rows if row.metric == rows[0].metric]
            sections.append(
                Section(
                    workload,
                    point,
                    tuple(_line(row) for row in rows),
                    tuple(invalid_notes(rows)),
                )
            )
    return ArmTable(summary, tuple(sections))


def _line(row: ArmRow) -> Line:
    if row.level is None:
        figure, interval = "-", ("all invalid" if row.invalid else row.problem or "no value")
    else:
        figure = amount(row.level.value, row.unit, row.metric)
        interval = span(row.level.interval, row.unit, row.metric)
        interval = interval or f"[{count(row.level.boots, 'boot')}: none]"
    change = ratio_text(row)
    if not change and row.level is not None:
        change = "" if row.is_reference else "no pair"
    return Line(
        metric=row.metric,
        arm=row.arm,
        figure=figure,
        interval=interval,
        n=f"{row.valid}+{row.invalid}" if row.invalid else str(row.valid),
        change=change,
        row=row,
    )


def _first_of_metric(lines: Sequence[Line]) -> Iterator[tuple[Line, bool]]:
    before = None
    for line in lines:
        yield line, line.metric != before
        before = line.metric


def invalid_notes(rows: Sequence[ArmRow]) -> list[str]:
    """Why samples of one point are invalid, one sentence per kind of reason.

    Args:
        rows: Rows of one workload and point; those of one metric suffice.
    """
    first = [row for row in rows if row.metric == rows[0].metric]
    by_kind: defaultdict[str, dict[str, int]] = defaultdict(dict)
    reasons: defaultdict[str, dict[str, int]] = defaultdict(dict)
    for row in first:
        for reason, number in row.reasons.items():
            kind = reason_kind(reason)
            by_kind[kind][row.arm] = by_kind[kind].get(row.arm, 0) + number
            reasons[kind][reason] = reasons[kind].get(reason, 0) + number
    total = sum(row.invalid + row.valid for row in first)
    notes = []
    for kind, arms in by_kind.items():
        number = sum(arms.values())
        who = ", ".join(f"{arm} {each}" for arm, each in arms.items())
        share = f"all {number}" if number == total else f"{number} of {total}"
        (words,) = reason_kinds(reasons[kind])
        text = f"{share} samples invalid ({who}): {words}"
        printed = [row.printed for row in first if row.printed is not None]
        if printed and len(by_kind) == 1:
            low, high = min(p[0] for p in printed), max(p[1] for p in printed)
            ends = [amount(end, first[0].unit, first[0].metric) for end in (low, high)]
            shown = ends[0] if ends[0] == ends[1] else f"{ends[0]} to {ends[1]}"
            text += f" (the tool's {first[0].metric}, not to be used: {shown})"
        notes.append(text)
    return notes


def aligned(
    rows: Sequence[Sequence[str]], right: Sequence[int] = (), indent: int = 2, gap: int = 2
) -> list[str]:
    """Rows as lines of text in columns, those of `right` flush right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if place in right else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append((" " * indent + (" " * gap).join(cells)).rstrip())
    return lines


def _record(row: ArmRow) -> dict[str, object]:
    own, ratio = row.level, row.effect

    def number(value: float | None) -> float:
        return np.nan if value is None or not np.isfinite(value) else float(value)

    return {
        "workload": row.workload,
        **{PARAM + name: value for name, value in row.params.items()},
        "metric": row.metric,
        "unit": row.unit,
        "arm": row.arm,
        "reference": row.reference,
        "figure": number(own.value if own else None),
        "low": number(own.interval.low if own and own.interval.known else None),
        "high": number(own.interval.high if own else None),
        "mean": number(own.mean if own else None),
        "boots": own.boots if own else 0,
        "valid": row.valid,
        "invalid": row.invalid,
        "reasons": "; ".join(f"{n} x {reason}" for reason, n in row.reasons.items()),
        "ratio": number(ratio.ratio if ratio else None),
        "ratio_low": number(ratio.interval.low if ratio and ratio.interval.known else None),
        "ratio_high": number(ratio.interval.high if ratio else None),
        "ratio_method": ratio.method if ratio else "",
        "noise_floor": number(row.floor),
        "beyond_noise": row.beyond_noise,
        "problem": row.problem,
    }
