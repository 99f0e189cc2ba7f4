"""What all figures of a run share: paper, ink, the colour of an arm, titles, legends, notes.

A figure is laid out in inches from measured text, in two widths: `wide` for a talk, a screen and
paper, `narrow` for a telephone, where a wide one shrinks until nobody can read it.

The neutral colours are tokens. They look as they should in a PNG, and a page that embeds the SVG
replaces them by its own, so that one picture is readable in light and in dark.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.textpath import text_to_path

from vringlab.analysis.frames import RunFrames
from vringlab.campaign.experiment import TWIN_SUFFIX
from vringlab.report.summary import Summary, arm_order, heading

Width = Literal["wide", "narrow"]

#: Colours that a page replaces by its own: text, secondary text, lines, background.
INK, MUTED, GRID, PAPER = "#010203", "#5b5c5d", "#dcddde", "#fefeff"

#: Reference first. Wong, "Points of view: Color blindness", Nature Methods 8, 441 (2011).
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_MARKERS = ("o", "s", "^", "v", "P", "X")

_INCHES: Mapping[Width, float] = MappingProxyType({"wide": 10.0, "narrow": 4.1})
_MARGIN = 0.12
_LINE = 1.45

TITLE, TEXT, SMALL = 12.0, 9.5, 8.5

#: Pixels per inch of a PNG: twice what a screen needs, for projectors and dense displays.
DPI = 200

_STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": TEXT,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "axes.facecolor": "none",
    "axes.linewidth": 0.7,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.labelsize": SMALL,
    "ytick.labelsize": SMALL,
    "figure.facecolor": PAPER,
    "savefig.facecolor": "auto",
    # Hinted glyphs are wider than they are measured, and differ with the resolution.
    "text.hinting": "none",
    "svg.fonttype": "path",
    # The same figure gives the same bytes.
    "svg.hashsalt": "vringlab",
    "path.simplify": True,
}


class RunFigure(Figure):
    """A figure that knows what it says.

    Attributes:
        caption: How to read it, and why samples are invalid: sentences.
        alt: One line for those who cannot see it.
    """

    caption: str = ""
    alt: str = ""

    def _repr_png_(self) -> bytes:
        """For notebooks, without pyplot and its list of open figures."""
        stream = io.BytesIO()
        self.savefig(stream, format="png", dpi=DPI / 2)
        return stream.getvalue()

    def svg(self) -> str:
        """The figure as an SVG element, with a transparent background and without a date."""
        stream = io.StringIO()
        with style():
            self.savefig(stream, format="svg", transparent=True, metadata={"Date": None})
        text = stream.getvalue()
        return text[text.index("<svg") :]


@contextmanager
def style() -> Iterator[None]:
    """The look of all figures, whatever the user's matplotlibrc says."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(_STYLE)  # type: ignore[arg-type]  # its keys are literals to mypy
        yield


@cache
def _advance(character: str, weight: str) -> float:
    """Width of a character in ems."""
    prop = FontProperties(family="DejaVu Sans", size=100, weight=weight)
    width, _, _ = text_to_path.get_text_width_height_descent(character, prop, ismath=False)
    return float(width) / 100


def text_inches(text: str, size: float = TEXT, weight: str = "normal") -> float:
    """Width of a line of text in inches, kerning left out."""
    # A little more than measured: renderers do not agree to the last pixel.
    return 1.01 * sum(_advance(character, weight) for character in text) * size / 72 + 0.01


def wrapped(text: str, inches: float, size: float = TEXT, weight: str = "normal") -> list[str]:
    """Text in lines that are no wider than `inches`; a longer word is cut."""
    lines: list[str] = []
    line = ""
    for word in text.split():
        for part in _fitting(word, inches, size, weight):
            longer = f"{line} {part}" if line else part
            if line and text_inches(longer, size, weight) > inches:
                lines.append(line)
                line = part
            else:
                line = longer
    return [*lines, line] if line else lines


def _fitting(word: str, inches: float, size: float, weight: str) -> Iterator[str]:
    while text_inches(word, size, weight) > inches and len(word) > 1:
        cut = next(
            n
            for n in range(len(word) - 1, 0, -1)
            if n == 1 or text_inches(word[:n], size, weight) <= inches
        )
        yield word[:cut]
        word = word[cut:]
    yield word


