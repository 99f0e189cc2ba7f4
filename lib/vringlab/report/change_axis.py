"""An axis of changes: logarithmic, with ticks at round percentages."""

from __future__ import annotations

from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

#: Changes in percent at which an axis may have a tick.
_ROUND = (
    -99.9, -99.5, -99, -98, -95, -90, -80, -70, -60, -50, -40, -30, -20, -15, -10, -5, -2, -1, 0,
    1, 2, 5, 10, 15, 20, 30, 40, 50, 75, 100, 150, 200, 300, 500, 900, 1900, 4900, 9900,
)  # fmt: skip


def change_ticks(low: float, high: float, most: int = 8) -> dict[float, str]:
    """Places on the log scale and their names, no more than `most` and well apart.

    No change is always among them when it is inside; those far from it come first, as they say
    how far the axis reaches.
    """
    inside = [percent for percent in _ROUND if low <= np.log1p(percent / 100) <= high]
    kept: list[float] = [0.0] if low <= 0 <= high else []
    for percent in sorted(inside, key=lambda p: -abs(np.log1p(p / 100))):
        place = np.log1p(percent / 100)
        apart = [abs(place - np.log1p(other / 100)) for other in kept]
        if min(apart, default=np.inf) > (high - low) / most:
            kept.append(percent)
    return {float(np.log1p(percent / 100)): _name(percent) for percent in sorted(kept)}


def _name(percent: float) -> str:
    if percent == 0:
        return "0 %"
    return f"{percent:+g} %" if percent < 900 else f"x{1 + percent / 100:g}"


def set_change_axis(axes: Axes, which: Literal["x", "y"], most: int = 8) -> None:
    """Give an axis of log ratios ticks at round changes, for its present limits."""
    low, high = sorted(axes.get_xlim() if which == "x" else axes.get_ylim())
    ticks = change_ticks(low, high, most)
    names = {round(place, 9): name for place, name in ticks.items()}
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(FixedLocator(list(ticks)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: names.get(round(value, 9), "")))
