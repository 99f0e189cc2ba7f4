"""What notebooks show of a run: its figures, tables and provenance, one call a cell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from IPython.display import Markdown, display
from matplotlib.figure import Figure

from vringlab.analysis.frames import RunFrames
from vringlab.analysis.judgement import verdicts_of as verdicts_of
from vringlab.campaign.progress import clock
from vringlab.errors import UserError
from vringlab.report import canvas, opinions
from vringlab.report.figures import figures_for, save_figures
from vringlab.report.instruction_figures import functions, opinions_figure, other_events
from vringlab.report.summary import Summary, reason_kinds
from vringlab.report.tables import arm_table
from vringlab.settings import settings


def show_figures(run: RunFrames, *kinds: str) -> None:
    """Show the figures of a run whose names begin with one of `kinds`; all when none is named.

    Raises:
        UserError: the run has no figure of any of these kinds.
    """
    figures = figures_for(run)
    found = [
        figure
        for kind in kinds or tuple(figures)
        for name, figure in figures.items()
        if name.startswith(kind)
    ]
    if not found:
        raise UserError(
            f"run {run.run_id} has no figure {' or '.join(map(repr, kinds))}",
            remedy=f"it has: {', '.join(figures)}",
        )
    for figure in found:
        display(figure)  # type: ignore[no-untyped-call]  # IPython's


def show_paths(run: RunFrames) -> None:
    """Show which path the packets took, or say why that was not seen."""
    figure = figures_for(run).get("path")
    if figure is not None:
        display(figure)  # type: ignore[no-untyped-call]  # IPython's
        return
    why = run.provenance.get("path_problem") or "its profile leaves that out"
    display(Markdown(f"This run did not see which path the packets took: {why}."))  # type: ignore[no-untyped-call]  # IPython's


def show_opinions(run: RunFrames) -> None:
    """Show time and instructions beside each other, or say why there are none."""
    _show_counted(run, opinions_figure)


def show_functions(run: RunFrames) -> None:
    """Show where the instructions went by function, or say why that is not known.

    Raises:
        UserError: a profile is damaged.
    """
    _show_counted(run, functions)


def show_events(run: RunFrames) -> None:
    """Show exits and context switches for one unit of work, or say why they are not known.

    Raises:
        UserError: what was kept of them is damaged.
    """
    _show_counted(run, other_events, "exits and context switches")


def _show_counted(
    run: RunFrames,
    draw: Callable[[Summary, str], canvas.RunFigure | None],
    what: str = "instructions",
) -> None:
    summary = opinions.summary_of(run)
    made = [draw(summary, workload) for workload in summary.workloads]
    figures = [figure for figure in made if figure is not None]
    for figure in figures:
        display(figure)  # type: ignore[no-untyped-call]  # IPython's
    if not figures:
        why = opinions.refusal(run) or "no point has both time and instructions"
        display(Markdown(f"This run has no {what} to show: {why}."))  # type: ignore[no-untyped-call]  # IPython's


def keep_figures(run: RunFrames, folder: Path | None, **more: Figure) -> None:
    """Write all figures of a run, and `more` by name, below `folder`; do nothing without one.

    They go to a folder named after the experiment. A relative folder is meant from the
    collection's, as a notebook's working folder depends on what runs it.

    Raises:
        InfrastructureError: the folder cannot be written.
    """
    if folder is None:
        return
    target = settings().root / folder / run.plan.experiment
    paths = save_figures(run, target)
    for name, figure in more.items():
        paths += canvas.save(figure, target, name.replace("_", "-"))
    print(f"{len(paths)} files in {target}")


def show_arms(run: RunFrames, metrics: Sequence[str] | None = None) -> Markdown:
    """The figures of a run by arm, as `vringlab show` prints them."""
    return Markdown(arm_table(run, metrics).markdown())  # type: ignore[no-untyped-call]  # IPython's


def about(run: RunFrames) -> pd.DataFrame:
    """Where and with what a run was measured, two columns; what is not known is left out."""
    known = run.provenance
    facts: dict[str, object] = {
        "run": run.run_id,
        "figures": "SIMULATED, no measurement" if run.simulated else "measured",
        "experiment": f"{run.plan.experiment}: {run.plan.title}",
        "profile": run.plan.profile,
        "samples": f"{run.samples['cell_id'].nunique()} of {len(run.plan.cells)} planned",
        "measured on": str(run.samples["started"].min())[:10],
        "host": f"{_at(known, 'run', 'host')}, {run.host_kind}",
        "its accelerator": _accelerator(known),
        "boots": boots_in_words(run),
        "base kernel": run.plan.base_kernel,
        "guest's kernel": _at(known, "kernels", "guest", "release"),
        "tools": ", ".join(f"{name} {text}" for name, text in _mapping(known, "tools").items()),
        "collection": str(_at(known, "git", "commit"))[:12],
    }
    if run.time:
        phases = _mapping(run.time, "phases")
        total = float(sum(phases.values()))
        share = float(phases.get("measure", 0)) / total if total else 0.0
        facts["wall time"] = f"{clock(total)}, {100 * share:.0f} % of it in timed windows"
    shown = {name: text for name, text in facts.items() if str(text) not in ("", "None")}
    return pd.DataFrame({"what": list(shown), "": list(map(str, shown.values()))})


def boots_in_words(run: RunFrames) -> str:
    """Which boots were restored from saved labs, and which were booted; empty where unrecorded."""
    by_way: dict[str, list[str]] = {}
    for name, facts in _mapping(run.provenance, "boots").items():
        if facts.get("how"):
            by_way.setdefault(facts["how"], []).append(name)
    named = {"restored": "restored from saved labs", "booted": "booted"}
    return "; ".join(f"{', '.join(names)} {named.get(way, way)}" for way, names in by_way.items())


def arms_of(run: RunFrames) -> pd.DataFrame:
    """The arms with the module and build-id that were found loaded."""
    built = _mapping(run.provenance, "arms")
    rows = []
    for arm in dict.fromkeys(cell.arm for cell in run.plan.cells):
        facts = _mapping(built, arm)
        rows.append(
            {
                "arm": f"{arm} (reference)" if arm == run.plan.reference else arm,
                "module": facts.get("module", run.plan.module),
                "build-id": str(facts.get("build_id", "not recorded"))[:16],
                "patched files": ", ".join(facts.get("patched_files", [])) or "none",
            }
        )
    return pd.DataFrame(rows).sort_values("arm", ignore_index=True)


def invalid_samples(run: RunFrames) -> pd.DataFrame:
    """Invalid samples by workload, parameter point and kind of reason, with their number."""
    cells = run.samples.drop_duplicates("cell_id")
    bad = cells[~cells["valid"].astype(bool)]
    rows = []
    for (workload, point), some in bad.groupby(["workload", _points(bad)], sort=False):
        counted = Counter(map(str, some["reason"]))
        for reason, number in reason_kinds(counted).items():
            rows.append(
                {"workload": workload, "point": point, "samples": number, "finding": reason}
            )
    return pd.DataFrame(rows, columns=["workload", "point", "samples", "finding"])


def _points(cells: pd.DataFrame) -> pd.Series[str]:
    names = [name for name in cells.columns if name.startswith("param_")]
    texts = [
        ", ".join(
            f"{str(name).removeprefix('param_')}={value}"
            for name, value in row.items()
            if pd.notna(value)
        )
        for row in cells[names].to_dict("records")
    ]
    return pd.Series(texts, index=cells.index, dtype=str)


def _accelerator(known: Mapping[str, Any]) -> str:
    facts = _mapping(_mapping(known, "host"), "accelerator")
    if not facts:
        return ""
    # After the colon stand the words of a program that failed.
    return f"{facts.get('name')}, because {str(facts.get('reason', '')).partition(': ')[0]}"


def _mapping(of: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = of.get(name)
    return found if isinstance(found, Mapping) else {}


def _at(of: Mapping[str, Any], *names: str) -> object:
    found: object = of
    for name in names:
        found = found.get(name) if isinstance(found, Mapping) else None
    return found
