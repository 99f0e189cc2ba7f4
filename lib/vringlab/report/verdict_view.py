"""Verdicts as tables and a figure: what was claimed, what was measured, and what follows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from pandas.io.formats.style import Styler

from vringlab.analysis.frames import RunFrames
from vringlab.analysis.pairing import point_text
from vringlab.analysis.units import METRICS
from vringlab.analysis.verdicts import Verdict, Word
from vringlab.analysis.wording import change, interval_text
from vringlab.report.canvas import (
    GRID,
    INK,
    MUTED,
    SMALL,
    RunFigure,
    Width,
    line_inches,
    looks,
    sheet,
    style,
    text_inches,
    tidy_axes,
    usable,
)
from vringlab.report.change_axis import set_change_axis
from vringlab.report.summary import summarise

#: The words, from the one an author hopes for to those that say nothing of the patch.
WORDS: tuple[Word, ...] = (
    "reproduced",
    "same direction, other size",
    "no effect seen",
    "contradicted",
    "not exercised",
    "not comparable",
    "insufficient data",
    "invalid as published",
)

# Ink on a pale ground of the same hue; the word itself says what the colour says.
_GROUNDS: dict[str, str] = {
    "reproduced": "#d3eee0",
    "same direction, other size": "#e4eeda",
    "no effect seen": "#f6e8c8",
    "contradicted": "#f8d9d0",
}
_OTHER = "#ececec"

_ROW = 0.26


def counts(verdicts: Sequence[Verdict]) -> pd.DataFrame:
    """How many claims of each version got which verdict; verdicts that none got are left out."""
    frame = pd.DataFrame(
        {
            "version": [verdict.claim.version for verdict in verdicts],
            "verdict": pd.Categorical([v.word for v in verdicts], categories=WORDS),
        }
    )
    versions = list(dict.fromkeys(frame["version"]))
    table = pd.crosstab(frame["version"], frame["verdict"]).reindex(versions)
    table.columns = list(table.columns)
    return table.rename_axis(None, axis="columns")


def verdict_table(verdicts: Sequence[Verdict]) -> Styler:
    """One row per claim: what was claimed, what was measured with its interval, and the verdict."""
    if not verdicts:
        return pd.DataFrame({"verdict": ["no claim"]}).style.hide(axis="index")
    rows = [
        {
            "version": verdict.claim.version,
            "metric": verdict.claim.metric,
            "point": point_text(dict(verdict.claim.params)),
            "claimed": _claimed(verdict),
            "measured here": _measured(verdict),
            "blocks in boots": _size(verdict),
            "verdict": verdict.word,
            "because": verdict.reason or verdict.evidence.problem,
        }
        for verdict in verdicts
    ]
    frame = pd.DataFrame(rows)
    look = {"text-align": "left", "vertical-align": "top", "white-space": "nowrap"}
    styled = frame.style.format(escape="html").hide(axis="index").set_properties(None, **look)
    styled = styled.set_table_styles([{"selector": "th", "props": [("text-align", "left")]}])
    styled = styled.map(_ground, subset=["verdict"])
    styled = styled.set_properties(subset=["point"], **{"white-space": "normal"})
    wrap = {"white-space": "normal", "min-width": "14em"}
    return styled.set_properties(subset=["because"], **wrap)


def _ground(word: object) -> str:
    return f"background-color: {_GROUNDS.get(str(word), _OTHER)}; color: #1b1b1b"


def _claimed(verdict: Verdict) -> str:
    ratio = verdict.evidence.claimed or verdict.claim.ratio
    return change(ratio) if ratio else "a figure, no ratio"


def _measured(verdict: Verdict) -> str:
    found = verdict.evidence
    if found.effect is None:
        return "-"
    text = change(found.effect.ratio)
    if not found.interval.known:
        return text
    return f"{text} {interval_text(found.interval).replace(' %,', ',').replace(' %]', ']')}"


def _size(verdict: Verdict) -> str:
    effect = verdict.evidence.effect
    return "-" if effect is None else f"{effect.blocks} in {effect.boots}"


def sentences(verdicts: Sequence[Verdict], details: bool = False) -> str:
    """Verdicts as Markdown, one point per claim, with what stands behind them if asked for."""
    lines = []
    for verdict in verdicts:
        word, _, rest = verdict.sentence.partition(": ")
        lines.append(f"- **{word}**: {rest}")
        lines += [f"    - {line}" for line in verdict.details] if details else []
    return "\n".join(lines) or "No claim."


def claimed_and_measured(
    run: RunFrames, verdicts: Sequence[Verdict], width: Width = "wide"
) -> RunFigure:
    """Each claim's change beside what the run found, on a logarithmic axis, by metric.

    Claims without a claimed ratio, or without any measured one, are left out and counted below.

    Args:
        run: The run.
        verdicts: Its verdicts.
        width: Wide or narrow.
    """
    shown = [v for v in verdicts if v.evidence.effect is not None and v.evidence.claimed]
    left_out = len(verdicts) - len(shown)
    by_metric = {
        metric: [v for v in shown if v.claim.metric == metric]
        for metric in METRICS
        if any(v.claim.metric == metric for v in shown)
    }
    summary = summarise(run, [])
    room = usable(width)
    names = [_name(v) for v in shown] or [""]
    left = min(0.45 * room, max(text_inches(name, SMALL) for name in names) + 0.15)
    head, axis = line_inches(9.5) + 0.06, 0.45
    heights = {metric: _ROW * len(rows) for metric, rows in by_metric.items()}
    caption = "Logarithmic axes: a change and its inverse are equally far from none."
    if left_out:
        caption += f" {left_out} of {len(verdicts)} claims have no measured ratio here."
    with style():
        made = sheet(
            summary,
            "claimed, and measured here",
            sum(heights.values()) + len(heights) * (head + axis) + 0.1,
            width,
            handles=_legend(),
            caption=caption,
        )
        arms = looks(run)
        top = 0.0
        for metric, rows in by_metric.items():
            axes = made.axes(left + 0.12, top + head, room - left - 0.1, heights[metric])
            better = METRICS[metric].direction
            axes.set_title(f"{metric} ({better} is better)", loc="left", size=9.5, weight="bold")
            axes.set_ylim(len(rows) - 0.5, -0.5)
            axes.set_yticks(range(len(rows)), [_name(v) for v in rows])
            _ends(axes, rows)
            for place, verdict in enumerate(rows):
                _draw(axes, verdict, place, arms[verdict.claim.arms[1]].colour)
            axes.axvline(0, color=INK, lw=0.9, zorder=2)
            tidy_axes(axes)
            axes.spines["left"].set_visible(False)
            axes.tick_params(axis="y", length=0)
            set_change_axis(axes, "x", 9)
            top += head + heights[metric] + axis
    return made.figure


def _name(verdict: Verdict) -> str:
    point = point_text(dict(verdict.claim.params))
    return f"{verdict.claim.version}  {point}".strip()


def _ends(axes: Axes, rows: Sequence[Verdict]) -> None:
    """Limits that hold every estimate and claim; an interval may run out of the picture."""
    core = [0.0]
    for verdict in rows:
        found = verdict.evidence
        assert found.effect is not None
        assert found.claimed is not None
        core += [found.effect.log_mean, float(np.log(found.claimed)), found.floor, -found.floor]
    low, high = min(core), max(core)
    pad = 0.15 * max(high - low, 0.05)
    axes.set_xlim(low - pad, high + pad)


def _draw(axes: Axes, verdict: Verdict, place: int, colour: str) -> None:
    found = verdict.evidence
    assert found.effect is not None
    assert found.claimed is not None
    if found.floor:
        band = Rectangle((-found.floor, place - 0.5), 2 * found.floor, 1, fc=GRID, lw=0, zorder=1)
        axes.add_patch(band)
    low, high = axes.get_xlim()
    if found.interval.known:
        ends = np.clip(np.log([max(found.interval.low, 1e-300), found.interval.high]), low, high)
        axes.plot(ends, [place, place], color=colour, lw=2, zorder=3, solid_capstyle="butt")
    axes.plot([found.effect.log_mean], [place], "o", color=colour, ms=6, zorder=5)
    withdrawn = verdict.claim.status != "standing"
    axes.plot(
        [np.log(found.claimed)],
        [place],
        "X" if withdrawn else "D",
        mfc="none" if not withdrawn else MUTED,
        mec=MUTED if withdrawn else INK,
        ms=7,
        mew=1.2,
        zorder=4,
    )


def _legend() -> list[Line2D]:
    return [
        Line2D([], [], ls="", marker="D", mfc="none", mec=INK, ms=7, label="claimed"),
        Line2D([], [], ls="", marker="X", color=MUTED, ms=7, label="withdrawn or superseded"),
        Line2D([], [], marker="o", color=MUTED, ms=6, lw=2, label="measured here, 95 % interval"),
        Line2D([], [], color=GRID, lw=8, label="noise floor"),
    ]
