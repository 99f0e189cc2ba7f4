"""Pairs, ratios and the table of `make bench`: pure, no machine and no clock."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vringlab.errors import UserError

#: The table stands between these lines of the README.
BEGIN = "<!-- bench: made by `make bench`, do not edit -->"
END = "<!-- /bench -->"

#: A ratio below this is shown as one part of so many.
_SMALL = 0.1


@dataclass(frozen=True)
class Pair:
    """One figure of ours beside one of the other side's, taken in turn."""

    ours: float
    theirs: float

    @property
    def ratio(self) -> float:
        """Ours in parts of theirs: less is better."""
        return self.ours / self.theirs


@dataclass(frozen=True)
class Line:
    """One line of the table.

    Attributes:
        row: Name of the row that measured it.
        ours: What was measured of vringlab.
        theirs: What it is compared with.
        pairs: The figures, in the order in which they were taken.
        unit: Their unit, such as `s`.
        at_most: What the median of the ratios must not exceed; None where nothing was asked for.
        ours_at_most: The same of the median of our figures.
        note: What a reader must know to take the comparison for what it is.
    """

    row: str
    ours: str
    theirs: str
    pairs: tuple[Pair, ...]
    unit: str = "s"
    at_most: float | None = None
    ours_at_most: float | None = None
    note: str = ""

    @property
    def ratio(self) -> float:
        """Median of the ratios, pair by pair."""
        return statistics.median(pair.ratio for pair in self.pairs)

    @property
    def met(self) -> bool | None:
        """Whether what was asked for is reached; None where nothing was."""
        held = []
        if self.at_most is not None:
            held.append(self.ratio <= self.at_most)
        if self.ours_at_most is not None:
            held.append(statistics.median(pair.ours for pair in self.pairs) <= self.ours_at_most)
        return all(held) if held else None

    @property
    def cells(self) -> tuple[str, ...]:
        """The cells of the table's line."""
        return (
            self.row,
            self.ours,
            self.theirs,
            str(len(self.pairs)),
            _middle([pair.ours for pair in self.pairs], self.unit),
            _middle([pair.theirs for pair in self.pairs], self.unit),
            f"**{shown_ratio([pair.ratio for pair in self.pairs])}**",
            self._asked(),
        )

    def _asked(self) -> str:
        asked = []
        if self.at_most is not None:
            asked.append(f"ratio <= {_ratio(self.at_most)}")
        if self.ours_at_most is not None:
            asked.append(f"<= {self.ours_at_most:g} {self.unit}")
        if not asked:
            return ""
        return f"{' and '.join(asked)}: {'yes' if self.met else 'no'}"


def _ratio(value: float) -> str:
    return f"1/{1 / value:.3g}" if 0 < value < _SMALL else f"{value:.3g}"


def shown_ratio(values: Sequence[float]) -> str:
    """Median and range: `0.41 (0.38 to 0.47)`, or `1/153 (1/170 to 1/140)` where it is small."""
    low, middle, high = min(values), statistics.median(values), max(values)
    if high < _SMALL:
        return f"{_ratio(middle)} ({_ratio(low)} to {_ratio(high)})"
    return f"{middle:.3g} ({low:.3g} to {high:.3g})"


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _middle(values: Sequence[float], unit: str) -> str:
    return f"{_figure(statistics.median(values))} {unit}"


_HEAD = ("row", "vringlab", "against", "pairs", "ours", "theirs", "ratio (range)", "asked")


def table(lines: Sequence[Line], where: str = "") -> str:
    """The table in Markdown, with what it was measured on and a note for each row that has one."""
    text = [f"{where}\n"] if where else []
    text += [
        f"| {' | '.join(_HEAD)} |",
        "|---|---|---|---:|---:|---:|---|---|",
        *(f"| {' | '.join(line.cells)} |" for line in lines),
    ]
    notes: dict[str, str] = {}
    for line in lines:
        if line.note:
            notes.setdefault(line.note, line.row)
    if notes:
        text += ["", *(f"- `{row}`: {note}" for note, row in notes.items())]
    return "\n".join(text)


def insert(document: str, found: str) -> str:
    """A document with the table between its two comments.

    Raises:
        UserError: they are not there, once each and in order.
    """
    begin, end = document.find(BEGIN), document.find(END)
    if document.count(BEGIN) != 1 or document.count(END) != 1 or end < begin:
        raise UserError(
            "there is no place for the table",
            remedy=f"write these two lines where it shall stand:\n    {BEGIN}\n    {END}",
        )
    return f"{document[: begin + len(BEGIN)]}\n\n{found}\n\n{document[end:]}"


def in_turn(
    count: int,
    ours: Callable[[], float],
    theirs: Callable[[], float],
    told: Callable[[str], None] = lambda _: None,
    unit: str = "s",
) -> tuple[Pair, ...]:
    """Take pairs, the other side first in every second one: a slow moment falls on both.

    Args:
        count: Pairs.
        ours: Measures ours once.
        theirs: Measures the other side once.
        told: Told each pair.
        unit: What both give, for the telling.
    """
    pairs = []
    for number in range(count):
        if number % 2 == 0:
            first = ours()
            pair = Pair(first, theirs())
        else:
            first = theirs()
            pair = Pair(ours(), first)
        pairs.append(pair)
        told(
            f"pair {number + 1} of {count}: {_figure(pair.ours)} {unit} against "
            f"{_figure(pair.theirs)} {unit}, ratio {_ratio(pair.ratio)}"
        )
    return tuple(pairs)
