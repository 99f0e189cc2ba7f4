"""A calibration as tables and a figure. All numbers in them are simulated, and say so."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from rich.console import Group
from rich.table import Table

from vringlab.analysis.calibrate import (
    INTERACTION,
    LEVEL,
    METHODS,
    OURS,
    PRIMARY,
    VERDICT,
    CalibrationResult,
    share_interval,
)

#: What a scenario is, in a few words for a heading.
HEADINGS = {
    "same boots": "All arms in each boot",
    "arm x boot": "All arms in each boot,\narms differ by boot",
    "arm x boot, bimodal": "All arms in each boot,\narms differ by boot, two modes",
    "own boots": "A boot of its own\nfor each arm",
}

_BESIDE = {
    "xycoords": ("axes fraction", "data"),
    "textcoords": "offset points",
    "va": "center",
    "fontsize": 8,
}

_TICKS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
_FLOOR = 0.004


def _percent(share: float) -> str:
    if not np.isfinite(share):
        return ""
    return f"{100 * share:.1f}"


def _wide(rows: pd.DataFrame, index: Sequence[str], values: str) -> pd.DataFrame:
    """One column per design, in the order of the rows."""
    designs = list(dict.fromkeys(rows["design"]))
    wide = rows.pivot_table(
        index=list(index), columns="design", values=values, sort=False, dropna=False
    )
    return wide[designs]


def false_positive_table(result: CalibrationResult) -> pd.DataFrame:
    """Share of equal arms that each method takes for different, by scenario and design."""
    return _wide(result.false_positives, ("scenario", "method"), "rejected")


def coverage_table(result: CalibrationResult) -> pd.DataFrame:
    """Coverage of each interval, by scenario and design, equal arms."""
    rows = result.false_positives
    return _wide(rows[rows["coverage"].notna()], ("scenario", "method"), "coverage")


def power_table(result: CalibrationResult) -> pd.DataFrame:
    """Share of true effects that are found, by scenario, method, effect and design."""
    rows = result.power.assign(effect=[f"{100 * (r - 1):+.0f} %" for r in result.power["ratio"]])
    return _wide(rows, ("scenario", "method", "effect"), "rejected")


def sequential_table(result: CalibrationResult) -> pd.DataFrame:
    """Stopping rules against the full design, one row per interaction, effect and rule."""
    rows = result.sequential
    if rows.empty:
        return rows
    effect = [f"{100 * (r - 1):+.0f} %" for r in rows["ratio"]]
    shown = rows.assign(effect_size=effect)
    keys = ["interaction", "effect_size", "rule"]
    return shown.set_index(keys)[["effect", "fixed", "agree", "units", "saved", "coverage"]]


# ------------------------------------------------------------------------------------ markdown


def _markdown(table: pd.DataFrame, units: Sequence[str] = ()) -> str:
    names = [str(name) for name in table.index.names]
    head = [*names, *map(str, table.columns)]
    lines = ["| " + " | ".join(head) + " |"]
    lines.append("|" + "---|" * len(names) + "---:|" * len(table.columns))
    for key, row in table.iterrows():
        labels = [str(part) for part in (key if isinstance(key, tuple) else (key,))]
        cells = [
            f"{value:.1f}" if str(name) in units else _percent(float(value))
            for name, value in row.items()
        ]
        lines.append("| " + " | ".join([*labels, *cells]) + " |")
    return "\n".join(lines)


def caption(result: CalibrationResult) -> str:
    """What the tables are made from, in one sentence."""
    noise = result.noise
    most = int(result.table["datasets"].max())
    count = f"{result.datasets:,} simulated data sets per cell (seed {result.seed})"
    if most > result.datasets:
        count += f", {most:,} for the primary interval and the verdict"
    return (
        f"{count}; no measurement. Spreads on the log scale: boot {noise.boot:g}, arm x boot "
        f"{INTERACTION:g}, run {noise.run:g} with {100 * noise.slow_share:.0f} % of runs slower "
        f"by {noise.slow:g}. Designs are boots x blocks; figures are percent."
    )


def markdown(result: CalibrationResult) -> str:
    """All tables for a README or a report."""
    parts = [
        caption(result),
        "**False positives: equal arms taken for different (nominal 5 %)**",
        _markdown(false_positive_table(result)),
        "**Coverage of the 95 % intervals**",
        _markdown(coverage_table(result)),
        "**Power: true effects found**",
        _markdown(power_table(result)),
    ]
    steps = sequential_table(result)
    if not steps.empty:
        parts += [
            "**Stopping early, of 10 boots; `units` is the mean number of boots used**",
            _markdown(steps, units=("units",)),
        ]
    if result.problems:
        parts += ["**Off beyond chance**", "\n".join(f"- {line}" for line in result.problems)]
    return "\n\n".join(parts) + "\n"


# ---------------------------------------------------------------------------------- terminal


def _rich(table: pd.DataFrame, title: str, units: Sequence[str] = ()) -> Table:
    shown = Table(title=title, title_justify="left", title_style="bold")
    for name in table.index.names:
        shown.add_column(str(name))
    for column in table.columns:
        shown.add_column(str(column), justify="right")
    before = None
    for key, row in table.iterrows():
        labels = [str(part) for part in (key if isinstance(key, tuple) else (key,))]
        if before is not None and labels[0] != before:
            shown.add_section()
        first = labels[0] if labels[0] != before else ""
        before = labels[0]
        cells = [
            f"{value:.1f}" if str(name) in units else _percent(float(value))
            for name, value in row.items()
        ]
        style = "bold" if any(label in OURS for label in labels) else None
        shown.add_row(first, *labels[1:], *cells, style=style)
    return shown


def terminal(result: CalibrationResult) -> Group:
    """All tables for a terminal."""
    tables = [
        _rich(false_positive_table(result), "False positives, % (nominal 5)"),
        _rich(coverage_table(result), "Coverage of the 95 % intervals, %"),
        _rich(power_table(result), "Power, %"),
    ]
    steps = sequential_table(result)
    if not steps.empty:
        tables.append(_rich(steps, "Stopping early, of 10 boots", units=("units",)))
    lines = [caption(result), *result.problems]
    return Group(*tables, *lines)


# ------------------------------------------------------------------------------------- figure


def figure(result: CalibrationResult) -> Figure:
    """False positives of each method by design, one panel per scenario.

    The band is where a method of just 5 % would lie by chance of the simulation; bars are the
    Monte-Carlo intervals of the shares. The axis is logarithmic, and what lies below its end is
    drawn there.
    """
    rows = result.false_positives
    scenarios = list(dict.fromkeys(rows["scenario"]))
    designs = list(dict.fromkeys(rows["design"]))
    methods = [method for method in METHODS if method in set(rows["method"])]
    colours = _colours(methods)
    with sns.axes_style("whitegrid", {"grid.color": "0.92", "axes.edgecolor": "0.7"}):
        shown, axes = plt.subplots(
            1,
            len(scenarios),
            figsize=(3.1 * len(scenarios) + 0.6, 4.9),
            sharey=True,
            squeeze=False,
            layout="constrained",
        )
    for panel, scenario in zip(axes[0], scenarios, strict=True):
        part = rows[rows["scenario"] == scenario]
        _panel(panel, part, designs, methods, colours, result.datasets)
        panel.set_title(HEADINGS.get(scenario, scenario), fontsize=10, loc="left")
    axes[0][0].set_ylabel("equal arms called different")
    last = axes[0][-1]
    last.annotate("nominal 5 %", (1, 1 - LEVEL), (3, 0), **_BESIDE)
    handles, labels = axes[0][0].get_legend_handles_labels()
    shown.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    shown.suptitle(
        f"False positives at a nominal 5 %, simulated ({result.datasets:,} data sets and more)",
        fontsize=12,
        fontweight="bold",
        x=0.01,
        ha="left",
    )
    return shown


def _colours(methods: Sequence[str]) -> dict[str, object]:
    others = [method for method in methods if method not in OURS]
    palette = sns.color_palette("flare", len(others))
    colours: dict[str, object] = dict(zip(others, palette, strict=True))
    # Two blues for ours: apart from the rest also without colour, by their darkness.
    colours[PRIMARY], colours[VERDICT] = "#0b3d91", "#4f9bd9"
    return colours


_MARKERS = ("o", "D", "s", "^", "v", "P", "X")


def _panel(
    panel: Axes,
    part: pd.DataFrame,
    designs: Sequence[str],
    methods: Sequence[str],
    colours: dict[str, object],
    datasets: int,
) -> None:
    low, high = share_interval(1 - LEVEL, datasets)
    panel.axhspan(low, high, color="0.85", zorder=0)
    panel.axhline(1 - LEVEL, color="0.25", linewidth=1, linestyle="--", zorder=1)
    step = 0.72 / max(1, len(methods) - 1)
    for index, method in enumerate(methods):
        own = part[part["method"] == method].set_index("design").reindex(list(designs))
        x = np.arange(len(designs)) - 0.36 + step * index
        y = np.maximum(own["rejected"].to_numpy(dtype=np.float64), _FLOOR)
        bars = [
            y - np.clip(own["low"].to_numpy(dtype=np.float64), _FLOOR, y),
            np.maximum(own["high"].to_numpy(dtype=np.float64) - y, 0),
        ]
        panel.errorbar(
            x,
            y,
            yerr=bars,
            fmt=_MARKERS[index % len(_MARKERS)],
            color=colours[method],
            markersize=6.5 if method in OURS else 5,
            linewidth=1.2,
            label=method,
            zorder=3,
        )
    for border in np.arange(len(designs) - 1) + 0.5:
        panel.axvline(border, color="0.92", linewidth=0.8, zorder=0)
    panel.set_xticks(np.arange(len(designs)), designs)
    panel.set_xlabel("boots x blocks in each", fontsize=9)
    panel.set_xlim(-0.6, len(designs) - 0.4)
    panel.grid(visible=False, axis="x")
    panel.set_yscale("log")
    panel.set_ylim(_FLOOR * 0.9, 1.0)
    panel.yaxis.set_major_locator(FixedLocator(_TICKS))
    panel.yaxis.set_minor_locator(NullLocator())
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %"))
    sns.despine(ax=panel)
