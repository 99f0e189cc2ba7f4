"""Published figures as tables and pictures: what was claimed, and what the audit says of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from pandas.io.formats.style import Styler

from vringlab.analysis.audit_versions import payload
from vringlab.analysis.claims import Claim
from vringlab.analysis.finding import RULES, Finding, figures_text, point_text, versions_text
from vringlab.analysis.rounding import percent_of, printed, raw_ratio
from vringlab.analysis.units import percent_text
from vringlab.errors import UserError
from vringlab.report.netperf_matrix import COLUMNS, DIRECTIONS, FULL_COLOUR
from vringlab.settings import settings

# Brown to green, readable with red-green blindness; white is no change.
_COLOURS = "BrBG"
_LIMIT = 100 * FULL_COLOUR
# Columns of text that may run over several lines.
_SENTENCES = ("point", "finding", "what it asks", "where it comes from")
_STANDING, _ENDED, _MARK = "#00696b", "#8a8a8a", "#d1006c"


def claims_table(claims: Sequence[Claim]) -> pd.DataFrame:
    """Claims for reading, figures as printed; versions that printed the same share a row."""
    same: dict[tuple[object, ...], list[Claim]] = {}
    for claim in claims:
        figure = (claim.published, claim.n, claim.status, claim.message_id)
        key = (claim.experiment, _local(claim), *figure)
        same.setdefault(key, []).append(claim)
    rows = []
    for group in same.values():
        claim = group[0]
        rows.append(
            {
                "experiment": claim.experiment,
                "version": versions_text([each.version for each in group]),
                "claim": _local(claim),
                "point": point_text(claim),
                "published": _unbroken(figures_text(claim)),
                "change": _unbroken(percent_text(claim.change or 0)) if claim.before else "",
                "better": claim.direction,
                "n": "?" if claim.n is None else str(claim.n),
                "host": claim.environment.kind,
                "status": claim.status,
            }
        )
    frame = pd.DataFrame(rows)
    return frame.drop(columns="experiment") if len({c.experiment for c in claims}) == 1 else frame


def _local(claim: Claim) -> str:
    return claim.id.removeprefix(f"{claim.experiment}/{claim.version}.")


def _unbroken(text: str) -> str:
    return text.replace(" ", "\u00a0")


def overview_table(claims: Sequence[Claim]) -> pd.DataFrame:
    """One row per experiment and version: how many figures, and how they stand."""
    frame = pd.DataFrame(
        {
            "experiment": [claim.experiment for claim in claims],
            "version": [claim.version for claim in claims],
            "date": [str(claim.date or "?") for claim in claims],
            "arms": [" / ".join(claim.arms) for claim in claims],
            "n": ["?" if claim.n is None else str(claim.n) for claim in claims],
            "host": [claim.environment.kind for claim in claims],
            "kernel": [claim.environment.kernel or "?" for claim in claims],
            "status": [claim.status for claim in claims],
        }
    )
    grouped = frame.groupby(list(frame.columns), sort=False).size()
    return grouped.rename("figures").reset_index().set_index(["experiment", "version"])


def findings_table(findings: Sequence[Finding]) -> pd.DataFrame:
    """Findings for reading, one a row."""
    return pd.DataFrame(
        {
            "experiment": [item.experiment for item in findings],
            "severity": [item.severity for item in findings],
            "rule": [item.kind for item in findings],
            "claims": [len(item.claims) for item in findings],
            "finding": [item.message for item in findings],
        }
    )


def rules_table() -> pd.DataFrame:
    """What the audit asks, and where each question comes from."""
    rules = list(RULES.values())
    return pd.DataFrame(
        {
            "rule": [rule.kind for rule in rules],
            "what it asks": [rule.title for rule in rules],
            "where it comes from": [rule.source for rule in rules],
        }
    )


def shown(frame: pd.DataFrame) -> Styler:
    """A table for a notebook: nothing cut off, text to the left, no row numbers."""
    look = {"text-align": "left", "vertical-align": "top"}
    style = frame.style.format(escape="html").set_properties(subset=None, **look)
    style = style.set_table_styles([{"selector": "th", "props": list(look.items())}])
    for column in frame.columns:
        wrap = "normal" if column in _SENTENCES else "nowrap"
        style = style.set_properties(subset=[column], **{"white-space": wrap})
    return style.hide(axis="index") if isinstance(frame.index, pd.RangeIndex) else style


def save_figures(folder: Path | None, **figures: Figure) -> list[Path]:
    """Write figures as `NAME.png` and give their paths; without a folder, do nothing.

    Args:
        folder: Where to; a relative path is meant from the collection's folder, as a notebook's
            working folder depends on what runs it.
        figures: By name; an underscore becomes a hyphen.
    """
    if folder is None:
        return []
    target = settings().root / folder
    target.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, figure in figures.items():
        paths.append(target / f"{name.replace('_', '-')}.png")
        figure.savefig(paths[-1], dpi=120)
    return paths


def matrix_frame(claims: Sequence[Claim], block: str, metrics: Sequence[str]) -> pd.DataFrame:
    """Changes in percent of one block of the netperf matrix, sessions by sizes."""
    cells = [
        (claim.params["sessions"], claim.params["size"], 100 * claim.change)
        for claim in claims
        if claim.params.get("direction") == block
        and claim.metric in metrics
        and claim.change is not None
    ]
    frame = pd.DataFrame(cells, columns=["sessions", "size", "change"])
    return frame.pivot(index="sessions", columns="size", values="change")


def heat_maps(claims: Sequence[Claim], findings: Sequence[Finding] = ()) -> Figure:
    """The published netperf matrix as heat maps: blocks down, metrics across.

    Every cell is the change in percent; its colour says whether it is for the better, which for
    CPU use is downwards. Cells that the audit found repeated digit for digit are framed.

    Args:
        claims: Claims with parameters `direction`, `size` and `sessions`.
        findings: Audit of these claims; only its repeated rows are used.

    Raises:
        UserError: no claim has such parameters.
    """
    blocks = [
        block for block in DIRECTIONS if any(c.params.get("direction") == block for c in claims)
    ]
    if not blocks:
        raise UserError(
            "no claims of a netperf matrix to draw",
            remedy="give claims with parameters direction, size and sessions, "
            "such as load_claims('vhost-net-rx-poll')",
        )
    repeated = {name for item in findings if item.kind == "duplicate-row" for name in item.claims}
    frames = {
        (block, column): matrix_frame(claims, block, each.metrics)
        for block in blocks
        for column, each in enumerate(COLUMNS)
    }
    heights = [len(frames[(block, 0)].index) for block in blocks]
    widest = max(len(frame.columns) for frame in frames.values())
    figure, axes = plt.subplots(
        len(blocks),
        len(COLUMNS),
        figsize=(12.5, 1.5 + 0.62 * sum(heights)),
        height_ratios=heights,
        layout="constrained",
        squeeze=False,
    )
    for row, block in enumerate(blocks):
        for column, each in enumerate(COLUMNS):
            framed = {
                (claim.params["size"], claim.params["sessions"])
                for claim in claims
                if claim.id in repeated
                and claim.metric in each.metrics
                and claim.params["direction"] == block
            }
            _heat_map(axes[row, column], frames[(block, column)], each.better, widest, framed)
            if row == 0:
                arrow = "higher" if each.better > 0 else "lower"
                axes[row, column].set_title(f"{each.title}\n({arrow} is better)", fontsize=10)
            if column == 0:
                axes[row, column].set_ylabel(f"{DIRECTIONS[block]}\nsessions")
        axes[row, 0].set_xlabel("message size (B)", loc="left")
    _matrix_legend(figure, axes, bool(repeated))
    figure.suptitle(
        f"{claims[0].experiment}: published change in %, arms {' to '.join(claims[0].arms)}\n"
        + _setup_text(claims[0])
    )
    return figure


def _setup_text(claim: Claim) -> str:
    setup = claim.environment
    host = "host not stated" if setup.kind == "unknown" else f"{setup.kind} host"
    runs = "n not stated" if claim.n is None else f"n = {claim.n}"
    return f"{host}, {setup.kernel or 'base kernel not stated'}, {runs}"


def _heat_map(
    axes: Axes,
    frame: pd.DataFrame,
    better: int,
    widest: int,
    framed: set[tuple[Any, Any]],
) -> None:
    values = frame.to_numpy()
    axes.pcolormesh(
        values * better,
        cmap=_COLOURS,
        norm=TwoSlopeNorm(0, -_LIMIT, _LIMIT),
        edgecolors="white",
        linewidth=1.5,
    )
    for (row, column), value in np.ndenumerate(values):
        shade = "white" if abs(value) > 0.62 * _LIMIT else "black"
        text = f"{value:+.1f}" if abs(value) >= 0.05 else "0.0"
        axes.text(
            column + 0.5, row + 0.5, text, ha="center", va="center", color=shade, fontsize=8.5
        )
        if (frame.columns[column], frame.index[row]) in framed:
            axes.add_patch(
                Rectangle((column + 0.05, row + 0.05), 0.9, 0.9, fill=False, lw=2, ec=_MARK)
            )
    axes.set_xticks(np.arange(len(frame.columns)) + 0.5, [str(size) for size in frame.columns])
    axes.set_yticks(np.arange(len(frame.index)) + 0.5, [str(count) for count in frame.index])
    # All blocks share one cell width, also the one with fewer sizes.
    axes.set_xlim(0, widest)
    axes.invert_yaxis()
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def _matrix_legend(figure: Figure, axes: np.ndarray, framed: bool) -> None:
    colours = plt.cm.ScalarMappable(TwoSlopeNorm(0, -_LIMIT, _LIMIT), _COLOURS)
    bar = figure.colorbar(
        colours, ax=axes, orientation="horizontal", fraction=0.04, aspect=60, extend="neither"
    )
    ticks = (-20, -10, 0, 10, 20)
    bar.set_ticks(ticks, labels=[f"{abs(tick)} %" if tick else "0" for tick in ticks])
    bar.outline.set_visible(False)
    note = "   (framed: the row repeats another digit for digit)" if framed else ""
    bar.set_label(f"worse  <  change  >  better{note}")


def latency_versions(claims: Sequence[Claim], streams: Sequence[Claim] = ()) -> Figure:
    """Published round trips by version and payload, against what a stream of them allows.

    Args:
        claims: Claims of round-trip times, of which the means are drawn.
        streams: Claims of one-way throughput; those of one stream give the shortest time in which
            a message of that size can pass.

    Raises:
        UserError: no claim of a mean round-trip time.
    """
    rows = [
        claim for claim in claims if claim.metric == "rtt_mean" and claim.before and claim.after
    ]
    if not rows:
        raise UserError(
            "no round-trip times to draw",
            remedy="give claims of the metric rtt_mean, such as "
            "load_claims('vsock-direct-enqueue')",
        )
    rows.sort(key=lambda claim: (payload(claim) or 0, claim.version))
    figure, axes = plt.subplots(figsize=(10.5, 1.8 + 0.48 * len(rows)), layout="constrained")
    for place, claim in enumerate(rows):
        colour = _STANDING if claim.status == "standing" else _ENDED
        before, after = (claim.before or 0) / 1e3, (claim.after or 0) / 1e3
        axes.plot([before, after], [place, place], color=colour, lw=1.5, zorder=1)
        axes.scatter(before, place, s=46, facecolor="white", edgecolor=colour, zorder=2)
        axes.scatter(after, place, s=46, color=colour, zorder=2)
        least = _least_time(claim, streams)
        if least is not None:
            axes.plot([least / 1e3] * 2, [place - 0.5, place + 0.5], color=_MARK, lw=2)
    axes.set_yticks(
        range(len(rows)),
        [
            f"{payload(claim):g} B, {claim.version} ({claim.arms[1]})\n{_setup_text(claim)}"
            for claim in rows
        ],
        fontsize=8.5,
    )
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    axes.set_xlim(low / 1.3, high * 1.3)
    ticks = [m * 10.0**e for e in range(-3, 6) for m in (1, 2, 5) if low < m * 10.0**e < high]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("mean round-trip time (µs, logarithmic)")
    _rows_style(axes)
    axes.set_title(
        f"{rows[0].experiment}: published round trips, before ({rows[0].arms[0]}) and after"
    )
    figure.legend(handles=_latency_legend(bool(streams)), loc="outside lower center", ncols=5)
    return figure


def _least_time(claim: Claim, streams: Sequence[Claim]) -> float | None:
    size = payload(claim)
    rates = [
        stream.before
        for stream in streams
        if stream.before and payload(stream) == size and stream.params.get("threads") == 1
    ]
    return None if size is None or not rates else size * 8 / max(rates) * 1e9


def _latency_legend(bound: bool) -> list[Line2D]:
    def dot(label: str, face: str, edge: str) -> Line2D:
        return Line2D([], [], ls="", marker="o", mfc=face, mec=edge, label=label)

    handles = [
        dot("before", "white", "black"),
        dot("after", "black", "black"),
        dot("standing", _STANDING, _STANDING),
        dot("withdrawn", _ENDED, _ENDED),
    ]
    if bound:
        handles.append(
            Line2D([], [], color=_MARK, lw=2, label="time per message of a one-way stream")
        )
    return handles


def stated_frame(claims: Sequence[Claim]) -> pd.DataFrame:
    """Claims that state a percentage beside raw figures, all columns in percent.

    Returns:
        Indexed by claim: `figures` as text; `exact`, the change of the raw figures, and its range
        `low` to `high` within rounding; `stated` with `half` its last digit; and `possible`.
    """
    rows = []
    for claim in claims:
        ratio, stated = raw_ratio(claim.published), claim.published.change
        if ratio is None or stated is None or claim.change is None:
            continue
        raw, about = percent_of(ratio), printed(stated)
        rows.append(
            {
                "claim": claim.id,
                "figures": figures_text(claim),
                "exact": 100 * claim.change,
                "low": float(raw.low),
                "high": float(raw.high),
                "stated": float(stated),
                "half": float(about.high - stated),
                "possible": about.meets(raw),
            }
        )
    columns = ["claim", "figures", "exact", "low", "high", "stated", "half", "possible"]
    return pd.DataFrame(rows, columns=columns).set_index("claim")


def stated_against_raw(claims: Sequence[Claim]) -> Figure:
    """How far stated percentages are from those of the raw figures, with the rounding of both.

    Raises:
        UserError: no claim states a percentage beside raw figures.
    """
    frame = stated_frame(claims)
    if frame.empty:
        raise UserError(
            "no stated percentages to draw",
            remedy="give claims with before, after and change, such as load_claims()",
        )
    figure, axes = plt.subplots(figsize=(10.5, 1.6 + 0.5 * len(frame)), layout="constrained")
    places = np.arange(len(frame))
    exact = frame["exact"]
    axes.hlines(
        places, frame["low"] - exact, frame["high"] - exact, color=_STANDING, lw=9, alpha=0.5
    )
    offset = (frame["stated"] - exact).to_numpy()
    for possible, colour, label in (
        (True, "black", "stated, possible"),
        (False, _MARK, "stated, not possible"),
    ):
        some = (frame["possible"] == possible).to_numpy()
        axes.errorbar(
            offset[some],
            places[some],
            xerr=frame["half"].to_numpy()[some],
            fmt="D",
            color=colour,
            ms=5,
            label=label,
        )
    rows = zip(frame.index, frame["figures"], exact, frame["stated"], strict=True)
    axes.set_yticks(
        places,
        [
            f"{name}\n{text} = {raw:+.1f} %, stated {stated:+g} %"
            for name, text, raw, stated in rows
        ],
        fontsize=8.5,
    )
    axes.axvline(0, color="black", lw=0.8, zorder=0)
    axes.set_xlabel("stated change minus change of the raw figures (percentage points)")
    _rows_style(axes)
    axes.set_title("Percentages as stated, against those of the raw figures")
    handle = Line2D([], [], color=_STANDING, lw=9, alpha=0.5, label="rounding of the raw figures")
    figure.legend(
        handles=[handle, *axes.get_legend_handles_labels()[0]],
        loc="outside lower center",
        ncols=3,
    )
    return figure


def _rows_style(axes: Axes) -> None:
    axes.invert_yaxis()
    axes.margins(y=0.08)
    axes.grid(axis="x", color="#dddddd", lw=0.7)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
