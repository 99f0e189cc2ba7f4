"""Heat maps of changes over a matrix: blocks below each other, columns side by side.

Colour says whether a change is for the better, and text says how large and how sure it is. No
change is the page's own colour, so that the picture is readable in light and in dark.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from vringlab.report.canvas import (
    INK,
    MUTED,
    SMALL,
    TEXT,
    RunFigure,
    Width,
    line_inches,
    sheet,
    text_inches,
    usable,
    wrapped,
)
from vringlab.report.netperf_matrix import FULL_COLOUR, Block, Change, MatrixColumn, Place
from vringlab.report.panels import invalid_text, shared_text
from vringlab.report.summary import Summary, count

#: Brown and teal, told apart with red-green blindness; so weak that ink is read on both.
_WORSE, _BETTER = "#a6611a", "#018571"
_OPAQUE = 0.6
#: Frames rows that repeat others.
_REPEATED = "#d1006c"

_ROW = 0.27
_WIDEST = 0.62
_AXIS = 0.24
_GAP = 0.16
_LEAST_TEXT = 6.0


def heat_maps(
    summary: Summary,
    workload: str,
    blocks: Sequence[Block],
    columns: Sequence[MatrixColumn],
    title: str,
    width: Width = "wide",
    notes: bool = True,
) -> RunFigure | None:
    """One figure of several blocks that share their axes; None without any.

    Args:
        summary: The run.
        workload: The workload.
        blocks: From top to bottom; their cells have a change for each of `columns`.
        columns: From left to right.
        title: Title of the figure.
        width: Wide or narrow: narrow ones have one column below the other.
        notes: Whether the caption is drawn.
    """
    if not blocks:
        return None
    places = sorted({place for block in blocks for place in block.cells})
    sizes = sorted({size for size, _ in places})
    sessions = sorted({number for _, number in places})
    room = usable(width)
    across = len(columns) if width == "wide" else 1
    left = max(text_inches(str(number), SMALL) for number in sessions) + 0.12
    left += line_inches(SMALL)
    pitch = (room - left + _GAP) / across
    cell = min(_WIDEST, (pitch - _GAP) / len(sizes))
    heads = [wrapped(_column_title(column), pitch - _GAP, TEXT, "bold") for column in columns]
    subs = {id(block): wrapped(block.title, room, SMALL) for block in blocks}
    head = line_inches(TEXT, max(map(len, heads))) + 0.06
    body = _ROW * len(sessions)
    each = {
        id(block): line_inches(SMALL, len(subs[id(block)])) + 0.05 + body + _AXIS
        for block in blocks
    }
    group = head + sum(each.values()) + line_inches(SMALL)
    changes = [change for block in blocks for row in block.cells.values() for change in row]
    size = _text_size(changes, cell)
    made = sheet(
        summary,
        title,
        group * (len(columns) // across) + 0.02,
        width,
        subject=workload,
        detail=shared_text(summary, workload),
        handles=_legend(blocks, places),
        caption=_caption(summary, blocks, places),
        notes=notes,
    )
    margin = (made.width - room) / 2
    top = 0.0
    for first in range(0, len(columns), across):
        for place, block in enumerate(blocks):
            y = top + head + sum(each[id(above)] for above in blocks[:place])
            y += line_inches(SMALL, len(subs[id(block)])) + 0.05
            for column in range(first, first + across):
                x = margin + left + (column - first) * pitch
                axes = made.axes(x, y, cell * len(sizes), body)
                _draw(axes, block, column, columns[column].better, sizes, sessions, size)
                labels = [str(number) for number in sessions] if column == first else []
                axes.set_yticks([n + 0.5 for n in range(len(labels))], labels)
                if column == first:
                    axes.set_ylabel("sessions", size=SMALL, labelpad=2)
                    _heading(axes, subs[id(block)], SMALL, left, 4, "normal", "group-title")
                if place == 0:
                    above = 4 + 72 * line_inches(SMALL, len(subs[id(block)])) + 4
                    _heading(axes, heads[column], TEXT, 0, above, "bold", "panel-title")
                if place == len(blocks) - 1:
                    axes.set_xlabel("message size (B)", size=SMALL, labelpad=1, loc="left")
        top += group
    return made.figure


def _column_title(column: MatrixColumn) -> str:
    return f"{column.title} ({'higher' if column.better > 0 else 'lower'} is better)"


def _heading(
    axes: Axes, lines: Sequence[str], size: float, left: float, up: float, weight: str, name: str
) -> None:
    for number, line in enumerate(reversed(lines)):
        axes.annotate(
            line,
            (0, 1),
            xytext=(-72 * left, up + 72 * line_inches(size, number)),
            size=size,
            weight=weight,
            color=INK if weight == "bold" else MUTED,
            xycoords="axes fraction",
            textcoords="offset points",
            gid=name,
        )


def _text(change: Change) -> str:
    """What a cell says: the change, and how sure it is."""
    forms = {
        "beyond noise": "{}*",
        "not seen": "({})",
        "no interval": "{}?",
        "one boot": "{}\u00b9",
    }
    return forms.get(change.sure, "{}").format(change.shown)


def _text_size(changes: Sequence[Change], cell: float) -> float:
    """Size at which the longest text fits a cell."""
    widest = max(
        (text_inches(_text(c), SMALL, _weight(c)) for c in changes if c.problem != "none"),
        default=0.1,
    )
    return max(_LEAST_TEXT, min(SMALL, SMALL * (cell - 0.05) / widest))


def _weight(change: Change) -> str:
    return "bold" if change.sure == "beyond noise" else "normal"


def _draw(
    axes: Axes,
    block: Block,
    column: int,
    better: int,
    sizes: Sequence[int],
    sessions: Sequence[int],
    text: float,
) -> None:
    axes.set_xlim(0, len(sizes))
    axes.set_ylim(len(sessions), 0)
    axes.set_xticks([n + 0.5 for n in range(len(sizes))], [str(size) for size in sizes])
    axes.tick_params(length=0, pad=2)
    axes.spines[:].set_visible(False)
    for x, size in enumerate(sizes):
        for y, number in enumerate(sessions):
            row = block.cells.get((size, number))
            change = row[column] if row is not None else Change(None, "", "none", "none")
            name = f"{block.arm}:{block.version or 'measured'}:{size}/{number}"
            axes.add_patch(_cell(x, y, change, better, name))
            if change.problem != "none":
                axes.text(
                    x + 0.5,
                    y + 0.52,
                    _text(change),
                    size=text,
                    weight=_weight(change),
                    color=INK if change.change is not None else MUTED,
                    ha="center",
                    va="center",
                    gid=f"change:{name}",
                )
            if (size, number) in block.repeats or (size, number) in block.repeats.values():
                frame = Rectangle(
                    (x + 0.06, y + 0.08), 0.88, 0.84, fill=False, ec=_REPEATED, lw=1.4
                )
                frame.set_gid(f"repeated:{name}")
                axes.add_patch(frame)


def colour_of(change: float, better: int) -> tuple[str, float]:
    """Colour of a change and how opaque it is, from 0 for none."""
    strength = min(1.0, abs(change) / FULL_COLOUR)
    return (_BETTER if change * better > 0 else _WORSE), _OPAQUE * strength


def _cell(x: int, y: int, change: Change, better: int, name: str) -> Rectangle:
    cell = Rectangle((x + 0.02, y + 0.03), 0.96, 0.94)
    if change.change is None:
        cell.set(facecolor="none", edgecolor=f"{MUTED}66", hatch="////", linewidth=0)
        cell.set_gid(f"missing:{name}")
        return cell
    colour, opaque = colour_of(change.change, better)
    cell.set(facecolor=(colour, opaque), edgecolor=f"{MUTED}40", linewidth=0.5)
    cell.set_gid(f"cell:{name}")
    return cell


def _legend(blocks: Sequence[Block], places: Sequence[Place]) -> list[Line2D | Patch]:
    handles: list[Line2D | Patch] = []
    full = f"{100 * FULL_COLOUR:g} %"
    for change, label in (
        (-FULL_COLOUR, f"worse by {full} or more"),
        (-FULL_COLOUR / 2, f"worse by {100 * FULL_COLOUR / 2:g} %"),
        (0.0, "no change"),
        (FULL_COLOUR / 2, f"better by {100 * FULL_COLOUR / 2:g} %"),
        (FULL_COLOUR, f"better by {full} or more"),
    ):
        handles.append(Patch(fc=colour_of(change, 1), ec=f"{MUTED}40", lw=0.5, label=label))
    if any(_missing(blocks, places)):
        handles.append(Patch(fc="none", ec=f"{MUTED}66", hatch="////", lw=0, label="no figure"))
    if any(block.repeats for block in blocks):
        handles.append(
            Patch(fc="none", ec=_REPEATED, lw=1.4, label="repeats another row digit for digit")
        )
    return handles


def _missing(blocks: Sequence[Block], places: Sequence[Place]) -> Iterator[tuple[Block, Place]]:
    for block in blocks:
        for place in places:
            row = block.cells.get(place)
            if row is None or any(change.change is None for change in row):
                yield block, place


def _caption(summary: Summary, blocks: Sequence[Block], places: Sequence[Place]) -> str:
    sure = {c.sure for block in blocks for row in block.cells.values() for c in row}
    level = f"{100 * summary.level:g} % interval"
    parts = ["Cells: change in percent."]
    marks = []
    if "beyond noise" in sure:
        marks.append(f"bold with a star: the {level} is beyond the noise floor")
    if "seen" in sure:
        marks.append("plain: it excludes no change, but not the noise floor")
    if "one boot" in sure:
        marks.append("\u00b9: it excludes no change, but is of one boot alone")
    if "not seen" in sure:
        marks.append(f"in brackets: the {level} includes no change")
    if "no interval" in sure:
        marks.append("with a question mark: one block has no interval")
    if marks:
        parts.append(f"Measured cells, {'; '.join(marks)}.")
    if "published" in sure:
        parts.append("Published cells came without intervals.")
    for block in blocks:
        lacking = [place for one, place in _missing([block], places) if place not in block.cells]
        if lacking:
            what = "not published" if block.version else "not measured"
            parts.append(f"{len(lacking)} of {count(len(places), 'point')} {what} of {block.arm}.")
    parts += invalid_text([row for block in blocks for row in block.rows])
    return " ".join(dict.fromkeys(parts))