@dataclass(frozen=True)
class Look:
    """How an arm is drawn, in every figure of a run."""

    colour: str
    marker: str
    dashes: Any


def looks(run: RunFrames) -> dict[str, Look]:
    """The look of each arm; the twin has its reference's colour and is dashed."""
    found: dict[str, Look] = {}
    number = 0
    for arm in arm_order(run):
        if arm.endswith(TWIN_SUFFIX) and arm.removesuffix(TWIN_SUFFIX) in found:
            of = found[arm.removesuffix(TWIN_SUFFIX)]
            found[arm] = Look(of.colour, "D", (0, (3, 1.5)))
            continue
        place = number % len(_COLOURS)
        # More arms than colours: told apart by their dashes.
        dashes = "-" if number < len(_COLOURS) else (0, (6, 1, 1, 1))
        found[arm] = Look(_COLOURS[place], _MARKERS[place], dashes)
        number += 1
    return found


@dataclass(frozen=True)
class Sheet:
    """A figure under construction: a title above, panels, then legend and notes below.

    Attributes:
        figure: The figure.
        width: Its width in inches.
        height: Its height in inches.
        top: Distance of the panels' upper edge from the top, in inches.
    """

    figure: RunFigure
    width: float
    height: float
    top: float

    def axes(self, left: float, top: float, width: float, height: float) -> Axes:
        """A panel; all in inches, `top` counted from below the title."""
        y = self.height - self.top - top - height
        return self.figure.add_axes(
            (left / self.width, y / self.height, width / self.width, height / self.height)
        )


def line_inches(size: float, lines: int = 1) -> float:
    """Height of lines of text in inches."""
    return lines * size * _LINE / 72


def inches(width: Width) -> float:
    """Width of a figure in inches."""
    return _INCHES[width]


def usable(width: Width) -> float:
    """Width between the margins in inches."""
    return _INCHES[width] - 2 * _MARGIN


def sheet(
    summary: Summary,
    title: str,
    panels: float,
    width: Width,
    *,
    subject: str = "",
    detail: str = "",
    handles: Sequence[Line2D | Patch] = (),
    caption: str = "",
    notes: bool = True,
) -> Sheet:
    """A figure with its title, legend and notes in place, and room for panels between.

    Args:
        summary: The run; its arms, base kernel, host kind and n stand under the title.
        title: What is shown.
        panels: Height of all panels in inches.
        width: Wide or narrow.
        subject: What of the experiment it is about, such as a workload; stands before the title.
        detail: What else belongs under the title, such as parameters that do not vary.
        handles: Entries of the legend.
        caption: How to read it.
        notes: Whether the caption is drawn; a page has it beside the figure.
    """
    run = summary.run
    full, room = _INCHES[width], usable(width)
    about = ", ".join(part for part in (run.plan.experiment, subject) if part)
    heads = wrapped(f"{about}: {title}", room, TITLE, "bold")
    twin = f" ({run.plan.twin}: the same again)" if run.plan.twin else ""
    arms = ", ".join(arm for arm in summary.arms if arm != run.plan.twin)
    under = ". ".join(part for part in (f"Arms {arms}{twin}", detail, heading(run)) if part)
    subs = wrapped(under, room)
    foot = wrapped(caption, room, SMALL) if notes else []
    columns, rows = _legend_shape(handles, room)
    top = _MARGIN + line_inches(TITLE, len(heads)) + line_inches(TEXT, len(subs)) + 0.12
    legend = line_inches(TEXT, rows) + 0.1 if rows else 0.0
    bottom = _MARGIN + line_inches(SMALL, len(foot)) + (0.06 if foot else 0) + legend
    height = top + panels + bottom
    figure = RunFigure(figsize=(full, height))
    FigureCanvasAgg(figure)
    figure.caption = caption
    figure.alt = f"{about}: {title}. {under}."
    place = height - _MARGIN
    for lines, size, weight, colour in ((heads, TITLE, "bold", INK), (subs, TEXT, "normal", MUTED)):
        for line in lines:
            figure.text(
                _MARGIN / full,
                place / height,
                line,
                size=size,
                weight=weight,
                color=colour,
                va="top",
                gid="title",
            )
            place -= line_inches(size)
    place = bottom - legend - (0.06 if foot else 0)
    for line in foot:
        figure.text(
            _MARGIN / full, place / height, line, size=SMALL, color=MUTED, va="top", gid="note"
        )
        place -= line_inches(SMALL)
    if handles:
        figure.legend(
            handles=handles,
            loc="upper left",
            bbox_to_anchor=(_MARGIN / full, (bottom - 0.02) / height),
            ncols=columns,
            frameon=False,
            fontsize=TEXT,
            borderpad=0,
            borderaxespad=0,
            handlelength=_HANDLE,
            columnspacing=_GAP,
        )
    if run.simulated:
        # Repeated, so that no part that is cut out of a tall figure looks measured.
        number = max(1, round(panels / (0.6 * full)))
        for place in range(number):
            figure.text(
                0.5,
                (bottom + panels * (place + 0.5) / number) / height,
                "SIMULATED",
                size=min(60, 6 * full, 30 * panels),
                color=MUTED,
                alpha=0.13,
                ha="center",
                va="center",
                rotation=20,
                gid="watermark",
                weight="bold",
            )
    return Sheet(figure, full, height, top)


