"""Where the wall time of a run went, as a picture and in words."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.patches import Patch

from vringlab.campaign.budget import PHASES
from vringlab.report.canvas import MUTED, PAPER, SMALL, RunFigure, Width, sheet, usable
from vringlab.report.summary import Summary

#: Measuring stands out; everything else is what it costs.
_COLOURS = {
    "set-up": "#56b4e9",
    "build": "#cc79a7",
    "boot": "#e69f00",
    "switch": "#d55e00",
    "prepare": "#8c8cd9",
    "measure": "#009e73",
    "count": "#0072b2",
    "path": "#c5b000",
    "collect": "#a6761d",
    "analyse": "#7f7f7f",
    "idle": "#bdbdbd",
}


def phases(time: Mapping[str, object]) -> dict[str, float]:
    """Seconds by phase in the order of a run, of all its attempts; empty when not recorded."""
    spent = time.get("phases")
    if not isinstance(spent, Mapping):
        return {}
    names = [*PHASES, *(str(name) for name in spent if name not in PHASES)]
    found = {name: spent.get(name) for name in names}
    return {
        name: float(seconds)
        for name, seconds in found.items()
        if isinstance(seconds, int | float) and seconds > 0
    }


def duration(seconds: float) -> str:
    """`25 ms`, `12.3 s`, `4 min 05 s`, `2 h 10 min`."""
    if seconds < 0.95:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"


def sentence(time: Mapping[str, object]) -> str:
    """`Of 4 min 05 s, 61 % went to measuring.`; empty when time was not recorded."""
    spent = phases(time)
    total = sum(spent.values())
    if not total:
        return ""
    share = spent.get("measure", 0.0) / total
    return f"Of {duration(total)}, {100 * share:.0f} % went to measuring."


def time_figure(summary: Summary, width: Width = "wide", notes: bool = True) -> RunFigure | None:
    """The time budget as one bar; None when it was not recorded."""
    spent = phases(summary.run.time)
    total = sum(spent.values())
    if not total:
        return None
    handles: list[Patch] = [
        Patch(
            fc=_COLOURS.get(name, MUTED),
            label=f"{name} {duration(seconds)}, {100 * seconds / total:.1f} %",
        )
        for name, seconds in spent.items()
    ]
    tries = summary.run.time.get("attempts")
    number = len(tries) if isinstance(tries, list) else 1
    caption = sentence(summary.run.time)
    if number > 1:
        caption += f" The run was continued: {number} attempts together."
    made = sheet(
        summary, "where the time went", 0.62, width, handles=handles, caption=caption, notes=notes
    )
    axes = made.axes((made.width - usable(width)) / 2, 0.05, usable(width), 0.42)
    axes.set_axis_off()
    axes.set(xticks=[], yticks=[])
    axes.set_xlim(0, total)
    axes.set_ylim(0, 1)
    start = 0.0
    for name, seconds in spent.items():
        bar = axes.barh(
            0.5, seconds, left=start, height=1, color=_COLOURS.get(name, MUTED), ec=PAPER, lw=0.8
        )
        bar[0].set_gid(f"phase:{name}")
        # A name that does not fit into its part is in the legend only.
        share = seconds / total * usable(width)
        if share > 0.09 * len(name) + 0.1:
            axes.text(
                start + seconds / 2,
                0.5,
                name,
                ha="center",
                va="center",
                size=SMALL,
                color="white" if name in ("measure", "switch", "analyse", "collect") else "black",
                gid="phase",
            )
        start += seconds
    return made.figure


__all__ = ["duration", "phases", "sentence", "time_figure"]
