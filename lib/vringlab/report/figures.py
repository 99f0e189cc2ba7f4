"""The figures of a run, chosen by what its workloads measured.

A family of figures is a module `*_figures` in this package that defines `FAMILY`; a new one is
one new file. What no family draws still gets a panel per parameter point, so a new workload has
figures from its first run.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from matplotlib.figure import Figure

from vringlab.analysis.frames import RunFrames
from vringlab.analysis.units import METRICS
from vringlab.campaign.files import writing
from vringlab.report import canvas
from vringlab.report.canvas import RunFigure, Width, statement, style
from vringlab.report.family import Family
from vringlab.report.forest import effects
from vringlab.report.marks import Mark, published
from vringlab.report.panels import Column, arm_panels
from vringlab.report.path_view import path_figure
from vringlab.report.summary import Summary, metric_order, run_notes, summarise
from vringlab.report.time_budget import time_figure

#: Rates and shares are read against nothing; events span decades.
_LOG = frozenset({"tx_interrupts", "kicks", "vmexits"})


@cache
def families() -> tuple[Family, ...]:
    """All families of figures, in the order in which a report shows them."""
    found = []
    for info in pkgutil.iter_modules([str(Path(__file__).parent)]):
        if info.name.endswith("_figures"):
            module = importlib.import_module(f"vringlab.report.{info.name}")
            family = getattr(module, "FAMILY", None)
            if family is not None:
                found.append(family)
    return tuple(sorted(found, key=lambda family: (family.order, family.name)))


def drawn_metrics(run: RunFrames) -> list[str]:
    """Metrics that the figures of a run show, for `summarise`."""
    found: list[str] = []
    for workload in run.plan.workloads:
        there = metric_order(run.samples, workload)
        covered = {name for family in families() for name in family.covers}
        found += [name for name in there if name not in covered]
    return list(dict.fromkeys(found))


def figures_for(
    run: RunFrames | Summary, width: Width = "wide", notes: bool = True
) -> dict[str, Figure]:
    """All figures of a run by name, in the order of a report. Never raises for a fault of the data.

    Names are `KIND` or, where several workloads have a kind, `KIND-WORKLOAD`: `latency`,
    `round-trips`, `packets`, `interrupts`, `figures`; then `effects`, `path` and `time`.

    Args:
        run: The run, or its summary over `drawn_metrics`.
        width: `wide` for slides, screens and paper; `narrow` for a telephone.
        notes: Whether each figure's caption is drawn below it.
    """
    summary = run if isinstance(run, Summary) else summarise(run, drawn_metrics(run))
    figures: dict[str, Figure] = {}
    with style():
        made = list(_workload_figures(summary, width, notes))
        kinds = [kind for kind, _, _ in made]
        for kind, workload, figure in made:
            figures[kind if kinds.count(kind) == 1 else f"{kind}-{workload}"] = figure
        if not summary.rows:
            text = " ".join(["No sample was measured.", *run_notes(summary)])
            figures["statement"] = statement(summary, "nothing to show", text, width)
        marks = published(summary)
        forest = effects(summary, _headline(summary, marks), width, notes, marks)
        if forest is not None:
            figures["effects"] = forest
        path = path_figure(summary, width, notes)
        if path is not None:
            figures["path"] = path
        time = time_figure(summary, width, notes)
        if time is not None:
            figures["time"] = time
    return figures


def _workload_figures(
    summary: Summary, width: Width, notes: bool
) -> Iterator[tuple[str, str, RunFigure]]:
    for workload in summary.workloads:
        there = summary.metrics(workload)
        left = [name for name in there if name != "none"]
        for family in families():
            if any(name in family.metrics for name in there):
                made = family.draw(summary, workload, width, notes)
                for kind, figure in made.items():
                    yield kind, workload, figure
                # Families may share a metric; one that drew nothing has not shown it.
                done = {*family.metrics, *family.covers} if made else set()
                left = [name for name in left if name not in done]
        columns = [Column(name, name, log=name in _LOG) for name in left]
        # Three across is what a row has room for.
        for start in range(0, len(columns), 3):
            some = columns[start : start + 3]
            rest = arm_panels(summary, workload, some, "figures of each sample", width, notes)
            if rest is not None:
                yield f"figures{start // 3 + 1 if start else ''}", workload, rest
        if not left and set(there) == {"none"}:
            text = f"Of {workload} there is no figure: " + "; ".join(
                sorted({reason for row in summary.of(workload) for reason in row.reasons})
            )
            yield "invalid", workload, statement(summary, "no figure", text, width)


def _headline(summary: Summary, marks: Sequence[Mark]) -> list[str]:
    """Metrics of the overview of effects.

    The families' own, those that a claim is about, and all that no family has.
    """
    known = {name for family in families() for name in (*family.metrics, *family.covers)}
    shown = {name for family in families() for name in family.headline}
    shown |= {mark.metric for mark in marks if any(mark.fits(row) for row in summary.rows)}
    there = [name for workload in summary.workloads for name in summary.metrics(workload)]
    names = [name for name in METRICS if name in there and name not in _mapped(summary)]
    return [name for name in names if name in shown or name not in known]


def _mapped(summary: Summary) -> set[str]:
    """Metrics whose changes are too many for the overview, and stand in heat maps."""
    return {
        name
        for family in families()
        for workload in summary.workloads
        if family.mapped(summary, workload)
        for name in family.metrics
        if name in summary.metrics(workload)
    }


def save_figures(run: RunFrames | Summary, folder: Path | str, width: Width = "wide") -> list[Path]:
    """Write all figures of a run as PNG and SVG into a folder, which is made.

    Args:
        run: The run, or its summary over `drawn_metrics`.
        folder: Where to.
        width: `wide` or `narrow`.

    Returns:
        The files.

    Raises:
        InfrastructureError: the folder cannot be written.
    """
    folder = Path(folder)
    paths: list[Path] = []
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name, figure in figures_for(run, width).items():
            paths += canvas.save(figure, folder, name)
    return paths