# Of the legend, in font sizes: length of a handle, gap between columns.
_HANDLE, _GAP = 1.8, 1.6


def _legend_shape(handles: Sequence[Line2D | Patch], room: float) -> tuple[int, int]:
    """Columns and rows of a legend that is no wider than the room."""
    if not handles:
        return 0, 0
    em = TEXT / 72
    widest = max(text_inches(str(handle.get_label())) for handle in handles)
    each = widest + (_HANDLE + 0.8 + _GAP) * em
    columns = max(1, min(len(handles), int((room + _GAP * em) / each)))
    return columns, -(-len(handles) // columns)


def statement(summary: Summary, title: str, text: str, width: Width = "wide") -> RunFigure:
    """A figure that says in words why there is nothing to show."""
    lines = wrapped(text, usable(width) - 0.4, TITLE)
    made = sheet(summary, title, line_inches(TITLE, len(lines)) + 0.6, width, caption="")
    full = made.height - made.top - 0.3
    for line in lines:
        made.figure.text(
            (_MARGIN + 0.2) / made.width,
            full / made.height,
            line,
            size=TITLE,
            va="top",
            gid="statement",
        )
        full -= line_inches(TITLE)
    made.figure.alt += f" {text}"
    return made.figure


def tidy_axes(axes: Axes, *, grid: Literal["x", "y", "both"] = "x") -> None:
    """Only the lines that help to read a value."""
    axes.grid(axis=grid, color=GRID, lw=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(length=2.5, width=0.7, pad=2)


def panel_title(axes: Axes, text: str, indent: float = 0.0) -> None:
    """Write what a panel shows above it; `indent` inches to the left of its axis."""
    axes.annotate(
        text,
        (0, 1),
        xytext=(-72 * indent, 4),
        size=TEXT,
        weight="bold",
        xycoords="axes fraction",
        textcoords="offset points",
        gid="panel-title",
    )


# Rounder first; a level is taken as far as there is room.
_MANTISSAS = ((1.0,), (3.0,), (2.0, 5.0), (1.5, 7.0), (1.2, 2.5, 4.0, 6.0, 8.0, 9.0))


def log_ticks(low: float, high: float, width: float, each: float = 0.6) -> list[float]:
    """Round ticks of a logarithmic axis, as many as there is room for.

    Args:
        low: Lower end of the axis, above 0.
        high: Upper end.
        width: Length of the axis in inches.
        each: Room for a label in inches.
    """
    span = np.log(high / low)
    if not span > 0:
        return [low]
    exponents = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
    # Powers of ten keep equal steps when there are too many of them.
    step = max(1, int(np.ceil(each * len(exponents) / width)))
    kept: list[float] = []
    for level in _MANTISSAS:
        for exponent in exponents:
            for mantissa in level:
                tick = mantissa * 10.0**exponent
                if not low <= tick <= high or (level == (1.0,) and exponent % step):
                    continue
                near = min((abs(np.log(tick / other)) for other in kept), default=np.inf)
                if near * width / span >= each:
                    kept.append(tick)
    return sorted(kept) or [float(f"{np.sqrt(low * high):.2g}")]


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write a figure as PNG (for slides) and SVG (for pages and print), and give their paths.

    The folder must exist.
    """
    paths = [folder / f"{name}.png", folder / f"{name}.svg"]
    with style():
        figure.savefig(paths[0], dpi=DPI)
        figure.savefig(paths[1], metadata={"Date": None})
    return paths
